"""Opening files that nobody vouches for: sizes, JSON, and what gets saved in a weight file's place."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from aoquant.errors import CheckpointError

MAX_JSON_BYTES = 64_000_000


class Seekable(Protocol):
    """What is needed of an open binary file. One read may give less than was asked for."""

    def seek(self, offset: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...


Opener = Callable[[Path], AbstractContextManager[tuple[Seekable, int]]]
"""Path → the open file and its bytes. Raises CheckpointError if there is none, or it cannot be opened."""


@contextmanager
def open_file(path: Path) -> Iterator[tuple[Seekable, int]]:
    """The Opener of files on this disk. An OSError of the block becomes a CheckpointError."""
    num_bytes = file_bytes(path)
    try:
        with path.open("rb", buffering=0) as file:
            yield file, num_bytes
    except OSError as error:
        raise unreadable(path, error) from error


def read_up_to(file: Seekable, count: int) -> bytes:
    """The next `count` bytes of a file, fewer only at its end."""
    content = file.read(count)
    while len(content) < count:
        more = file.read(count - len(content))
        if not more:
            break
        content += more
    return content


def list_files(folder: Path) -> dict[str, int]:
    """A folder's regular files (links followed), name → bytes. CheckpointError if it cannot be listed."""
    try:
        found = {}
        for path in folder.iterdir():
            try:
                status = path.stat()
            except OSError:  # a dangling link is not a file that can be read
                continue
            if stat.S_ISREG(status.st_mode):
                found[path.name] = status.st_size
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be listed: {error.strerror}", hint="name a folder that holds a model"
        ) from error
    return found


def read_json(path: Path, *, unique_keys: bool = False) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if it is missing, too large, not JSON or not an object.

    unique_keys: refuse an object that holds one key twice, where Python would silently keep the last.
    """
    num_bytes = file_bytes(path)
    if num_bytes > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path.name} is {num_bytes:,} bytes; a JSON file here may have {MAX_JSON_BYTES:,}",
            hint="is it the right file?",
        )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    refuse_foreign(path, raw[:512])
    content = parse_json(raw, path.name, unique_keys=unique_keys)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path.name} holds a JSON {_json_kind(content)}, not an object", hint="download it again"
        )
    return content


def parse_json(raw: bytes, origin: str, *, unique_keys: bool = False) -> Any:
    """Parse JSON from an untrusted file called `origin`. Raises CheckpointError, and nothing else."""
    hook = _unique if unique_keys else None
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=hook, parse_int=_bounded_int, parse_constant=_constant)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors too
        reason = str(error)
    raise CheckpointError(f"{origin} is not valid JSON: {quoted(reason, quote=False)}", hint="download it again")


def file_bytes(path: Path) -> int:
    """The size of a regular file. CheckpointError if there is none, or it is a folder, a pipe or a device."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}", hint="check the path") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name} is not a regular file", hint="name a file, or its folder")
    return status.st_size


def unreadable(path: Path, error: OSError | ValueError) -> CheckpointError:
    """The error for a file that the system does not let us read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CheckpointError(f"{path.name} cannot be read: {reason}", hint="check its permissions and the disk")


def refuse_foreign(path: Path, head: bytes) -> None:
    """Raise CheckpointError if `head`, a file's first bytes, shows what gets saved in a file's place."""
    if not head:
        raise CheckpointError(f"{path.name} is empty", hint="download it again")
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path.name} is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in its folder"
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CheckpointError(
            f"{path.name} is a web page, not the file itself",
            hint="download it again, signed in if it is gated",
        )


def quoted(value: object, *, quote: bool = True, limit: int = 100) -> str:
    """Text from a file made safe for a one-line message: cut, and without control characters or line ends."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if not text.isprintable():
        text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return f"'{text}'" if quote else text


def size(num_bytes: int) -> str:
    """`2.56 GB`: powers of 1000, as file sizes are advertised."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        seen: set[str] = set()
        double = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(double)} is there twice")
    return built


def _bounded_int(text: str) -> int:
    if len(text) > 20:  # no size or offset needs more, and Python 3.10 takes quadratic time for long ones
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _constant(text: str) -> float:
    """NaN and Infinity, which Python writes into configs although JSON has no such numbers."""
    return float(text)


def _json_kind(content: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(content), "number")
