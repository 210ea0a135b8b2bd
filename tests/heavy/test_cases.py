"""What users of the stock libraries run into, as public reports have it, and what happens here instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from tests.heavy import stock, tiny
from tests.light import processes
from tests.light.bad_input import run

Make = Callable[..., Any]


def test_a_bin_in_shards_is_found(made: Make, stock_model: Make) -> None:
    """huggingface/diffusers#14811: the stock loader says that there is no such file."""
    result = made("flux", "int8wo", max_shard_size=20_000)
    folder = result.plan.output
    assert len(list(folder.glob("*.bin"))) > 1
    with pytest.raises(OSError, match="no file named"):
        tiny.MODELS["flux"].cls.from_pretrained(str(folder), torch_dtype=torch.bfloat16)
    stock.assert_same_state(aoquant.load(folder).state_dict(), stock_model("flux", "int8wo").state_dict())
    assert "use_safetensors=False" in result.plan.snippet(folder=str(folder), model="model")


def test_a_process_without_torchao_loads_it_and_patches_nothing(made: Make) -> None:
    """huggingface/diffusers#11018: torch.load stops there, and programs replace it for the whole process."""
    folder = made("flux", "int8wo").plan.output
    (file,) = folder.glob("*.bin")
    code = f"""if True:
        import pickle, sys, torch
        from aoquant.cli import main
        assert "torchao" not in sys.modules
        before = torch.load, torch.serialization.load, torch.nn.Module.load_state_dict
        try:
            torch.load({str(file)!r}, weights_only=True)
        except pickle.UnpicklingError as error:
            assert "Unsupported global" in str(error)
        else:
            raise AssertionError("it loads without torchao")
        assert main(["load", {str(folder)!r}, "--json", "-q"]) == 0
        assert before == (torch.load, torch.serialization.load, torch.nn.Module.load_state_dict)
        names = {{getattr(thing, '__module__', '') for thing in torch.serialization.get_safe_globals()}}
        assert all(name.partition('.')[0] in ('', 'torch', 'torchao', 'aoquant') for name in names), names
    """
    done = processes.run(["-c", code])
    assert (done.returncode, done.stderr) == (0, "")
    (component,) = json.loads(done.stdout)["components"]
    assert component["weights"]["Int8Tensor"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_t5_comes_back_in_the_dtype_it_was_made_in(dtype: str, made: Make) -> None:
    """huggingface/diffusers#8604: in float16 T5's `wo` stays in float32, and `.to(float16)` spoils the picture."""
    state = aoquant.load(made("t5", "int8wo", dtype=dtype).plan.output).state_dict()
    outputs = {value.dtype for name, value in state.items() if name.endswith("wo.weight")}
    assert outputs == {torch.float32 if dtype == "float16" else torch.bfloat16}
    others = {value.dtype for name, value in state.items() if name.endswith("q.weight")}
    assert others == {getattr(torch, dtype)}


def test_float16_warns(made: Make) -> None:
    assert any("float16" in warning for warning in made("t5", "int8wo", dtype="float16").plan.warnings)
    assert not any("float16" in warning for warning in made("t5", "int8wo").plan.warnings)


def test_what_is_slow_without_compilation_says_so(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/diffusers-torchao: int8dq, uncompiled, takes twenty times as long as bfloat16."""
    result = made("flux", "int8dq")
    (warning,) = result.plan.warnings
    assert "int8dq is slow without torch.compile" in warning
    code, out, err = run(["load", str(result.plan.output)], capsys)
    assert code == 0 and "slow" in out and "torch.compile" in out, (out, err)
    code, out, _ = run(["load", str(result.plan.output), "--json"], capsys)
    (component,) = json.loads(out)["components"]
    assert "torch.compile" in component["speed"]
    assert made("flux", "int8wo").plan.warnings == ()
    code, out, _ = run(["load", str(made("flux", "int8wo").plan.output)], capsys)
    assert code == 0 and "saves memory, not time" in out


@pytest.mark.parametrize("text", ["int8wo", "int8_weight_only"])
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_a_config_in_words_is_explained(
    name: str, text: str, made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bghira/SimpleTuner#2778: an AssertionError today. What older versions wrote, around weights of today's."""
    folder = shutil.copytree(made(name, "int8wo").plan.output, tmp_path / "out")
    (folder / "aoquant.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_type"] = text
    (folder / "config.json").write_text(json.dumps(config))
    for command, expected in (("inspect", 0), ("load", 4)):
        code, _, err = run([command, str(folder)], capsys)
        assert code == expected and "Assertion" not in err and "Traceback" not in err, err
    assert f"quant_type '{text}'" in err and "aoquant upgrade" in err
    code, _, err = run(["upgrade", str(folder), "-o", str(tmp_path / "new")], capsys)
    assert code == 0, err
    stock.assert_same_state(
        aoquant.load(tmp_path / "new").state_dict(), aoquant.load(made(name, "int8wo").plan.output).state_dict()
    )
