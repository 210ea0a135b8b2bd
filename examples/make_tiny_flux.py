#!/usr/bin/env python3
"""Build a small but complete Flux pipeline in code, with seeded random weights, and save it.

The classes are the real ones (transformer, CLIP, T5, VAE, both tokenizers, scheduler); nothing is downloaded.
Most widths are multiples of 128, so that every group size fits most layers. The weights are drawn so that its
pictures have structure: an abstract texture, whose changes under quantization an eye can judge.

    python make_tiny_flux.py OUT [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import string
import tempfile
from pathlib import Path
from typing import TypeVar

for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer", "transformers"):
    logging.getLogger(name).addFilter(lambda record: False)  # what they say while they are imported helps nobody

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

Model = TypeVar("Model", bound=nn.Module)

CHARACTERS = string.ascii_lowercase + string.digits + string.punctuation


def fill(model: Model, generator: torch.Generator, *, smooth: bool = False) -> Model:
    """Give `model` seeded weights in place and return it in bfloat16, in eval mode.

    Matrices and kernels keep the variance of what passes through them. smooth: 3x3 kernels blur, so that an
    upsampling decoder draws soft shapes and not pixel noise.
    """
    blur = torch.tensor([1.0, 2.0, 1.0])
    kernel = torch.outer(blur, blur) / blur.square().sum()
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if smooth and parameter.shape[2:] == (3, 3):
            values = values[:, :, 1:2, 1:2] * kernel / math.sqrt(parameter.shape[1])
        elif parameter.ndim > 1:
            values /= math.sqrt(math.prod(parameter.shape[1:]))
        else:
            values = values * 0.05 + float("norm" in name and name.endswith("weight"))
        with torch.no_grad():
            parameter.copy_(values)
    # nn.Module's own cast: diffusers' warns about modules that `from_pretrained` would keep in float32.
    return nn.Module.to(model, torch.bfloat16).eval()


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer whose vocabulary is single characters: no merges to learn."""
    last = [character + "</w>" for character in CHARACTERS]
    tokens = ["<|startoftext|>", "<|endoftext|>", *CHARACTERS, *last]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    merges.write_text("#version: 0.2\n")
    return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=77)


def t5_tokenizer(folder: Path) -> T5TokenizerFast:
    """A T5 tokenizer: a Unigram model over single characters."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *CHARACTERS]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return T5TokenizerFast(tokenizer_file=str(file), extra_ids=0, model_max_length=64)


def tiny_clip(vocabulary: int) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def tiny_t5(vocabulary: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocabulary,
        d_model=256,
        d_kv=64,
        d_ff=640,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def tiny_transformer() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=64,
        num_attention_heads=6,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 32, 64, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=16,
        sample_size=256,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def tiny_flux(seed: int) -> FluxPipeline:
    """The whole pipeline, in memory, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, tokenizer_2 = clip_tokenizer(Path(folder)), t5_tokenizer(Path(folder))
    vae = fill(tiny_vae(), generator, smooth=True)
    with torch.no_grad():
        vae.decoder.conv_out.weight *= 0.45  # so that few pixels are clipped to black or white
        vae.decoder.conv_out.bias.zero_()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=fill(tiny_clip(len(tokenizer)), generator),
        tokenizer=tokenizer,
        text_encoder_2=fill(tiny_t5(len(tokenizer_2)), generator),
        tokenizer_2=tokenizer_2,
        transformer=fill(tiny_transformer(), generator),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another model (default 0)")
    args = parser.parse_args()
    disable_progress_bar()
    tiny_flux(args.seed).save_pretrained(args.out)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: a complete FluxPipeline, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
