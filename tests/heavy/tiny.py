"""Tiny models of the real diffusers and transformers classes, and the folders that stock code saves of them.

Awkward on purpose: biases, widths that 32, 64 or 128 do not divide, convolutions, norms, embeddings, tied
weights, parameters at the root, modules kept in float32, checkpoint names that are not module names. Every
value is seeded.

    model = build("flux")                                   a float32 module on the CPU, in eval mode
    folder = save("flux", tmp_path, format="bin", shards=3)  a component folder with config.json and weights
    forward(model, "flux")                                  one tensor, the same for the same weights
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import diffusers
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

Inputs = dict[str, Any]
Format = Literal["safetensors", "bin"]
Layout = Literal["stock", "shuffled", "views"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """One row of the table `MODELS`.

    component: the folder it usually has in a pipeline. config: what its class (diffusers) or config class
    (transformers) is built from. inputs: dtype → the arguments of `forward`, seeded. hub_prefix: what the
    names in published checkpoints begin with and today's module names do not.
    """

    name: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    component: str
    config: Mapping[str, Any]
    inputs: Callable[[torch.dtype], Inputs]
    config_class: str = ""
    call: Mapping[str, Any] = field(default_factory=dict)
    hub_prefix: str = ""

    @property
    def cls(self) -> Any:
        return getattr(diffusers if self.library == "diffusers" else transformers, self.class_name)


def _noise(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _tokens(vocabulary: int, length: int = 8) -> torch.Tensor:
    ids = torch.randint(3, vocabulary - 1, (2, length), generator=torch.Generator().manual_seed(2))
    ids[:, -1] = vocabulary - 1  # where CLIP pools, as its end-of-text token
    return ids


def _flux_inputs(dtype: torch.dtype) -> Inputs:
    grid = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(2.0), torch.arange(3.0), indexing="ij"), -1)
    return {
        "hidden_states": _noise(1, 6, 16, dtype=dtype),
        "encoder_hidden_states": _noise(1, 5, 48, dtype=dtype, seed=2),
        "pooled_projections": _noise(1, 48, dtype=dtype, seed=3),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": grid.reshape(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def _sd3_inputs(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": _noise(1, 4, 8, 8, dtype=dtype),
        "encoder_hidden_states": _noise(1, 5, 40, dtype=dtype, seed=2),
        "pooled_projections": _noise(1, 56, dtype=dtype, seed=3),
        "timestep": torch.tensor([500.0], dtype=dtype),
    }


def _sdxl_inputs(dtype: torch.dtype) -> Inputs:
    conditions = {
        "text_embeds": _noise(1, 24, dtype=dtype, seed=3),
        "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]], dtype=dtype),
    }
    return {
        "sample": _noise(1, 4, 8, 8, dtype=dtype),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": _noise(1, 5, 40, dtype=dtype, seed=2),
        "added_cond_kwargs": conditions,
    }


def _wan_inputs(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": _noise(1, 4, 2, 8, 8, dtype=dtype),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": _noise(1, 5, 40, dtype=dtype, seed=2),
    }


def _cogvideox_inputs(dtype: torch.dtype) -> Inputs:
    return {
        "hidden_states": _noise(1, 2, 4, 8, 8, dtype=dtype),
        "encoder_hidden_states": _noise(1, 6, 24, dtype=dtype, seed=2),
        "timestep": torch.tensor([500]),
    }


def _text_inputs(vocabulary: int) -> Callable[[torch.dtype], Inputs]:
    def inputs(dtype: torch.dtype) -> Inputs:
        return {"input_ids": _tokens(vocabulary)}

    return inputs


_T5: Mapping[str, Any] = {
    "vocab_size": 77, "d_model": 64, "d_kv": 16, "d_ff": 100, "num_layers": 1, "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_CLIP: Mapping[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 16, "projection_dim": 40, "eos_token_id": 98,
    "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
_DECODER: Mapping[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0,
    "eos_token_id": 100, "pad_token_id": 1,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "fullatt_block_indexes": [0],
}  # fmt: skip
_IMAGES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip

_ROWS: tuple[TinyModel, ...] = (
    TinyModel(
        name="flux", library="diffusers", class_name="FluxTransformer2DModel", component="transformer",
        config={
            "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 48,
            "pooled_projection_dim": 48, "guidance_embeds": False, "axes_dims_rope": (8, 12, 12),
        },
        inputs=_flux_inputs,
    ),
    TinyModel(
        name="sd3", library="diffusers", class_name="SD3Transformer2DModel", component="transformer",
        config={
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 32,
            "num_attention_heads": 2, "joint_attention_dim": 40, "caption_projection_dim": 64,
            "pooled_projection_dim": 56, "out_channels": 4, "pos_embed_max_size": 8, "qk_norm": "rms_norm",
            "dual_attention_layers": (0,),
        },
        inputs=_sd3_inputs,
    ),
    TinyModel(
        name="sdxl_unet", library="diffusers", class_name="UNet2DConditionModel", component="unet",
        config={
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64),
            "layers_per_block": 1, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 40,
            "attention_head_dim": (2, 4), "use_linear_projection": True,
            "transformer_layers_per_block": (1, 2), "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 72, "norm_num_groups": 8,
        },
        inputs=_sdxl_inputs,
    ),
    TinyModel(
        name="wan", library="diffusers", class_name="WanTransformer3DModel", component="transformer",
        config={
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4,
            "out_channels": 4, "text_dim": 40, "freq_dim": 32, "ffn_dim": 100, "num_layers": 1,
            "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
        },
        inputs=_wan_inputs,
    ),
    TinyModel(
        name="cogvideox", library="diffusers", class_name="CogVideoXTransformer3DModel",
        component="transformer",
        config={
            "num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 20, "text_embed_dim": 24, "num_layers": 1, "sample_width": 8,
            "sample_height": 8, "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4,
            "max_text_seq_length": 6,
        },
        inputs=_cogvideox_inputs,
    ),
    TinyModel(
        name="autoencoder_kl", library="diffusers", class_name="AutoencoderKL", component="vae",
        config={
            "block_out_channels": (16, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "layers_per_block": 1,
            "norm_num_groups": 8, "sample_size": 16,
        },
        inputs=lambda dtype: {"sample": _noise(1, 3, 16, 16, dtype=dtype)},
    ),
    TinyModel(
        name="t5", library="transformers", class_name="T5EncoderModel", component="text_encoder_2",
        config_class="T5Config", config=_T5, inputs=_text_inputs(77),
    ),
    TinyModel(
        name="umt5", library="transformers", class_name="UMT5EncoderModel", component="text_encoder",
        config_class="UMT5Config", config={**_T5, "num_layers": 2}, inputs=_text_inputs(77),
    ),
    TinyModel(
        name="clip_text", library="transformers", class_name="CLIPTextModel", component="text_encoder",
        config_class="CLIPTextConfig", config=_CLIP, inputs=_text_inputs(99), hub_prefix="text_model.",
    ),
    TinyModel(
        name="clip_text_projection", library="transformers", class_name="CLIPTextModelWithProjection",
        component="text_encoder_2", config_class="CLIPTextConfig", config=_CLIP, inputs=_text_inputs(99),
    ),
    TinyModel(
        name="llama", library="transformers", class_name="LlamaModel", component="text_encoder_4",
        config_class="LlamaConfig", config={**_DECODER, "attention_bias": True}, inputs=_text_inputs(101),
        call={"use_cache": False},
    ),
    TinyModel(
        name="qwen2_lm", library="transformers", class_name="Qwen2ForCausalLM", component="text_encoder",
        config_class="Qwen2Config", config={**_DECODER, "tie_word_embeddings": True},
        inputs=_text_inputs(101), call={"use_cache": False},
    ),
    TinyModel(
        name="gemma2", library="transformers", class_name="Gemma2Model", component="text_encoder",
        config_class="Gemma2Config", config={**_DECODER, "head_dim": 20}, inputs=_text_inputs(101),
        call={"use_cache": False},
    ),
    TinyModel(
        name="qwen2_moe", library="transformers", class_name="Qwen2MoeModel", component="text_encoder",
        config_class="Qwen2MoeConfig",
        config={
            **_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1,
        },
        inputs=_text_inputs(101), call={"use_cache": False},
    ),
    TinyModel(
        name="qwen2_5_vl", library="transformers", class_name="Qwen2_5_VLForConditionalGeneration",
        component="text_encoder", config_class="Qwen2_5_VLConfig",
        config={
            "text_config": {
                **_DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            "vision_config": _VISION, "image_token_id": 97, "video_token_id": 98, "vision_start_token_id": 95,
            "vision_end_token_id": 96, "tie_word_embeddings": False,
        },
        inputs=lambda dtype: {"input_ids": _tokens(94)}, call={"use_cache": False},
    ),
    TinyModel(
        name="qwen3_lm", library="transformers", class_name="Qwen3ForCausalLM", component="text_encoder",
        config_class="Qwen3Config", config={**_DECODER, "head_dim": 16, "tie_word_embeddings": True},
        inputs=_text_inputs(101), call={"use_cache": False},
    ),
    TinyModel(
        name="mistral3", library="transformers", class_name="Mistral3ForConditionalGeneration",
        component="text_encoder", config_class="Mistral3Config",
        config={
            "text_config": {**_DECODER, "model_type": "mistral", "head_dim": 16},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 4, "head_dim": 16,
            },
            "image_token_index": 97, "spatial_merge_size": 2, "tie_word_embeddings": False,
        },
        inputs=lambda dtype: {"input_ids": _tokens(94)}, call={"use_cache": False},
    ),
    TinyModel(
        name="gemma3", library="transformers", class_name="Gemma3ForConditionalGeneration",
        component="text_encoder", config_class="Gemma3Config",
        config={
            "text_config": {**_DECODER, "head_dim": 20}, "vision_config": _IMAGES, "mm_tokens_per_image": 4,
            "image_token_index": 97, "boi_token_index": 98, "eoi_token_index": 99,
        },
        inputs=lambda dtype: {"input_ids": _tokens(94)}, call={"use_cache": False},
    ),
    TinyModel(
        name="clip_vision", library="transformers", class_name="CLIPVisionModel", component="image_encoder",
        config_class="CLIPVisionConfig", config=_IMAGES, hub_prefix="vision_model.",
        inputs=lambda dtype: {"pixel_values": _noise(2, 3, 32, 32, dtype=dtype)},
    ),
)  # fmt: skip

MODELS: Mapping[str, TinyModel] = {row.name: row for row in _ROWS}
DIFFUSERS = tuple(row.name for row in _ROWS if row.library == "diffusers")
TRANSFORMERS = tuple(row.name for row in _ROWS if row.library == "transformers")


def fill(model: nn.Module, *, seed: int = 0) -> None:
    """Give every parameter of `model`, in place, seeded values that quantize as trained ones do.

    Matrices and kernels: normal with a deviation of 1/sqrt(fan-in), held within 0.02 to 0.5, and one value
    in 500 (at least one a tensor) six times as large. Norm weights near 1, biases and other vectors near 0,
    none all zero.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(seed * 100_003 + number)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            values *= min(max(1 / math.sqrt(math.prod(parameter.shape[1:])), 0.02), 0.5)
            count = max(1, values.numel() // 500)
            values.view(-1)[torch.randint(values.numel(), (count,), generator=generator)] *= 6
        else:
            values = values * 0.1 + float(name.endswith("weight"))
        with torch.no_grad():
            parameter.copy_(values.to(parameter.dtype))


def build(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model `name` of the table, on the CPU, in eval mode, filled from `seed`, its state in `dtype`."""
    row = MODELS[name]
    if row.library == "diffusers":
        model = row.cls(**row.config)
    else:
        model = row.cls(getattr(transformers, row.config_class)(**row.config))
    return finish(model, dtype=dtype, seed=seed)


def finish(model: Any, *, dtype: torch.dtype, seed: int = 0) -> Any:
    """`model` itself, filled from `seed`, its state in `dtype`, in eval mode."""
    fill(model, seed=seed)
    # As loading casts: what a checkpoint holds, and not the rotary tables that `Module.to` would round too.
    for value in model.state_dict(keep_vars=True).values():
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    return model.eval()


def forward(model: Any, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The one output tensor of `model` for the seeded inputs of `name`, cast to `dtype` (default: the
    model's own)."""
    row = MODELS[name]
    inputs = row.inputs(dtype or model.dtype)
    with torch.no_grad():
        output = model(**inputs, **row.call)
    for attribute in ("sample", "text_embeds", "logits", "last_hidden_state"):
        if getattr(output, attribute, None) is not None:
            return cast(torch.Tensor, getattr(output, attribute))
    raise TypeError(f"{name}: no known tensor in a {type(output).__name__}")


def checkpoint_state(model: Any, name: str, *, hub_names: bool = True) -> dict[str, torch.Tensor]:
    """The state dict of `model` under the names that its library puts into a checkpoint.

    Tied names are all there and share memory, as `torch.save(model.state_dict())` always had them.
    hub_names=False leaves a `hub_prefix` out, as today's library does when it saves a model that it built
    itself.
    """
    row = MODELS[name]
    state = dict(model.state_dict())
    if row.library == "transformers":
        from transformers.core_model_loading import revert_weight_conversion

        # It clones nothing for one-to-one names, so ties survive; merged experts come apart as views.
        state = revert_weight_conversion(model, state)
    return {(row.hub_prefix if hub_names else "") + key: value for key, value in state.items()}


def save(
    name: str,
    folder: Path,
    *,
    format: Format = "safetensors",
    shards: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    variant: str | None = None,
    layout: Layout = "stock",
    hub_names: bool = True,
    seed: int = 0,
) -> Path:
    """Write the model `name` to `folder` as a component folder and return `folder`.

    layout "stock": the files that `save_pretrained` writes, in `shards` shards or one or two more (its
    greedy split decides); transformers' `.bin`, which it writes no longer, as its older versions did.
    "shuffled": exactly `shards` files with an index, tensors dealt out in a seeded random order. "views":
    one `.bin` in which the first matrix is stored transposed, the second as a slice of a larger storage and
    the last two as views of one storage.
    """
    model = build(name, dtype=dtype, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    by_library = layout == "stock" and (MODELS[name].library == "diffusers" or format == "safetensors")
    if by_library:
        _save_by_library(model, name, folder, format, shards, variant, hub_names)
        return folder
    _save_config(model, name, folder)
    state = checkpoint_state(model, name, hub_names=hub_names)
    if format == "safetensors":
        state = {key: value.clone().contiguous() for key, value in _untied(state).items()}
    elif layout == "views":
        state = _as_views(state)
    keys = list(state)
    if layout == "shuffled":
        random.Random(seed).shuffle(keys)
    _save_files(state, list(_deal(keys, state, shards, by_size=layout != "shuffled")), name, folder, format, variant)
    return folder


def _save_by_library(
    model: Any,
    name: str,
    folder: Path,
    file_format: Format,
    shards: int,
    variant: str | None,
    hub_names: bool,
) -> None:
    total = sum(value.numel() * value.element_size() for value in _untied(dict(model.state_dict())).values())
    options: dict[str, Any] = {"variant": variant}
    if shards > 1:
        options["max_shard_size"] = -(-total // shards)
    if MODELS[name].library == "diffusers":
        model.save_pretrained(str(folder), safe_serialization=file_format == "safetensors", **options)
        return
    prefix = MODELS[name].hub_prefix
    if prefix and hub_names:
        # A model that was built and not loaded saves today's module names; published checkpoints have the
        # prefix.
        options["state_dict"] = {prefix + key: value for key, value in model.state_dict().items()}
    model.save_pretrained(str(folder), **options)


def _save_config(model: Any, name: str, folder: Path) -> None:
    if MODELS[name].library == "diffusers":
        model.save_config(str(folder))
        return
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [MODELS[name].class_name]
    model.config.save_pretrained(str(folder))


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with one name for each stored tensor: the first. safetensors takes no two of the same
    memory."""
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for key, value in state.items():
        seen.setdefault((value.data_ptr(), value.shape, value.stride()), key)
    kept = set(seen.values())
    return {key: value for key, value in state.items() if key in kept}


def _as_views(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Equal tensors on awkward storages: transposed, a slice of a larger one, two in one."""
    result = dict(state)
    matrices = [key for key, value in state.items() if value.ndim == 2]
    first, second, third, fourth = matrices[0], matrices[1], matrices[-2], matrices[-1]
    result[first] = state[first].t().contiguous().t()
    wide = torch.full((state[second].shape[0] + 3, state[second].shape[1] + 5), 7.0, dtype=state[second].dtype)
    wide[1:-2, 2:-3] = state[second]
    result[second] = wide[1:-2, 2:-3]
    both = torch.cat([state[third].reshape(-1), state[fourth].reshape(-1)])
    result[third] = both[: state[third].numel()].view(state[third].shape)
    result[fourth] = both[state[third].numel() :].view(state[fourth].shape)
    return result


def _deal(keys: list[str], state: Mapping[str, torch.Tensor], shards: int, *, by_size: bool) -> Iterable[list[str]]:
    """`keys` in `shards` lists: runs of about equal bytes, or one to each in turn."""
    if not by_size:
        return [keys[start::shards] for start in range(shards)]
    target = sum(value.numel() * value.element_size() for value in state.values()) / shards
    lists: list[list[str]] = [[] for _ in range(shards)]
    done = 0.0
    for key in keys:
        lists[min(int(done / target), shards - 1)].append(key)
        done += state[key].numel() * state[key].element_size()
    return [chosen for chosen in lists if chosen]


def _save_files(
    state: Mapping[str, torch.Tensor],
    lists: list[list[str]],
    name: str,
    folder: Path,
    file_format: Format,
    variant: str | None,
) -> None:
    """Write a file for each list of names, and an index for several, under the library's file names."""
    if MODELS[name].library == "diffusers":
        stem = "diffusion_pytorch_model"
    else:
        stem = "pytorch_model" if file_format == "bin" else "model"
    middle = f".{variant}" if variant else ""
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(lists, 1):
        part = f"-{number:05d}-of-{len(lists):05d}" if len(lists) > 1 else ""
        file = folder / f"{stem}{middle}{part}.{file_format}"
        tensors = {key: state[key] for key in keys}
        if file_format == "bin":
            torch.save(tensors, file)
        else:
            save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, file.name)
    if len(lists) > 1:
        total = sum(value.numel() * value.element_size() for value in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.{file_format}.index{middle}.json").write_text(json.dumps(index, indent=2) + "\n")
