"""Signals to real processes: the target is absent or untouched, nothing temporary is left, the exit code says so."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import accelerate
import diffusers
import pytest
import torch

import aoquant
from tests.heavy import tiny
from tests.light.processes import ROOT, Child, start

UNWINDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TARGETS = ("fresh", "over")
# Slow enough that a signal meets it at work: about two seconds of writing.
ARGUMENTS = ("--transformer", "uint4wo", "--overwrite", "--device", "cpu")


def name_of(number: int) -> str:
    return signal.Signals(number).name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Flux transformer of wide layers, 340 MB in bfloat16, written without ever being in memory."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    folder.mkdir()
    config = {**tiny.MODELS["flux"].config, "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 48}
    with accelerate.init_empty_weights():
        model = diffusers.FluxTransformer2DModel(**config)
    model.save_config(str(folder))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in model.state_dict().items():
        begin, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    run = values.view(torch.uint8).numpy().tobytes()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, len(run)):
            file.write(run[: end - start])
    assert 300e6 < end < 400e6
    return folder


@pytest.fixture(scope="module")
def old(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished checkpoint, small."""
    source = tiny.save("flux", tmp_path_factory.mktemp("flux") / "flux")
    target = tmp_path_factory.mktemp("old") / "over"
    aoquant.quantize(source, {"transformer": "int8wo"}, output=target)
    return target


@contextmanager
def started(argv: list[str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -m aoquant`, with the signals' usual meanings, whatever this process was told to ignore."""

    def usual() -> None:
        for number in UNWINDING:
            signal.signal(number, signal.SIG_DFL)

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "aoquant", *argv], cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=usual,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def until(condition: Callable[[], bool], running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_writing(folder: Path, target: str) -> bool:
    """Whether some weights of `target` are on the disk, beside its place."""
    return any(path.stat().st_size > 10e6 for path in folder.glob(f".{target}.*/*.bin"))


def are_running(children: Iterable[Child]) -> bool:
    return all(child.returncode is None for child in children)


def interrupt(number: int, model: Path, old: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """Send the signal to one process for each target, side by side, each as soon as it writes: exit code and stderr."""
    shutil.copytree(old, folder / "over")
    ended = {}
    commands = {target: ["-m", "aoquant", "quantize", str(model), *ARGUMENTS, "-o", target] for target in TARGETS}
    with ExitStack() as stack:
        processes = {target: stack.enter_context(start(argv, cwd=folder)) for target, argv in commands.items()}
        waiting = dict(processes)
        while waiting:
            until(lambda: any(is_writing(folder, target) for target in waiting), lambda: are_running(waiting.values()))
            for target in [target for target in waiting if is_writing(folder, target)]:
                waiting.pop(target).send_signal(number)
        for target, process in processes.items():
            done = process.finish(timeout=60)
            assert done.stdout == ""
            ended[target] = done.returncode, done.stderr
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("number", UNWINDING, ids=name_of)
def test_an_interrupt_leaves_everything_as_it_was(number: int, model: Path, old: Path, tmp_path: Path) -> None:
    ended = interrupt(number, model, old, tmp_path)
    for target in TARGETS:
        code, err = ended[target]
        assert code == 130, err
        assert [line for line in err.splitlines() if line.startswith("error:")] == ["error: interrupted"]
        assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["over"]
    assert hashes(tmp_path / "over") == hashes(old)


@pytest.mark.slow
def test_a_kill_leaves_the_target_absent_or_as_it_was(model: Path, old: Path, tmp_path: Path) -> None:
    ended = interrupt(signal.SIGKILL, model, old, tmp_path)
    assert {code for code, _ in ended.values()} == {-signal.SIGKILL}
    assert not (tmp_path / "fresh").exists()
    assert hashes(tmp_path / "over") == hashes(old)
    # What the kill left behind is hidden, beside the target, and in nobody's way.
    leftovers = [path for path in tmp_path.iterdir() if path.name != "over"]
    assert all(path.name.startswith((".fresh.", ".over.")) for path in leftovers)
    aoquant.quantize(old_source(old), {"transformer": "int8wo"}, output=tmp_path / "fresh")
    assert (tmp_path / "fresh" / "aoquant.json").is_file()


def old_source(old: Path) -> Path:
    return tiny.save("flux", old.parent / "source")


@pytest.mark.parametrize(
    ("delay_s", "number"),
    [(0.25, signal.SIGINT), (0.6, signal.SIGTERM), (1.0, signal.SIGINT), (1.5, signal.SIGHUP), (2.5, signal.SIGINT)],
)
def test_an_interrupt_while_libraries_are_imported_is_one_line(
    number: int, delay_s: float, model: Path, tmp_path: Path
) -> None:
    with started(["quantize", str(model), *ARGUMENTS, "-o", "out"], tmp_path) as process:
        until(lambda: handles(process.pid, signal.SIGTERM), lambda: process.poll() is None)
        time.sleep(delay_s)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"], err
    assert list(tmp_path.iterdir()) == []


def handles(pid: int, number: int) -> bool:
    """Whether a process has come so far that it catches a signal, as Linux tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True  # another system: the delay has to do
    (caught,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught & (1 << (number - 1)))
