"""The output folder appears whole or not at all. All of it holds for root too, who may write anywhere."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoquant import output
from aoquant.checkpoint.manifest import MANIFEST
from aoquant.errors import AoquantError, ResourceError, UsageError
from tests.light.bad_input import contents

LONG = "x" * 255
CJK = "图" * 85  # 255 bytes


def checkpoint(folder: Path, text: str = "old") -> Path:
    """A folder that aoquant wrote."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"files": [{"path": f"{text}.bin"}]}))
    (folder / f"{text}.bin").write_text(text)
    return folder


def fill(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "new.bin").write_text("new")


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out", "a/b/c/out", LONG, CJK, "with space", ".hidden", "sub/../out"])
def test_a_new_place_is_fine_and_left_as_it_was(name: str, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    before = contents(tmp_path)
    output.check_place(tmp_path / name, overwrite=overwrite, source=tmp_path / "source")
    assert contents(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("make", [checkpoint, Path.mkdir], ids=["a checkpoint", "an empty folder"])
def test_what_may_be_replaced_is_refused_until_asked_for(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path / "out")
    with pytest.raises(UsageError, match="exists") as raised:
        output.check_place(tmp_path / "out", overwrite=False)
    assert "--overwrite" in raised.value.hint
    output.check_place(tmp_path / "out", overwrite=True)


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")


def mixed(path: Path) -> None:
    checkpoint(path)
    (path / "sub").mkdir()
    (path / "sub" / "thesis.tex").write_text("years of work")


def linked(path: Path) -> None:
    checkpoint(path)
    (path / "mine").symlink_to(path.parent)


def broken_manifest(path: Path) -> None:
    checkpoint(path)
    (path / MANIFEST).write_text("{")


def nested_manifest(path: Path) -> None:
    checkpoint(path / "inner")


def manifest_folder(path: Path) -> None:
    (path / MANIFEST).mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (foreign, "was not written by aoquant"),
        (nested_manifest, "was not written by aoquant"),
        (manifest_folder, "was not written by aoquant"),
        (mixed, "holds 'sub/thesis.tex', which aoquant did not write"),
        (linked, "holds 'mine', which aoquant did not write"),
        (broken_manifest, "was not written by aoquant"),
        (Path.touch, "is not a folder"),
        (lambda path: path.symlink_to(path.parent), "is a link"),
        (lambda path: path.symlink_to(checkpoint(path.parent / "real")), "is a link"),
        (lambda path: path.symlink_to("gone"), "is a link"),
        (lambda path: path.symlink_to(path), "is a link"),
        (os.mkfifo, "is not a folder"),
    ],
)
def test_what_is_never_replaced(make: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    make(tmp_path / "out")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="exists") as raised:
        output.check_place(tmp_path / "out", overwrite=False)
    assert "--overwrite" not in raised.value.hint  # it would be refused too
    with pytest.raises(UsageError, match=words) as raised:
        output.check_place(tmp_path / "out", overwrite=True)
    assert raised.value.hint
    assert contents(tmp_path) == before


def test_the_source_and_what_holds_it_are_never_replaced(tmp_path: Path) -> None:
    checkpoint(tmp_path / "out")
    (tmp_path / "out" / "deep" / "source").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "out" / "deep")
    for source in ("out", "out/deep/source", "link/source", "out/../out"):
        with pytest.raises(UsageError, match="holds the source"):
            output.check_place(tmp_path / "out", overwrite=True, source=tmp_path / source)
    (tmp_path / "beside").mkdir()
    output.check_place(tmp_path / "out", overwrite=True, source=tmp_path / "beside")


@pytest.mark.parametrize("name", ["file/out", "file/a/b/out", "x" * 256, "图" * 86, "loop/out", "a\0b"])
def test_a_place_that_cannot_be(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    before = contents(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(UsageError) as raised:
            output.check_place(tmp_path / name, overwrite=overwrite)
        assert "--output" in raised.value.hint
    assert contents(tmp_path) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where not even root makes folders")
@pytest.mark.parametrize("name", ["/proc/out", "/proc/self/a/out"])
def test_a_place_where_nobody_can_write(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        output.check_place(Path(name), overwrite=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_rights(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        output.check_place(tmp_path / "locked" / "out", overwrite=False)


def test_a_mount_point_is_not_replaced() -> None:
    with pytest.raises(UsageError, match="mount point"):
        output.check_place(Path("/"), overwrite=True)


def test_the_working_directory_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint(tmp_path / "out"))
    output.check_place(Path(), overwrite=True)
    with output.staging(Path()) as folder:
        assert folder.parent == tmp_path
        fill(folder)
    assert contents(tmp_path).keys() == {"out", f"out/{MANIFEST}", "out/sub", "out/sub/new.bin"}


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    for name in ("out", "a/b/out"):
        free = output.free_bytes(tmp_path / name)
        assert free == pytest.approx(shutil.disk_usage(tmp_path).free, abs=10**9)
        output.check_disk(tmp_path / name, 1)
        with pytest.raises(ResourceError, match=f"{10**18:,} bytes are needed") as raised:
            output.check_disk(tmp_path / name, 10**18)
        assert "another disk" in raised.value.hint
    assert list(tmp_path.iterdir()) == []


# --- staging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out", "a/b/out", LONG, CJK, "sub/../out"])
def test_what_is_written_beside_takes_its_place(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    target = tmp_path / name
    with output.staging(target) as folder:
        assert not target.exists()
        assert folder.parent.samefile(target.parent) and folder.name.startswith(".")
        fill(folder)
    assert contents(target).keys() == {MANIFEST, "sub", "sub/new.bin"}
    assert list(tmp_path.rglob(".*")) == []


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with output.staging(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_the_old_one_is_replaced_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path / "out")
    with output.staging(tmp_path / "out") as folder:
        fill(folder)
        assert (tmp_path / "out" / "old.bin").read_text() == "old"
    assert contents(tmp_path / "out").keys() == {MANIFEST, "sub", "sub/new.bin"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


ENDINGS = pytest.mark.parametrize(
    ("error", "becomes", "words"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (SystemExit(3), SystemExit, "3"),
        (ValueError("odd"), ValueError, "odd"),
        (UsageError("ours"), UsageError, "ours"),
        (OSError(errno.ENOSPC, "No space left on device"), ResourceError, "is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ResourceError, "is full"),
        (OSError(errno.EFBIG, "File too large"), ResourceError, "is full"),
        (PermissionError(errno.EACCES, "Permission denied"), UsageError, "cannot be written"),
        (OSError(errno.EROFS, "Read-only file system"), UsageError, "cannot be written"),
        (OSError(errno.EIO, "Input/output error", "w.bin"), AoquantError, "w.bin: Input/output error"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value) or "none",
)


@ENDINGS
@pytest.mark.parametrize("there", [False, True], ids=["new", "over an old one"])
@pytest.mark.parametrize("name", ["out", "a/b/out"])
def test_whatever_goes_wrong_nothing_changes(
    name: str, there: bool, error: BaseException, becomes: type[BaseException], words: str, tmp_path: Path
) -> None:
    if there:
        checkpoint(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(becomes, match=words) as raised, output.staging(tmp_path / name) as folder:
        fill(folder)
        raise error
    assert type(raised.value) is becomes
    assert contents(tmp_path).keys() == before.keys()
    if there:
        assert (tmp_path / name / "old.bin").read_text() == "old"


@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr)
def test_an_interrupt_within_the_exchange_loses_neither(
    error: BaseException, when: str, calls_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal becomes an exception between any two steps: before the first rename, between them, after the second."""
    checkpoint(tmp_path / "out")
    rename = Path.rename
    calls = 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls - 1 != calls_before:
            return rename(self, target)
        if when == "after":
            rename(self, target)
        raise error

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises((KeyboardInterrupt, AoquantError)), output.staging(tmp_path / "out") as folder:
        fill(folder)
    monkeypatch.undo()
    done = (when, calls_before) == ("after", 1)
    assert (tmp_path / "out" / ("sub/new.bin" if done else "old.bin")).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_interrupt_while_cleaning_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree
    calls = 0

    def interrupted(path: Path, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), output.staging(tmp_path / "out") as folder:
        fill(folder)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [foreign, Path.touch, checkpoint], ids=["a folder", "a file", "a checkpoint"])
def test_what_came_to_be_there_meanwhile_is_not_replaced(make: Callable[[Path], Any], tmp_path: Path) -> None:
    """Another process may have been quicker: --overwrite spoke of what was there at the start."""
    with pytest.raises(UsageError) as raised, output.staging(tmp_path / "out") as folder:
        fill(folder)
        make(tmp_path / "out")
        there = contents(tmp_path / "out")
    assert "--output" in raised.value.hint
    assert contents(tmp_path / "out") == there
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from aoquant import output

rename = Path.rename

def killed(self, target):
    if self.suffix == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

Path.rename = killed
with output.staging(Path(sys.argv[1])) as folder:
    (folder / "new.bin").write_text("new")
    if sys.argv[2] == "wait":
        print("writing", flush=True)
        sys.stdin.read()
"""


def killed_run(target: Path, when: str) -> None:
    """A process that writes `target` and is killed where it would rename a folder of that suffix."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), when], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL


needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders")


@needs_locks
def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.0123456789abcdef.other").mkdir()
    killed_run(tmp_path / "out", ".new")
    (left,) = tmp_path.glob(".out.*.new")
    with output.staging(tmp_path / "out") as folder:
        assert not left.exists()
        fill(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.0123456789abcdef.other"}


@needs_locks
def test_the_only_old_one_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    """Killed between the two renames: the old folder is beside its place."""
    checkpoint(tmp_path / "out")
    killed_run(tmp_path / "out", ".new")
    assert not (tmp_path / "out").exists()
    (aside,) = tmp_path.glob(".out.*.old")
    with pytest.raises(KeyboardInterrupt), output.staging(tmp_path / "out"):
        raise KeyboardInterrupt
    assert (aside / "old.bin").read_text() == "old"
    with output.staging(tmp_path / "out") as folder:
        fill(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@needs_locks
def test_a_run_that_is_alive_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out"), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "writing\n"
        with output.staging(tmp_path / "out") as folder:
            fill(folder)
        (theirs,) = tmp_path.glob(".out.*.new")
        assert (theirs / "new.bin").read_text() == "new"
        other.communicate("")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_parent_that_someone_else_uses_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), output.staging(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "theirs").write_text("")
        raise KeyboardInterrupt
    assert contents(tmp_path).keys() == {"a", "a/theirs"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where not even root makes folders")
def test_a_staging_folder_that_cannot_be_made() -> None:
    with pytest.raises(AoquantError, match="No such file"), output.staging(Path("/proc/out")):
        raise AssertionError


def test_every_translated_error_names_what_it_is_about() -> None:
    for number in (*output._FULL, *output._FORBIDDEN, errno.EIO, errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
        error = output.translated(OSError(number, os.strerror(number)), Path("some/out"))
        assert "some/out" in error.message
        assert error.hint or error.exit_code == 1
