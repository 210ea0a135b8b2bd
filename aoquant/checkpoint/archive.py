"""The zip around a torch `.bin` file: names and places of its records, nothing unpacked.

Python's `zipfile` reads a directory of any size into memory, and settles contradictions its own way; torch's
reader settles them another way. Here the directory is bounded, and a contradiction is damage.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aoquant.checkpoint.files import Seekable, quoted, read_up_to
from aoquant.errors import CheckpointError

MAX_DIRECTORY_BYTES = 64_000_000

_END = struct.Struct("<4s4HIIH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s4B4HI2I5H2I")
_LOCAL = struct.Struct("<4s22xHH")
_MAX_COMMENT = 65_535
_ONES32 = 0xFFFFFFFF
_ZIP64_EXTRA = 1


class Record(NamedTuple):
    """One record: `header_offset` is where its local header begins, `num_bytes` its size."""

    name: str
    header_offset: int
    num_bytes: int


class Archive:
    """An open zip of uncompressed records. `prefix` is the folder that all of torch's records lie in."""

    __slots__ = ("file", "num_bytes", "path", "prefix", "records")

    def __init__(self, path: Path, file: Seekable, num_bytes: int) -> None:
        self.path = path
        self.file = file
        self.num_bytes = num_bytes
        self.records: Mapping[str, Record] = self._directory()
        self.prefix = next(iter(self.records), "").partition("/")[0]

    def get(self, name: str) -> Record | None:
        """The record `name` in the archive's folder."""
        return self.records.get(f"{self.prefix}/{name}")

    def read(self, record: Record, limit: int) -> bytes:
        """A record's bytes. Raises CheckpointError if there are more than `limit`."""
        if record.num_bytes > limit:
            raise self.damaged(f"{quoted(record.name)} has {record.num_bytes:,} bytes, {limit:,} are allowed")
        return self._read_at(self.place(record), record.num_bytes)

    def place(self, record: Record) -> int:
        """Where a record's bytes begin in the file. Raises CheckpointError if they do not all lie in it."""
        signature, name_bytes, extra_bytes = _LOCAL.unpack(self._read_at(record.header_offset, _LOCAL.size))
        if signature != b"PK\x03\x04":
            raise self.damaged(f"{quoted(record.name)} is not where the zip's directory says")
        begin: int = record.header_offset + _LOCAL.size + name_bytes + extra_bytes
        if begin + record.num_bytes > self.num_bytes:
            raise self.damaged(f"{quoted(record.name)} reaches past the end of the file")
        return begin

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name} is damaged: {what}", hint="download or copy it again")

    def _read_at(self, offset: int, count: int) -> bytes:
        if not 0 <= offset <= self.num_bytes - count:
            raise self.damaged(f"its zip points to byte {offset:,} of {self.num_bytes:,}")
        self.file.seek(offset)
        content = read_up_to(self.file, count)
        if len(content) < count:
            raise self.damaged("it shrank while it was read")
        return content

    def _directory(self) -> dict[str, Record]:
        offset, size, count = self._find_directory()
        if size > MAX_DIRECTORY_BYTES:
            raise self.damaged(f"its zip directory has {size:,} bytes, {MAX_DIRECTORY_BYTES:,} are allowed")
        data = self._read_at(offset, size)
        records: dict[str, Record] = {}
        lowered: set[str] = set()
        pos = 0
        while pos < size:
            if pos + _ENTRY.size > size:
                raise self.damaged("its zip directory ends inside an entry")
            record, pos = self._entry(data, pos)
            records[record.name] = record
            lowered.add(record.name.lower())  # torch's reader compares without case
        if len(lowered) != count:
            raise self.damaged(f"its zip directory has {len(lowered):,} names for {count:,} records")
        return records

    def _find_directory(self) -> tuple[int, int, int]:
        """Offset, bytes and number of records of the directory, from the end record (or its 64-bit twin)."""
        tail_bytes = min(self.num_bytes, _END.size + _MAX_COMMENT)
        tail = self._read_at(self.num_bytes - tail_bytes, tail_bytes)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > tail_bytes:
            raise CheckpointError(
                f"{self.path.name} is truncated: the directory at the end of its zip is not there",
                hint="download or copy it again",
            )
        _, _, _, _, count, size, offset, comment_bytes = _END.unpack_from(tail, at)
        if at + _END.size + comment_bytes != tail_bytes:
            raise self.damaged("bytes follow the end of its zip")
        end = self.num_bytes - tail_bytes + at
        if end >= _END64_LOCATOR.size:
            locator = _END64_LOCATOR.unpack(self._read_at(end - _END64_LOCATOR.size, _END64_LOCATOR.size))
            if locator[0] == b"PK\x06\x07":
                end = locator[2]
                record = _END64.unpack(self._read_at(end, _END64.size))
                if record[0] != b"PK\x06\x06":
                    raise self.damaged("its zip's 64-bit end record is not where it says")
                count, size, offset = record[7], record[8], record[9]
        if offset + size > end:
            raise self.damaged("its zip's directory overlaps the end record")
        return offset, size, count

    def _entry(self, data: bytes, pos: int) -> tuple[Record, int]:
        (
            signature, _, _, _, _, flags, method, _, _, _, packed, size,
            name_bytes, extra_bytes, comment_bytes, _, _, _, offset,
        ) = _ENTRY.unpack_from(data, pos)  # fmt: skip
        name_at = pos + _ENTRY.size
        after = name_at + name_bytes + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or after > len(data):
            raise self.damaged("its zip directory holds no proper entry")
        try:
            name = str(data[name_at : name_at + name_bytes], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged("its zip names a record in no known encoding") from None
        if _ONES32 in (packed, size, offset):
            extra = data[name_at + name_bytes : name_at + name_bytes + extra_bytes]
            size, packed, offset = self._wide(name, extra, [size, packed, offset])
        if method != 0 or flags & 1 or packed != size:
            raise self.damaged(f"{quoted(name)} is compressed or encrypted, which torch never does")
        return Record(name, offset, size), after

    def _wide(self, name: str, extra: bytes, fields: list[int]) -> list[int]:
        """Replace fields that are all ones by the 64-bit extra field's, which holds just these in order."""
        pos = 0
        while pos + 4 <= len(extra):
            kind, count = struct.unpack_from("<HH", extra, pos)
            if kind == _ZIP64_EXTRA:
                wide = list(struct.unpack_from(f"<{min(count, len(extra) - pos - 4) // 8}Q", extra, pos + 4))
                if len(wide) < fields.count(_ONES32):
                    break
                return [wide.pop(0) if field == _ONES32 else field for field in fields]
            pos += 4 + count
        raise self.damaged(f"{quoted(name)} has no size in the zip's directory")
