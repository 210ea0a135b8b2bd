"""Fills a laid-out file, front to back wherever it can, and knows its SHA-256 when it is done."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from pathlib import Path, PurePosixPath
from types import TracebackType

from aoquant.checkpoint.manifest import FileRecord
from aoquant.engine.crc import crc32_combine
from aoquant.engine.formats import FileLayout, Fixed, Hole, Slot

_READ_BACK_BYTES = 1 << 20
_FLUSH_BYTES = 1 << 26


class FileWriter:
    """Writes the file of one layout: bytes are placed by anyone, then sealed in order, slot by slot.

    What is sealed in the file's own order is hashed from memory; anything else is read back once it is whole. Nothing
    is held in memory. Raises OSError as the file system does.
    """

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        self._layout = layout
        self._path = folder / layout.name
        self._file = self._path.open("xb+", buffering=0)
        self._hash = hashlib.sha256()
        self._starts: dict[Slot, int] = {}
        self._ends: dict[Slot, int] = {}
        self._crcs: dict[Slot, int] = {}
        offset = 0
        for piece in layout.pieces:
            if isinstance(piece, Hole):
                self._starts[piece.slot] = offset
                self._ends[piece.slot] = offset + piece.num_bytes
                self._crcs[piece.slot] = 0
            offset += piece.num_bytes
        self._sealed = dict(self._starts)  # how far each slot's bytes are in place and checked
        self._wants_crc = any(not isinstance(piece, Fixed | Hole) for piece in layout.pieces)
        self._next = 0  # the first piece that is not finished
        self._hashed = 0  # bytes from the front that are written and hashed
        self._flushed = 0  # bytes from the front that the disk has been told about
        self._lock = threading.Lock()
        self._advance()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def place(self, slot: Slot, position: int, data: memoryview) -> int:
        """Put bytes of `slot`, from `position` of it on, into the file. Any thread may, in any order.

        Returns their CRC-32 for `seal`; 0 where the format has none.
        """
        offset = self._starts[slot] + position
        if offset + len(data) > self._ends[slot]:
            raise ValueError(f"more data for {slot} than was planned")
        self._put(offset, data)
        return zlib.crc32(data) if self._wants_crc else 0

    def seal(self, slot: Slot, data: memoryview, crc: int) -> None:
        """Take the checksums of the next bytes of `slot`, which are in place. One thread, in the slot's order.

        crc: what `place` returned for them.
        """
        start = self._sealed[slot]
        self._sealed[slot] = start + len(data)
        if self._wants_crc:
            self._crcs[slot] = crc32_combine(self._crcs[slot], crc, len(data))
        if start == self._hashed:
            self._hash.update(data)
            self._hashed += len(data)
        if self._sealed[slot] == self._ends[slot]:
            self._advance()
        self._flush_some()

    def append(self, slot: Slot, data: memoryview) -> None:
        """Place and seal the next bytes of `slot` in one step."""
        self.seal(slot, data, self.place(slot, self._sealed[slot] - self._starts[slot], data))

    def finish(self) -> FileRecord:
        """Flush to the disk and close; the record's path is the file's name. ValueError if a slot was never filled."""
        if self._next < len(self._layout.pieces):
            raise ValueError(f"{self._layout.name}: {self._layout.pieces[self._next]} was not filled")
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(path=PurePosixPath(self._layout.name), num_bytes=self._hashed, sha256=self._hash.hexdigest())

    def _advance(self) -> None:
        while self._next < len(self._layout.pieces):
            piece = self._layout.pieces[self._next]
            if isinstance(piece, Hole):
                if self._sealed[piece.slot] < self._ends[piece.slot]:
                    return
                self._read_back(self._ends[piece.slot])
            else:
                data = piece.data if isinstance(piece, Fixed) else piece.build(self._crcs)
                self._put(self._hashed, memoryview(data))
                self._hash.update(data)
                self._hashed += len(data)
            self._next += 1

    def _put(self, offset: int, data: memoryview) -> None:
        while data:
            count = self._write_at(offset, data)
            offset += count
            data = data[count:]

    def _write_at(self, offset: int, data: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), data, offset)
        with self._lock:  # Windows
            self._file.seek(offset)
            return self._file.write(data)

    def _read_back(self, end: int) -> None:
        while self._hashed < end:
            with self._lock:
                self._file.seek(self._hashed)
                data = self._file.read(min(end - self._hashed, _READ_BACK_BYTES))
            self._hash.update(data)
            self._hashed += len(data)

    def _flush_some(self) -> None:
        """Let the disk begin while the arithmetic goes on, so that the final fsync finds little left to do.

        Linux starts writing dirty pages back when it is told that they will not be needed; it does not wait.
        """
        count = self._hashed - self._flushed
        if count >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._flushed, count, os.POSIX_FADV_DONTNEED)
            self._flushed += count
