"""What a device can make and run, config by config, and what to expect of it."""

from __future__ import annotations

import torch

from aoquant.configs import QuantConfig
from aoquant.engine import libraries
from aoquant.engine.formats import parts
from aoquant.engine.quantize import Kernel, Scratch, kernel_for
from aoquant.errors import AoquantError

_PROBE = (256, 256)  # a multiple of every group size and tile


def cannot_make(config: QuantConfig, device: torch.device) -> str:
    """Why `config` cannot be made on `device`; empty if it can. Known without trying."""
    if config.options.get("layout") == "tile_packed" and device.type != "cuda":
        return f"packed by CUDA, and the device is {device}"
    return ""


def speed(config: QuantConfig, device: torch.device) -> str:
    """What a Linear of `config` does on `device`, in a few words, against the same in bfloat16."""
    if "dynamic" not in config.row.traits:
        if config.row.family == "int4":
            return _int4_speed(device)
        return "saves memory, not time"
    if device.type == "cuda" and (config.row.family != "float8" or _capability(device) >= (8, 9)):
        return "fast with torch.compile, slow without"
    if config.row.family == "float8":
        return "slow: its kernels need a GPU of compute capability 8.9 or more"
    return "slow: its kernels are for CUDA with torch.compile"


def probe(config: QuantConfig, device: torch.device) -> tuple[str, str]:
    """Make a small weight of `config` on `device` and multiply with it: why the one fails, why the other. Tried."""
    if reason := cannot_make(config, device):
        return reason, reason
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_PROBE, generator=generator).to(device, torch.bfloat16)
    with libraries.quiet():
        try:
            made = quantized(kernel_for(config, weight.dtype), weight)
        except Exception as error:
            return _reason(error), "it cannot be made"
        try:
            _multiply(made, weight[:32])
        except Exception as error:
            return "", _reason(error)
    return "", ""


def quantized(kernel: Kernel, weight: torch.Tensor) -> torch.Tensor:
    """weight: [N, K] → the tensor that a checkpoint of it holds, on the same device. N: a multiple of row_step."""
    like = kernel.outline(weight.to("meta"))
    scratch = Scratch()
    peak = kernel.peak(weight, scratch) if kernel.peak is not None else None
    streamed = torch.empty(kernel.run_bytes(*weight.shape), dtype=torch.uint8, device=weight.device)
    made = {kernel.streamed: [streamed]}
    for part, values in kernel.rows(weight, streamed, scratch, peak).items():
        values = values[:1] if peak is not None else values
        made.setdefault(part.partition(".")[0], []).append(kernel.assemble([values]))
    inner = {}
    for name, stored in parts(like).items():
        pieces = [piece.contiguous().view(-1).view(torch.uint8) for piece in made[name]]
        inner[name] = torch.cat(pieces).view(stored.dtype).view(stored.shape)
    _, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    tensor: torch.Tensor = type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())  # type: ignore[attr-defined]
    return tensor


def _multiply(weight: torch.Tensor, activations: torch.Tensor) -> None:
    from torchao.quantization import Int4Tensor

    from aoquant import int4

    if isinstance(weight, Int4Tensor):
        weight = int4.converted(weight)
    with torch.no_grad():
        torch.nn.functional.linear(activations, weight)


def _int4_speed(device: torch.device) -> str:
    from aoquant.int4 import kernels_of

    kernels = kernels_of(device)
    if kernels.mslk or kernels.tile_packed:
        return "an int4 kernel: fast for few rows"
    if kernels.cpu:
        return "an int4 kernel: fast for few rows, slow for many"
    return "saves memory, not time"


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, AoquantError) else str(error)
    return " ".join(text.split()).partition(". ")[0][:160] or type(error).__name__
