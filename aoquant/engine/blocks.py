"""The work itself, block by block: read, cast, quantize and put in place on worker threads; checksums follow in order.

A job is a run of rows that one worker takes a block at a time, so that each block is read and worked while it is in the
core's cache. A few jobs are in flight, so memory does not depend on the size of the tensor, let alone of the model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from aoquant.engine import devices
from aoquant.engine.formats import Slot
from aoquant.engine.plan import ComponentPlan, TensorPlan
from aoquant.engine.quantize import Kernel, Parts, Scratch, is_finite
from aoquant.engine.reader import Reader
from aoquant.engine.writer import FileWriter
from aoquant.errors import CheckpointError

_T = TypeVar("_T")

# Values in one block. Alone, a core is fastest at 2^18, whose float32 copy fits its L2 (a [12288, 3072] weight to int8
# takes 47 ms, 58 ms at 2^20). But every operation hands Python's lock on: two workers beside a hashing thread made a
# 5.1 GB component in 5.5 s at 2^20 and 2^21, 6.1 s at 2^19, 6.9 s at 2^18 (medians of three, torch 2.13, 2 cores).
CPU_BLOCK = 1 << 20
DEVICE_BLOCK = 1 << 24
JOB_BLOCKS = 2  # of a CPU's blocks: what it costs to hand a job out is then lost in the job's own work


class Workers:
    """A few threads that run blocks. Used as a context; leaving it cancels what has not begun.

    on_cpu: names of tensors that the accelerator could not take, and that were worked on the CPU instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cpu: set[str] = set()
        self._num_threads = _num_workers()
        self._torch_threads = torch.get_num_threads()
        self._local = threading.local()
        self._buffers: deque[torch.Tensor] = deque()
        # One torch thread for each worker: blocks run side by side, not the inside of one.
        self._pool = ThreadPoolExecutor(self._num_threads, "aoquant", initializer=lambda: torch.set_num_threads(1))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self._torch_threads)  # the threads' setting is also the default of threads to come

    @property
    def block_size(self) -> int:
        """Values in one block."""
        return CPU_BLOCK if self.device.type == "cpu" else DEVICE_BLOCK

    @property
    def job_size(self) -> int:
        """Values in one job."""
        return max(self.block_size, CPU_BLOCK * JOB_BLOCKS)

    def borrow(self, num_bytes: int) -> torch.Tensor:
        """A buffer [num_bytes] uint8 on the CPU for a job's result; `give_back` it when it is used up.

        Fresh memory for each result would cost more in page faults than the arithmetic takes.
        """
        with contextlib.suppress(IndexError):
            buffer = self._buffers.pop()
            if buffer.numel() >= num_bytes:
                return buffer
        return torch.empty(max(num_bytes, 2 * self.job_size), dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

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
            wait(running)  # a job still at work writes into a file that is about to be closed

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        return self._pool.submit(job)


def _num_workers() -> int:
    return min(devices.num_cpus(), 16)


def working_bytes(plan: ComponentPlan) -> int:
    """A bound on the tensor data in memory at one time: buffers of the jobs in flight, or the whole component."""
    if plan.component.whole_reason:
        return plan.source_bytes + plan.unquantized_bytes
    made = [tensor for tensor in plan.tensors if tensor.fate == "quantize"]
    widest = max((tensor.shape[-1] for tensor in made), default=0)
    workers = _num_workers()
    per_worker = max(CPU_BLOCK, widest) * 12  # a block as stored, cast, and as float32
    results = (2 * workers + 2) * max(2 * CPU_BLOCK * JOB_BLOCKS, 2 * widest)
    small = max((tensor.num_bytes - plan.kernel.run_bytes(*tensor.shape) for tensor in made), default=0)
    return workers * per_worker + results + 2 * small


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What one job brings back.

    data: the run of the streamed part, in `buffer` and already in its place; crc: its CRC-32. small: the other parts.
    """

    tensor: TensorPlan
    slot: Slot
    data: memoryview
    crc: int
    buffer: torch.Tensor
    small: Parts
    is_last: bool


def write_tensors(
    tensors: Sequence[TensorPlan],
    kernel: Kernel,
    reader: Reader,
    workers: Workers,
    writer: FileWriter,
    on_bytes: Callable[[int], None],
) -> None:
    """Make `tensors` and write them, in order. Work on one begins while the one before it is still being finished.

    on_bytes is told how many bytes have been finished. Raises CheckpointError for weights that are not finite.
    """
    jobs = (job for tensor in tensors for job in _jobs(tensor, kernel, reader, workers, writer))
    small: dict[str, list[torch.Tensor]] = {}
    for made in workers.in_order(jobs):
        writer.seal(made.slot, made.data, made.crc)
        on_bytes(len(made.data))
        workers.give_back(made.buffer)
        for part, values in made.small.items():
            small.setdefault(part, []).append(values)
        if made.is_last:
            for part, pieces in small.items():
                data = _as_bytes(_checked(made.tensor, part, kernel.assemble(pieces)))
                writer.append(Slot(made.tensor.name, part.partition(".")[0]), data)
                on_bytes(len(data))
            small = {}


def _jobs(
    tensor: TensorPlan, kernel: Kernel, reader: Reader, workers: Workers, writer: FileWriter
) -> Iterator[Callable[[], _Made]]:
    reader.await_file(tensor.stored)
    if tensor.fate == "quantize":
        return _quantizing_jobs(tensor, kernel, reader, workers, writer)
    return _copying_jobs(tensor, reader, workers, writer)


def _copying_jobs(
    tensor: TensorPlan, reader: Reader, workers: Workers, writer: FileWriter
) -> Iterator[Callable[[], _Made]]:
    total = math.prod(tensor.shape)
    slot = Slot(tensor.name, "")

    def copy(start: int, count: int) -> _Made:
        buffer = workers.borrow(count * tensor.dtype.itemsize)
        out = buffer[: count * tensor.dtype.itemsize].view(tensor.dtype)
        for first, size in _runs(count, CPU_BLOCK):
            out[first : first + size].copy_(reader.read(tensor.stored, start + first, size))
        data = _as_bytes(out)
        crc = writer.place(slot, start * tensor.dtype.itemsize, data)
        is_last = start + count == total
        return _Made(tensor=tensor, slot=slot, data=data, crc=crc, buffer=buffer, small={}, is_last=is_last)

    for start, count in _runs(total, CPU_BLOCK * JOB_BLOCKS):
        yield functools.partial(copy, start, count)


def _quantizing_jobs(
    tensor: TensorPlan, kernel: Kernel, reader: Reader, workers: Workers, writer: FileWriter
) -> Iterator[Callable[[], _Made]]:
    num_rows, in_features = tensor.shape
    job_rows, block_rows = (
        max(1, size // in_features // kernel.row_step) * kernel.row_step
        for size in (workers.job_size, workers.block_size)
    )
    runs = list(_runs(num_rows, job_rows))
    slot = Slot(tensor.name, kernel.streamed)

    def blocks(start: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        for first, size in _runs(rows, block_rows):
            values = reader.read(tensor.stored, (start + first) * in_features, size * in_features)
            yield first, values.to(tensor.dtype).view(size, in_features)

    peak: torch.Tensor | None = None
    if kernel.peak is not None:
        peak = _peak(kernel.peak, [functools.partial(blocks, *run) for run in runs], workers)

    def quantize(start: int, rows: int) -> _Made:
        num_bytes = kernel.run_bytes(rows, in_features)
        buffer = workers.borrow(num_bytes)
        out = buffer[:num_bytes]
        pieces: dict[str, list[torch.Tensor]] = {}
        for first, block in blocks(start, rows):
            begin, end = (kernel.run_bytes(count, in_features) for count in (first, first + len(block)))
            small = _on_device(tensor, block, out[begin:end], kernel, workers, peak)
            for part, values in small.items():
                pieces.setdefault(part, []).append(values)
        small = {part: torch.cat(found) for part, found in pieces.items()}
        if peak is not None:
            small = {part: values[:1] for part, values in small.items()} if start == 0 else {}  # one for the tensor
        data = _as_bytes(out)
        crc = writer.place(slot, kernel.run_bytes(start, in_features), data)
        is_last = start + rows == num_rows
        return _Made(tensor=tensor, slot=slot, data=data, crc=crc, buffer=buffer, small=small, is_last=is_last)

    for start, rows in runs:
        yield functools.partial(quantize, start, rows)


def _peak(
    find: Callable[[torch.Tensor, Scratch], torch.Tensor],
    runs: Sequence[Callable[[], Iterator[tuple[int, torch.Tensor]]]],
    workers: Workers,
) -> torch.Tensor:
    """The largest magnitude of a whole weight: one pass over it, before the one that quantizes."""

    def largest(run: Callable[[], Iterator[tuple[int, torch.Tensor]]]) -> torch.Tensor:
        return torch.stack([find(block, workers.scratch) for _, block in run()]).amax(dim=0)

    futures = [workers.submit(functools.partial(largest, run)) for run in runs]
    return torch.stack([future.result() for future in futures]).amax(dim=0)


def _runs(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the runs that cover `total`; one empty run where there is nothing."""
    for start in range(0, max(total, 1), step):
        yield start, min(step, total - start)


def _on_device(
    tensor: TensorPlan,
    block: torch.Tensor,
    out: torch.Tensor,
    kernel: Kernel,
    workers: Workers,
    peak: torch.Tensor | None,
) -> Parts:
    """Quantize one block into `out`, on the accelerator if there is one and it can. Both are on the CPU."""
    device = workers.device
    if device.type != "cpu":
        try:
            there = torch.empty(out.shape, dtype=out.dtype, device=device)
            moved = peak if peak is None else peak.to(device)
            small = kernel.rows(block.to(device), there, workers.scratch, moved)
            out.copy_(there)
            return {part: values.cpu() for part, values in small.items()}
        except (torch.OutOfMemoryError, NotImplementedError, TypeError):  # mps, for one, has no float8
            workers.on_cpu.add(tensor.name)
    return kernel.rows(block, out, workers.scratch, peak)


def _checked(tensor: TensorPlan, part: str, values: torch.Tensor) -> torch.Tensor:
    if part.startswith("scale") and not is_finite(values):
        raise CheckpointError(
            f"{tensor.stored} holds NaN or infinite values in {str(tensor.dtype).removeprefix('torch.')}",
            hint="the weights are damaged, or overflow in this --dtype",
        )
    return values


def _as_bytes(values: torch.Tensor) -> memoryview:
    array: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
