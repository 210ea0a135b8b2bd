"""The examples that `make demo` does not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path

import forward_errors
import pytest

from aoquant import inspect
from tests.heavy import stock, tiny
from tests.light import bad_input, processes

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "examples" / "slurm-array.sh"
CONFIGS = {"transformer": "int8wo", "text_encoder_2": "fp8wo"}
COMPONENTS = [f"{name}={config}" for name, config in CONFIGS.items()]

# `aoquant` on PATH: has the command run by the test, which need not import torch for each.
LAUNCHER = f"""#!{sys.executable}
import os, sys
from multiprocessing.connection import Client
with Client(os.environ["LAUNCHES"]) as launches:
    launches.send((sys.argv[1:], os.getcwd(), dict(os.environ)))
    code, out, err = launches.recv()
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""

# What a cluster's sbatch would do, done here at once: run every task of an array, or the one job.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
echo "$*" >> sbatch.log
last=-1
while [[ $1 == --* ]]; do
    case $1 in --array=0-*) last=${1#--array=0-} ;; esac
    shift
done
if ((last < 0)); then exec "$@"; fi
for ((task = 0; task <= last; task++)); do SLURM_ARRAY_TASK_ID=$task "$@" >&2; done
echo "41;cluster"
"""


def test_forward_errors_shrink_with_finer_weights(capsys: pytest.CaptureFixture[str]) -> None:
    forward_errors.main(["--configs", "int8wo", "uint2wo"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| config | bits per weight | Flux | T5 |", "| --- | --- | --- | --- |"]
    fine, coarse = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    assert (fine[0], coarse[0]) == ("`int8wo`", "`uint2wo`")
    for column in (2, 3):
        assert 0 < float(fine[column]) < 0.1 < float(coarse[column]) < 2
    assert 8 < float(fine[1]) < 8.5


@pytest.fixture
def cluster(tiny_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A working directory with a pipeline of Flux and T5, and with aoquant and sbatch in its bin."""
    parts = {
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }
    bad_input.write(tmp_path, {"pipe/model_index.json": {"_class_name": "FluxPipeline", **parts}})
    (tmp_path / "pipe" / "transformer").symlink_to(tiny_folder("flux"))
    (tmp_path / "pipe" / "text_encoder_2").symlink_to(tiny_folder("t5"))
    bad_input.write(tmp_path, {"bin/aoquant": LAUNCHER, "bin/sbatch": SBATCH})
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    return tmp_path


def launch_all(listener: Listener) -> None:
    """Run each command that a launcher sends, in a process of its own."""
    while True:
        with listener.accept() as launcher:
            if (sent := launcher.recv()) is None:
                return
            argv, cwd, environment = sent
            done = processes.run(["-m", "aoquant", *argv], cwd=Path(cwd), env=environment)
            launcher.send((done.returncode, done.stdout, done.stderr))


def slurm(cluster: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{cluster / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [str(SLURM), *words, *COMPONENTS]
    with Listener(family="AF_UNIX") as listener:
        launches = threading.Thread(target=launch_all, args=(listener,))
        launches.start()
        try:
            environment = {**os.environ, "PATH": path, "LAUNCHES": str(listener.address), **environment}
            return subprocess.run(command, cwd=cluster, env=environment, capture_output=True, text=True, timeout=300)
        finally:
            with Client(listener.address) as end:
                end.send(None)
            launches.join()


def test_a_task_of_the_slurm_array_quantizes_its_component_and_can_be_run_again(cluster: Path) -> None:
    for _ in range(2):
        done = slurm(cluster, "part", "pipe", "out", SLURM_ARRAY_TASK_ID="1")
        assert done.returncode == 0, done.stderr
    assert [path.name for path in (cluster / "out.parts").iterdir()] == ["text_encoder_2"]
    report = inspect(cluster / "out.parts" / "text_encoder_2")
    assert report.is_sound
    assert [component.name for component in report.components] == ["text_encoder_2"]


def test_a_slurm_array_of_what_cannot_be_planned_is_not_submitted(cluster: Path) -> None:
    (cluster / "pipe" / "text_encoder_2").unlink()
    done = slurm(cluster, "pipe", "out")
    assert done.returncode == 4 and "error: " in done.stderr
    assert not (cluster / "sbatch.log").exists()


def test_a_slurm_array_and_its_join_make_one_checkpoint(cluster: Path) -> None:
    done = slurm(cluster, "pipe", "out")
    assert done.returncode == 0, done.stderr
    array, join = (cluster / "sbatch.log").read_text().splitlines()
    assert array == f"--parsable --array=0-1 {SLURM} part pipe out {' '.join(COMPONENTS)}"
    assert join == f"--dependency=afterok:41 --kill-on-invalid-dep=yes {SLURM} join pipe out {' '.join(COMPONENTS)}"
    assert not (cluster / "out.parts").exists()
    manifest = json.loads((cluster / "out" / "aoquant.json").read_text())
    assert {name: record["config"] for name, record in manifest["components"].items()} == CONFIGS
    for row in (tiny.MODELS["flux"], tiny.MODELS["t5"]):
        where = (cluster / "pipe" / row.component, row.library, row.class_name)
        loaded = stock.load(cluster / "out" / row.component, row.library, row.class_name)
        stock.assert_same_state(loaded.state_dict(), stock.quantize(*where, CONFIGS[row.component]).state_dict())
