"""`aoquant env`: what this machine makes and runs, and nothing private."""

from __future__ import annotations

import getpass
import json
import platform
import sys
from pathlib import Path

import pytest
import torch

from aoquant.configs import CONFIGS, parse_config
from aoquant.engine import support
from aoquant.engine.quantize import kernel_for
from tests.light import processes, schemas

CPU = torch.device("cpu")


def test_every_config_is_made_and_run_on_a_cpu(tmp_path: Path) -> None:
    done = processes.run(["-m", "aoquant", "env", "--json"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = schemas.validated(done.stdout, "env")
    verdicts = {row["config"]: row["on"]["cpu"] for row in report["configs"]}
    assert verdicts.keys() == CONFIGS.keys()
    assert {(verdict["cannot_make"], verdict["cannot_run"]) for verdict in verdicts.values()} == {("", "")}
    assert report["versions"]["torch"] == torch.__version__
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(processes.ROOT)):
        assert json.dumps(private)[1:-1] not in done.stdout.replace(sys.platform, "")


def test_what_is_bound_to_a_gpu_says_so() -> None:
    config = parse_config("int4wo:layout=tile_packed")
    assert support.probe(config, CPU) == (support.cannot_make(config, CPU),) * 2
    assert "packed by CUDA" in support.cannot_make(config, CPU)
    assert "compute capability 8.9" in support.speed(parse_config("fp8dq"), CPU)
    assert support.speed(parse_config("int8wo"), CPU) == "saves memory, not time"


@pytest.mark.parametrize("text", ["int8wo", "fp8dq", "uint3wo", "fp6wo", "int4dq"])
def test_a_weight_made_alone_means_what_it_was_made_of(text: str) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    made = support.quantized(kernel_for(parse_config(text), torch.bfloat16), weight)
    error = (made.dequantize().float() - weight.float()).norm() / weight.float().norm()
    assert 0 < error < {"uint3wo": 0.3, "int4dq": 0.15}.get(text, 0.08)
