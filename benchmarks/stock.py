"""Quantize one diffusers component the documented way: from_pretrained(quantization_config=…), then save_pretrained.

    python benchmarks/stock.py COMPONENT OUT --config int8wo [--format safetensors]

Prints one JSON line. `work_s` leaves the imports out, `process_s` is everything.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse
import json
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel, TorchAoConfig
from diffusers.quantizers import DiffusersAutoQuantizer
from peak import peak_bytes

from aoquant.configs import parse_config
from aoquant.engine.quantize import stock_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("component", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="int8wo")
    parser.add_argument("--format", default="bin")
    arguments = parser.parse_args()
    _ = DiffusersAutoQuantizer  # imported before the clock starts
    quantization = TorchAoConfig(stock_config(parse_config(arguments.config)))
    started = time.perf_counter()
    model = FluxTransformer2DModel.from_pretrained(
        str(arguments.component), quantization_config=quantization, torch_dtype=torch.bfloat16
    )
    model.save_pretrained(arguments.out, safe_serialization=arguments.format == "safetensors", max_shard_size="50GB")
    ended = time.perf_counter()
    report = {
        "work_s": ended - started,
        "process_s": ended - STARTED,
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
