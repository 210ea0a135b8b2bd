"""What is planned is what happens: files to the byte, fates, names; and what is refused before anything is written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

import aoquant
from aoquant.configs import CONFIGS, ConfigRow
from aoquant.errors import AoquantError, CheckpointError, GateError, UsageError
from tests.heavy import stock, tiny

Folder = Callable[..., Path]
Make = Callable[..., Any]
State = dict[str, torch.Tensor]

FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])
FLUX: tuple[stock.Library, str] = ("diffusers", "FluxTransformer2DModel")
T5: tuple[stock.Library, str] = ("transformers", "T5EncoderModel")


def plan(folder: Path, config_text: str = "int8wo", **options: Any) -> Any:
    return aoquant.plan(folder, {"transformer": config_text}, output=folder.parent / "never", **options)


def rewritten(folder: Path, target: Path, change: Callable[[State], State]) -> Path:
    """A copy of a safetensors component folder whose state dict went through `change`."""
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    save_file(change(stock.read_state_dict(folder)), file, metadata={"format": "pt"})
    return target


def kept_modules(result: Any) -> dict[str, str]:
    """Module → reason, of the Linears that a plan keeps."""
    tensors = result.components[0].tensors
    return {tensor.name.removesuffix(".weight"): tensor.reason for tensor in tensors if tensor.fate == "keep"}


def quantized_modules(result: Any) -> set[str]:
    tensors = result.components[0].tensors
    return {tensor.name.removesuffix(".weight") for tensor in tensors if tensor.fate == "quantize"}


# --- plan ≡ result --------------------------------------------------------------------------------------------------


def assert_plan_is_result(result: Any, planned: Any) -> None:
    """Fail unless the folder has the planned files and sizes, and inspect finds the planned tensors."""
    folder = result.plan.output
    assert planned.to_json() | {"free_bytes": 0, "output": ""} == result.plan.to_json() | {
        "free_bytes": 0,
        "output": "",
    }
    on_disk = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert {str(file.path): file.num_bytes for file in planned.files} == on_disk
    assert {"aoquant.json", "README.md", "config.json"} <= on_disk.keys()
    assert planned.output_bytes == sum(on_disk.values())
    report = aoquant.inspect(folder)
    assert report.is_sound and not report.problems
    (found,) = report.components
    (component,) = planned.components
    assert not found.problems and found.class_name == component.source.class_name
    assert found.entries.keys() == {tensor.saved for tensor in component.tensors}
    for tensor in component.tensors:
        entry = found.entries[tensor.saved]
        assert entry.kind == tensor.kind, tensor.name
        assert entry.is_plain == (tensor.fate != "quantize"), tensor.name
        assert entry.shape == tensor.shape, tensor.name
        assert entry.dtype == str(tensor.dtype).removeprefix("torch."), tensor.name
        assert entry.num_bytes == tensor.num_bytes, tensor.name
    assert found.num_quantized == component.num_quantized
    assert found.weight_bytes == component.tensor_bytes < component.unquantized_bytes


@pytest.mark.parametrize("config_text", ["int8wo", "uint4wo"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_files_and_fates_of_every_model(name: str, config_text: str, made: Make, tiny_folder: Folder) -> None:
    result = made(name, config_text)
    planned = aoquant.plan(tiny_folder(name), {tiny.MODELS[name].component: config_text}, output=result.plan.output)
    assert_plan_is_result(result, planned)


@FORMATS
@pytest.mark.parametrize("config_text", ["int8wo", "int8dq", "fp8dq", "fp8dqrow", "int4dq", "int4wo", "uint1wo"])
@pytest.mark.parametrize("name", ["flux", "t5", "qwen2_5_vl"])
def test_files_and_fates_of_every_kind_of_config(
    name: str, config_text: str, file_format: str, made: Make, tiny_folder: Folder
) -> None:
    options: dict[str, Any] = {"format": file_format, "max_shard_size": 50_000}
    result = made(name, config_text, **options)
    component = {tiny.MODELS[name].component: config_text}
    assert_plan_is_result(result, aoquant.plan(tiny_folder(name), component, output=result.plan.output, **options))


def test_the_same_plan_whatever_the_sources_form(tiny_folder: Folder) -> None:
    """Only the order of the tensors, and what is read, follows the source."""
    forms: list[dict[str, Any]] = [{}, {"format": "bin"}, {"shards": 3, "layout": "shuffled"}, {"dtype": torch.float32}]
    fates = []
    for options in forms:
        tensors = plan(tiny_folder("flux", **options)).components[0].tensors
        fates.append(sorted((t.name, t.fate, t.reason, t.kind, t.num_bytes) for t in tensors))
    assert all(found == fates[0] for found in fates)


def test_a_pipeline_of_two_components_with_the_rest_of_it(tiny_folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "pipe"
    shutil.copytree(tiny_folder("flux"), source / "transformer")
    shutil.copytree(tiny_folder("t5", format="bin"), source / "text_encoder_2")
    shutil.copytree(tiny_folder("autoencoder_kl"), source / "vae")
    (source / "scheduler").mkdir()
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {
        "_class_name": "FluxPipeline", "transformer": list(FLUX), "text_encoder_2": list(T5),
        "vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (source / "model_index.json").write_text(json.dumps(index))
    for full in (False, True):
        output = tmp_path / f"out-{full}"
        configs = {"transformer": "int8wo", "text_encoder_2": "fp8wo"}
        planned = aoquant.plan(source, configs, output=output, full=full)
        assert not output.exists()
        aoquant.quantize(source, configs, output=output, full=full)
        files = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
        assert {str(file.path): file.num_bytes for file in planned.files} == {
            name: path.stat().st_size for name, path in files.items()
        }
        others = {"model_index.json", "scheduler/scheduler_config.json", "vae/config.json"}
        assert (others <= files.keys()) is full
        if full:
            assert all((source / name).read_bytes() == files[name].read_bytes() for name in others)
        assert aoquant.inspect(output).is_sound
        for name in configs:
            assert type(aoquant.load(output, component=name)).__name__ == index[name][1]


# --- skips ----------------------------------------------------------------------------------------------------------

TO = ("q", "k", "v", "out.0", "add_out")


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (["proj_out"], {"proj_out"}),
        (["*.proj_out"], {"single_transformer_blocks.0.proj_out"}),
        (["*proj_out"], {"proj_out", "single_transformer_blocks.0.proj_out"}),
        (["transformer_blocks.0.attn.to_*"], {f"transformer_blocks.0.attn.to_{x}" for x in TO}),
        (["transformer_blocks.0.ff"], {"transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2"}),
        (["transformer:proj_out"], {"proj_out"}),
        (["transformer:*.proj_out", "x_embedder"], {"single_transformer_blocks.0.proj_out", "x_embedder"}),
        (["PROJ_OUT", "proj_out"], None),
        (["proj"], None),
        (["proj_out.weight"], None),
        (["transformer_blocks.0.norm1.norm"], None),
        (["transformer:nothing"], None),
        (["text_encoder:proj_out"], None),
        ([""], None),
        (["transformer:"], None),
        (["."], None),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_skip_patterns_match_whole_names(skip: list[str], kept: set[str] | None, tiny_folder: Folder) -> None:
    if kept is None:
        with pytest.raises(UsageError, match="--skip"):
            plan(tiny_folder("flux"), skip=skip)
        return
    planned = plan(tiny_folder("flux"), skip=skip)
    found = kept_modules(planned)
    assert found.keys() == kept
    assert all(reason.startswith("--skip ") for reason in found.values())
    every = {name for name, _ in stock.linear_shapes(tiny_folder("flux"), *FLUX).items()}
    assert quantized_modules(planned) == every - kept


def test_a_pattern_limited_to_one_component(tiny_folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "pipe"
    shutil.copytree(tiny_folder("flux"), source / "transformer")
    shutil.copytree(tiny_folder("flux"), source / "transformer_2")
    parts = {name: list(FLUX) for name in ("transformer", "transformer_2")}
    (source / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **parts}))

    def kept(*skip: str) -> list[list[str]]:
        found = aoquant.plan(source, dict.fromkeys(parts, "int8wo"), output=tmp_path / "out", skip=skip)
        return [[t.name for t in component.tensors if t.fate == "keep"] for component in found.components]

    assert kept("proj_out") == [["proj_out.weight"], ["proj_out.weight"]]
    assert kept("transformer_2:proj_out") == [[], ["proj_out.weight"]]
    assert kept("transformer:proj_out", "transformer_2:x_embedder") == [["proj_out.weight"], ["x_embedder.weight"]]
    with pytest.raises(UsageError, match="--skip vae:proj_out: vae is not being quantized"):
        kept("vae:proj_out")


def test_a_pattern_that_matches_nothing_names_the_nearest(tiny_folder: Folder) -> None:
    with pytest.raises(UsageError, match="--skip prj_out matches no Linear module") as caught:
        plan(tiny_folder("flux"), skip=["prj_out"])
    assert caught.value.hint == "did you mean proj_out?"


@FORMATS
@pytest.mark.parametrize("config_text", ["int8wo", "uint4wo"])
@pytest.mark.parametrize(
    ("name", "skip"),
    [
        ("flux", ["proj_out"]),
        ("flux", ["single_transformer_blocks.0.proj_out", "transformer_blocks.*.attn.to_q"]),
        ("t5", ["encoder.block.0.layer.0.SelfAttention.o"]),
        ("clip_text", ["encoder.layers.1.mlp.fc1"]),
        ("qwen2_lm", ["model.layers.0.mlp"]),
    ],
)
def test_a_checkpoint_with_skips_equals_stocks_with_the_same_exact_skips(
    name: str, skip: list[str], config_text: str, file_format: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    row = tiny.MODELS[name]
    where = (tiny_folder(name), row.library, row.class_name)
    result = aoquant.quantize(
        where[0], {row.component: config_text}, output=tmp_path / "out", skip=skip, format=file_format
    )
    exact = [module for module, reason in kept_modules(result.plan).items() if reason.startswith("--skip")]
    assert exact
    expected = stock.quantize(
        *where, config_text, skip=sorted({*exact, *stock.indivisible(*where, stock.group_size(config_text))})
    )
    loaded = stock.load(tmp_path / "out", row.library, row.class_name)
    stock.assert_same_state(loaded.state_dict(), expected.state_dict())
    assert torch.equal(tiny.forward(loaded, name), tiny.forward(expected, name))
    state = loaded.state_dict()
    assert all(stock.kind(state[f"{module}.weight"]) == "Tensor" for module in exact)
    if skip == ["proj_out"]:
        assert stock.kind(state["single_transformer_blocks.0.proj_out.weight"]) != "Tensor"


# --- refusals -------------------------------------------------------------------------------------------------------


def assert_refused(
    folder: Path, kind: type[AoquantError], words: str, config_text: str = "int8wo", **options: Any
) -> None:
    """Fail unless both plan and quantize refuse, with one line and a hint, and leave nothing behind."""
    before = sorted(folder.parent.iterdir())
    for verb in (aoquant.plan, aoquant.quantize):
        with pytest.raises(kind, match=words) as caught:
            verb(folder, {"own": config_text}, output=folder.parent / "never", **options)
        assert type(caught.value) is kind
        assert caught.value.hint and "\n" not in caught.value.message + caught.value.hint
    assert sorted(folder.parent.iterdir()) == before


def test_nothing_to_quantize(tiny_folder: Folder, tmp_path: Path) -> None:
    words = "int4wo:group_size=256 would quantize none of its 7 Linear weights: in_features 64 is not a multiple"
    assert_refused(tiny_folder("t5"), UsageError, words, "int4wo:group_size=256")
    assert_refused(tiny_folder("flux"), UsageError, "would quantize none", skip=["*"])


def test_not_smaller(tmp_path: Path) -> None:
    """A row of 4 values takes 8 bytes in bfloat16, and 4 with a scale and zero point of 5 in int8."""
    config = {**tiny.MODELS["flux"].config, "in_channels": 4}
    model = diffusers.FluxTransformer2DModel(**config)
    tiny.fill(model)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "q")
    others = ["*blocks*", "time_text_embed", "context_embedder", "norm_out", "proj_out"]
    words = r"int8wo would not make it smaller \([\d,]+ bytes, [\d,]+ unquantized\)"
    assert_refused(tmp_path / "q", GateError, words, skip=others)


@pytest.mark.parametrize("kind", ["torchao bin", "torchao safetensors"])
@pytest.mark.parametrize("with_block", [True, False])
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_torchao_checkpoints_are_refused(
    name: str, kind: str, with_block: bool, stock_folder: Folder, tmp_path: Path
) -> None:
    """By config.json, and where that lost its block by the tensors."""
    folder = shutil.copytree(stock_folder(name, "int8wo", kind.removeprefix("torchao ")), tmp_path / "q")
    if not with_block:
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    words = r"already quantized: config.json has a" if with_block else r"already quantized: .* is a Int8Tensor"
    assert_refused(folder, CheckpointError, words)


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "quanto", "fp8", "compressed-tensors"])
def test_other_methods_are_refused_by_config_json(method: str, tiny_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("flux"), tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    assert_refused(folder, CheckpointError, rf"already quantized: config.json has .*method {method}")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
def test_linears_stored_in_few_bits_are_refused(dtype: torch.dtype, tiny_folder: Folder, tmp_path: Path) -> None:
    weight = "transformer_blocks.0.attn.to_q.weight"
    folder = rewritten(tiny_folder("flux"), tmp_path / "q", lambda state: state | {weight: state[weight].to(dtype)})
    dtype_name = str(dtype).removeprefix("torch.")
    assert_refused(folder, CheckpointError, f"already quantized: {weight} is stored as {dtype_name}")


def test_a_shape_that_does_not_fit(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = rewritten(
        tiny_folder("flux"), tmp_path / "q", lambda state: state | {"proj_out.weight": torch.ones(8, 64)}
    )
    assert_refused(folder, CheckpointError, r"proj_out.weight has shape \[8, 64\], Flux.* wants \[16, 64\]")


def test_missing_tensors(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = rewritten(
        tiny_folder("t5"), tmp_path / "q", lambda state: {k: v for k, v in state.items() if "wo" not in k}
    )
    assert_refused(folder, CheckpointError, r"1 of \d+ tensors of T5EncoderModel are missing, first encoder\.block\.0")


def test_unexpected_tensors_are_left_out_with_a_warning(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = rewritten(tiny_folder("flux"), tmp_path / "q", lambda state: state | {"zz.odd": torch.ones(3)})
    result = aoquant.quantize(folder, {"transformer": "int8wo"}, output=tmp_path / "out")
    assert any("1 stored tensors are not part of Flux" in text and "zz.odd" in text for text in result.plan.warnings)
    state = stock.read_state_dict(tmp_path / "out")
    stock.assert_same_state(state, stock.quantize(tiny_folder("flux"), *FLUX, "int8wo").state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("config_text", ["int8wo", "fp8wo", "fp8dq", "uint4wo:group_size=16", "int4wo:group_size=32"])
def test_weights_that_are_not_finite(config_text: str, bad: float, tiny_folder: Folder, tmp_path: Path) -> None:
    weight = "transformer_blocks.0.attn.to_q.weight"

    def spoil(state: State) -> State:
        state[weight][13, 40] = bad
        return state

    folder = rewritten(tiny_folder("flux"), tmp_path / "q", spoil)
    with pytest.raises(CheckpointError, match=rf"{weight} holds NaN or infinite values in bfloat16"):
        aoquant.quantize(folder, {"transformer": config_text}, output=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q"]


def test_weights_that_overflow_in_the_asked_dtype(tiny_folder: Folder, tmp_path: Path) -> None:
    weight = "transformer_blocks.0.attn.to_q.weight"
    folder = rewritten(tiny_folder("flux"), tmp_path / "q", lambda state: state | {weight: state[weight] * 1e6})
    aoquant.quantize(folder, {"transformer": "int8wo"}, output=tmp_path / "fits")
    with pytest.raises(CheckpointError, match=rf"{weight} holds NaN or infinite values in float16"):
        aoquant.quantize(folder, {"transformer": "int8wo"}, output=tmp_path / "out", dtype="float16")


# --- ties and shards ------------------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("source_format", ["bin", "safetensors"])
@pytest.mark.parametrize(
    ("name", "stored", "copy"),
    [
        ("t5", "shared.weight", "encoder.embed_tokens.weight"),
        ("umt5", "shared.weight", "encoder.embed_tokens.weight"),
        ("qwen2_lm", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_tied_weights_are_stored_once_unquantized_and_tied_again(
    name: str, stored: str, copy: str, source_format: str, file_format: str, made: Make, stock_model: Make
) -> None:
    result = made(name, "int8wo", source={"format": source_format}, format=file_format)
    (component,) = result.plan.components
    assert component.tied == {copy: stored}
    saved = stock.read_state_dict(result.plan.output)
    assert stored in saved and copy not in saved
    assert stock.kind(saved[stored]) == "Tensor"
    loaded = stock.load(result.plan.output, "transformers", tiny.MODELS[name].class_name)
    state = loaded.state_dict()
    assert state[stored].data_ptr() == state[copy].data_ptr()
    assert torch.equal(tiny.forward(loaded, name), tiny.forward(stock_model(name, "int8wo"), name))


@FORMATS
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_shards_keep_to_the_size_and_each_weight_in_one(name: str, file_format: str, made: Make) -> None:
    limit = 10_000
    result = made(name, "uint4wo", format=file_format, max_shard_size=limit)
    (component,) = result.plan.components
    for shard in component.shards:
        total = sum(tensor.num_bytes for tensor in shard.tensors)
        assert total <= limit or len(shard.tensors) == 1
    (index_path,) = result.plan.output.glob("*.index.json")
    index = json.loads(index_path.read_text())
    assert index["metadata"]["total_size"] == component.tensor_bytes
    assert set(index["weight_map"].values()) == {shard.layout.name for shard in component.shards}
    (found,) = aoquant.inspect(result.plan.output).components
    assert len(found.files) == len(component.shards) > 3
    for entry in found.entries.values():
        assert len({part.file for part in entry.parts.values()}) == 1, entry.name


@pytest.mark.parametrize("row", [row for row in CONFIGS.values() if row.family == "lowbit"], ids=lambda row: row.name)
def test_packed_weights_take_their_bits_and_scales(row: ConfigRow, wide_folder: Path, tmp_path: Path) -> None:
    """X bits, and at most half a bit more; unpacked, a byte."""
    for config_text, bits in {row.name: row.bits, f"{row.name}:layout=unpacked": 8}.items():
        if "layout" in config_text and not row.unpacked:
            continue
        (component,) = aoquant.plan(wide_folder, {"transformer": config_text}, output=tmp_path / "out").components
        made = [tensor for tensor in component.tensors if tensor.fate == "quantize" and tensor.shape[1] >= 256]
        num_bytes, num_weights = (sum(tensor.num_bytes for tensor in made), sum(math.prod(t.shape) for t in made))
        assert bits <= 8 * num_bytes / num_weights <= bits + 0.48
        assert {tensor.kind for tensor in made} == {"LowBitTensor" if bits < 8 else "IntxUnpackedToInt8Tensor"}


@pytest.mark.parametrize("twin", ["transformer_2", "unconditional_transformer"])
def test_two_transformers_of_which_one_is_quantized(twin: str, tiny_folder: Folder, tmp_path: Path) -> None:
    source = tmp_path / "pipe"
    pair = {name: ["diffusers", "WanTransformer3DModel"] for name in ("transformer", twin)}
    for name in pair:
        shutil.copytree(tiny_folder("wan"), source / name)
    shutil.copytree(tiny_folder("autoencoder_kl"), source / "vae")
    index = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKL"], **pair}
    (source / "model_index.json").write_text(json.dumps(index))
    for name, other in (("transformer", twin), (twin, "transformer")):
        one = aoquant.plan(source, {name: "int8wo"}, output=tmp_path / "out")
        assert one.warnings == (f"pipe also has {other}, which stays unquantized",)
    both = aoquant.plan(source, dict.fromkeys(pair, "int8wo"), output=tmp_path / "out")
    assert both.warnings == ()


@pytest.mark.parametrize("class_name", [None, "Any; import os", ["pipeline", "Custom"], 7])
def test_the_printed_lines_name_no_class_that_is_no_name(class_name: Any, tiny_folder: Folder, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder("flux"), tmp_path / "pipe" / "transformer")
    index = {"_class_name": class_name, "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "pipe" / "model_index.json").write_text(json.dumps(index))
    plan = aoquant.plan(tmp_path / "pipe", {"transformer": "int8wo"}, output=tmp_path / "out")
    assert "\npipeline = DiffusionPipeline.from_pretrained(" in plan.snippet(folder="out", model="pipe")
