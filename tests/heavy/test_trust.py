"""What `load` lets torch unpickle: what is known to be harmless by itself, anything else only where it is trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from aoquant import loading
from aoquant.cli import main
from aoquant.engine import pickled
from aoquant.errors import UnsafeError
from tests.heavy import tiny

Make = Callable[..., Any]


class Payload:
    """Pickles as a call that makes a file and gives a tensor: what a trusted one may do, and a hostile one does."""

    def __init__(self, marker: Path, value: torch.Tensor) -> None:
        self.marker, self.value = marker, value

    def __reduce__(self) -> Any:
        code = f"(__import__('pathlib').Path({str(self.marker)!r}).touch(), value)[1]"
        return eval, (code, {"value": self.value})


@pytest.fixture
def odd(made: Make, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of which one tensor is a call, and the file that the call makes."""
    folder = tmp_path / "odd"
    shutil.copytree(made("flux", "int8wo").plan.output, folder)
    file = folder / "diffusion_pytorch_model.bin"
    state = torch.load(file, weights_only=True)
    name = next(name for name, value in state.items() if type(value) is torch.Tensor)
    torch.save({**state, name: Payload(tmp_path / "ran", state[name])}, file)
    manifest = json.loads((folder / "aoquant.json").read_text())
    (folder / "aoquant.json").unlink()  # it would say that the file is another one
    assert manifest["files"]
    return folder, tmp_path / "ran"


def test_what_runs_code_is_refused_and_named(odd: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, ran = odd
    assert main(["load", str(folder)]) == 5
    err = capsys.readouterr().err
    assert "eval" in err.splitlines()[0] and "--trust-pickle" in err.splitlines()[1] and len(err.splitlines()) == 2
    with pytest.raises(UnsafeError):
        aoquant.load(folder)
    assert main(["inspect", str(folder)]) == 5
    assert not ran.exists()


def test_what_is_trusted_runs(odd: tuple[Path, Path], made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder, ran = odd
    assert main(["load", str(folder), "--trust-pickle", "--json"]) == 0
    assert ran.exists()
    trusted = aoquant.load(folder, trust_pickle=True)
    plain = aoquant.load(made("flux", "int8wo").plan.output)
    assert torch.equal(tiny.forward(trusted, "flux"), tiny.forward(plain, "flux"))


@pytest.mark.parametrize("config", ["int8wo", "fp8wo", "uint3wo", "uint4wo:layout=unpacked", "int4wo:group_size=32"])
@pytest.mark.parametrize("name", ["flux", "sdxl_unet", "wan", "t5", "clip_text", "qwen2_lm"])
def test_a_trusted_load_is_the_same_as_a_plain_one(made: Make, name: str, config: str) -> None:
    folder = made(name, config, max_shard_size=60_000).plan.output
    plain, trusted = (loading.load_component(folder, "", trust_pickle=trust) for trust in (False, True))
    assert plain.report.weights == trusted.report.weights
    assert not trusted.module.training
    for (left_name, left), (right_name, right) in zip(
        plain.module.state_dict().items(), trusted.module.state_dict().items(), strict=True
    ):
        assert (left_name, type(left), left.dtype) == (right_name, type(right), right.dtype)
    with torch.no_grad():
        assert torch.equal(tiny.forward(plain.module, name), tiny.forward(trusted.module, name))


def test_nothing_stays_allowed(made: Make) -> None:
    with pickled.harmless_allowed():  # whatever registers itself when it is imported has done so then
        pass
    before = set(map(str, torch.serialization.get_safe_globals()))
    loading.load_component(made("flux", "int4dq").plan.output, "")
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_safetensors_have_nothing_to_trust(made: Make) -> None:
    folder = made("flux", "int8wo", format="safetensors").plan.output
    plain, trusted = (loading.load_component(folder, "", trust_pickle=trust).module for trust in (False, True))
    assert torch.equal(tiny.forward(plain, "flux"), tiny.forward(trusted, "flux"))
