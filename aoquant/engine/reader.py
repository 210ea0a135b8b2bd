"""Runs of values of a source's tensors, read with plain reads into buffers that are used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch

from aoquant.checkpoint.files import unreadable
from aoquant.checkpoint.tensors import ITEM_BYTES, StoredTensor
from aoquant.errors import CheckpointError


class Reader(Protocol):
    """Where weights come from. `read` may be called from several threads."""

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Values `start` to `start + count` of the flattened tensor, in its stored dtype: [count] on the CPU.

        They are valid until the same thread reads again.
        """
        ...

    def await_file(self, name: str) -> None:
        """Return when the tensor can be read; it may still be on its way here. Before `read`, from one thread."""
        ...

    def close(self) -> None: ...


class FileReader:
    """Reads stored tensors from their files. Memory: one buffer of the largest run for each thread.

    wait: returns when a file is there.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], wait: Callable[[Path], None] = lambda _: None) -> None:
        self._tensors = tensors
        self._wait = wait
        self._local = threading.local()
        self._handles: list[FileIO] = []
        self._handles_lock = threading.Lock()
        self._gather_lock = threading.Lock()
        self._gathered: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        stored = self._tensors[name]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not count:
            return torch.empty(0, dtype=dtype)
        if not stored.is_contiguous:
            return self._gather(name, stored)[start : start + count]
        item_bytes = ITEM_BYTES[stored.dtype]
        run = self._buffer(count * item_bytes)
        self._fill(stored.file, stored.offset + start * item_bytes, run)
        return torch.frombuffer(run, dtype=dtype)

    def await_file(self, name: str) -> None:
        self._wait(self._tensors[name].file)

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
        self._gathered = None

    def _gather(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """A transposed or strided tensor, whole: rare, and only in `.bin` files. The last one is kept."""
        with self._gather_lock:
            if self._gathered is None or self._gathered[0] != name:
                item_bytes = ITEM_BYTES[stored.dtype]
                extent = sum((size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True)) + 1
                run = memoryview(bytearray(extent * item_bytes))
                self._fill(stored.file, stored.offset, run)
                values = torch.frombuffer(run, dtype=getattr(torch, stored.dtype))
                strided = values.as_strided(stored.shape, stored.stride)
                self._gathered = name, strided.contiguous().view(-1)
            return self._gathered[1]

    def _buffer(self, num_bytes: int) -> memoryview:
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._local.buffer = bytearray(num_bytes)
        return memoryview(buffer)[:num_bytes]

    def _fill(self, file: Path, offset: int, run: memoryview) -> None:
        got = 0
        try:
            handle = self._handle(file)
            handle.seek(offset)
            while got < len(run):
                count = handle.readinto(run[got:])
                if not count:
                    break
                got += count
        except OSError as error:
            raise unreadable(file, error) from error
        if got < len(run):
            raise CheckpointError(
                f"{file.name} ends {len(run) - got} bytes early, at byte {offset + got}",
                hint="the file is truncated: fetch it again",
            )

    def _handle(self, file: Path) -> FileIO:
        handles: dict[Path, FileIO] | None = getattr(self._local, "handles", None)
        if handles is None:
            handles = self._local.handles = {}
        if file not in handles:
            handle = handles[file] = file.open("rb", buffering=0)
            with self._handles_lock:
                self._handles.append(handle)
        return handles[file]


class MemoryReader:
    """Reads from tensors that the library has loaded whole."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        return self._tensors[name].contiguous().view(-1)[start : start + count]

    def await_file(self, name: str) -> None:
        pass

    def close(self) -> None:
        self._tensors = {}
