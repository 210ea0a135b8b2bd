"""The output folder appears whole or not at all: checked before, written beside its place, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aoquant.checkpoint.manifest import MANIFEST
from aoquant.errors import AoquantError, ResourceError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EISDIR,
)


def check_place(output: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Refuse an output that is in the way, that `overwrite` may not replace, or that would swallow its `source`.

    Only folders that hold an aoquant.json, and empty ones, are ever replaced. Raises UsageError.
    """
    try:
        if not (output.is_symlink() or output.exists()):
            return
        if not overwrite:
            raise UsageError(f"{output} exists", hint="choose another --output, or replace it with --overwrite")
        if output.is_symlink() or not output.is_dir():
            raise UsageError(f"{output} is not a folder", hint="choose another --output")
        if not (output / MANIFEST).is_file() and any(output.iterdir()):
            raise UsageError(
                f"{output} was not written by aoquant, so --overwrite leaves it alone",
                hint="remove it yourself, or choose another --output",
            )
        if source is not None and output.resolve() in (source.resolve(), *source.resolve().parents):
            raise UsageError(f"{output} holds the source itself", hint="choose another --output")
    except OSError as error:
        raise translated(error, output) from error


def check_disk(output: Path, num_bytes: int) -> None:
    """Raise ResourceError if the disk that `output` will lie on has less than `num_bytes` free."""
    free = free_bytes(output)
    if num_bytes > free:
        raise ResourceError(
            f"{num_bytes:,} bytes are needed for {output}, {free:,} are free on its disk",
            hint="free some space, or choose an --output on another disk",
        )


def free_bytes(output: Path) -> int:
    """Free bytes on the disk that `output` will lie on."""
    existing = next(folder for folder in output.absolute().parents if folder.is_dir())
    return shutil.disk_usage(existing).free


@contextlib.contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A fresh folder beside `output`, which takes its place when the block ends well, and is removed when it does not.

    Raises what the block raises; an OSError becomes ResourceError (disk full), UsageError (not allowed) or a plain
    AoquantError. Parents that had to be made go again too.
    """
    made: list[Path] = []
    done = False
    try:
        for parent in reversed(output.absolute().parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        folder = _beside(output, ".new")
        try:
            folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private, and it is about to become the result
            yield folder
            _put_in_place(folder, output)
            done = True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise translated(error, output) from error
    finally:
        for parent in () if done else reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()


def translated(error: OSError, output: Path) -> AoquantError:
    """An OSError met on the way to `output`, as what it means to the user."""
    if error.errno in _FULL:
        return ResourceError(
            f"the disk of {output} is full ({error.strerror})",
            hint="free some space, or choose an --output on another disk; nothing was left behind",
        )
    if error.errno in _FORBIDDEN:
        return UsageError(f"{output} cannot be written: {error.strerror}", hint="choose another --output")
    return AoquantError(f"{error.filename or output}: {error.strerror or error}")


def _beside(output: Path, suffix: str) -> Path:
    name = output.name[:200]  # leave room: file systems allow 255 bytes
    return Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=suffix, dir=output.absolute().parent))


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _put_in_place(folder: Path, output: Path) -> None:
    """Rename the finished `folder` to `output`. An old one there is moved aside first, and back if that fails."""
    if not output.exists():
        folder.rename(output)
        _sync_folder(output.absolute().parent)
        return
    aside = _beside(output, ".old")
    try:
        output.rename(aside / "old")
        try:
            folder.rename(output)
        except BaseException:
            (aside / "old").rename(output)
            raise
        _sync_folder(output.absolute().parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where folders can be synced at all."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
