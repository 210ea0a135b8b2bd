"""The zip around a `.bin`: 64-bit sizes, and directories that contradict themselves."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from aoquant.checkpoint.archive import Archive
from aoquant.errors import CheckpointError


def entry(name: str, size: int, offset: int, *, packed: int | None = None, method: int = 0, flags: int = 0) -> bytes:
    """One entry of the directory, with 64-bit sizes throughout."""
    extra = struct.pack("<HHQQQ", 1, 24, size, size if packed is None else packed, offset)
    ones = 0xFFFFFFFF
    head = struct.pack("<4s4B4HI2I5H2I", b"PK\1\2", 45, 0, 45, 0, flags, method, 0, 0, 0, ones, ones, len(name),
                       len(extra), 0, 0, 0, 0, ones)  # fmt: skip
    return head + name.encode() + extra


def local(name: str) -> bytes:
    return struct.pack("<4s22xHH", b"PK\3\4", len(name), 0) + name.encode()


def end64(count: int, size: int, offset: int, at: int) -> bytes:
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    ones = 0xFFFF
    return record + locator + struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, ones, ones, 0xFFFFFFFF, 0xFFFFFFFF, 0)


def open_archive(path: Path) -> Archive:
    return Archive(path, path.open("rb", buffering=0), path.stat().st_size)


def test_records_beyond_four_gigabytes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    large, at = 12_000_000_000, 12_000_000_100
    with path.open("wb") as file:
        file.write(local("a/data/0"))
        file.seek(at)
        file.write(local("a/data.pkl") + b"}.")
        directory = entry("a/data/0", large, 0) + entry("a/data.pkl", 2, at)
        begin = file.tell()
        file.write(directory + end64(2, len(directory), begin, begin + len(directory)))
    archive = open_archive(path)
    assert archive.prefix == "a"
    record, stream = archive.get("data/0"), archive.get("data.pkl")
    assert record is not None and stream is not None
    assert (archive.place(record), record.num_bytes) == (38, large)
    assert archive.read(stream, 100) == b"}."
    with pytest.raises(CheckpointError, match=r"has 12,000,000,000 bytes, 100 are allowed"):
        archive.read(record, 100)


BAD: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "no end": (lambda entries, at: entries, "directory at the end of its zip is not there"),
    "bytes behind the end": (
        lambda entries, at: entries + end64(1, len(entries), at, at + len(entries)) + b"x",
        "bytes follow the end",
    ),
    "another count": (
        lambda entries, at: entries + end64(2, len(entries), at, at + len(entries)),
        "1 names for 2 records",
    ),
    "directory past the end": (lambda entries, at: entries + end64(1, 10**12, at, at + len(entries)), "overlaps"),
    "directory cut": (
        lambda entries, at: entries + end64(1, len(entries) - 3, at, at + len(entries)),
        "no proper entry",
    ),
    "directory of something else": (
        lambda entries, at: entries + end64(1, 30, 0, at + len(entries)),
        "inside an entry",
    ),
    "end record elsewhere": (lambda entries, at: entries + end64(1, len(entries), at, 0), "not where it says"),
    "end record outside": (lambda entries, at: entries + end64(1, len(entries), at, 2**60), "points to byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_directories_that_make_no_sense(case: str, tmp_path: Path) -> None:
    make, words = BAD[case]
    start = local("a/data.pkl") + b"}."
    path = tmp_path / "m.bin"
    path.write_bytes(start + make(entry("a/data.pkl", 2, 0), len(start)))
    with pytest.raises(CheckpointError, match=words):
        open_archive(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (entry("a/x", 2, 0, method=8), "compressed or encrypted"),
        (entry("a/x", 2, 0, flags=1), "compressed or encrypted"),
        (entry("a/x", 2, 0, packed=1), "compressed or encrypted"),
        (entry("a/x", 2, 0)[:-28] + b"\2" + entry("a/x", 2, 0)[-27:], "no size"),
        (entry("a/x", 2**40, 0), "reaches past the end"),
        (entry("a/x", 2, 2**62), "points to byte"),
        (entry("a/x", 2, 5), "not where the zip's directory says"),
    ],
)
def test_records_that_make_no_sense(record: bytes, words: str, tmp_path: Path) -> None:
    start = local("a/x") + b"}." + bytes(40)
    path = tmp_path / "m.bin"
    path.write_bytes(start + record + end64(1, len(record), len(start), len(start) + len(record)))
    with pytest.raises(CheckpointError, match=words):
        archive = open_archive(path)
        archive.place(archive.records["a/x"])
