"""All that is printed. stdout carries the result and nothing else; stderr what is said on the way."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aoquant.checkpoint.files import size as size
from aoquant.errors import AoquantError

_LINE_EVERY_S = 5.0
_PLAIN_WIDTH = 120  # where there is no terminal to ask
_MEANWHILE = "downloading"  # how a stage begins that goes on beside the others, and has a bar of its own


def open_streams() -> None:
    """Open a stream that was closed by who started this process (`>&-`) on nothing.

    Python has None in its place, and the first file to be opened would get its number, and what libraries print there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode))


def silence_stdout() -> None:
    """Let nothing more be said there, not even when the interpreter flushes stdout on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def accept_any_text() -> None:
    """Let stdout and stderr take what their encoding lacks, as `?` or an escape: names of files may be any bytes."""
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


class ReaderGone(Exception):  # noqa: N818  (its name says no error because it is none)
    """Whoever read stdout has seen enough (`| head`), which is no error. Typer and rich would exit with 1."""


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        raise ReaderGone


class Console:
    """Prints for one command. as_json: the result is one JSON document. quiet: no progress, notes or hints."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self._as_json = as_json
        self._quiet = quiet
        width = None if sys.stdout.isatty() else _PLAIN_WIDTH
        self._out = _Rich(file=sys.stdout, width=width, highlight=False, emoji=False)
        self._err = _Rich(file=sys.stderr, highlight=False, emoji=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """Whether somebody watches, and wants to."""
        return not self._quiet and self._err.is_terminal

    @contextlib.contextmanager
    def library_talk(self) -> Iterator[None]:
        """Where libraries may speak their mind on stderr: not in a quiet command."""
        before = logging.root.manager.disable
        if self._quiet:
            logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)

    def result(self, document: dict[str, Any], tables: Callable[[], RenderableType]) -> None:
        """The result: `document` as JSON, or `tables` for eyes."""
        if self._as_json:
            try:
                sys.stdout.write(json.dumps(document, indent=2) + "\n")
                sys.stdout.flush()
            except BrokenPipeError as error:
                raise ReaderGone from error
        else:
            self._out.print(tables())

    def code(self, text: str) -> None:
        """Lines to copy, never wrapped; no part of a JSON result."""
        if not self._as_json:
            self._out.print(escape(text), style="cyan", soft_wrap=True)

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        if not self._quiet:
            self._err.print(f"[yellow]note:[/] {escape(text)}")

    def error(self, error: AoquantError) -> None:
        """What went wrong, in one line, and what to do about it, in another."""
        self._err.print(f"[bold red]error:[/] {escape(_one_line(error.message))}")
        if error.hint:
            self._err.print(f"[cyan]hint:[/] {escape(_one_line(error.hint))}")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None] | None]:
        """A callback (stage, bytes done, bytes in all): a bar on a terminal, a plain line now and then elsewhere."""
        if self._quiet:
            yield None
        elif self._err.is_terminal:
            with _bar(self._err) as bar:
                yield bar
        else:
            yield _Lines(self._err)


@contextlib.contextmanager
def _bar(console: RichConsole) -> Iterator[Callable[[str, int, int], None]]:
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {kind: progress.add_task("", total=None, visible=False) for kind in (True, False)}

        def update(stage: str, done: int, total: int) -> None:
            task = tasks[stage.startswith(_MEANWHILE)]
            progress.update(task, description=escape(stage), completed=done, total=total, visible=done < total)

        yield update


class _Lines:
    """Progress for a log: a plain line every few seconds."""

    def __init__(self, console: RichConsole) -> None:
        self._console = console
        self._started = time.monotonic()
        self._said = {True: self._started, False: self._started}  # when, of what goes on meanwhile and of the rest
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        kind = stage.startswith(_MEANWHILE)
        with self._lock:
            if now - self._said[kind] < _LINE_EVERY_S:
                return
            self._said[kind] = now
        percent = 100 * done / total if total else 100.0
        self._console.print(
            f"{escape(stage)}: {percent:.0f} % ({size(done)} of {size(total)}) after {now - self._started:.0f} s"
        )


def _one_line(text: str) -> str:
    """One line, and nothing that a terminal would act on: names come from files."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
