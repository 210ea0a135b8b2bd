"""Every config on torch 2.6 and torchao 0.15: made, read, loaded, and what unpickling it took."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from aoquant import loading
from aoquant.configs import CONFIGS
from aoquant.errors import CheckpointError, UsageError
from tests.heavy import stock, tiny
from tests.light.bad_input import bad, check, table

ROOT = Path(__file__).parents[2]
Make = Callable[..., Any]

NEEDS = {
    "int8wo": "plain",
    "int8dq": "plain",
    "fp8wo": "plain",
    "fp8dq": "plain",
    "fp8dqrow": "plain",
    "int4wo": "plain",
    "int4dq": "allow-listed",
    **{f"uint{bits}wo": "plain" for bits in range(1, 8)},
    **{f"uint{bits}wo:layout=unpacked": "allow-listed" for bits in range(1, 8)},
    **{f"fp{bits}wo": "plain" for bits in range(3, 8)},
}
"""Config → how its `.bin` is unpickled here: as it is, or with torch's sub-byte dtypes allowed for the call. None needs
to be trusted."""

# torch 2.6 has no _scaled_mm for CPUs.
NOT_ON_A_CPU = ("fp8dq", "fp8dqrow")


def test_the_table_has_every_config() -> None:
    assert {name.partition(":")[0] for name in NEEDS} == set(CONFIGS)


@pytest.mark.parametrize("name", ["flux", "t5"])
@pytest.mark.parametrize("config_text", NEEDS)
def test_it_is_made_read_and_loaded(config_text: str, name: str, made: Make) -> None:
    result = made(name, config_text)
    report = aoquant.inspect(result.plan.output)
    assert report.is_sound and not report.components[0].problems
    aoquant.load(result.plan.output)  # torchao registers a class where it is first imported
    before = set(torch.serialization.get_safe_globals())
    (loaded,) = loading.load_each(result.plan.output)
    assert set(torch.serialization.get_safe_globals()) == before
    assert loaded.report.unpickled == NEEDS[config_text]
    assert (loaded.report.allowed != ()) is (NEEDS[config_text] == "allow-listed")
    if config_text not in NOT_ON_A_CPU:
        assert tiny.forward(loaded.module, name).isfinite().all()


@pytest.mark.parametrize("config_text", ["int8wo", "int8dq", "fp8wo", "uint7wo", "fp7wo"])
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_it_computes_what_the_original_does(name: str, config_text: str, made: Make) -> None:
    original = tiny.forward(tiny.build(name, dtype=torch.bfloat16), name).float()
    quantized = tiny.forward(aoquant.load(made(name, config_text).plan.output), name).float()
    assert (quantized - original).norm() < 0.15 * original.norm()


@pytest.mark.parametrize("config_text", [text for text, way in NEEDS.items() if way == "allow-listed"])
def test_what_is_allow_listed_here_stock_does_not_load(config_text: str, made: Make) -> None:
    folder = made("flux", config_text).plan.output
    (file,) = folder.glob("*.bin")
    with pytest.raises(pickle.UnpicklingError, match=r"Unsupported global: GLOBAL torch\.int"):
        torch.load(file, weights_only=True)
    with pytest.raises(OSError, match="Unable to load weights"):
        stock.load(folder, "diffusers", "FluxTransformer2DModel")


@pytest.mark.parametrize("max_shard_size", ["10GB", "20kB"])
@pytest.mark.parametrize("name", ["flux", "t5", "clip_text", "wan"])
def test_shards(name: str, max_shard_size: str, made: Make) -> None:
    folder = made(name, "int4dq", max_shard_size=max_shard_size).plan.output
    assert (len(list(folder.glob("*.bin"))) > 1) is (max_shard_size == "20kB")
    assert tiny.forward(aoquant.load(folder), name).isfinite().all()


def test_int8_weights_are_those_of_later_versions(made: Make) -> None:
    """torchao 0.15 itself makes no scale below 2^-7 in bfloat16."""
    module = aoquant.load(made("flux", "int8wo").plan.output)
    original = tiny.build("flux", dtype=torch.bfloat16)
    for name, weight in original.state_dict().items():
        found = module.state_dict()[name]
        if type(found).__name__ == "Int8Tensor":
            scale = weight.abs().amax(-1, keepdim=True) / 127.5
            assert torch.equal(found.scale, scale)
            codes = (weight.float() * (1 / scale.float())).round().clamp(-128, 127).to(torch.int8)
            assert torch.equal(found.qdata, codes)


FIXTURES = ROOT / "tests" / "fixtures" / "legacy"
FIXTURE_NEEDS = {"t5-aoquant-int4dq": "allow-listed"}
# transformers 5.24 takes the `dtype` of UIntXWeightOnlyConfig for one of its own, and stock code fails in the same way.
NOT_READ_BY_TRANSFORMERS = ("t5-int4wo-hqq", "t5-uint3wo", "t5-uint7wo")


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.name != "expected"))
def test_what_stock_code_saved_here_loads_here(name: str) -> None:
    if name in NOT_READ_BY_TRANSFORMERS:
        with pytest.raises(CheckpointError, match="does not load: Failed to find class dtype"):
            aoquant.load(FIXTURES / name)
        return
    (loaded,) = loading.load_each(FIXTURES / name)
    assert loaded.report.unpickled == FIXTURE_NEEDS.get(name, "plain")
    known = json.loads((FIXTURES / "expected" / f"{name}.json").read_text())
    found = {}
    for key, tensor in loaded.module.state_dict().items():
        if key in known:
            values = getattr(tensor.data, "original_weight_tensor", tensor.data).dequantize()
            found[key] = hashlib.sha256(values.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
    assert found == known


def test_int8_weights_of_a_later_torchao_are_explained(made: Make, tmp_path: Path) -> None:
    """From 0.16 on they have a zero point; here it would be lost without a word."""
    folder = shutil.copytree(made("flux", "int8wo").plan.output, tmp_path / "out")
    (folder / "aoquant.json").unlink()
    (file,) = folder.glob("*.bin")
    state = torch.load(file, weights_only=True)
    for tensor in state.values():
        if type(tensor) is not torch.Tensor:
            tensor.zero_point = torch.zeros_like(tensor.scale, dtype=torch.int8)
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"has a zero_point, unlike the Int8Tensor .* installed: torchao 0\.15"):
        aoquant.load(folder)


REFUSED = [
    bad("safetensors", "quantize model --transformer int8wo --format safetensors", 2, "safetensors", "torchao>=0.16"),
    bad("safetensors planned", "plan model --transformer fp8wo --format safetensors", 2, "safetensors"),
    bad("int8 by the group", "quantize model --transformer int8wo:group_size=32", 2, "group_size=32", "by the row"),
]


@table(REFUSED)
def test_what_this_stack_cannot_do(
    row: Any, tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "model").symlink_to(tiny_folder("flux"))
    check(row, tmp_path, monkeypatch, capsys)


def test_an_error_of_the_library_too(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="writes no safetensors"):
        aoquant.plan(tiny_folder("flux"), {"transformer": "int8wo"}, format="safetensors", output=tmp_path / "out")


def test_a_process_of_its_own_says_nothing_but_the_document(made: Make) -> None:
    argv = [sys.executable, "-m", "aoquant", "load", str(made("t5", "int4dq").plan.output), "--json", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (component,) = json.loads(done.stdout)["components"]
    assert (component["unpickled"], component["allowed"]) == ("allow-listed", ["torch.int4"])
