"""What aoquant streams is what the stock libraries make, class by class and bit by bit, and it computes the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import aoquant
from aoquant.configs import CONFIGS
from aoquant.engine import blocks
from tests.heavy import stock, tiny

Folder = Callable[..., Path]
Make = Callable[..., Any]

CONFIG_TEXTS = (
    *CONFIGS, "int8wo:group_size=32", "fp8wo:dtype=e5m2", "int4wo:group_size=32", "uint4wo:group_size=16",
    "int4dq:group_size=64",
)  # fmt: skip
FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])
FLUX: tuple[stock.Library, str] = ("diffusers", "FluxTransformer2DModel")
T5: tuple[stock.Library, str] = ("transformers", "T5EncoderModel")


def load(folder: Path, name: str, **options: Any) -> Any:
    row = tiny.MODELS[name]
    return stock.load(folder, row.library, row.class_name, **options)


def int4_state(model: Any, group: int) -> dict[str, torch.Tensor]:
    """The state of an unquantized stock model, its Linear weights as `Int4Tensor`s by the written formula.

    Stock has no int4 quantizer on a CPU (it needs the mslk package).
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.in_features % group == 0:
            state[f"{name}.weight"] = stock.int4_tensor(module.weight.detach(), group)
    return state


def assert_same(folder: Path, name: str, expected: Any, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Fail unless the checkpoint in `folder`, loaded by stock, is the model `expected` and computes the same."""
    loaded = load(folder, name, dtype=dtype)
    stock.assert_same_state(loaded.state_dict(), expected.state_dict())
    assert torch.equal(tiny.forward(loaded, name), tiny.forward(expected, name))


@FORMATS
@pytest.mark.parametrize("config_text", CONFIG_TEXTS)
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_every_config(
    name: str, config_text: str, file_format: str, made: Make, stock_model: Make, tiny_folder: Folder
) -> None:
    result = made(name, config_text, format=file_format)
    assert result.plan.components[0].num_quantized > 0
    if config_text.startswith("int4wo"):
        group = stock.group_size(config_text)
        assert group is not None
        expected = int4_state(load(tiny_folder(name), name), group)
        stock.assert_same_state(load(result.plan.output, name).state_dict(), expected)
    else:
        assert_same(result.plan.output, name, stock_model(name, config_text))


@pytest.mark.parametrize("config_text", ["int8wo", "fp8wo", "uint4wo"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_model(name: str, config_text: str, made: Make, stock_model: Make) -> None:
    assert_same(made(name, config_text).plan.output, name, stock_model(name, config_text))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_model_as_safetensors(name: str, made: Make, stock_model: Make) -> None:
    result = made(name, "int8wo", format="safetensors")
    assert_same(result.plan.output, name, stock_model(name, "int8wo"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("config_text", ["int8wo", "fp8wo", "uint4wo"])
@pytest.mark.parametrize("name", ["flux", "t5", "wan"])
def test_other_dtypes(name: str, config_text: str, dtype: torch.dtype, made: Make, stock_model: Make) -> None:
    result = made(name, config_text, dtype=str(dtype).removeprefix("torch."))
    assert_same(result.plan.output, name, stock_model(name, config_text, dtype=dtype), dtype=dtype)


@FORMATS
def test_t5_in_float16_quantizes_wo_from_float32(file_format: str, made: Make, stock_model: Make) -> None:
    output = made("t5", "int8wo", dtype="float16", format=file_format).plan.output
    state = load(output, "t5", dtype=torch.float16).state_dict()
    stock.assert_same_state(state, stock_model("t5", "int8wo", dtype=torch.float16).state_dict())
    wo = state["encoder.block.0.layer.1.DenseReluDense.wo.weight"]
    wi = state["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"]
    assert (stock.kind(wo), wo.dtype, stock.kind(wi), wi.dtype) == (
        "Int8Tensor", torch.float32, "Int8Tensor", torch.float16,
    )  # fmt: skip


SOURCES: tuple[dict[str, Any], ...] = (
    {"format": "bin"},
    {"shards": 3},
    {"format": "bin", "shards": 3},
    {"shards": 3, "layout": "shuffled"},
    {"format": "bin", "shards": 3, "layout": "shuffled"},
    {"variant": "fp16"},
    {"format": "bin", "shards": 2, "variant": "fp16"},
    {"format": "bin", "layout": "views"},
    {"dtype": torch.float32},
)


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("name", ["flux", "t5", "clip_text", "qwen2_5_vl", "qwen2_moe"])
def test_every_form_of_source(name: str, source: dict[str, Any], made: Make, stock_model: Make) -> None:
    assert_same(made(name, "int8wo", source=source).plan.output, name, stock_model(name, "int8wo"))


def test_a_source_under_todays_module_names(made: Make, stock_model: Make) -> None:
    result = made("clip_text", "int8wo", source={"hub_names": False})
    assert_same(result.plan.output, "clip_text", stock_model("clip_text", "int8wo"))


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("config_text", ["int8wo", "uint4wo"])
def test_source_and_target_dtype_are_cast_as_stock_casts(
    source_dtype: torch.dtype, config_text: str, made: Make, tiny_folder: Folder
) -> None:
    folder = tiny_folder("flux", dtype=source_dtype)
    for dtype in ("float16", "float32"):
        expected = stock.quantize(
            folder,
            *FLUX,
            config_text,
            dtype=getattr(torch, dtype),
            skip=stock.indivisible(folder, *FLUX, stock.group_size(config_text)),
        )
        result = made("flux", config_text, source={"dtype": source_dtype}, dtype=dtype)
        assert_same(result.plan.output, "flux", expected, dtype=getattr(torch, dtype))


@FORMATS
@pytest.mark.parametrize("config_text", ["int8wo", "fp8wo", "uint4wo"])
@pytest.mark.parametrize("name", ["flux", "t5", "qwen2_5_vl"])
def test_shards_of_output(name: str, config_text: str, file_format: str, made: Make, stock_model: Make) -> None:
    result = made(name, config_text, format=file_format, max_shard_size=20_000)
    assert len(result.plan.components[0].shards) > 2
    assert_same(result.plan.output, name, stock_model(name, config_text))


def expected_state(source: Path, config_text: str, where: tuple[stock.Library, str]) -> dict[str, torch.Tensor]:
    """The state of the model in `source` as stock quantizes it, for int4wo as its formula says."""
    group = stock.group_size(config_text)
    if config_text.startswith("int4wo"):
        assert group is not None
        return int4_state(stock.load(source, *where), group)
    skip = stock.indivisible(source, *where, group)
    state: dict[str, torch.Tensor] = stock.quantize(source, *where, config_text, skip=skip).state_dict()
    return state


@pytest.fixture(scope="module")
def wide_state(wide_folder: Path) -> Callable[[str], dict[str, torch.Tensor]]:
    """`wide_state(config_text)` → `expected_state` of the wide Flux transformer."""
    return functools.cache(lambda config_text: expected_state(wide_folder, config_text, FLUX))


@FORMATS
@pytest.mark.parametrize(
    "config_text",
    ["int8wo", "int8wo:group_size=32", "fp8wo", "fp8dq", "fp8dqrow", "uint4wo:group_size=16", "int4dq", "int4wo"],
)
def test_many_small_blocks_and_jobs(
    config_text: str, file_format: str, wide_folder: Path, wide_state: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A weight of a hundred blocks, more jobs than may be in flight, last ones that are short."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", 4000)
    monkeypatch.setattr(blocks, "JOB_BLOCKS", 3)
    aoquant.quantize(wide_folder, {"transformer": config_text}, output=tmp_path / "out", format=file_format)
    state = stock.load(tmp_path / "out", *FLUX).state_dict()
    stock.assert_same_state(state, wide_state(config_text))
    assert any(value.numel() > 300_000 for value in state.values() if stock.kind(value) != "Tensor")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 encoder with weights of [4112, 1024]. Do not write there."""
    config = transformers.T5Config(**{**tiny.MODELS["t5"].config, "d_model": 1024, "d_ff": 4112})
    model = transformers.T5EncoderModel(config)
    tiny.fill(model)
    folder = tmp_path_factory.mktemp("long")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config_text", ["int8wo", "fp8dq", "uint4wo", "int4wo"])
def test_weights_of_several_blocks_and_jobs(config_text: str, long_folder: Path, tmp_path: Path) -> None:
    """At the real sizes: [4112, 1024] is a little more than two jobs of eight blocks."""
    aoquant.quantize(long_folder, {"text_encoder": config_text}, output=tmp_path / "out")
    assert 2 * blocks.CPU_BLOCK * blocks.JOB_BLOCKS < 4112 * 1024
    state = stock.load(tmp_path / "out", *T5).state_dict()
    stock.assert_same_state(state, expected_state(long_folder, config_text, T5))


def test_legacy_attention_names_of_a_vae(tiny_folder: Folder, tmp_path: Path) -> None:
    """diffusers before 0.15 called the VAE's attention `query`, `key`, `value` and `proj_attn`; stock reads it."""
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    source = tmp_path / "vae"
    source.mkdir()
    original = tiny_folder("autoencoder_kl", format="bin")
    (source / "config.json").write_bytes((original / "config.json").read_bytes())
    state = {}
    for name, value in stock.read_state_dict(original).items():
        for new, old in old_names.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        state[name] = value
    assert any(".query.weight" in name for name in state)
    torch.save(state, source / "diffusion_pytorch_model.bin")
    expected = stock.quantize(source, "diffusers", "AutoencoderKL", "int8wo", use_safetensors=False)
    for file_format in ("bin", "safetensors"):
        output = tmp_path / file_format
        aoquant.quantize(source, {"vae": "int8wo"}, output=output, format=file_format)
        assert_same(output, "autoencoder_kl", expected)


def with_zero_row(folder: Path, source: Path, weight: str) -> Path:
    """A copy of a Flux folder with row 3 of `weight` zero."""
    model = stock.load(source, *FLUX)
    with torch.no_grad():
        model.get_parameter(weight)[3] = 0
    model.save_pretrained(str(folder))
    return folder


@FORMATS
@pytest.mark.parametrize("config_text", ["fp8wo", "fp8wo:dtype=e5m2", "fp8dqrow"])
def test_a_row_of_zeros_stays_zero_in_float8_where_stock_writes_nan(
    config_text: str, file_format: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """The one deliberate difference: stock divides 0 by a scale of 0, and a model with such a row draws black."""
    weight = "proj_out.weight"
    source = with_zero_row(tmp_path / "source", tiny_folder("flux"), weight)
    theirs = stock.quantize(source, *FLUX, config_text)
    aoquant.quantize(source, {"transformer": config_text}, output=tmp_path / "out", format=file_format)
    ours = stock.load(tmp_path / "out", *FLUX)
    mine, other = ours.state_dict(), theirs.state_dict()
    assert other[weight].qdata[3].float().isnan().all()
    assert tiny.forward(theirs, "flux").isnan().any()
    assert mine[weight].qdata[3].view(torch.uint8).eq(0).all()
    assert mine[weight].scale[3].item() == 0
    assert tiny.forward(ours, "flux").isfinite().all()
    rest = torch.arange(len(mine[weight].qdata)) != 3
    for part in ("qdata", "scale"):
        assert stock.same_bits(getattr(mine[weight], part)[rest], getattr(other[weight], part)[rest])
    del mine[weight], other[weight]
    stock.assert_same_state(mine, other)


def test_a_matrix_of_zeros_stays_zero_in_fp8dq(tiny_folder: Folder, tmp_path: Path) -> None:
    model = stock.load(tiny_folder("flux"), *FLUX)
    weight = "transformer_blocks.0.attn.to_q.weight"
    with torch.no_grad():
        model.get_parameter(weight).zero_()
    model.save_pretrained(str(tmp_path / "source"))
    aoquant.quantize(tmp_path / "source", {"transformer": "fp8dq"}, output=tmp_path / "out")
    ours = stock.load(tmp_path / "out", *FLUX)
    assert ours.get_parameter(weight).qdata.view(torch.uint8).eq(0).all()
    assert tiny.forward(ours, "flux").isfinite().all()


@pytest.mark.parametrize("name", tiny.MODELS)
def test_config_json_says_what_stock_saves(name: str, made: Make, stock_folder: Folder) -> None:
    """Save for key order, and a path of this machine that stock diffusers writes."""
    import json

    ours = json.loads((made(name, "int8wo").plan.output / "config.json").read_text())
    theirs = json.loads((stock_folder(name, "int8wo", "safetensors") / "config.json").read_text())
    theirs.pop("_name_or_path", None)
    assert ours == theirs
