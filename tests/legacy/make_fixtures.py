"""Write tests/fixtures/torchao-0.15: a tiny Flux transformer as stock diffusers saves it in that torchao's old classes.

.venv-legacy/bin/python tests/legacy/make_fixtures.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel, TorchAoConfig
from torchao import quantization

from tests.heavy import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures" / "torchao-0.15"
CONFIGS = {
    "int8wo": quantization.Int8WeightOnlyConfig(version=1),
    "int8dq": quantization.Int8DynamicActivationInt8WeightConfig(version=1),
    "uint4wo": getattr(quantization, "UIntXWeightOnlyConfig")(dtype=getattr(torch, "uint4"), group_size=16),  # noqa: B009  (today's have neither)
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        source = str(tiny.save("flux", Path(scratch)))
        for name, config in CONFIGS.items():
            quantized = TorchAoConfig(config)
            model = FluxTransformer2DModel.from_pretrained(source, quantization_config=quantized, dtype=torch.bfloat16)
            model.save_pretrained(str(FIXTURES / name), safe_serialization=False)
