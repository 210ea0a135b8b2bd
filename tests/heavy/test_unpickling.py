"""What a `.bin` may make, and what it takes to let it do more. `make test-legacy` runs this on torch 2.6 too."""

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
import torchao.quantization

import aoquant
from aoquant import loading, unpickling
from aoquant.checkpoint.pickles import read_pickle_file
from aoquant.engine import libraries
from aoquant.errors import CheckpointError, UnsafeError
from tests.heavy import stock, tiny
from tests.light import forge
from tests.light.bad_input import contents, run
from tests.light.forge import Called, Named

Make = Callable[..., Any]
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
    "the whole": lambda: Calls(os.mkdir, MARK),
}  # fmt: skip


@pytest.fixture
def spoilt(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`spoilt(name, value)` → a checkpoint whose state dict holds `value` too, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SOURCE)

    def get(name: str, value: Any, *, whole: bool = False, **options: Any) -> Path:
        folder = shutil.copytree(made(name, "int8wo", **options).plan.output, tmp_path / "out")
        file = sorted(folder.glob("*.bin"))[0]
        state = torch.load(file, weights_only=True)
        torch.save(value if whole else {**state, "zz": value}, file)
        (folder / "aoquant.json").unlink()
        return folder

    return get


@pytest.mark.parametrize("name", ["flux", "t5"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hostile_pickle_runs_only_for_those_who_trust_it(
    payload: str, name: str, spoilt: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spoilt(name, PAYLOADS[payload](), whole=payload == "the whole")
    before = contents(folder)
    for command in ("inspect", "load", "upgrade"):
        code, out, err = run([command, str(folder)], capsys)
        assert (code, bool(out)) == (5, command == "inspect"), err
        assert "Traceback" not in err and ("--trust-pickle" in err) is (command == "load")
        assert not Path(MARK).exists()
    with pytest.raises(UnsafeError):
        aoquant.load(folder)
    assert not Path(MARK).exists()
    assert contents(folder) == before
    if payload == "the whole":  # there is nothing to load then, trusted or not
        torch.load(next(folder.glob("*.bin")), weights_only=False)
    else:
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


@pytest.mark.parametrize("module", ["torchao.quantization", "torchao.evil", "aoquant.evil", __name__])
def test_an_impostor_in_torchaos_name_is_not_allowed(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something in torchao that is called like a tensor class, and is none."""
    monkeypatch.chdir(tmp_path)

    def impostor(command: str) -> None:
        os.system(command)

    impostor.__module__ = module
    monkeypatch.setattr(torchao.quantization, "EvilTensor", impostor, raising=False)
    state = {"x": Called(Named("torchao.quantization", "EvilTensor"), (COMMAND,))}
    file = forge.TorchFile(state=state).write(tmp_path / "x.bin")
    named = read_pickle_file(file).named
    assert named == ("torchao.quantization.EvilTensor",)
    with unpickling.allowed(named) as added, pytest.raises(pickle.UnpicklingError) as caught:
        torch.load(file, weights_only=True)
    assert not added and not Path(MARK).exists()
    assert unpickling.blocked(caught.value) == "torchao.quantization.EvilTensor"
    torch.load(file, weights_only=False)
    assert Path(MARK).exists()


def test_only_data_is_allowed_and_only_for_the_call() -> None:
    names = [
        "torch.int3", "torchao.quantization.quantize_", "torchao.quantization.linear_activation_scale.to_weight_tensor",
        "torchao.utils.os", "os.system", "builtins.eval", "torchao.utils.TorchAOBaseTensor", "torch.load",
    ]  # fmt: skip
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(ZeroDivisionError), unpickling.allowed(names) as added:
        assert set(added) <= {"torch.int3", "torchao.utils.TorchAOBaseTensor"}
        raise ZeroDivisionError
    assert set(torch.serialization.get_safe_globals()) == before


# --- trust ------------------------------------------------------------------------------------------------------------

HARMLESS = argparse.Namespace(learning_rate=1.0)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", ["flux", "t5", "clip_text", "qwen2_5_vl"])
def test_trusted_components_are_those_that_load_safely(
    name: str, shards: bool, spoilt: Make, made: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spoilt(name, HARMLESS, **({"max_shard_size": 20_000} if shards else {}))
    code, _, err = run(["load", str(folder)], capsys)
    assert code == 5 and "argparse.Namespace" in err and "--trust-pickle" in err
    code, _, err = run(["load", str(folder), "--trust-pickle"], capsys)
    assert (code, "without any check" in err) == (0, True)
    (loaded,) = loading.load_each(folder, trust_pickle=True)
    assert loaded.report.unpickled == "trusted"
    expected = aoquant.load(made(name, "int8wo").plan.output)
    assert type(loaded.module) is type(expected) and not loaded.module.training
    stock.assert_same_state(loaded.module.state_dict(), expected.state_dict())
    assert torch.equal(tiny.forward(loaded.module, name), tiny.forward(expected, name))


@pytest.mark.parametrize("shards", [False, True])
def test_where_transformers_reads_no_bin(shards: bool, made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on torch before 2.6."""
    import transformers.utils.import_utils as checks

    folder = made("t5", "int8wo", **({"max_shard_size": 20_000} if shards else {})).plan.output
    expected = aoquant.load(folder).state_dict()
    monkeypatch.setattr(checks, "is_torch_greater_or_equal", lambda *_, **__: False)
    with pytest.raises(UnsafeError, match="transformers reads none") as caught:
        aoquant.load(folder)
    assert "--trust-pickle" in caught.value.hint
    module = aoquant.load(folder, trust_pickle=True)
    stock.assert_same_state(module.state_dict(), expected)


def test_trust_is_not_used_where_it_is_not_needed(made: Make) -> None:
    (loaded,) = loading.load_each(made("flux", "int8wo").plan.output, trust_pickle=True)
    assert loaded.report.unpickled in ("plain", "allow-listed")


def test_trust_does_not_excuse_a_tensor_that_is_missing(spoilt: Make) -> None:
    folder = spoilt("flux", HARMLESS)
    (file,) = folder.glob("*.bin")
    state = torch.load(file, weights_only=False)
    del state["proj_out.bias"]
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"proj_out\.bias"):
        aoquant.load(folder, trust_pickle=True)


def test_nothing_global_stays_changed_by_trust(spoilt: Make) -> None:
    before = (torch.load, set(torch.serialization.get_safe_globals()), torch.get_default_dtype())
    aoquant.load(spoilt("flux", HARMLESS), trust_pickle=True)
    assert (torch.load, set(torch.serialization.get_safe_globals()), torch.get_default_dtype()) == before


def test_the_report_says_how_it_was_read(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    formats = {"bin": {"plain", "allow-listed"}, "safetensors": {""}}
    if not libraries.has_safetensors():
        del formats["safetensors"]
    for file_format, ways in formats.items():
        code, out, err = run(["load", str(made("t5", "int4dq", format=file_format).plan.output), "--json"], capsys)
        assert code == 0, err
        (component,) = json.loads(out)["components"]
        assert component["unpickled"] in ways
