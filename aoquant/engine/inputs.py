"""Noise in the shapes that a component takes, as its config and the size of the picture say: what `bench` feeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aoquant.engine import libraries
from aoquant.errors import UsageError

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is drawn: pixels, frames of a video, and the tokens of its prompt."""

    height: int = 1024
    width: int = 1024
    num_frames: int = 1
    num_tokens: int = 512

    def latent(self, spatial: int = 8) -> tuple[int, int]:
        """(height, width) in latents of `spatial` pixels a side, at least one each."""
        return max(1, self.height // spatial), max(1, self.width // spatial)

    def latent_frames(self, temporal: int = 4) -> int:
        return (self.num_frames - 1) // temporal + 1


class _Maker:
    """Makes the tensors of one call, seeded."""

    def __init__(self, config: Any, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.size = config, size
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, self._dtype)

    def full(self, *shape: int, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, value, device=self._device, dtype=dtype or self._dtype)

    def tokens(self, vocabulary: int, count: int) -> torch.Tensor:
        return torch.randint(vocabulary, (1, count), generator=self._generator).to(self._device)

    def mask(self, count: int) -> torch.Tensor:
        return self.full(1, count, value=1, dtype=torch.int64)

    def positions(self, num_axes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flux's ids of image and text tokens, [T, num_axes]: row and column of each patch of 16 pixels, zeros."""
        height, width = self.size.latent(16)
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        image = torch.zeros(height * width, num_axes, device=self._device)
        image[:, 1], image[:, 2] = rows.flatten(), columns.flatten()
        return image, torch.zeros(self.size.num_tokens, num_axes, device=self._device)

    @property
    def num_patches(self) -> int:
        height, width = self.size.latent(16)
        return height * width

    def guidance(self) -> Inputs:
        return {"guidance": self.full(1, value=4.0)} if self.config.get("guidance_embeds") else {}


def _packed(make: _Maker) -> Inputs:
    """Flux and its kin: patches of 2 × 2 latents in a row."""
    image, text = make.positions(len(make.config["axes_dims_rope"]))
    return {
        "hidden_states": make.noise(1, make.num_patches, make.config["in_channels"]),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["joint_attention_dim"]),
        "timestep": make.full(1, value=0.5),
        "img_ids": image,
        "txt_ids": text,
        **make.guidance(),
    }


def _flux(make: _Maker) -> Inputs:
    return _packed(make) | {"pooled_projections": make.noise(1, make.config["pooled_projection_dim"])}


def _flux_controlnet(make: _Maker) -> Inputs:
    found = _flux(make) | {"controlnet_cond": make.noise(1, make.num_patches, make.config["in_channels"])}
    if make.config.get("num_mode"):
        found["controlnet_mode"] = make.full(1, 1, value=0, dtype=torch.int64)
    return found


def _qwen_image(make: _Maker) -> Inputs:
    return {
        "hidden_states": make.noise(1, make.num_patches, make.config["in_channels"]),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["joint_attention_dim"]),
        "encoder_hidden_states_mask": make.mask(make.size.num_tokens),
        "timestep": make.full(1, value=0.5),
        "img_shapes": [[(1, *make.size.latent(16))]],
        **make.guidance(),
    }


def _sd3(make: _Maker) -> Inputs:
    return {
        "hidden_states": make.noise(1, make.config["in_channels"], *make.size.latent()),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["joint_attention_dim"]),
        "pooled_projections": make.noise(1, make.config["pooled_projection_dim"]),
        "timestep": make.full(1, value=500),
    }


def _unet(make: _Maker) -> Inputs:
    found: Inputs = {
        "sample": make.noise(1, make.config["in_channels"], *make.size.latent()),
        "timestep": make.full(1, value=500),
        "encoder_hidden_states": make.noise(1, min(77, make.size.num_tokens), make.config["cross_attention_dim"]),
    }
    if make.config["addition_embed_type"] == "text_time":
        total, each = make.config["projection_class_embeddings_input_dim"], make.config["addition_time_embed_dim"]
        num_ids = 5 if total - 5 * each == _REFINER_POOLED else 6
        found["added_cond_kwargs"] = {
            "text_embeds": make.noise(1, total - num_ids * each),
            "time_ids": make.full(1, num_ids, value=make.size.height),
        }
    if make.config.get("num_class_embeds"):
        found["class_labels"] = make.full(1, value=0, dtype=torch.int64)
    return found


_REFINER_POOLED = 1280  # of SDXL's refiner, which takes five ids; its base takes six


def _controlnet(make: _Maker) -> Inputs:
    scale = 2 ** (len(make.config["conditioning_embedding_out_channels"]) - 1)  # of the convolutions that take it down
    height, width = (scale * side for side in make.size.latent())
    return _unet(make) | {"controlnet_cond": make.noise(1, make.config["conditioning_channels"], height, width)}


def _sana(make: _Maker) -> Inputs:
    return {
        "hidden_states": make.noise(1, make.config["in_channels"], *make.size.latent(32)),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["caption_channels"]),
        "encoder_attention_mask": make.mask(make.size.num_tokens),
        "timestep": make.full(1, value=500),
        **make.guidance(),
    }


def _lumina2(make: _Maker) -> Inputs:
    height, width = make.size.latent()
    patch = make.config["patch_size"]
    num_tokens = min(make.size.num_tokens, 256, make.config["axes_lens"][0] - 1)
    return {
        "hidden_states": make.noise(1, make.config["in_channels"], _up(height, patch), _up(width, patch)),
        "encoder_hidden_states": make.noise(1, num_tokens, make.config["cap_feat_dim"]),
        "encoder_attention_mask": make.mask(num_tokens).bool(),
        "timestep": make.full(1, value=0.5),
    }


def _z_image(make: _Maker) -> Inputs:
    height, width = (_up(side, 2) for side in make.size.latent())
    return {
        "x": [make.noise(make.config["in_channels"], 1, height, width)],
        "t": make.full(1, value=0.5),
        "cap_feats": [make.noise(make.size.num_tokens, make.config["cap_feat_dim"])],
    }


def _wan(make: _Maker) -> Inputs:
    found: Inputs = {
        "hidden_states": _frames(make, make.config["patch_size"][1], 16 if make.config["in_channels"] == 48 else 8),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["text_dim"]),
        "timestep": make.full(1, value=500, dtype=torch.int64),
    }
    if make.config.get("image_dim"):
        # CLIP's patches, of the first picture or of the first and the last.
        pictures = 2 if make.config.get("pos_embed_seq_len") else 1
        found["encoder_hidden_states_image"] = make.noise(pictures, 257, make.config["image_dim"])
    return found


def _hunyuan_video(make: _Maker) -> Inputs:
    return {
        "hidden_states": _frames(make, make.config["patch_size"]),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["text_embed_dim"]),
        "encoder_attention_mask": make.mask(make.size.num_tokens),
        "pooled_projections": make.noise(1, make.config["pooled_projection_dim"]),
        "timestep": make.full(1, value=500, dtype=torch.int64),
        **({"guidance": make.full(1, value=6000.0)} if make.config["guidance_embeds"] else {}),
    }


def _cogvideox(make: _Maker) -> Inputs:
    height, width = (_up(side, make.config["patch_size"]) for side in make.size.latent())
    frames = _up(make.size.latent_frames(), make.config.get("patch_size_t") or 1)
    found: Inputs = {
        "hidden_states": make.noise(1, frames, make.config["in_channels"], height, width),
        "encoder_hidden_states": make.noise(1, make.config["max_text_seq_length"], make.config["text_embed_dim"]),
        "timestep": make.full(1, value=500, dtype=torch.int64),
    }
    if make.config["use_rotary_positional_embeddings"]:
        patches = make.config["patch_size"] ** 2 * (make.config.get("patch_size_t") or 1)
        shape = (frames * height * width // patches, make.config["attention_head_dim"])
        found["image_rotary_emb"] = (make.noise(*shape).float(), make.noise(*shape).float())
    if make.config.get("ofs_embed_dim"):
        found["ofs"] = make.full(1, value=2.0)
    return found


def _ltx(make: _Maker) -> Inputs:
    height, width = make.size.latent(32)
    frames = make.size.latent_frames(8)
    return {
        "hidden_states": make.noise(1, frames * height * width, make.config["in_channels"]),
        "encoder_hidden_states": make.noise(1, make.size.num_tokens, make.config["caption_channels"]),
        "encoder_attention_mask": make.mask(make.size.num_tokens),
        "timestep": make.full(1, value=500, dtype=torch.int64),
        "num_frames": frames,
        "height": height,
        "width": width,
    }


def _vae(make: _Maker) -> Inputs:
    height, width = (8 * side for side in make.size.latent())
    return {"sample": make.noise(1, make.config["in_channels"], height, width)}


def _frames(make: _Maker, patch: int, spatial: int = 8) -> torch.Tensor:
    height, width = (_up(side, patch) for side in make.size.latent(spatial))
    return make.noise(1, make.config["in_channels"], make.size.latent_frames(), height, width)


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple


_BY_CLASS: Mapping[str, Callable[[_Maker], Inputs]] = {
    "AutoencoderKL": _vae,
    "ChromaTransformer2DModel": _packed,
    "CogVideoXTransformer3DModel": _cogvideox,
    "ControlNetModel": _controlnet,
    "Flux2Transformer2DModel": _packed,
    "FluxControlNetModel": _flux_controlnet,
    "FluxTransformer2DModel": _flux,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "LTXVideoTransformer3DModel": _ltx,
    "Lumina2Transformer2DModel": _lumina2,
    "QwenImageTransformer2DModel": _qwen_image,
    "SD3Transformer2DModel": _sd3,
    "SanaTransformer2DModel": _sana,
    "UNet2DConditionModel": _unet,
    "WanTransformer3DModel": _wan,
    "ZImageTransformer2DModel": _z_image,
}


_VIDEOS = ("HunyuanVideoTransformer3DModel", "LTXVideoTransformer3DModel",
           "WanTransformer3DModel")  # fmt: skip


_WIDTH_OF_SD_2 = 1024  # of the text that it and SD 1 take; SDXL takes 2048


def usual_size(module: nn.Module) -> Size:
    """What is usually drawn with `module`: what its config says, else pictures of 1024 × 1024, videos of 832 × 480."""
    config: Any = module.config
    if type(module).__name__ == "CogVideoXTransformer3DModel":
        return Size(
            height=8 * config["sample_height"], width=8 * config["sample_width"], num_frames=config["sample_frames"]
        )
    if type(module).__name__ in _VIDEOS:
        return Size(height=480, width=832, num_frames=81)
    if type(module).__name__ == "ControlNetModel" and config["cross_attention_dim"] <= _WIDTH_OF_SD_2:
        return Size(height=512, width=512)
    latent = config.get("sample_size") if isinstance(config, Mapping) else None
    if type(module).__name__ in ("UNet2DConditionModel", "SD3Transformer2DModel") and isinstance(latent, int):
        return Size(height=8 * latent, width=8 * latent)
    return Size()


def synthetic_inputs(module: nn.Module, size: Size, *, device: torch.device, dtype: torch.dtype) -> Inputs:
    """The arguments of one call of `module`: for a denoiser one step, for a text encoder one prompt.

    A picture of one prompt, without the second one of classifier-free guidance. Raises UsageError for a class of
    diffusers that is not in the table, and for models of transformers that take neither `input_ids` nor pictures.
    """
    name = type(module).__name__
    config: Any = module.config
    if isinstance(module, _models_of_transformers()):
        return _encoder(module, _Maker(config, size, device, dtype))
    if name not in _BY_CLASS:
        raise UsageError(f"bench has no inputs for {name}", hint=f"it knows {', '.join(_BY_CLASS)} and text encoders")
    return _BY_CLASS[name](_Maker(config, size, device, dtype))


def _models_of_transformers() -> type:
    found: type = libraries.load("transformers").PreTrainedModel
    return found


def _encoder(module: Any, make: _Maker) -> Inputs:
    if module.main_input_name == "pixel_values":
        config = getattr(make.config, "vision_config", None) or make.config
        return {"pixel_values": make.noise(1, config.num_channels, config.image_size, config.image_size)}
    if module.main_input_name != "input_ids":
        raise UsageError(
            f"bench has no inputs for {type(module).__name__}, which takes {module.main_input_name}",
            hint="name the components to measure with --component",
        )
    config = getattr(make.config, "text_config", None) or make.config
    longest: int = getattr(config, "max_position_embeddings", None) or make.size.num_tokens
    return {"input_ids": make.tokens(config.vocab_size // 2, min(make.size.num_tokens, longest))}
