"""Fills a laid-out file, front to back wherever it can, and knows its SHA-256 when it is done."""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from aoquant.engine.formats import FileLayout, Fixed, Hole, Slot

_READ_BACK_BYTES = 1 << 20
_FLUSH_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A finished file: its name, size, and SHA-256 in hexadecimal."""

    name: str
    num_bytes: int
    sha256: str


class FileWriter:
    """Writes the file of one layout. Data for each slot comes in order; the slots themselves may come in any order.

    What arrives in the file's own order is hashed on the way to the disk; anything else is read back once it is
    whole. Nothing is held in memory. Raises OSError as the file system does.
    """

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._path = folder / layout.name
        self._file = self._path.open("xb+", buffering=0)
        self._hash = hashlib.sha256()
        self._starts: dict[Slot, int] = {}
        self._left: dict[Slot, int] = {}
        self._crcs: dict[Slot, int] = {}
        offset = 0
        for piece in layout.pieces:
            if isinstance(piece, Hole):
                self._starts[piece.slot] = offset
                self._left[piece.slot] = piece.num_bytes
                self._crcs[piece.slot] = 0
            offset += piece.num_bytes
        self._wants_crc = any(not isinstance(piece, Fixed | Hole) for piece in layout.pieces)
        self._next = 0  # the first piece that is not finished
        self._hashed = 0  # bytes from the front that are written and hashed
        self._position = 0  # of the file handle
        self._flushed = 0  # bytes from the front that the disk has been told about
        self._advance()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, slot: Slot, data: memoryview | bytes) -> None:
        """Put the next bytes of `slot` in their place."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        start = self._starts[slot]
        self._starts[slot] = start + len(view)
        self._left[slot] -= len(view)
        if self._left[slot] < 0:
            raise ValueError(f"more data for {slot} than was planned")
        self._put(start, view)
        if self._wants_crc:
            self._crcs[slot] = zlib.crc32(view, self._crcs[slot])
        if start == self._hashed:
            self._hash.update(view)
            self._hashed += len(view)
        if not self._left[slot]:
            self._advance()

    def finish(self) -> WrittenFile:
        """Flush to the disk and close. Raises ValueError if a slot was never filled."""
        if self._next < len(self._layout.pieces):
            raise ValueError(f"{self._layout.name}: {self._layout.pieces[self._next]} was not filled")
        os.fsync(self._file.fileno())
        self._file.close()
        return WrittenFile(name=self._layout.name, num_bytes=self._hashed, sha256=self._hash.hexdigest())

    def _advance(self) -> None:
        while self._next < len(self._layout.pieces):
            piece = self._layout.pieces[self._next]
            if isinstance(piece, Hole):
                if self._left[piece.slot]:
                    return
                self._read_back(self._starts[piece.slot])
            else:
                data = piece.data if isinstance(piece, Fixed) else piece.build(self._crcs)
                self._put(self._hashed, memoryview(data))
                self._hash.update(data)
                self._hashed += len(data)
            self._next += 1

    def _put(self, offset: int, data: memoryview) -> None:
        if self._position != offset:
            self._file.seek(offset)
        self._position = offset + len(data)
        while data:
            data = data[self._file.write(data) :]
        if self._position - self._flushed >= _FLUSH_BYTES:
            self._start_flush()

    def _start_flush(self) -> None:
        """Let the disk begin while the arithmetic goes on, so that the final fsync finds little left to do.

        Linux starts writing dirty pages back when it is told that they will not be needed; it does not wait.
        """
        if hasattr(os, "posix_fadvise"):
            count = self._position - self._flushed
            os.posix_fadvise(self._file.fileno(), self._flushed, count, os.POSIX_FADV_DONTNEED)
        self._flushed = self._position

    def _read_back(self, end: int) -> None:
        while self._hashed < end:
            self._file.seek(self._hashed)
            data = self._file.read(min(end - self._hashed, _READ_BACK_BYTES))
            self._position = self._hashed + len(data)
            self._hash.update(data)
            self._hashed += len(data)
