"""That the tiny models and the stock references are what the other heavy tests take them for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from tests.heavy import stock, tiny

Folder = Callable[..., Path]
ALL = pytest.mark.parametrize("name", tiny.MODELS)


def load(folder: Path, name: str, **options: Any) -> Any:
    row = tiny.MODELS[name]
    return stock.load(folder, row.library, row.class_name, **options)


@ALL
def test_forward_is_finite_and_says_something(name: str) -> None:
    output = tiny.forward(tiny.build(name), name)
    assert output.isfinite().all()
    assert 0.1 < output.std() < 10


@ALL
def test_no_row_of_a_matrix_is_zero(name: str) -> None:
    for key, value in tiny.build(name).named_parameters():
        assert value.ndim < 2 or value.flatten(1).abs().amax(1).min() > 0, key


@ALL
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shards": 3, "variant": "fp16"},
        {"format": "bin", "shards": 3, "variant": "fp16"},
        {"shards": 2, "layout": "shuffled"},
        {"format": "bin", "layout": "views"},
    ],
    ids=str,
)
def test_every_saved_form_loads_in_stock_as_the_same_model(
    name: str, options: dict[str, Any], tiny_folder: Folder
) -> None:
    folder = tiny_folder(name, **options)
    loaded = load(folder, name, variant=options.get("variant"))
    expected = load(tiny_folder(name), name)
    stock.assert_same_state(loaded.state_dict(), expected.state_dict())
    assert torch.equal(tiny.forward(loaded, name), tiny.forward(expected, name))
    assert len(list(folder.glob("*.index*.json"))) == (options.get("shards", 1) > 1)


def test_same_seed_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, second, other = (
        stock.read_state_dict(tiny.save("flux", tmp_path / folder, seed=seed))
        for folder, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    stock.assert_same_state(first, second)
    with pytest.raises(AssertionError, match="values"):
        stock.assert_same_state(first, other)


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_shuffled_shards_do_not_follow_the_models_order(name: str, tiny_folder: Folder) -> None:
    state = stock.read_state_dict(tiny_folder(name, format="bin", shards=2, layout="shuffled"))
    assert list(state) != list(tiny.build(name).state_dict())


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_views_are_not_contiguous_and_share_storage(name: str, tiny_folder: Folder) -> None:
    state = stock.read_state_dict(tiny_folder(name, format="bin", layout="views"))
    matrices = [value for value in state.values() if value.ndim == 2]
    assert not matrices[0].is_contiguous()
    assert matrices[1].storage_offset() > 0
    assert matrices[-1].untyped_storage().data_ptr() == matrices[-2].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("t5", ("shared.weight", "encoder.embed_tokens.weight")),
        ("umt5", ("shared.weight", "encoder.embed_tokens.weight")),
        ("qwen2_lm", ("model.embed_tokens.weight", "lm_head.weight")),
    ],
)
def test_tied_names_share_storage_in_bin_and_are_one_in_safetensors(
    name: str, tied: tuple[str, str], tiny_folder: Folder
) -> None:
    state = stock.read_state_dict(tiny_folder(name, format="bin"))
    assert state[tied[0]].data_ptr() == state[tied[1]].data_ptr()
    assert len(tied & stock.read_state_dict(tiny_folder(name)).keys()) == 1


@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize(
    ("name", "in_checkpoint", "in_module"),
    [
        ("clip_text", "text_model.encoder.layers.0.mlp.fc1.weight", "encoder.layers.0.mlp.fc1.weight"),
        ("qwen2_moe", "layers.0.mlp.experts.3.up_proj.weight", "layers.0.mlp.experts.gate_up_proj"),
        (
            "qwen2_5_vl",
            "model.layers.0.mlp.up_proj.weight",
            "model.language_model.layers.0.mlp.up_proj.weight",
        ),
    ],
)
def test_checkpoint_names_are_not_module_names(
    name: str, in_checkpoint: str, in_module: str, file_format: str, tiny_folder: Folder
) -> None:
    state = stock.read_state_dict(tiny_folder(name, format=file_format))
    module = tiny.build(name).state_dict()
    assert in_checkpoint in state.keys() - module.keys()
    assert in_module in module.keys() - state.keys()


def test_clip_text_without_hub_names_has_todays_names(tiny_folder: Folder) -> None:
    state = stock.read_state_dict(tiny_folder("clip_text", hub_names=False))
    assert state.keys() == tiny.build("clip_text").state_dict().keys()


def test_wan_has_a_root_parameter_and_float32_keeps(tiny_folder: Folder) -> None:
    state = load(tiny_folder("wan"), "wan").state_dict()
    assert state["scale_shift_table"].dtype == torch.float32
    assert state["proj_out.weight"].dtype == torch.bfloat16


@ALL
@pytest.mark.parametrize("config_text", ["int8wo", "uint4wo"])
@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
def test_stock_round_trip_is_exact(
    name: str, config_text: str, file_format: str, stock_model: Callable[..., Any], stock_folder: Folder
) -> None:
    model = stock_model(name, config_text)
    assert any(stock.kind(value) != "Tensor" for value in model.state_dict().values())
    loaded = load(stock_folder(name, config_text, file_format), name)
    stock.assert_same_state(loaded.state_dict(), model.state_dict())
    assert torch.equal(tiny.forward(loaded, name), tiny.forward(model, name))


@pytest.mark.parametrize("config_text", stock.CPU_CONFIGS)
@pytest.mark.parametrize("name", ["flux", "t5"])
def test_stock_makes_every_config_on_a_cpu(
    name: str, config_text: str, stock_model: Callable[..., Any], tiny_folder: Folder
) -> None:
    model = stock_model(name, config_text)
    row = tiny.MODELS[name]
    skipped = stock.indivisible(tiny_folder(name), row.library, row.class_name, stock.group_size(config_text))
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module_name in skipped:
            assert stock.kind(module.weight) == "Tensor", module_name
    assert any(stock.kind(m.weight) != "Tensor" for m in model.modules() if isinstance(m, nn.Linear))
    assert tiny.forward(model, name).isfinite().all()


def test_hardware_check_is_lifted_only_inside() -> None:
    config = stock.stock_config("fp8dq")
    with stock.without_hardware_check():
        quantize_(nn.Linear(32, 32, dtype=torch.bfloat16), config)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError):
            quantize_(nn.Linear(32, 32, dtype=torch.bfloat16), config)


@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize("name", ["flux", "wan", "t5"])
def test_read_state_dict_gives_back_what_was_saved(
    name: str, file_format: str, stock_model: Callable[..., Any], stock_folder: Folder, tmp_path: Path
) -> None:
    model = stock_model(name, "int8wo")
    expected = dict(model.state_dict())
    if name == "t5" and file_format == "safetensors":
        del expected["encoder.embed_tokens.weight"]
    stock.assert_same_state(stock.read_state_dict(stock_folder(name, "int8wo", file_format)), expected)
    if (tiny.MODELS[name].library, file_format) != ("transformers", "bin"):
        sharded = stock.save(model, tmp_path, tiny.MODELS[name].library, file_format, max_shard_bytes=60_000)
        assert len(list(sharded.glob(f"*.{file_format}"))) > 1
        stock.assert_same_state(stock.read_state_dict(sharded), expected)


def test_zero_rows_are_nan_in_float8_per_row_and_zero_in_int8() -> None:
    values = {}
    for config_text in ("fp8wo", "int8wo"):
        linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            linear.weight[3] = 0
        quantize_(linear, stock.stock_config(config_text))
        values[config_text] = linear.weight
    assert values["fp8wo"].dequantize()[3].isnan().all()
    assert not values["int8wo"].dequantize()[3].any()
    stock.assert_same_state({"w": values["fp8wo"]}, {"w": values["fp8wo"].detach().clone()})


def test_assert_same_state_sees_one_bit_and_names_it() -> None:
    linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    quantize_(linear, stock.stock_config("int8wo"))
    other = linear.weight.detach().clone()
    stock.assert_same_state({"a.weight": linear.weight}, {"a.weight": other})
    qdata = stock.parts(other)["qdata"]
    assert isinstance(qdata, torch.Tensor)
    qdata.view(torch.uint8)[5, 7] ^= 1
    with pytest.raises(AssertionError, match=r"^a\.weight: qdata differ"):
        stock.assert_same_state({"a.weight": linear.weight}, {"a.weight": other})


def test_assert_same_state_sees_names_classes_dtypes_and_attributes() -> None:
    weight = torch.randn(32, 64, dtype=torch.bfloat16)
    linears = []
    for group in (32, 64):
        linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            linear.weight.copy_(weight)
        quantize_(linear, stock.stock_config(f"int8wo:group_size={group}"))
        linears.append(linear.weight)
    for other, word in ((linears[1], "qdata"), (weight, "Tensor"), (weight.float(), "Tensor")):
        with pytest.raises(AssertionError, match=word):
            stock.assert_same_state({"w": linears[0]}, {"w": other})
    with pytest.raises(AssertionError, match="missing"):
        stock.assert_same_state({"w": weight}, {"w": weight, "v": weight})
    with pytest.raises(AssertionError, match="no tensors"):
        stock.assert_same_state({}, {})
    with pytest.raises(AssertionError, match="values"):
        stock.assert_same_state({"w": weight}, {"w": weight.half()})


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_reference_is_the_nearest_of_sixteen_steps(group: int) -> None:
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    parts = stock.int4_reference(weight, group)
    bytes_ = parts["qdata"].view(torch.uint8).int()
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).reshape(48, 256)
    scale, zero = (parts[key].t().repeat_interleave(group, dim=1) for key in ("scale", "zero_point"))
    values = (nibbles - 16 * (nibbles > 7)) * scale + zero
    assert ((values - weight).abs() <= scale / 2 + 1e-6).all()
    assert parts["scale"].shape == (256 // group, 48)
    assert stock.int4_tensor(weight.bfloat16(), group).dtype == torch.bfloat16
