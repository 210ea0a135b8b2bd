"""Checkpoints of other versions: they load, are upgraded to the bit, or are explained. Never a traceback.

tests/fixtures/legacy was written by tests/legacy/make_fixtures.py on torch 2.6 and torchao 0.15.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from aoquant import unpickling
from aoquant.errors import CheckpointError, UsageError
from tests.heavy import stock, tiny
from tests.light import forge, schemas
from tests.light.bad_input import contents, run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "legacy"
Make = Callable[..., Any]
UPGRADED = {
    "flux-int8wo": ("int8wo", "Int8Tensor"),
    "flux-uint4wo": ("uint4wo:group_size=64", "LowBitTensor"),
    "t5-aoquant-int4dq": ("int4dq", "IntxUnpackedToInt8Tensor"),
    "t5-aoquant-int8dq": ("int8dq", "Int8Tensor"),
    "t5-aoquant-int8wo": ("int8wo", "Int8Tensor"),
    "t5-int8dq": ("int8dq", "Int8Tensor"),
    "t5-int8wo-group32": ("int8wo:group_size=32", "Int8Tensor"),
    "t5-uint3wo": ("uint3wo:group_size=32", "LowBitTensor"),
    "t5-uint7wo": ("uint7wo:group_size=32", "LowBitTensor"),
}
"""Fixture → the config and the class that its weights become."""
LOADED = ("t5-fp8wo", "t5-aoquant-int8wo")
EXPLAINED = ("t5-int4wo-hqq",)


@pytest.fixture(params=sorted(UPGRADED.keys() | {*LOADED, *EXPLAINED}))
def fixture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def hashes(module: torch.nn.Module) -> dict[str, str]:
    found = {}
    for name, tensor in module.state_dict().items():
        if type(tensor.data) is not torch.Tensor:
            values = tensor.data.dequantize().contiguous().view(torch.int16).numpy()
            found[name] = hashlib.sha256(values.tobytes()).hexdigest()
    return found


def expected(name: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((FIXTURES / "expected" / f"{name}.json").read_text())
    return found


def test_every_fixture_is_spoken_of() -> None:
    folders = {path.name for path in FIXTURES.iterdir()} - {"expected"}
    assert folders == UPGRADED.keys() | {*LOADED, *EXPLAINED}
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) < 1_000_000


def test_it_loads_or_says_what_to_do(fixture: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = FIXTURES / fixture
    code, _, err = run(["inspect", str(folder), "-q"], capsys)
    assert code == 0, err
    code, _, err = run(["load", str(folder)], capsys)
    if fixture in LOADED:
        assert code == 0, err
        assert hashes(aoquant.load(folder)) == expected(fixture)
        return
    assert code == 4 and "Traceback" not in err
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]
    for words in ("written by", "installed: torchao", f"aoquant upgrade {folder}", "aoquant quantize"):
        assert words in err
    assert "weights_only" not in err and "trust" not in err


def test_it_is_upgraded_to_the_bit(fixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = shutil.copytree(FIXTURES / fixture, tmp_path / "in"), tmp_path / "out"
    before = contents(folder)
    code, stdout, err = run(["upgrade", str(folder), "-o", str(out), "--json"], capsys)
    assert contents(folder) == before
    if fixture not in UPGRADED:
        assert (code, stdout) == (4 if fixture in EXPLAINED else 2, "") and not out.exists()
        assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]
        return
    assert (code, err) == (0, "")
    config, kind = UPGRADED[fixture]
    (component,) = schemas.validated(stdout, "upgrade")["components"]
    assert (component["config"], component["upgraded"]) == (config, len(expected(fixture)))
    report = aoquant.inspect(out)
    assert report.is_sound and not report.components[0].problems
    module = aoquant.load(out)
    assert hashes(module) == expected(fixture)
    assert {type(value.data).__name__ for value in module.state_dict().values()} == {kind, "Tensor"}
    again = stock.load(out, report.components[0].library, report.components[0].class_name)  # type: ignore[arg-type]
    stock.assert_same_state(module.state_dict(), again.state_dict())
    if fixture.startswith("t5"):
        assert tiny.forward(module, "t5").isfinite().all()
    for index in out.glob("*.index.json"):
        found = json.loads(index.read_text())
        assert found["metadata"]["total_size"] == report.components[0].weight_bytes
        assert set(found["weight_map"].values()) == {path.name for path in out.glob("*.bin")}
    if (folder / "aoquant.json").exists():
        aoquant.verify(out)
    with pytest.raises(UsageError, match="nothing to upgrade"):
        aoquant.upgrade(out, tmp_path / "twice")


def test_the_default_place_is_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "t5-int8dq", tmp_path / "old")
    monkeypatch.chdir(tmp_path)
    assert aoquant.upgrade("old").output == tmp_path / "old-upgraded"
    with pytest.raises(UsageError):
        aoquant.upgrade("old")


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "aoquant.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("text", ["int8wo", "int8_weight_only"])
def test_what_older_diffusers_wrote_is_explained_and_upgraded(text: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "flux-int8wo", tmp_path / "old")
    edited(folder, lambda block: block.update(quant_type=text, quant_type_kwargs={}))
    with pytest.raises(CheckpointError, match=f"quant_type '{text}', as diffusers before 0.38 wrote it") as caught:
        aoquant.load(folder)
    assert "aoquant upgrade" in caught.value.hint
    assert hashes(aoquant.load(aoquant.upgrade(folder, tmp_path / "new").output)) == expected("flux-int8wo")


def default(block: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = block["quant_type"]["default"]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda block: default(block).update(_version=9), "version 9 of Int8WeightOnlyConfig, later than 2"),
        (lambda block: default(block).update(_version=1), "version 1 of Int8WeightOnlyConfig, which .* has dropped"),
        (lambda block: default(block).update(_type="Int9WeightOnlyConfig"), "names 'Int9WeightOnlyConfig'"),
        (lambda block: default(block).update(_type="quantize_"), "names 'quantize_'"),
        (lambda block: default(block)["_data"].update(granularity={"_type": "load", "_data": {}}), "names 'load'"),
        (lambda block: block.pop("quant_type"), "in no form"),
        (lambda block: block.update(quant_type={"default": {}}), "in no form"),
        (lambda block: block.update(quant_type=7), "in no form"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
def test_a_config_that_does_not_fit_is_explained(
    file_format: str, change: Callable[[dict[str, Any]], object], words: str, made: Make, tmp_path: Path
) -> None:
    folder = shutil.copytree(made("flux", "int8wo", format=file_format).plan.output, tmp_path / "out")
    edited(folder, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        aoquant.load(folder)
    assert "quantize` the original" in caught.value.hint and "trust" not in caught.value.hint


@pytest.mark.parametrize("kind", ["Int8Tensor", "Int9Tensor"])
def test_tensors_of_a_later_torchao_are_explained(kind: str, made: Make, tmp_path: Path) -> None:
    """A class, or a part of one, that is not there yet."""
    folder = shutil.copytree(made("flux", "int8wo").plan.output, tmp_path / "out")
    edited(folder, lambda block: None)
    (weights,) = folder.glob("*.bin")
    file = forge.TorchFile()
    more = {"smoothing": file.tensor("FloatStorage", (4, 1)), "qdata": file.tensor("CharStorage", (4, 64))}
    parts = {**more, "scale": file.tensor("FloatStorage", (4, 1)), "block_size": [1, 64]}
    file.state = {"proj_out.weight": file.subclass(kind, (4, 64), parts)}
    file.write(weights)
    if kind == "Int9Tensor":
        edited(folder, lambda block: default(block).update(_type="Int9WeightOnlyConfig"))
    with pytest.raises(CheckpointError, match=r"smoothing|Int9Tensor") as caught:
        aoquant.load(folder)
    assert "installed: torchao" in caught.value.message


def test_safetensors_of_a_later_torchao_are_explained(made: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(made("flux", "int8wo", format="safetensors").plan.output, tmp_path / "out")
    edited(folder, lambda block: default(block).update(_type="Int9WeightOnlyConfig"))
    (weights,) = folder.glob("*.safetensors")
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:8] + data[8 : 8 + length].replace(b"Int8Tensor", b"Int9Tensor") + data[8 + length :])
    with pytest.raises(CheckpointError, match="safetensors hold Int9Tensor"):
        aoquant.load(folder)


def test_trust_is_no_cure_for_versions() -> None:
    with pytest.raises(CheckpointError, match="AffineQuantizedTensor"):
        aoquant.load(FIXTURES / "flux-int8wo", trust_pickle=True)
    with pytest.raises(CheckpointError, match="installed versions lack") as caught:
        unpickling.load_trusted((FIXTURES / "flux-int8wo").glob("*.bin"))
    assert "install the versions" in caught.value.hint
