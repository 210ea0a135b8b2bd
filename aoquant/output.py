"""The output folder appears whole or not at all: checked before, written beside its place, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from aoquant.checkpoint.files import quoted, read_json
from aoquant.checkpoint.manifest import MANIFEST, listed_files
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UsageError

if sys.platform != "win32":
    import fcntl

LINKED_FROM = 1_000_000
"""Bytes from which on a file of another folder may become a hard link: small ones are there to be edited."""

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
    """Refuse an output that is in the way, that `overwrite` may not replace, that would swallow its `source`, or that
    cannot be made where it is.

    Only folders whose every file their aoquant.json lists, and empty ones, are ever replaced. Raises UsageError.
    """
    try:
        if _is_there(output):
            _check_replaceable(output, overwrite=overwrite)
        if source is not None and output.resolve() in (source.resolve(), *source.resolve().parents):
            raise UsageError(f"{output} holds the source itself", hint="choose another --output")
        _try_making_a_folder(output)
    except OSError as error:
        raise translated(error, output) from error
    except ValueError as error:
        raise UsageError(f"{str(output)!r} is no path: {error}", hint="choose another --output") from error


def _is_there(output: Path) -> bool:
    """Whether something has this name, be it a dangling link. A file among its parents counts as absent."""
    try:
        output.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _check_replaceable(output: Path, *, overwrite: bool) -> None:
    reason = _why_irreplaceable(output)
    if overwrite and reason:
        raise UsageError(f"{output} {reason}: --overwrite leaves it alone", hint="choose another --output")
    if reason:
        raise UsageError(f"{output} exists, and {reason}", hint="choose another --output")
    if not overwrite:
        raise UsageError(f"{output} exists", hint="choose another --output, or replace it with --overwrite")


def _why_irreplaceable(output: Path) -> str:
    if output.is_symlink():
        return "is a link"
    if not output.is_dir():
        return "is not a folder"
    if _place(output).is_mount():
        return "is a mount point"
    foreign = _foreign_file(output)
    if foreign == MANIFEST:
        return "was not written by aoquant"
    return f"holds {quoted(foreign)}, which aoquant did not write" if foreign else ""


def _foreign_file(output: Path) -> str:
    """What of a folder aoquant has not written: a path in it; MANIFEST if it lacks a sound one; empty if nothing."""
    there = [
        path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_symlink() or not path.is_dir()
    ]
    if not there:
        return MANIFEST if any(output.iterdir()) else ""
    try:
        listed = {str(path) for path, _ in listed_files(read_json(output / MANIFEST))}
    except CheckpointError:
        return MANIFEST
    return min(set(there) - listed - {MANIFEST}, default="")


def _try_making_a_folder(output: Path) -> None:
    """Make and remove an empty folder where `output` will be made: nothing else tells of rights and read-only disks."""
    parent = next(folder for folder in _place(output).parents if os.path.lexists(folder))
    folder = parent / f".aoquant.{secrets.token_hex(8)}"
    try:
        folder.mkdir()
    except FileNotFoundError as error:  # /proc answers so, and a dangling link
        reason = f"{parent} takes no folders"
        raise UsageError(f"{output} cannot be written: {reason}", hint="choose another --output") from error
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_disk(output: Path, num_bytes: int, *, cache: Path | None = None, download_bytes: int = 0) -> None:
    """Raise ResourceError if `num_bytes` for `output`, or what comes into `cache` before, does not fit their disks."""
    free = free_bytes(output)
    if cache is not None and download_bytes:
        if same_disk(cache, output):
            if num_bytes + download_bytes > free:
                raise ResourceError(
                    f"{download_bytes:,} bytes to download and {num_bytes:,} for {output} are needed, "
                    f"{free:,} are free on their disk",
                    hint="free some space, or set HF_HOME or --output to a folder on another disk",
                )
        elif download_bytes > (left := free_bytes(cache)):
            raise ResourceError(
                f"{download_bytes:,} bytes are to be downloaded, {left:,} are free on the disk of {cache}",
                hint="free some space, or set HF_HOME to a folder on a larger disk",
            )
    if num_bytes > free:
        raise ResourceError(
            f"{num_bytes:,} bytes are needed for {output}, {free:,} are free on its disk",
            hint="free some space, or choose an --output on another disk",
        )


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that `folder`, which need not exist yet, will lie on."""
    return shutil.disk_usage(_existing(folder)).free


def same_disk(one: Path, other: Path) -> bool:
    """Whether two folders, which need not exist yet, will lie on the same file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(parent for parent in (_place(folder), *_place(folder).parents) if parent.is_dir())


def link(origin: Path, target: Path) -> bool:
    """Make `target` a hard link to `origin`, where that can be done. Nothing of aoquant's ever writes through one."""
    try:
        os.link(origin.resolve(), target)  # the Hub's cache keeps symbolic links to its blobs
    except OSError:  # across file systems, or on one without hard links
        return False
    return True


_open: list[Path] = []
_finished: list[Path] = []


def is_staging() -> bool:
    """Whether this process has a folder that is to be removed if it ends now."""
    return bool(_open)


def finished() -> list[Path]:
    """The folders that took their places in this process, since `forget`."""
    return list(_finished)


def forget() -> None:
    _finished.clear()


@contextlib.contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A fresh folder beside `output`, which takes its place when the block ends well, and is removed when it does not.

    Raises what the block raises; an OSError becomes ResourceError (disk full), UsageError (not allowed) or a plain
    AoquantError. Parents that had to be made go again too, and so does what an earlier, killed run left for `output`.
    """
    made: list[Path] = []
    done = False
    try:
        place = _place(output)
        replaces = place.exists()
        for parent in reversed(place.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        _sweep(place)
        folder = _beside(place, ".new")
        _open.append(folder)
        try:
            folder.mkdir()
            with _held(folder):
                yield folder
                _put_in_place(folder, place, replaces=replaces)
            done = True
            _finished.append(output)
            _sweep(place)
        finally:
            _remove(folder)
            _open.remove(folder)
    except OSError as error:
        raise translated(error, output) from error
    finally:
        for parent in () if done else reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()


def check_file(target: Path, *, hint: str) -> None:
    """Raise UsageError, with that hint, where no file can be made beside `target`."""
    beside = _beside_file(target)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}", hint=hint) from error


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A name beside `target`, of the same suffix: the file that the block writes there takes its place.

    An OSError becomes what it means to the user, as with `staging`; nothing is left behind.
    """
    beside = _beside_file(target)
    try:
        yield beside
        beside.replace(target)
    except OSError as error:
        raise translated(error, target) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _beside_file(target: Path) -> Path:
    return target.with_name(f".{secrets.token_hex(8)}{target.suffix.lower()}")


def translated(error: OSError, output: Path) -> AoquantError:
    """An OSError met on the way to `output`, as what it means to the user."""
    if error.errno in _FULL:
        return ResourceError(
            f"the disk of {output} is full ({error.strerror})",
            hint="free some space, or choose an --output on another disk; nothing was left behind",
        )
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return UsageError(f"{output} came to exist meanwhile", hint="choose another --output, or use --overwrite")
    if error.errno in _FORBIDDEN:
        return UsageError(f"{output} cannot be written: {error.strerror}", hint="choose another --output")
    return AoquantError(f"{error.filename or output}: {error.strerror or error}")


def _place(output: Path) -> Path:
    """`output` in full, so that `.` and `a/..` can be renamed. A link in its last part, refused before, would be
    followed."""
    return Path(os.path.realpath(output))


def _beside(place: Path, suffix: str) -> Path:
    """An unused hidden name beside `place`. It is known before the folder is made: no interrupt falls in between."""
    return place.parent / f"{_stem(place)}{secrets.token_hex(8)}{suffix}"


def _stem(place: Path) -> str:
    name = os.fsencode(place.name)[:200].decode(errors="ignore")  # leave room: file systems allow 255 bytes
    return f".{name}."


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a temporary folder, so that another run can tell that this one is alive: a lock dies with its process."""
    handle = _try_lock(folder)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _try_lock(folder: Path) -> int | None:
    """An open, locked handle of a folder; None if another process holds it, or this system has no such locks."""
    if sys.platform == "win32":
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(place: Path) -> None:
    """Remove what `kill -9` or a power cut made earlier runs leave beside `place`.

    An old folder that was moved aside stays where nothing took its place: it may be the only one. So does an empty
    new one: another run has perhaps just made it, and is about to lock it.
    """
    name = re.compile(re.escape(_stem(place)) + r"[0-9a-f]{16}\.(new|old)")
    with contextlib.suppress(OSError):
        for left in sorted(path for path in place.parent.iterdir() if name.fullmatch(path.name)):
            needed = not place.exists() if left.name.endswith(".old") else not any(left.iterdir())
            handle = None if needed else _try_lock(left)
            if handle is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a temporary folder, also if a second interrupt comes meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _put_in_place(folder: Path, place: Path, *, replaces: bool) -> None:
    """Rename the finished `folder` to `place`. One that it `replaces` is moved aside first, and back if that fails.

    Wherever an interrupt falls, what is at `place` decides: the old one is removed only when the new one is there.
    What came to be at `place` since the start was not there to be checked: the rename fails on it.
    """
    aside = _beside(place, ".old")
    try:
        if replaces:
            place.rename(aside)
        folder.rename(place)
        _sync_folder(place.parent)
    finally:
        if aside.exists() and not place.exists():
            aside.rename(place)
        _remove(aside)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where folders can be synced at all."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
