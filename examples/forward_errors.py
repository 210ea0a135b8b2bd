#!/usr/bin/env python3
"""How far each config moves what a model says, beside the bits that a weight takes: a Markdown table.

Two components of the pipeline of make_tiny_flux.py, a Flux transformer and a T5 encoder with seeded weights, are
quantized with `aoquant.quantize`, loaded with `aoquant.load` and run in bfloat16 on fixed inputs. The error is
||y_quantized - y|| / ||y|| in float32, y being what the unquantized component says, in bfloat16 too. The bits are those
of the transformer's quantized weights, scales included. The table compares configs; what a trained model loses is for
that model to tell.

    python forward_errors.py [--configs int8wo uint4wo:group_size=32 …]

Most of its time is fp8dq, whose matrix product has no fast form on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer", "transformers"):
    logging.getLogger(name).addFilter(lambda record: False)  # what they say while they are imported helps nobody

import torch
from diffusers import FluxTransformer2DModel
from make_tiny_flux import tiny_flux
from torch import nn
from transformers import T5EncoderModel
from transformers.utils.logging import disable_progress_bar

import aoquant
from aoquant.configs import CONFIGS

TRANSFORMER, TEXT_ENCODER = "transformer", "text_encoder_2"
VOCABULARY = 60  # fewer than the tokenizer has


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_flux(model: nn.Module) -> torch.Tensor:
    """One step on 2 x 4 latent patches and 4 text tokens → [1, 8, 64] float32."""
    rows, columns = torch.meshgrid(torch.arange(2.0), torch.arange(4.0), indexing="ij")
    with torch.no_grad():
        output: torch.Tensor = model(
            hidden_states=noise(1, 8, 64, seed=1),
            encoder_hidden_states=noise(1, 4, 256, seed=2),
            pooled_projections=noise(1, 128, seed=3),
            timestep=torch.tensor([0.5]).bfloat16(),
            guidance=torch.tensor([3.5]).bfloat16(),
            img_ids=torch.stack([torch.zeros(2, 4), rows, columns], dim=-1).view(8, 3),
            txt_ids=torch.zeros(4, 3),
            return_dict=False,
        )[0]
    return output.float()


def run_t5(model: nn.Module) -> torch.Tensor:
    """A text of 8 tokens → its last hidden state, [1, 8, 256] float32."""
    tokens = torch.randint(VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=tokens).last_hidden_state
    return output.float()


RUNS = {TRANSFORMER: run_flux, TEXT_ENCODER: run_t5}


def save_pipeline(folder: Path) -> None:
    """Write the pipeline of make_tiny_flux.py, its T5's attention made soft.

    T5 does not divide by the square root of d_kv, because its own initialisation puts that into the query weights.
    Without it attention picks single tokens, and the smallest change of a weight makes it pick others.
    """
    pipeline = tiny_flux(seed=0)
    with torch.no_grad():
        for block in pipeline.text_encoder_2.encoder.block:
            block.layer[0].SelfAttention.q.weight /= math.sqrt(pipeline.text_encoder_2.config.d_kv)
    pipeline.save_pretrained(folder)


def run_unquantized(pipeline: Path) -> dict[str, torch.Tensor]:
    """What each component of the pipeline says as it is, in bfloat16."""
    transformer = FluxTransformer2DModel.from_pretrained(
        str(pipeline), subfolder=TRANSFORMER, torch_dtype=torch.bfloat16
    )
    text_encoder = T5EncoderModel.from_pretrained(str(pipeline), subfolder=TEXT_ENCODER, dtype=torch.bfloat16)
    return {TRANSFORMER: run_flux(transformer), TEXT_ENCODER: run_t5(text_encoder)}


def error(folder: Path, name: str, expected: torch.Tensor) -> str:
    """The relative error of one component, to two digits."""
    model = aoquant.load(folder, component=name)
    try:
        output = RUNS[name](model)
    except (AttributeError, NotImplementedError):  # torch.ops raises the first for an operator that is not installed
        return "not on a CPU"
    return f"{(output - expected).norm() / expected.norm():#.2g}"


def row(pipeline: Path, config: str, expected: dict[str, torch.Tensor]) -> str:
    """Quantize both components and compare: one row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "quantized")
        aoquant.quantize(pipeline, dict.fromkeys(RUNS, config), output=folder)
        bits = {part.name: part.quantized_bits_per_weight for part in aoquant.inspect(folder).components}
        errors = [error(folder, name, expected[name]) for name in RUNS]
    return f"| `{config}` | {bits[TRANSFORMER]:.2f} | {' | '.join(errors)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), metavar="CONFIG", help="default: all")
    arguments = parser.parse_args(argv)
    disable_progress_bar()
    torch.set_num_threads(1)  # more only wait for each other in models this small
    with tempfile.TemporaryDirectory() as temporary:
        pipeline = Path(temporary, "pipeline")
        save_pipeline(pipeline)
        expected = run_unquantized(pipeline)
        print("| config | bits per weight | Flux | T5 |\n| --- | --- | --- | --- |")
        for config in arguments.configs:
            print(row(pipeline, config, expected), flush=True)


if __name__ == "__main__":
    main()
