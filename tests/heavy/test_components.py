"""A component on the meta device: what stock would do with each tensor, found from the classes and not from names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aoquant.checkpoint.weights import read_weights
from aoquant.engine import component as components
from aoquant.engine.component import Component
from aoquant.errors import CheckpointError
from aoquant.source import open_component, open_source
from tests.heavy import stock, tiny

Folder = Callable[..., Path]
ALL = pytest.mark.parametrize("name", tiny.MODELS)


def build(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Component:
    source = open_component(open_source(str(folder), components=("any",)), "any")
    contents = read_weights(source.weights)
    contents.require_sound()
    return components.build(source, contents.entries, sharded=source.weights.index is not None, dtype=dtype)


@ALL
def test_nothing_is_materialized(name: str, tiny_folder: Folder) -> None:
    component = build(tiny_folder(name))
    tensors = [*component.module.parameters(), *(v for v in component.module.state_dict().values())]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_and_fates_are_stocks(name: str, dtype: torch.dtype, tiny_folder: Folder, stock_model: Any) -> None:
    """What stock quantizes is what is quantizable, and every tensor has the dtype that stock gives it."""
    component = build(tiny_folder(name), dtype=dtype)
    model = stock_model(name, "int8wo", dtype=dtype)
    state = model.state_dict()
    assert component.targets.keys() == state.keys()
    for key, target in component.targets.items():
        value = state[key]
        assert target.shape == tuple(value.shape), key
        assert target.dtype in (None, value.dtype), key
        if key not in component.tied:
            assert target.quantizable == (stock.kind(value) != "Tensor"), key
        module = model.get_submodule(key.rpartition(".")[0])
        assert target.linear == (isinstance(module, nn.Linear) and key.endswith("weight")), key
        assert bool(target.reason) == (target.linear and not target.quantizable), key


@ALL
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_every_stored_tensor_finds_its_place(name: str, file_format: str, tiny_folder: Folder) -> None:
    component = build(tiny_folder(name, format=file_format))
    assert not component.unexpected
    if component.whole_reason:
        assert name == "qwen2_moe"
        return
    placed = set(component.renames.values()) | component.tied.keys()
    assert placed == component.targets.keys()


def test_only_the_merged_experts_are_loaded_whole(tiny_folder: Folder) -> None:
    reasons = {name: build(tiny_folder(name)).whole_reason for name in tiny.MODELS}
    assert [name for name, reason in reasons.items() if reason] == ["qwen2_moe"]
    assert "merges or splits 24 of its tensors, first layers.0.mlp.experts." in reasons["qwen2_moe"]


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("t5", {"encoder.embed_tokens.weight": "shared.weight"}),
        ("umt5", {"encoder.embed_tokens.weight": "shared.weight"}),
        ("qwen2_lm", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("flux", {}),
        ("llama", {}),
    ],
)
def test_tied_names(name: str, tied: dict[str, str], file_format: str, tiny_folder: Folder) -> None:
    assert build(tiny_folder(name, format=file_format)).tied == tied


def test_a_checkpoint_that_has_only_the_copys_name(tiny_folder: Folder, tmp_path: Path) -> None:
    """Where only `encoder.embed_tokens` is stored, that is what `shared` repeats."""
    folder = rewritten(tiny_folder("t5"), tmp_path, lambda state: rename(state, "shared", "encoder.embed_tokens"))
    component = build(folder)
    assert component.tied == {"shared.weight": "encoder.embed_tokens.weight"}


def test_kept_in_float32_says_so(tiny_folder: Folder) -> None:
    wan = build(tiny_folder("wan"))
    assert wan.targets["scale_shift_table"].dtype == torch.float32
    embedder = wan.targets["condition_embedder.time_embedder.linear_1.weight"]
    assert (embedder.dtype, embedder.quantizable) == (torch.float32, True) or embedder.reason


def test_unexpected_tensors_are_listed(tiny_folder: Folder, tmp_path: Path) -> None:
    extra = {"zz.extra": torch.ones(3), "another": torch.ones(2)}
    folder = rewritten(tiny_folder("flux"), tmp_path, lambda state: {**state, **extra})
    assert build(folder).unexpected == ["another", "zz.extra"]


@pytest.mark.parametrize("name", ["flux", "t5"])
def test_missing_tensors_are_an_error_that_names_the_first(name: str, tiny_folder: Folder, tmp_path: Path) -> None:
    names = [key for key in stock.read_state_dict(tiny_folder(name)) if "norm" in key]
    folder = rewritten(tiny_folder(name), tmp_path, lambda state: {k: v for k, v in state.items() if k not in names})
    with pytest.raises(CheckpointError, match=rf"{len(names)} of \d+ tensors of {tiny.MODELS[name].class_name} are"):
        build(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("flux", {"_class_name": "NoSuchTransformer"}, "diffusers .* has no model class NoSuchTransformer"),
        ("flux", {"_class_name": "FluxPipeline"}, "has no model class FluxPipeline"),
        ("flux", {"num_attention_heads": "many"}, "cannot be built from its config.json"),
        ("t5", {"architectures": ["NoSuchModel"]}, "transformers .* has no model class NoSuchModel"),
        ("t5", {"d_model": None}, "cannot be built from its config.json"),
    ],
)
def test_a_class_that_cannot_be_built(
    name: str, change: dict[str, Any], words: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder(name), tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=words):
        build(folder)


def test_the_default_dtype_stays(tiny_folder: Folder) -> None:
    for name in ("flux", "t5"):
        build(tiny_folder(name), dtype=torch.float16)
        assert torch.get_default_dtype() == torch.float32


def rename(state: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {key.replace(old, new, 1): value for key, value in state.items()}


def rewritten(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Path:
    """A copy of a safetensors component folder whose state dict went through `change`."""
    from safetensors.torch import save_file

    copy = shutil.copytree(folder, tmp_path / "rewritten")
    (file,) = copy.glob("*.safetensors")
    save_file(change(stock.read_state_dict(folder)), file, metadata={"format": "pt"})
    return copy
