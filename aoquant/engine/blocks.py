"""The work itself, block by block: read, cast, quantize on worker threads; results come back in order.

Each block is read, worked and left in the core's cache before the next one starts, and no more than a few are in
flight, so memory does not depend on the size of the tensor, let alone of the model.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from aoquant.engine.formats import Slot
from aoquant.engine.plan import ComponentPlan, TensorPlan
from aoquant.engine.quantize import Kernel, Parts, Scratch
from aoquant.engine.reader import Reader
from aoquant.errors import CheckpointError

_T = TypeVar("_T")

# Values in one block. 2^18 and their float32 copy fit an L2 of 2 MiB: a [12288, 3072] weight to int8 takes one core
# 47 ms, at 2^19 58 ms, at 2^15 78 ms (torch 2.13). An accelerator wants more work at a time.
CPU_BLOCK = 1 << 18
DEVICE_BLOCK = 1 << 24


@dataclass(slots=True, kw_only=True)
class Fallbacks:
    """Tensors that the accelerator could not take, and that were worked on the CPU instead."""

    names: set[str] = field(default_factory=set)


class Workers:
    """A few threads that run blocks. Used as a context; leaving it cancels what has not begun."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fallbacks = Fallbacks()
        self._num_threads = _num_workers()
        self._torch_threads = torch.get_num_threads()
        self._local = threading.local()
        # One torch thread for each worker: blocks run side by side, not the inside of one.
        self._pool = ThreadPoolExecutor(self._num_threads, "aoquant", initializer=lambda: torch.set_num_threads(1))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._torch_threads)  # the threads' setting is also the default of threads to come

    @property
    def block_size(self) -> int:
        return CPU_BLOCK if self.device.type == "cpu" else DEVICE_BLOCK

    @property
    def scratch(self) -> Scratch:
        """The calling thread's own buffers."""
        found: Scratch | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = Scratch()
        return found

    def in_order(self, jobs: Iterator[Callable[[], _T]]) -> Iterator[_T]:
        """Run `jobs` on the workers, yield results in order; at most twice as many as workers are in flight."""
        running: deque[Future[_T]] = deque()
        try:
            for job in jobs:
                running.append(self._pool.submit(job))
                if len(running) > 2 * self._num_threads:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        return self._pool.submit(job)


def _num_workers() -> int:
    with contextlib.suppress(AttributeError):  # not on macOS and Windows
        return max(1, min(len(os.sched_getaffinity(0)), 16))
    return max(1, min(os.cpu_count() or 1, 16))


def working_bytes(plan: ComponentPlan) -> int:
    """A bound on the tensor data in memory at one time: buffers of the blocks in flight, or the whole component."""
    if plan.component.whole_reason:
        return plan.source_bytes + plan.unquantized_bytes
    widest = max((tensor.shape[-1] for tensor in plan.tensors if tensor.fate == "quantize"), default=0)
    per_block = max(CPU_BLOCK, widest) * 16  # stored, cast, float32 scratch, and the parts of two results
    small_parts = max((tensor.num_bytes for tensor in plan.tensors if tensor.fate == "quantize"), default=0) // 2
    return 3 * _num_workers() * per_block + small_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What one job brings back: the parts of one block, and whether the tensor is complete with it."""

    tensor: TensorPlan
    parts: Parts
    is_last: bool


def tensor_data(
    tensors: Sequence[TensorPlan], kernel: Kernel, reader: Reader, workers: Workers
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """The data of `tensors`, in order: (where it belongs, the next run of its values, on the CPU).

    Work on one tensor begins while the one before it is still being written.
    """
    jobs = (job for tensor in tensors for job in _jobs(tensor, kernel, reader, workers))
    small: dict[str, list[torch.Tensor]] = {}
    for made in workers.in_order(jobs):
        for part, values in made.parts.items():
            if part in ("", kernel.streamed):
                yield Slot(made.tensor.name, part), values
            else:
                small.setdefault(part, []).append(values)
        if made.is_last:
            for part, pieces in small.items():
                yield Slot(made.tensor.name, part), kernel.assemble(pieces)
            small = {}


def _jobs(tensor: TensorPlan, kernel: Kernel, reader: Reader, workers: Workers) -> Iterator[Callable[[], _Made]]:
    if tensor.fate == "quantize":
        return _quantizing_jobs(tensor, kernel, reader, workers)
    return _copying_jobs(tensor, reader)


def _copying_jobs(tensor: TensorPlan, reader: Reader) -> Iterator[Callable[[], _Made]]:
    total = torch.Size(tensor.shape).numel()

    def copy(start: int, count: int) -> _Made:
        values = reader.read(tensor.stored, start, count).to(tensor.dtype, copy=True)
        return _Made(tensor=tensor, parts={"": values}, is_last=start + count == total)

    for start, count in _runs(total, CPU_BLOCK):
        yield functools.partial(copy, start, count)


def _quantizing_jobs(
    tensor: TensorPlan, kernel: Kernel, reader: Reader, workers: Workers
) -> Iterator[Callable[[], _Made]]:
    num_rows, in_features = tensor.shape
    runs = list(_runs(num_rows, max(1, workers.block_size // in_features)))

    def block(start: int, rows: int) -> torch.Tensor:
        values = reader.read(tensor.stored, start * in_features, rows * in_features)
        return values.to(tensor.dtype).view(rows, in_features)

    peak: torch.Tensor | None = None
    if kernel.peak is not None:
        find_peak = kernel.peak
        peaks = [workers.submit(lambda run=run: find_peak(block(*run))) for run in runs]  # type: ignore[misc]
        peak = torch.stack([future.result() for future in peaks]).amax(dim=0)

    def quantize(start: int, rows: int) -> _Made:
        parts = _on_device(tensor, block(start, rows), kernel, workers, peak)
        if peak is not None and start:
            parts = {kernel.streamed: parts[kernel.streamed]}  # the one scale comes with the first block
        return _Made(tensor=tensor, parts=parts, is_last=start + rows == num_rows)

    for start, rows in runs:
        yield functools.partial(quantize, start, rows)


def _runs(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the runs that cover `total`; one empty run where there is nothing."""
    for start in range(0, max(total, 1), step):
        yield start, min(step, total - start)


def _on_device(
    tensor: TensorPlan, block: torch.Tensor, kernel: Kernel, workers: Workers, peak: torch.Tensor | None
) -> Parts:
    device = workers.device
    if device.type != "cpu":
        try:
            moved = kernel.rows(block.to(device), workers.scratch, peak if peak is None else peak.to(device))
            return _checked(tensor, {part: values.cpu() for part, values in moved.items()})
        except (torch.OutOfMemoryError, NotImplementedError, TypeError):  # mps, for one, has no float8
            workers.fallbacks.names.add(tensor.name)
    return _checked(tensor, kernel.rows(block, workers.scratch, peak))


def _checked(tensor: TensorPlan, parts: Parts) -> Parts:
    if not bool(parts["scale"].isfinite().all()):
        raise CheckpointError(
            f"{tensor.stored} holds NaN or infinite values in {str(tensor.dtype).removeprefix('torch.')}",
            hint="the weights are damaged, or overflow in this --dtype",
        )
    return parts
