"""What `load` lets torch unpickle: what is known to be harmless by itself, anything else only where it is trusted."""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib
import io
import json
import os
import pickle
import runpy
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
from tests.light import forge
from tests.light.bad_input import contents, run
from tests.light.forge import Called, Named

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


# --- hostile files: nothing runs -----------------------------------------------------------------------------------

MARK = "ran"
COMMAND = f"mkdir {MARK}"
SOURCE = f"__import__('os').mkdir({MARK!r})"


class Calls:
    """Pickled as a call of `function` with `args`."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """pickle wants what is called to be callable; what it is pickled as will be."""


def nested() -> bytes:
    """A torch file inside the file."""
    buffer = io.BytesIO()
    torch.save({"x": Calls(os.system, COMMAND)}, buffer)
    return buffer.getvalue()


PAYLOADS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: Calls(os.system, COMMAND),
    "builtins.eval": lambda: Calls(eval, SOURCE),
    "builtins.exec": lambda: Calls(exec, SOURCE),
    "runpy": lambda: Calls(runpy.run_path, "script.py"),
    "torch.load nested": lambda: Calls(
        functools.partial(torch.load, weights_only=False), Calls(io.BytesIO, nested())
    ),
    "torch._load_from_bytes": lambda: Calls(importlib.import_module("torch.storage")._load_from_bytes, nested()),
    "pickle.loads": lambda: Calls(pickle.loads, pickle.dumps(Calls(os.system, COMMAND))),
    "a chain of getattr": lambda: Calls(Calls(builtins.getattr, Calls(importlib.import_module, "os"), "mkdir"), MARK),
    "a call of a call": lambda: Calls(Calls(functools.partial, os.mkdir), MARK),
    "a call in a state": lambda: Calls(argparse.Namespace, state={"x": Calls(os.mkdir, MARK)}),
    "a key": lambda: {Calls(os.mkdir, MARK): 1},
}  # fmt: skip


@pytest.fixture
def spoilt(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`spoilt(name, value)` → a checkpoint whose state dict holds `value` too, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SOURCE)

    def get(name: str, value: Any, **options: Any) -> Path:
        folder = shutil.copytree(made(name, "int8wo", **options).plan.output, tmp_path / "out")
        file = sorted(folder.glob("*.bin"))[0]
        state = torch.load(file, weights_only=True)
        torch.save({**state, "zz": value}, file)
        (folder / "aoquant.json").unlink()
        return folder

    return get


@pytest.mark.parametrize("name", ["flux", "t5"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hostile_pickle_runs_only_for_those_who_trust_it(
    payload: str, name: str, spoilt: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spoilt(name, PAYLOADS[payload]())
    before = contents(folder)
    for command in ("inspect", "load"):
        code, out, err = run([command, str(folder)], capsys)
        assert (code, bool(out)) == (5, command == "inspect"), err
        assert "Traceback" not in err and ("--trust-pickle" in err) is (command == "load")
        assert not Path(MARK).exists()
    with pytest.raises(UnsafeError):
        aoquant.load(folder)
    assert not Path(MARK).exists()
    assert contents(folder) == before
    run(["load", str(folder), "--trust-pickle"], capsys)
    assert Path(MARK).exists(), "the payload is a dud: this test would not notice if it ran"


FORGED: dict[str, Any] = {
    "no such class in torchao": Called(Named("torchao.quantization", "EvilTensor"), (COMMAND,)),
    "no such module in torchao": Called(Named("torchao.evil", "EvilTensor"), (COMMAND,)),
    "a module beside torchao": Called(Named("torchao_evil", "EvilTensor"), (COMMAND,)),
    "a function of torchao": Called(Named("torchao.quantization", "quantize_"), (COMMAND,)),
    "what torchao imports": Called(Named("torchao.utils", "importlib.import_module"), ("os",)),
    "a class of aoquant that is none": Called(Named("aoquant.evil", "EvilTensor"), (COMMAND,)),
    "a class of torch that is none of data": Called(Named("torch.utils.cpp_extension", "load"), ("x", COMMAND)),
    "torch.load": Called(Named("torch", "load"), ("inner.bin",)),
    "torch.hub": Called(Named("torch.hub", "load"), (".", "x")),
    "os.system by its C name": Called(Named("posix", "system"), (COMMAND,)),
    "NEWOBJ": Called(Named("os", "system"), (COMMAND,), new=True),
    "a harmless class made by a call": Called(Named("torchao.quantization", "Int8Tensor"), (COMMAND,)),
    "attributes on a class": Called(
        Named("torch._utils", "_rebuild_parameter"), (), state={"__reduce__": Named("os", "system")}
    ),
}


@pytest.mark.parametrize("forged", FORGED)
def test_nothing_that_a_forged_stream_names_runs(
    forged: str, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(made("flux", "int8wo").plan.output, tmp_path / "out")
    (weights,) = folder.glob("*.bin")
    file = forge.TorchFile()
    file.state = {"proj_out.weight": file.int8(4, 64), "zz": FORGED[forged]}
    file.write(weights)
    (folder / "aoquant.json").unlink()
    for command in ("inspect", "load"):
        code, _, err = run([command, str(folder)], capsys)
        assert code in (4, 5) or (command, code) == ("inspect", 0), err
        assert "Traceback" not in err and not Path(MARK).exists()
