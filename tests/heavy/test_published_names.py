"""Checkpoints as they are published: under other names than the installed library's modules have, and with more.

Each is streamed where names map one to one, and equals what stock makes of the very same folder; where tensors have to
be merged, it is loaded whole, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import aoquant
from aoquant.cli import main
from tests.heavy import stock, tiny

State = dict[str, torch.Tensor]


def renamed(*changes: tuple[str, str]) -> Callable[[State], State]:
    """The state with the first of `changes` (old prefix → new prefix) that fits a name made in it."""

    def name(key: str) -> str:
        for old, new in changes:
            if key.startswith(old):
                return new + key.removeprefix(old)
        return key

    return lambda state: {name(key): value for key, value in state.items()}


def with_more(*changes: tuple[str, str], **tensors: torch.Tensor) -> Callable[[State], State]:
    """`renamed`, and further tensors, `__` for a dot in their names."""
    rename = renamed(*changes)
    return lambda state: rename(state) | {key.replace("__", "."): value for key, value in tensors.items()}


def both_names(first: str, second: str) -> Callable[[State], State]:
    """The state with one of two tied names copied to the other, as two tensors of equal values."""
    return lambda state: state | {second: state[first].clone()}


MATRIX = torch.ones(8, 64, dtype=torch.bfloat16)

TIED = {
    "t5": {"encoder.embed_tokens.weight"}, "umt5": {"encoder.embed_tokens.weight"}, "qwen3_lm": {"lm_head.weight"},
    "gemma3": {"lm_head.weight"},
}  # fmt: skip

# model, what its checkpoint is like, module names → stored names, stored names that are no part of the class.
PUBLISHED: list[tuple[str, str, Callable[[State], State], list[str]]] = [
    ("clip_text", "text_model", renamed(("", "text_model.")), []),
    (
        "clip_text", "position_ids",
        with_more(("", "text_model."), text_model__embeddings__position_ids=torch.arange(16)[None]),
        ["text_model.embeddings.position_ids"],
    ),
    (
        "clip_text", "of a whole CLIPModel",
        with_more(("", "text_model."), vision_model__post_layernorm__weight=MATRIX[0], logit_scale=torch.ones(())),
        ["logit_scale", "vision_model.post_layernorm.weight"],
    ),
    ("clip_text_projection", "as modules", renamed(), []),
    ("t5", "shared", renamed(), []),
    ("t5", "embed_tokens", renamed(("shared.", "encoder.embed_tokens.")), []),
    ("t5", "shared and embed_tokens", both_names("shared.weight", "encoder.embed_tokens.weight"), []),
    (
        "t5", "of a whole T5",
        with_more(decoder__final_layer_norm__weight=MATRIX[0], lm_head__weight=MATRIX.clone()),
        ["decoder.final_layer_norm.weight", "lm_head.weight"],
    ),
    ("umt5", "shared and embed_tokens", both_names("shared.weight", "encoder.embed_tokens.weight"), []),
    ("gemma2", "as modules", renamed(), []),
    ("gemma2", "of a causal LM", renamed(("", "model.")), []),
    ("llama", "of a causal LM", with_more(("", "model."), lm_head__weight=MATRIX), ["lm_head.weight"]),
    ("qwen3_lm", "with lm_head", both_names("model.embed_tokens.weight", "lm_head.weight"), []),
    ("qwen3_lm", "of a base model", renamed(("model.", "")), []),
    (
        "qwen2_5_vl", "before transformers 4.52",
        renamed(("model.language_model.", "model."), ("model.visual.", "visual.")), [],
    ),
    ("qwen2_5_vl", "as modules", renamed(), []),
    (
        "mistral3", "before transformers 4.52",
        renamed(
            ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
            ("model.", ""),
        ), [],
    ),
    ("mistral3", "as modules", renamed(), []),
    (
        "gemma3", "before transformers 4.52",
        renamed(
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.language_model.", "language_model.model."), ("model.", ""),
        ), [],
    ),
    ("clip_vision", "vision_model", renamed(("", "vision_model.")), []),
    (
        "clip_vision", "of a whole CLIPModel",
        with_more(("", "vision_model."), text_model__final_layer_norm__weight=MATRIX[0], logit_scale=torch.ones(())),
        ["logit_scale", "text_model.final_layer_norm.weight"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize(
    ("name", "publish", "ignored"),
    [pytest.param(name, publish, ignored, id=f"{name} {what}") for name, what, publish, ignored in PUBLISHED],
)
def test_one_to_one_names_are_streamed_and_equal_stock(
    name: str, publish: Callable[[State], State], ignored: list[str], file_format: str, tmp_path: Path
) -> None:
    row = tiny.MODELS[name]
    source = tmp_path / "source"
    tiny.save(name, source)
    (file,) = source.glob("*.safetensors")
    modules = tiny.build(name, dtype=torch.bfloat16).state_dict()
    state = publish({key: value for key, value in modules.items() if key not in TIED.get(name, ())})
    save_file(state, file, metadata={"format": "pt"})
    result = aoquant.quantize(source, {row.component: "int8wo"}, output=tmp_path / "out", format=file_format)
    (component,) = result.plan.components
    assert component.component.whole_reason == ""
    assert sorted(component.ignored) == ignored
    theirs = stock.quantize(source, "transformers", row.class_name, "int8wo")
    ours = stock.load(tmp_path / "out", "transformers", row.class_name)
    stock.assert_same_state(ours.state_dict(), theirs.state_dict())
    assert torch.equal(tiny.forward(ours, name), tiny.forward(theirs, name))
    assert aoquant.inspect(tmp_path / "out").problems == ()


def test_a_tensor_at_the_root_of_a_transformers_model_in_safetensors(tmp_path: Path) -> None:
    """Stock cannot load what it saves itself of such a model (transformers 5.24, torchao 0.18)."""
    text, vision = ({**tiny.MODELS[name].config} for name in ("clip_text", "clip_vision"))
    model = tiny.finish(
        transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision)),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(str(tmp_path / "source"))
    theirs = stock.quantize(tmp_path / "source", "transformers", "SiglipModel", "int8wo")
    assert "logit_scale" in theirs.state_dict()
    for file_format in ("bin", "safetensors"):
        out = tmp_path / file_format
        aoquant.quantize(tmp_path / "source", {"image_encoder": "int8wo"}, output=out, format=file_format)
        ours = stock.load(out, "transformers", "SiglipModel")
        stock.assert_same_state(ours.state_dict(), theirs.state_dict())
        assert aoquant.inspect(out).problems == ()


def test_experts_that_are_published_one_by_one_are_loaded_whole_and_said_so(
    tiny_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installed transformers holds all of a layer's experts in two tensors."""
    argv = [str(tiny_folder("qwen2_moe")), "--text-encoder", "int8wo", "-o", str(tmp_path / "out")]
    note = "note: Qwen2MoeModel is loaded whole into memory: transformers merges or splits 24 of its tensors, first "
    for command in ("plan", "quantize"):
        assert main([command, *argv]) == 0
        assert note + "layers.0.mlp.experts." in capsys.readouterr().err
