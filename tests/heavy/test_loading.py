"""`aoquant.load`: what a program with the stock libraries gets (of int4wo, what computes), or a word on why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import aoquant
from aoquant import loading
from aoquant.configs import CONFIGS
from aoquant.errors import AoquantError, CheckpointError, SourceError, UnsafeError, UsageError, is_out_of_memory
from tests.heavy import stock, tiny

Folder = Callable[..., Path]
Make = Callable[..., Any]
FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])


@pytest.fixture
def copy_of(made: Make, tmp_path: Path) -> Callable[..., Path]:
    """`copy_of(name, config_text, **options of aoquant.quantize)` → a checkpoint that may be spoilt."""

    def get(name: str, config_text: str = "int8wo", **options: Any) -> Path:
        return shutil.copytree(made(name, config_text, **options).plan.output, tmp_path / "copy")

    return get


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "aoquant.json").unlink(missing_ok=True)  # it would tell by the file's size


def edit_bin(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    (file,) = folder.glob("*.bin")
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)
    (folder / "aoquant.json").unlink(missing_ok=True)
    return file


def assert_refused(folder: Path, kind: type[AoquantError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        aoquant.load(folder)
    assert type(caught.value) is kind
    assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint


@FORMATS
@pytest.mark.parametrize("config_text", [name for name in CONFIGS if name != "int4wo"])  # see test_int4.py
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_every_config_loads_as_stock_loads_it(name: str, config_text: str, file_format: str, made: Make) -> None:
    row = tiny.MODELS[name]
    result = made(name, config_text, format=file_format)
    module = aoquant.load(result.plan.output)
    assert type(module) is row.cls
    assert not module.training
    expected = stock.load(result.plan.output, row.library, row.class_name)
    stock.assert_same_state(module.state_dict(), expected.state_dict())


@FORMATS
@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_model_computes_as_stock_quantized_it(name: str, file_format: str, made: Make, stock_model: Make) -> None:
    module = aoquant.load(made(name, "int8wo", format=file_format).plan.output)
    assert torch.equal(tiny.forward(module, name), tiny.forward(stock_model(name, "int8wo"), name))


@FORMATS
@pytest.mark.parametrize("name", ["flux", "t5", "wan"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_the_checkpoints(name: str, dtype: str, file_format: str, made: Make, stock_model: Make) -> None:
    module = aoquant.load(made(name, "int8wo", dtype=dtype, format=file_format).plan.output)
    stock.assert_same_state(module.state_dict(), stock_model(name, "int8wo", dtype=getattr(torch, dtype)).state_dict())


@FORMATS
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_shards(name: str, file_format: str, made: Make, stock_model: Make) -> None:
    output = made(name, "int8wo", format=file_format, max_shard_size=20_000).plan.output
    stock.assert_same_state(aoquant.load(output).state_dict(), stock_model(name, "int8wo").state_dict())


def test_the_report_counts_what_is_in_memory(made: Make) -> None:
    result = made("t5", "int8wo")
    (loaded,) = loading.load_each(result.plan.output)
    report = loaded.report
    (component,) = result.plan.components
    assert report.weights["Int8Tensor"] == component.num_quantized
    assert (report.class_name, report.library, report.device, report.dtype) == (
        "T5EncoderModel", "transformers", "cpu", "bfloat16",
    )  # fmt: skip
    assert report.num_bytes == component.tensor_bytes
    state = loaded.module.state_dict()
    assert Counter(stock.kind(value) for value in state.values())["Int8Tensor"] == component.num_quantized


def test_one_of_several_components(tiny_folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "pipe"
    index = {
        "_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }  # fmt: skip
    shutil.copytree(tiny_folder("flux"), source / "transformer")
    shutil.copytree(tiny_folder("t5"), source / "text_encoder_2")
    (source / "model_index.json").write_text(json.dumps(index))
    aoquant.quantize(source, {"transformer": "int8wo", "text_encoder_2": "fp8wo"}, output=tmp_path / "out")
    assert set(loading.component_names(tmp_path / "out")) == {"transformer", "text_encoder_2"}
    assert type(aoquant.load(tmp_path / "out", component="text_encoder_2")).__name__ == "T5EncoderModel"
    assert type(aoquant.load(str(tmp_path / "out"), component="transformer")).__name__ == "FluxTransformer2DModel"
    for component in (None, "vae"):
        with pytest.raises(UsageError, match="holds") as caught:
            aoquant.load(tmp_path / "out", component=component)
        assert "transformer" in caught.value.hint and "text_encoder_2" in caught.value.hint


def test_a_device_that_is_not_there(made: Make) -> None:
    with pytest.raises(UsageError, match="there is no device cuda:97"):
        aoquant.load(made("flux", "int8wo").plan.output, device="cuda:97")


def test_nothing_global_stays_changed(made: Make) -> None:
    import diffusers
    import transformers

    def settings() -> tuple[object, ...]:
        return (
            torch.load,
            set(torch.serialization.get_safe_globals()),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            diffusers.utils.logging.is_progress_bar_enabled(),
            transformers.utils.logging.is_progress_bar_enabled(),
            torch.nn.Module.register_parameter,
        )

    folder = made("t5", "int8wo").plan.output, made("flux", "uint4wo").plan.output
    before = settings()
    for output in folder:
        aoquant.load(output)
    assert settings() == before


# --- what does not load ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_safetensors_whose_config_lost_its_quantization(name: str, copy_of: Folder) -> None:
    """Stock diffusers loads them without an error, its weights on the meta device."""
    folder = copy_of(name, format="safetensors")
    edit_config(folder, lambda config: config.pop("quantization_config"))
    assert_refused(folder, CheckpointError, "quantization_config")


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_a_bin_whose_config_lost_its_quantization_still_knows_it(name: str, copy_of: Folder, stock_model: Make) -> None:
    """Its pickle names the tensors' class, so that stock loads it whole."""
    folder = copy_of(name)
    edit_config(folder, lambda config: config.pop("quantization_config"))
    module = aoquant.load(folder)
    stock.assert_same_state(module.state_dict(), stock_model(name, "int8wo").state_dict())
    (component,) = aoquant.inspect(folder).components
    assert [problem.severity for problem in component.problems] == ["warning"]


@pytest.mark.parametrize(
    ("name", "dropped"),
    [("flux", "proj_out.bias"), ("flux", "proj_out.weight"), ("t5", "encoder.final_layer_norm.weight")],
)
def test_a_tensor_that_is_not_there(name: str, dropped: str, copy_of: Folder) -> None:
    """diffusers leaves it on meta, transformers makes it up; either way the model is not the checkpoint's."""
    folder = copy_of(name)
    edit_bin(folder, lambda state: state.pop(dropped))
    assert_refused(folder, CheckpointError, f"1 tensors were not filled, first {dropped}")


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_a_weight_of_another_shape(name: str, copy_of: Folder) -> None:
    folder = copy_of(name)
    key = {"flux": "proj_out.bias", "t5": "encoder.final_layer_norm.weight"}[name]
    edit_bin(folder, lambda state: state.update({key: torch.ones(7)}))
    assert_refused(folder, CheckpointError, "does not load")


class Explosive:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_a_bin_that_would_run_code(name: str, copy_of: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(name)
    edit_bin(folder, lambda state: state.update({"zz": Explosive()}))
    assert_refused(folder, UnsafeError, r"would run code: (posix|nt)\.mkdir")
    assert not Path("exploded").exists()


@FORMATS
@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_truncated_file(keep: float, file_format: str, copy_of: Folder) -> None:
    folder = copy_of("flux", format=file_format)
    (file,) = folder.glob(f"*.{file_format}")
    os.truncate(file, int(keep if keep > 1 else file.stat().st_size * keep))
    (folder / "aoquant.json").unlink()
    assert_refused(folder, CheckpointError, file.name)


@FORMATS
def test_a_missing_shard(file_format: str, copy_of: Folder) -> None:
    folder = copy_of("flux", format=file_format, max_shard_size=20_000)
    shard = sorted(folder.glob(f"*.{file_format}"))[1]
    shard.unlink()
    assert_refused(folder, CheckpointError, shard.name)


def test_another_type_in_the_config(copy_of: Folder) -> None:
    folder = copy_of("flux")

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["quant_type"]["default"]["_type"] = "Float8WeightOnlyConfig"

    edit_config(folder, change)
    with pytest.raises(CheckpointError):
        aoquant.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_class_name": "NoSuchModel"}, "no model class NoSuchModel"),
        ({"_class_name": None}, "which class of which library"),
        ({"num_attention_heads": 3}, "does not load|not filled"),
    ],
)
def test_a_config_of_another_model(change: dict[str, Any], words: str, copy_of: Folder) -> None:
    folder = copy_of("flux")
    edit_config(folder, lambda config: config.update(change))
    assert_refused(folder, CheckpointError, words)


def test_unquantized_folders_and_files(tiny_folder: Folder, made: Make, tmp_path: Path) -> None:
    assert_refused(tiny_folder("flux"), CheckpointError, "holds no quantized component")
    (file,) = made("flux", "int8wo").plan.output.glob("*.bin")
    assert_refused(file, CheckpointError, "is a file")
    assert_refused(tmp_path / "nothing", SourceError, "does not exist")


@FORMATS
@pytest.mark.parametrize("name", ["flux", "t5", "clip_text", "qwen2_5_vl"])
def test_what_stock_saved_is_read_and_loaded_too(
    name: str, file_format: str, stock_folder: Folder, stock_model: Make
) -> None:
    """Its safetensors may describe module names and store a checkpoint's (`text_model.` in front)."""
    folder = stock_folder(name, "int8wo", file_format)
    expected = stock_model(name, "int8wo")
    (component,) = aoquant.inspect(folder).components
    assert not component.problems
    kinds = Counter(stock.kind(value) for value in expected.state_dict().values())
    assert component.num_quantized == kinds["Int8Tensor"] > 0
    stock.assert_same_state(aoquant.load(folder).state_dict(), expected.state_dict())


def test_one_component_is_in_memory_at_a_time(tiny_folder: Folder, tmp_path: Path) -> None:
    for name, component in (("flux", "transformer"), ("t5", "text_encoder_2")):
        aoquant.quantize(tiny_folder(name), {component: "int8wo"}, output=tmp_path / "out" / component)
    alive: list[weakref.ref[Any]] = []
    for loaded in loading.load_each(tmp_path / "out"):
        assert [reference for reference in alive if reference() is not None] == []
        alive.append(weakref.ref(loaded.module))
        del loaded
    assert len(alive) == 2


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space as Linux does")
def test_memory_that_runs_out_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    config = transformers.T5Config(**{**tiny.MODELS["t5"].config, "vocab_size": 8000, "d_model": 1024})
    transformers.T5EncoderModel(config).bfloat16().save_pretrained(tmp_path / "t5")
    aoquant.quantize(tmp_path / "t5", {"text_encoder": "int8wo"}, output=tmp_path / "out")
    script = """
        import contextlib, io, resource
        from aoquant.cli import main
        with contextlib.redirect_stdout(io.StringIO()):
            main(["load", "out"])  # imports what it takes
        with open("/proc/self/status") as file:
            size = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        print(main(["load", "out"]))
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, env=environment, check=False, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.stdout == "6\n", done.stderr
    first, second = done.stderr.splitlines()
    assert "T5EncoderModel does not fit cpu: its weights take" in first and "larger machine" in second


@pytest.mark.parametrize("allocate", [lambda: bytearray(1 << 60), lambda: torch.empty(1 << 55, dtype=torch.uint8)])
def test_memory_that_runs_out_is_known(allocate: Callable[[], object]) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    assert is_out_of_memory(caught.value) and not is_out_of_memory(ValueError("out of memory"))
