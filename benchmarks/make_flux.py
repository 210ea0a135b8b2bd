"""Write a transformer folder with the layer shapes of FLUX.1-dev and random bfloat16 weights, at any depth.

    python benchmarks/make_flux.py OUT --layers 4 --single-layers 8      # 5.1 GB; the real one is 19 38, 23.8 GB

The values are a seeded block of normal noise, read from a place that moves with each tensor, so that every run writes
the same bytes at the speed of the disk and holds a few hundred megabytes.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel

NOISE = 1 << 26  # values
SHARD_BYTES = 4_900_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4, help="double blocks")
    parser.add_argument("--single-layers", type=int, default=8)
    arguments = parser.parse_args()
    make(arguments.out, layers=arguments.layers, single_layers=arguments.single_layers)


def make(out: Path, *, layers: int, single_layers: int) -> None:
    """Write the folder: config.json, shards of at most 4.9 GB, and their index."""
    with init_empty_weights():
        model = FluxTransformer2DModel(num_layers=layers, num_single_layers=single_layers, guidance_embeds=True)
    out.mkdir(parents=True)
    model.save_config(out)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, tensor in model.state_dict().items():
        num_bytes = 2 * tensor.numel()
        if num_bytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tuple(tensor.shape)
        room -= num_bytes
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    array: Any = noise.view(torch.uint8).numpy()
    data = memoryview(array)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = out / f"diffusion_pytorch_model{suffix}.safetensors"
        write_shard(file, shapes, data)
        weight_map |= dict.fromkeys(shapes, file.name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (out / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{out}: {len(weight_map)} tensors, {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]], data: memoryview) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for position, shape in enumerate(shapes.values()):
            left = 2 * math.prod(shape)
            start = position * 7919 * 2 % (len(data) // 2)
            while left:
                run = data[start : start + left]
                stream.write(run)
                left -= len(run)
                start = 0


if __name__ == "__main__":
    main()
