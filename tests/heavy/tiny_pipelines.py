"""Tiny but complete pipelines of the real classes: models, tokenizers and schedulers, made in code and seeded.

folder = save("flux", tmp_path)     what a published pipeline's folder holds, names of tensors included
images = run(pipeline, "flux")      two steps on the CPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from make_tiny_flux import CHARACTERS, clip_tokenizer, t5_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from tests.heavy import tiny

PROMPT = "a lighthouse at dusk"
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}<|im_end|>\n{% endfor %}"
)

Parts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPipeline:
    """One row of the table `PIPELINES`.

    parts: a folder for scratch → what its class is built from. options: the rest of the class's arguments. configs:
    component → the config that it is quantized to. call: the arguments of its `__call__`, but for the prompt and the
    number of steps. prefixes: component → what published names begin with, where today's library saves a model that
    it built without it.
    """

    name: str
    class_name: str
    parts: Callable[[Path], Parts]
    configs: Mapping[str, str]
    call: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)


def _model(name: str, **changes: Any) -> Any:
    """The model `name` of tiny.py's table, some of its config changed."""
    row = tiny.MODELS[name]
    config = {**row.config, **changes}
    model = row.cls(**config) if row.library == "diffusers" else row.cls(_config(row.config_class, config))
    return tiny.finish(model, dtype=torch.bfloat16)


def _diffusers(class_name: str, **config: Any) -> Any:
    return tiny.finish(getattr(diffusers, class_name)(**config), dtype=torch.bfloat16)


def _config(class_name: str, config: Mapping[str, Any]) -> Any:
    return getattr(transformers, class_name)(**config)


# Text encoders, each with a tokenizer of single characters.


def _clip(folder: Path, name: str = "clip_text", **changes: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer(folder)
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return _model(name, max_position_embeddings=77, **ids, **changes), tokenizer


def _t5(folder: Path, name: str = "t5") -> tuple[Any, Any]:
    return _model(name), t5_tokenizer(folder)


def _bytes_tokenizer() -> Any:
    """Qwen's: a byte-level one, without merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"]
    vocabulary = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return transformers.Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(vocabulary)}, merges=[],
        extra_special_tokens=special[1:], chat_template=_CHAT, model_max_length=2048,
    )  # fmt: skip


def _decoder(name: str, tokenizer: Any, **changes: Any) -> Any:
    return _model(
        name, vocab_size=len(tokenizer), max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **changes,
    )  # fmt: skip


def _qwen2_5_vl() -> tuple[Any, Any]:
    tokenizer = _bytes_tokenizer()
    text = {**tiny.MODELS["qwen2_5_vl"].config["text_config"], "vocab_size": len(tokenizer)}
    text |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return _model("qwen2_5_vl", text_config=text), tokenizer


def _qwen3() -> tuple[Any, Any]:
    tokenizer = _bytes_tokenizer()
    return _decoder("qwen3_lm", tokenizer), tokenizer


def _gemma2() -> tuple[Any, Any]:
    vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *CHARACTERS]
    tokenizer = transformers.GemmaTokenizer(
        vocab={token: number for number, token in enumerate(vocabulary)}, merges=[], model_max_length=512
    )
    return _decoder("gemma2", tokenizer), tokenizer


def _mistral3() -> tuple[Any, Any]:
    """With a plain tokenizer for the PixtralProcessor around one that it is published with, which needs torchvision."""
    tokenizer = _bytes_tokenizer()
    text = {**tiny.MODELS["mistral3"].config["text_config"], "vocab_size": len(tokenizer)}
    text |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return _model("mistral3", text_config=text), tokenizer


# VAEs.


def _image_vae(**changes: Any) -> Any:
    return _model("autoencoder_kl", **changes)


def _wan_like_vae(class_name: str) -> Any:
    return _diffusers(class_name, base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


_FLOW = diffusers.FlowMatchEulerDiscreteScheduler
_SHIFTING = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
_IMAGE = {"height": 32, "width": 32, "output_type": "np"}


def _flux(folder: Path) -> Parts:
    clip, tokenizer = _clip(folder)
    t5, tokenizer_2 = _t5(folder)
    return {
        "transformer": _model("flux", joint_attention_dim=64, pooled_projection_dim=64),
        "vae": _image_vae(shift_factor=0.1),
        "text_encoder": clip, "tokenizer": tokenizer, "text_encoder_2": t5, "tokenizer_2": tokenizer_2,
        "scheduler": _FLOW(**_SHIFTING),
    }  # fmt: skip


def _sdxl(folder: Path) -> Parts:
    clip, tokenizer = _clip(folder)
    clip_2, tokenizer_2 = _clip(folder, "clip_text_projection", hidden_act="gelu")
    return {
        "unet": _model("sdxl_unet", cross_attention_dim=128, projection_class_embeddings_input_dim=40 + 6 * 8),
        "vae": _image_vae(),
        "text_encoder": clip, "tokenizer": tokenizer, "text_encoder_2": clip_2, "tokenizer_2": tokenizer_2,
        "scheduler": diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    }  # fmt: skip


def _sdxl_controlnet(folder: Path) -> Parts:
    unet = tiny.MODELS["sdxl_unet"].config
    shared = {key: unet[key] for key in (
        "down_block_types", "block_out_channels", "layers_per_block", "attention_head_dim", "use_linear_projection",
        "transformer_layers_per_block", "addition_embed_type", "addition_time_embed_dim", "norm_num_groups",
    )}  # fmt: skip
    return _sdxl(folder) | {
        "controlnet": _diffusers(
            "ControlNetModel", in_channels=4, cross_attention_dim=128, projection_class_embeddings_input_dim=40 + 6 * 8,
            conditioning_embedding_out_channels=(8, 16), **shared,
        ),
    }  # fmt: skip


def _flux_controlnet(folder: Path) -> Parts:
    changes = {"joint_attention_dim": 64, "pooled_projection_dim": 64}
    return _flux(folder) | {
        "controlnet": _diffusers("FluxControlNetModel", **{**tiny.MODELS["flux"].config, **changes})
    }


def _sd3(folder: Path) -> Parts:
    clip, tokenizer = _clip(folder, "clip_text_projection", hidden_size=32)  # two side by side are as wide as T5
    clip_2, tokenizer_2 = _clip(folder, "clip_text_projection", hidden_size=32, hidden_act="gelu")
    t5, tokenizer_3 = _t5(folder)
    return {
        "transformer": _model("sd3", joint_attention_dim=64, pooled_projection_dim=80, pos_embed_max_size=16),
        "vae": _image_vae(shift_factor=0.06),
        "text_encoder": clip, "tokenizer": tokenizer, "text_encoder_2": clip_2, "tokenizer_2": tokenizer_2,
        "text_encoder_3": t5, "tokenizer_3": tokenizer_3,
        "scheduler": _FLOW(shift=3.0),
    }  # fmt: skip


def _wan(folder: Path) -> Parts:
    umt5, tokenizer = _t5(folder, "umt5")
    shape = {"in_channels": 16, "out_channels": 16, "text_dim": 64}
    return {
        "transformer": _model("wan", **shape),
        "transformer_2": _model("wan", **shape),
        "vae": _wan_like_vae("AutoencoderKLWan"),
        "text_encoder": umt5, "tokenizer": tokenizer,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }  # fmt: skip


def _cogvideox(folder: Path) -> Parts:
    t5, tokenizer = _t5(folder)
    return {
        "transformer": _model("cogvideox", text_embed_dim=64, sample_width=2, sample_height=2, max_text_seq_length=16),
        "vae": _diffusers(
            "AutoencoderKLCogVideoX", block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1,
            norm_num_groups=2, sample_height=16, sample_width=16,
            down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        ),
        "text_encoder": t5, "tokenizer": tokenizer, "scheduler": diffusers.CogVideoXDDIMScheduler(),
    }  # fmt: skip


def _qwen_image(folder: Path) -> Parts:
    encoder, tokenizer = _qwen2_5_vl()
    return {
        "transformer": _diffusers(
            "QwenImageTransformer2DModel", patch_size=2, in_channels=64, out_channels=16, num_layers=2,
            attention_head_dim=16, num_attention_heads=3, joint_attention_dim=64, axes_dims_rope=(8, 4, 4),
        ),
        "vae": _wan_like_vae("AutoencoderKLQwenImage"),
        "text_encoder": encoder, "tokenizer": tokenizer, "scheduler": _FLOW(**_SHIFTING),
    }  # fmt: skip


def _chroma(folder: Path) -> Parts:
    t5, tokenizer = _t5(folder)
    return {
        "transformer": _diffusers(
            "ChromaTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(4, 4, 8), approximator_num_channels=8,
            approximator_hidden_dim=32, approximator_layers=1,
        ),
        "vae": _image_vae(shift_factor=0.1),
        "text_encoder": t5, "tokenizer": tokenizer, "scheduler": _FLOW(),
    }  # fmt: skip


def _ltx(folder: Path) -> Parts:
    t5, tokenizer = _t5(folder)
    return {
        "transformer": _diffusers(
            "LTXVideoTransformer3DModel", in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8,
            cross_attention_dim=32, num_layers=1, caption_channels=64,
        ),
        "vae": _diffusers(
            "AutoencoderKLLTXVideo", latent_channels=8, block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        ),
        "text_encoder": t5, "tokenizer": tokenizer, "scheduler": _FLOW(**_SHIFTING),
    }  # fmt: skip


def _sana(folder: Path) -> Parts:
    gemma, tokenizer = _gemma2()
    return {
        "transformer": _diffusers(
            "SanaTransformer2DModel", in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2,
            attention_head_dim=16, num_cross_attention_heads=2, cross_attention_head_dim=16, cross_attention_dim=32,
            caption_channels=64, sample_size=8,
        ),
        "vae": _diffusers(
            "AutoencoderDC", latent_channels=4, attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), scaling_factor=0.41407,
        ),
        "text_encoder": gemma, "tokenizer": tokenizer,
        "scheduler": diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }  # fmt: skip


def _lumina2(folder: Path) -> Parts:
    gemma, tokenizer = _gemma2()
    return {
        "transformer": _diffusers(
            "Lumina2Transformer2DModel", sample_size=4, in_channels=4, hidden_size=24, num_layers=1,
            num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2),
            axes_lens=(256, 32, 32), cap_feat_dim=64,
        ),
        "vae": _image_vae(shift_factor=0.1),
        "text_encoder": gemma, "tokenizer": tokenizer, "scheduler": _FLOW(shift=6.0),
    }  # fmt: skip


def _z_image(folder: Path) -> Parts:
    qwen, tokenizer = _qwen3()
    return {
        "transformer": _diffusers(
            "ZImageTransformer2DModel", in_channels=16, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2,
            n_kv_heads=2, cap_feat_dim=64, axes_dims=[8, 4, 4], axes_lens=[512, 32, 32],
        ),
        "vae": _image_vae(latent_channels=16, shift_factor=0.1),
        "text_encoder": qwen, "tokenizer": tokenizer, "scheduler": _FLOW(shift=3.0),
    }  # fmt: skip


def _flux2_model(**changes: Any) -> Any:
    return _diffusers(
        "Flux2Transformer2DModel", in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=192, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
        **changes,
    )  # fmt: skip


def _flux2_vae() -> Any:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return _diffusers(
        "AutoencoderKLFlux2", block_out_channels=(8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2,
        sample_size=32, **blocks,
    )  # fmt: skip


def _flux2(folder: Path) -> Parts:
    mistral, tokenizer = _mistral3()
    return {
        "transformer": _flux2_model(), "vae": _flux2_vae(), "text_encoder": mistral, "tokenizer": tokenizer,
        "scheduler": _FLOW(**_SHIFTING),
    }  # fmt: skip


def _flux2_klein(folder: Path) -> Parts:
    qwen, tokenizer = _qwen3()
    return {
        "transformer": _flux2_model(guidance_embeds=False), "vae": _flux2_vae(), "text_encoder": qwen,
        "tokenizer": tokenizer, "scheduler": _FLOW(**_SHIFTING),
    }  # fmt: skip


def _hunyuan_video(folder: Path) -> Parts:
    tokenizer = _bytes_tokenizer()
    clip, tokenizer_2 = _clip(folder)
    return {
        "transformer": _diffusers(
            "HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1, patch_size=1,
            patch_size_t=1, text_embed_dim=64, pooled_projection_dim=64, rope_axes_dim=(4, 6, 6),
        ),
        "vae": _diffusers(
            "AutoencoderKLHunyuanVideo", latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1,
            norm_num_groups=2,
        ),
        "text_encoder": _decoder("llama", tokenizer), "tokenizer": tokenizer,
        "text_encoder_2": clip, "tokenizer_2": tokenizer_2, "scheduler": _FLOW(shift=7.0),
    }  # fmt: skip


_VIDEO = {"height": 16, "width": 16, "num_frames": 5, "output_type": "np"}
_HINT = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
_BOTH = {"transformer": "int8wo", "text_encoder": "int8wo"}

_ROWS = (
    TinyPipeline(
        name="flux", class_name="FluxPipeline", parts=_flux, configs={**_BOTH, "text_encoder_2": "fp8wo"},
        call={**_IMAGE, "max_sequence_length": 16}, prefixes={"text_encoder": "text_model."},
    ),
    TinyPipeline(
        name="sdxl", class_name="StableDiffusionXLPipeline", parts=_sdxl,
        configs={"unet": "int8wo", "text_encoder": "int8wo", "text_encoder_2": "int8wo"}, call=_IMAGE,
        prefixes={"text_encoder": "text_model."},
    ),
    TinyPipeline(
        name="flux_controlnet", class_name="FluxControlNetPipeline", parts=_flux_controlnet,
        configs={"transformer": "int8wo", "controlnet": "int8wo"},
        call={**_IMAGE, "max_sequence_length": 16, "control_image": _HINT},
        prefixes={"text_encoder": "text_model."},
    ),
    TinyPipeline(
        name="sdxl_controlnet", class_name="StableDiffusionXLControlNetPipeline", parts=_sdxl_controlnet,
        configs={"unet": "int8wo", "controlnet": "int8wo"}, call={**_IMAGE, "image": _HINT},
        prefixes={"text_encoder": "text_model."},
    ),
    TinyPipeline(
        name="sd3", class_name="StableDiffusion3Pipeline", parts=_sd3,
        configs={**_BOTH, "text_encoder_2": "int8wo", "text_encoder_3": "int8wo"},
        call={**_IMAGE, "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="wan2.2", class_name="WanPipeline", parts=_wan, options={"boundary_ratio": 0.9},
        configs={**_BOTH, "transformer_2": "int8wo"}, call={**_VIDEO, "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="cogvideox", class_name="CogVideoXPipeline", parts=_cogvideox, configs=_BOTH,
        call={**_VIDEO, "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="qwen_image", class_name="QwenImagePipeline", parts=_qwen_image, configs=_BOTH,
        call={**_IMAGE, "negative_prompt": " ", "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="chroma", class_name="ChromaPipeline", parts=_chroma, configs=_BOTH,
        call={**_IMAGE, "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="ltx", class_name="LTXPipeline", parts=_ltx, configs=_BOTH,
        call={**_VIDEO, "height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 16},
    ),
    TinyPipeline(
        name="sana", class_name="SanaPipeline", parts=_sana, configs=_BOTH,
        call={
            **_IMAGE, "max_sequence_length": 16, "complex_human_instruction": None, "use_resolution_binning": False,
        },
    ),
    TinyPipeline(
        name="lumina2", class_name="Lumina2Pipeline", parts=_lumina2, configs=_BOTH,
        call={**_IMAGE, "max_sequence_length": 16, "system_prompt": "draw"},
    ),
    TinyPipeline(
        name="z_image", class_name="ZImagePipeline", parts=_z_image, configs=_BOTH,
        call={**_IMAGE, "max_sequence_length": 64},
    ),
    TinyPipeline(
        name="flux2", class_name="Flux2Pipeline", parts=_flux2, configs=_BOTH,
        call={**_IMAGE, "max_sequence_length": 64, "text_encoder_out_layers": (0, 1, 2)},
    ),
    TinyPipeline(
        name="flux2_klein", class_name="Flux2KleinPipeline", parts=_flux2_klein, configs=_BOTH,
        call={**_IMAGE, "max_sequence_length": 64, "text_encoder_out_layers": (0, 1, 2)},
    ),
    TinyPipeline(
        name="hunyuan_video", class_name="HunyuanVideoPipeline", parts=_hunyuan_video,
        configs={**_BOTH, "text_encoder_2": "int8wo"},
        call={
            **_VIDEO, "max_sequence_length": 16, "prompt_template": {"template": "draw: {}", "crop_start": 6},
        },
        prefixes={"text_encoder_2": "text_model."},
    ),
)  # fmt: skip

PIPELINES: Mapping[str, TinyPipeline] = {row.name: row for row in _ROWS}


def save(name: str, folder: Path) -> Path:
    """Write the pipeline `name` to `folder` as stock does, its tensors called as in published ones; return `folder`."""
    row = PIPELINES[name]
    with tempfile.TemporaryDirectory() as scratch:
        pipeline = getattr(diffusers, row.class_name)(**row.parts(Path(scratch)), **row.options)
        pipeline.save_pretrained(str(folder))
    for component, prefix in row.prefixes.items():
        (file,) = (folder / component).glob("*.safetensors")
        state = {prefix + key: value for key, value in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
    return folder


def run(pipeline: Any, name: str) -> torch.Tensor:
    """What two seeded steps of a loaded `pipeline` draw, as one tensor."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    output = pipeline(prompt=PROMPT, num_inference_steps=2, generator=generator, **PIPELINES[name].call)
    return torch.as_tensor(output[0])
