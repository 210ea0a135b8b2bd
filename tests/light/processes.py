"""Processes of their own, forked from one that has imported torch, and all of it that torchao wants: three seconds.

`start(["-m", "aoquant", …])` gives what subprocess.Popen would: an environment, streams, a working directory and
signals of its own. Left to be imported are torchao, which is talkative then, huggingface_hub, which reads the
environment then, and aoquant. True starts are for `tests/light/test_cli.py` and `tests/heavy/test_cli.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_SLOW = (
    "torch",
    "torch._dynamo",
    "torch._inductor.decomposition",
    "httpx2",
    "httpx",
    "yaml",
    "tqdm.auto",
    "rich.console",
    "typer",
)


class Child:
    """A process and its two streams, in files. pid, returncode: as of subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="streams-")
        self._streams = [Path(self._folder.name) / name for name in ("out", "err")]
        names = [str(path) for path in self._streams]
        self._process = _CONTEXT.Process(
            target=_become, args=(list(arguments), str(cwd), dict(environment), names), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        """Stdout and stderr, as far as they are written."""
        out, err = (path.read_text() if path.exists() else "" for path in self._streams)
        return out, err

    def finish(self, *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        out, err = self.output()
        if self.returncode is None:
            raise subprocess.TimeoutExpired("its arguments", timeout, out, err)
        return subprocess.CompletedProcess([], self.returncode, out, err)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._folder.cleanup()


def start(arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Child:
    """A Python with these `arguments`, "-m" or "-c" first. env: in addition to that of this process."""
    _CONTEXT.set_forkserver_preload([name for name in _SLOW if name in sys.modules])
    return Child(arguments, cwd or Path.cwd(), {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})})


def run(
    arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`start`, and wait for the end."""
    with start(arguments, cwd=cwd, env=env) as child:
        return child.finish()


def _become(arguments: list[str], cwd: str, environment: dict[str, str], streams: list[str]) -> None:
    for number, path in enumerate(streams, start=1):
        opened = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    assert "huggingface_hub" not in sys.modules  # it is to read this environment
    how, what, *sys.argv[1:] = arguments
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert how == "-c"
        sys.argv[0] = how
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
