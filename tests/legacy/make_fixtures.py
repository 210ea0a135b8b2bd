"""Writes tests/fixtures/legacy: what torch 2.6, torchao 0.15 and aoquant on them made, and what every weight means.

    .venv-legacy/bin/python tests/legacy/make_fixtures.py

expected/NAME.json: quantized weight → SHA-256 of its dequantized values, as torchao 0.15 computes them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
import torchao.quantization as ao
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import aoquant  # noqa: E402
from tests.heavy import tiny  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "legacy"


def flux() -> Any:
    config = dict(tiny.MODELS["flux"].config) | {"num_layers": 0, "num_single_layers": 1}
    return tiny.finish(diffusers.FluxTransformer2DModel(**config), dtype=torch.bfloat16)


def t5() -> Any:
    return tiny.build("t5", dtype=torch.bfloat16)


def fits(group_size: int) -> Any:
    def filter_fn(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or name.endswith("wo"):
            return False
        return module.in_features % group_size == 0

    return filter_fn


UINT3, UINT4, UINT7 = (getattr(torch, f"uint{bits}") for bits in (3, 4, 7))  # torch's stubs leave them out

STOCK: dict[str, tuple[Any, Any, int]] = {
    "flux-int8wo": (flux, ao.Int8WeightOnlyConfig(), 1),
    "t5-int8wo-group32": (t5, ao.Int8WeightOnlyConfig(group_size=32), 32),
    "t5-int8dq": (t5, ao.Int8DynamicActivationInt8WeightConfig(), 1),
    "flux-uint4wo": (flux, ao.UIntXWeightOnlyConfig(UINT4, group_size=64), 64),
    "t5-uint3wo": (t5, ao.UIntXWeightOnlyConfig(UINT3, group_size=32), 32),
    "t5-uint7wo": (t5, ao.UIntXWeightOnlyConfig(UINT7, group_size=32), 32),
    "t5-fp8wo": (t5, ao.Float8WeightOnlyConfig(), 1),
    "t5-int4wo-hqq": (t5, ao.UIntXWeightOnlyConfig(UINT4, group_size=32, use_hqq=True), 32),
}
"""Folder → (model, torchao config, what has to divide in_features), saved as stock code saves it."""

OURS = {"t5-aoquant-int8wo": "int8wo", "t5-aoquant-int8dq": "int8dq", "t5-aoquant-int4dq": "int4dq"}
"""Folder → config of aoquant's own checkpoint."""
IN_SHARDS = ("t5-aoquant-int8dq",)


def main() -> None:
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for name, (build, config, divisor) in STOCK.items():
        model = build()
        ao.quantize_(model, config, filter_fn=fits(divisor))
        save(model, FIXTURES / name, config)
    source = FIXTURES / "source"
    t5().save_pretrained(source)
    for name, text in OURS.items():
        largest = "20kB" if name in IN_SHARDS else "10GB"
        aoquant.quantize(source, {"text_encoder_2": text}, output=FIXTURES / name, max_shard_size=largest)
        expect(aoquant.load(FIXTURES / name), FIXTURES / name)
    shutil.rmtree(source)


def save(model: Any, folder: Path, config: Any) -> None:
    folder.mkdir(parents=True)
    if name_of_library(model) == "diffusers":
        block = diffusers.TorchAoConfig(config).to_dict()
        text, file = json.loads(model.to_json_string()), "diffusion_pytorch_model.bin"
    else:
        block = transformers.TorchAoConfig(config).to_dict()
        model.config.architectures = [type(model).__name__]
        text, file = json.loads(model.config.to_json_string()), "pytorch_model.bin"
    text.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": block}, indent=2, default=str))
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "encoder.embed_tokens.weight"}
    torch.save(state, folder / file)
    expect(model, folder)


def name_of_library(model: Any) -> str:
    return type(model).__module__.partition(".")[0]


def expect(model: Any, folder: Path) -> None:
    values = {
        name: hashlib.sha256(dequantized(tensor.data).contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
        if type(tensor.data) is not torch.Tensor
    }
    target = FIXTURES / "expected" / f"{folder.name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(values, indent=1) + "\n")


def dequantized(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = getattr(tensor, "original_weight_tensor", tensor).dequantize()
    return values


if __name__ == "__main__":
    main()
