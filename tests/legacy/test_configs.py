"""Every config on the oldest stack that is tested: torch 2.6 and torchao 0.15. `make test-legacy` runs it there.

What each needed to be unpickled is printed at the end: `plain` is torch.load(weights_only=True) with torchao imported.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import pytest
import torch

import aoquant
from aoquant import loading
from aoquant.configs import CONFIGS
from aoquant.engine import libraries, pickled
from aoquant.errors import CheckpointError, UsageError
from tests.heavy import tiny

EACH_MODEL = pytest.mark.parametrize("name", ["flux", "t5"])
ALL = [*CONFIGS, *(f"uint{bits}wo:layout=unpacked" for bits in (2, 4, 7)), "fp8wo:dtype=e5m2"]
# Configs with dynamic float8 activations are made anywhere; torch 2.6 multiplies them on CUDA only.
NO_FORWARD_HERE = {"fp8dq", "fp8dqrow"}
BIN_ONLY = {"int8wo", "int8dq"}  # torchao 0.15's safetensors form knows no Int8Tensor
Saved = Callable[[str], Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tiny.save(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return get


@pytest.fixture(scope="session")
def needed(pytestconfig: pytest.Config) -> Iterator[dict[str, str]]:
    """Config → what its `.bin` needed; printed when all is done."""
    found: dict[str, str] = {}
    yield found
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        lines = [f"  {config:26} {what}" for config, what in found.items()]
        print("\n\nunpickled:", *lines, sep="\n")  # noqa: T201  (it is what the run is for)


def test_this_is_the_oldest_stack() -> None:
    assert torch.__version__.startswith("2.6.") and metadata.version("torchao") == "0.15.0"


@EACH_MODEL
@pytest.mark.parametrize("config", ALL)
def test_a_config_is_made_inspected_and_loaded(
    saved: Saved, needed: dict[str, str], tmp_path: Path, config: str, name: str
) -> None:
    for file_format in ("bin", "safetensors"):
        out = tmp_path / file_format
        components = {tiny.MODELS[name].component: config}
        if file_format == "safetensors" and config.partition(":")[0] in BIN_ONLY:
            with pytest.raises(UsageError, match=r"torchao 0\.15\.0 does not write"):
                aoquant.quantize(saved(name), components, output=out, format=file_format)
            continue
        result = aoquant.quantize(saved(name), components, output=out, format=file_format)
        assert result.plan.components[0].num_quantized > 0
        assert aoquant.inspect(out).is_sound
        if file_format == "safetensors" and tiny.MODELS[name].library == "diffusers":
            assert any("torchao 0.16" in warning for warning in result.plan.warnings)
            with pytest.raises(CheckpointError, match=r"with torchao 0\.16 or newer, installed is 0\.15\.0"):
                loading.load_component(out, "")
            continue
        loaded = loading.load_component(out, "")
        if config not in NO_FORWARD_HERE:
            assert torch.isfinite(tiny.forward(loaded.module, name, dtype=torch.bfloat16)).all()
    needed[config] = needs(next((tmp_path / "bin").glob("*.bin")))
    assert needed[config] in ("plain", "allow-listed")


def needs(file: Path) -> str:
    libraries.load("torchao.quantization")
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        with pickled.harmless_allowed():
            torch.load(file, weights_only=True)
        return "allow-listed"
    return "plain"


def test_what_this_torchao_cannot_multiply_is_not_made(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scaled per row only"):
        aoquant.quantize(saved("flux"), {"transformer": "int8wo:group_size=16"}, output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@EACH_MODEL
def test_a_trusted_load_is_the_same(saved: Saved, tmp_path: Path, name: str) -> None:
    aoquant.quantize(
        saved(name), {tiny.MODELS[name].component: "int4dq"}, output=tmp_path / "out", max_shard_size=20_000
    )
    plain = loading.load_component(tmp_path / "out", "").module
    trusted = loading.load_component(tmp_path / "out", "", trust_pickle=True).module
    outputs: list[Any] = [tiny.forward(module, name, dtype=torch.bfloat16) for module in (plain, trusted)]
    assert torch.equal(*outputs)
