"""The promise about wrong input, held in one place: one line, one hint, the right code, and nothing else anywhere."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aoquant.cli import main

Make = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One wrong input. argv: relative to the working directory. make: what it finds there. words: all on stderr."""

    name: str
    argv: tuple[str, ...]
    code: int
    words: tuple[str, ...]
    make: Make | None = None


def bad(name: str, argv: str | Sequence[str], code: int, *words: str, make: Make | None = None) -> Bad:
    """A row. argv: a line to be split at blanks, or the arguments themselves."""
    arguments = argv.split() if isinstance(argv, str) else argv
    return Bad(name=name, argv=tuple(arguments), code=code, words=words, make=make)


def table(rows: Sequence[Bad]) -> pytest.MarkDecorator:
    """The rows as one parametrised table, each under its name."""
    assert len({row.name for row in rows}) == len(rows)
    return pytest.mark.parametrize("row", rows, ids=lambda row: re.sub(r"\W+", "-", row.name))


def check(row: Bad, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run `row` in `work` and hold all of the promise."""
    if row.make is not None:
        row.make(work)
    monkeypatch.chdir(work)
    before = contents(work)
    code, out, err = run(row.argv, capsys)
    assert (code, out) == (row.code, ""), err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"], err
    assert all(line.partition(":")[2].strip() for line in err.splitlines()), err
    assert "Traceback" not in err
    missing = [word for word in row.words if word not in err]
    assert not missing, f"{missing} not in {err}"
    assert contents(work) == before


def run(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """`main(argv)` in this process: exit code, stdout, stderr."""
    capsys.readouterr()
    with signals_kept():
        code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """The signal handlers that are set within do not outlive it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below `folder`: path → kind and rights, size, time of the last change. Links are not followed."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        size = 0 if path.is_dir() else status.st_size
        found[path.relative_to(folder).as_posix()] = (status.st_mode, size, status.st_mtime_ns)
    return found


def write(work: Path, files: dict[str, Any]) -> None:
    """Write `files` (path → bytes, text, or a value to be JSON) below `work`."""
    for name, content in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def having(content: dict[str, Any]) -> Make:
    """A `make` that writes these files."""
    return lambda work: write(work, content)
