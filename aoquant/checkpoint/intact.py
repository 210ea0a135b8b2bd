"""The files of a folder, held against what its aoquant.json says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from aoquant.checkpoint.files import quoted
from aoquant.checkpoint.manifest import CARD, MANIFEST

Status = Literal["ok", "edited", "missing", "resized", "changed", "unreadable", "unlisted"]

_BLOCK_BYTES = 1 << 22
# What git and `hf download` put into a folder beside the repository's files.
_NOT_OURS = (".git/", ".gitattributes", ".cache/huggingface/")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """How one file compares with aoquant.json. text: what is wrong with it, empty if nothing.

    `edited` is a model card that differs, which is what it is there for; `unlisted` a file of nobody's.
    """

    path: str
    num_bytes: int
    status: Status
    text: str = ""


def check_file(
    root: Path,
    path: PurePosixPath,
    record: Mapping[str, Any],
    *,
    hash_up_to: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> FileCheck:
    """Hold one file below `root` against its record in aoquant.json: its size, then its SHA-256.

    hash_up_to: files of more bytes are judged by their size alone. on_bytes: called with the bytes that were hashed.
    """
    name = quoted(str(path))
    num_bytes = 0

    def found(status: Status, text: str = "") -> FileCheck:
        return FileCheck(path=str(path), num_bytes=num_bytes, status=status, text=text)

    try:
        num_bytes = (root / path).stat().st_size
        same_size = num_bytes == record.get("bytes")
        judged = not same_size or (hash_up_to is not None and num_bytes > hash_up_to)
        same = same_size if judged else sha256_of(root / path, on_bytes) == record.get("sha256")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return found("missing", f"{name}, which {MANIFEST} lists, is missing")
    except OSError as error:
        return found("unreadable", f"{name} cannot be read: {error.strerror}")
    if same:
        return found("ok")
    if str(path) == CARD:
        return found("edited")
    if not same_size:
        said = quoted(record.get("bytes"), quote=False)
        return found("resized", f"{name} has {num_bytes:,} bytes, {MANIFEST} says {said}")
    return found("changed", f"{name} was changed since aoquant wrote it: its SHA-256 differs")


def unlisted_files(root: Path, listed: Collection[PurePosixPath]) -> list[FileCheck]:
    """What lies below `root` and is neither listed nor aoquant.json itself, nor of git or the Hub's client."""
    known = {str(path) for path in listed} | {MANIFEST}
    found = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name in known or name.startswith(_NOT_OURS) or (path.is_dir() and not path.is_symlink()):
            continue
        text = f"{quoted(name)} is not listed in {MANIFEST}"
        found.append(FileCheck(path=name, num_bytes=path.lstat().st_size, status="unlisted", text=text))
    return found


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return digest.hexdigest()
