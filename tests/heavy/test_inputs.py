"""`bench` feeds a component noise: in shapes that it takes, from its config alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn

from aoquant.engine.inputs import Size, synthetic_inputs, usual_size
from aoquant.errors import UsageError
from tests.heavy import tiny, tiny_pipelines

SIZE = Size(height=64, width=32, num_frames=9, num_tokens=16)


def first_tensor(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def given(module: Any, size: Size) -> dict[str, Any]:
    return synthetic_inputs(module, size, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("name", tiny_pipelines.PIPELINES)
def test_every_component_takes_them(name: str) -> None:
    row = tiny_pipelines.PIPELINES[name]
    with tempfile.TemporaryDirectory() as folder:
        parts = row.parts(Path(folder))
    for component in row.configs:
        module = parts[component].eval()
        inputs = synthetic_inputs(module, SIZE, device=torch.device("cpu"), dtype=torch.bfloat16)
        again = synthetic_inputs(module, SIZE, device=torch.device("cpu"), dtype=torch.bfloat16)
        with torch.no_grad():
            output, same = (first_tensor(module(**given, return_dict=False)) for given in (inputs, again))
        assert output.isfinite().all() and torch.equal(output, same)


def test_a_picture_of_more_pixels_has_more_of_them() -> None:
    module = tiny.build("flux")
    small, large = (
        synthetic_inputs(module, Size(height=side, width=64), device=torch.device("cpu"), dtype=torch.float32)
        for side in (64, 128)
    )
    assert (small["hidden_states"].shape, large["hidden_states"].shape) == ((1, 16, 16), (1, 32, 16))
    assert large["img_ids"].amax(0).tolist() == [0, 7, 3]


def test_the_largest_models_that_a_config_bounds() -> None:
    """Prompts and pictures that the pipelines of these classes cut to what they take."""
    lumina = tiny_pipelines.PIPELINES["lumina2"].parts
    with tempfile.TemporaryDirectory() as folder:
        module = lumina(Path(folder))["transformer"]
    inputs = synthetic_inputs(module, Size(height=32, width=32), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert inputs["encoder_hidden_states"].shape[1] == 255  # of 256 positions
    cogvideox = tiny.build("cogvideox")
    assert usual_size(cogvideox) == Size(height=64, width=64, num_frames=5)
    first_tensor(cogvideox(**given(cogvideox, usual_size(cogvideox)), return_dict=False))


@pytest.mark.parametrize("name", ["CLIPVisionModelWithProjection", "SiglipVisionModel"])
def test_image_encoders_take_pictures(name: str) -> None:
    config = getattr(transformers, name).config_class(
        hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    module = getattr(transformers, name)(config).eval()
    inputs = given(module, usual_size(module))
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert first_tensor(module(**inputs, return_dict=False)).isfinite().all()


def test_a_model_that_takes_neither_is_named() -> None:
    config = transformers.WhisperConfig(
        vocab_size=60000, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    with pytest.raises(UsageError, match="takes input_features"):
        given(transformers.WhisperModel(config), SIZE)


def test_what_is_usually_drawn() -> None:
    assert usual_size(tiny.build("flux")) == Size(height=1024, width=1024)
    assert usual_size(tiny.build("sdxl_unet")) == Size(height=64, width=64)
    assert usual_size(tiny.build("wan")) == Size(height=480, width=832, num_frames=81)


def test_a_class_without_any_is_named() -> None:
    class Other(nn.Module):
        config: ClassVar = {"in_channels": 4}

    with pytest.raises(UsageError, match="no inputs for Other") as caught:
        synthetic_inputs(Other(), SIZE, device=torch.device("cpu"), dtype=torch.float32)
    assert "FluxTransformer2DModel" in caught.value.hint
