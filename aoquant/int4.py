"""int4wo on any device: each weight in torchao's plain `Int4Tensor` becomes the class that computes where it lies.

The plain class stores well and computes only with the mslk package, which has no CPU build. All classes here mean the
same number, q * scale + zero_point with q in [-8, 7], so codes, scales and zero points are carried over bit by bit, and
no weight is dequantized on the way:

- CPU: torchao's `Int4OpaqueTensor`, over torch's own int4 kernel.
- CUDA: the plain class where mslk's kernel is there and takes the weight; else torchao's `Int4TilePackedTo4dTensor`.
- Everywhere else, and for weights that no kernel takes: `LowBitTensor`, which is plain torch. That includes XPU: the
  zero point of torchao's class for it, `Int4PlainInt32Tensor`, is an int8, and a floating zero_point is not always a
  whole number of steps. It includes ROCm, whose tiles have 16 rows and are untried here.

The packed classes are laid out for the machine they were made on: neither save such a module nor move it elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torchao.quantization import Int4Tensor
from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

from aoquant.lowbit import LowBitTensor, unpack

__all__ = ["Form", "Kernels", "choose_form", "converted", "kernels_of", "tile_packed", "tile_padded", "to_runnable"]

Form = Literal["plain", "opaque", "tile_packed", "low_bit"]

_GROUP_SIZES = (32, 64, 128, 256)  # of aten::_weight_int4pack_mm and its twin for CPUs
_SIGN_BITS = 0x88  # q in two's complement, xor 8, is q + 8; for both values of a byte
_TILE_ROWS, _TILE_COLUMNS, _INNER_K_TILES = 8, 1024, 8  # as in Int4TilePackedTo4dTensor.from_hp (torchao 0.18)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which int4 kernels a device has."""

    cpu: bool = False
    tile_packed: bool = False
    mslk: bool = False


def to_runnable(module: nn.Module, device: torch.device | None = None) -> None:
    """Convert every `Int4Tensor` parameter of `module` in place; parameters that are shared stay shared.

    device: where it will compute, if not where its weights lie, as with offloading: each is converted there and comes
    back. Extra memory: that of the largest weight, converted, and on a CPU about 6 bytes for each of its values.
    """
    weights = _int4_weights(module)
    while weights:
        old, places = weights.pop()
        home = old.device
        new = nn.Parameter(converted(old.data.to(device or home)).to(home), requires_grad=False)
        for owner, name in places:
            setattr(owner, name, new)
        del old  # before the next weight is made


def _int4_weights(module: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Each `Int4Tensor` parameter once, with all (owner, name) it has."""
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, Int4Tensor):
                found.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
    return list(found.values())


def converted(weight: Int4Tensor) -> torch.Tensor:
    """weight: [N, K] → the same values in the class that computes best on its device.

    Returns `weight` itself where it already is, and where it holds what the other classes cannot (and aoquant does not
    write): three dimensions, a scale for its activations, or activations in float8.
    """
    made: torch.Tensor = weight
    activations = getattr(weight, "activation_dtype", torch.bfloat16)  # torchao 0.15 has bfloat16 only
    if weight.ndim != 2 or weight.act_pre_scale is not None or activations != torch.bfloat16:
        return made
    match choose_form(weight, kernels_of(weight.device)):
        case "plain":
            pass
        case "opaque":
            made = _opaque(weight)
        case "tile_packed":
            made = tile_packed(weight)
        case "low_bit":
            made = _low_bit(weight)
    return made


def choose_form(weight: Int4Tensor, kernels: Kernels) -> Form:
    """The first of `kernels` that takes the dtype, shape [N, K] and group size of `weight`.

    The CPU kernel takes bfloat16, float16 and float32, and N in multiples of 16 (torch 2.13). tinygemm on CUDA takes
    bfloat16; N and K are padded. mslk's takes bfloat16 activations only, whatever their dtype says, groups of a
    multiple of its tiles' 128 columns, and rows of 16 bytes.
    """
    out_features, group_size = weight.shape[0], weight.block_size[1]
    is_bfloat16 = weight.dtype == torch.bfloat16
    if kernels.mslk and is_bfloat16 and group_size % 128 == 0 and out_features % 8 == 0:
        return "plain"
    if kernels.tile_packed and is_bfloat16 and group_size in _GROUP_SIZES:
        return "tile_packed"
    if kernels.cpu and group_size in _GROUP_SIZES and out_features % 16 == 0:
        return "opaque"
    return "low_bit"


def kernels_of(device: torch.device) -> Kernels:
    """Which kernels work on `device`, as far as that can be known without running them.

    torch's CPU kernel is written for AVX2 and AVX-512, and not for Microsoft's compiler. Elsewhere it is a loop over
    single values, slower than `LowBitTensor` from a few rows on. mslk's is for compute capability 9.0 alone (Hopper);
    the mslk 0.0.0 on PyPI is empty.
    """
    if device.type == "cpu":
        has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and sys.platform != "win32"
        return Kernels(cpu=has_vectors and _opaque_class() is not None)
    if device.type != "cuda" or torch.version.hip is not None:
        return Kernels()
    major, minor = torch.cuda.get_device_capability(device)
    return Kernels(tile_packed=major >= 8, mslk=(major, minor) == (9, 0) and _has_mslk())


def _has_mslk() -> bool:
    try:
        importlib.import_module("mslk")
    except Exception:  # one built for another torch fails in ways of its own
        return False
    return hasattr(torch.ops.mslk, "bf16i4bf16_rowwise")


def _opaque_class() -> Any:
    """torchao's `Int4OpaqueTensor`, or None; it is a prototype, and torchao 0.15 had it elsewhere."""
    for name in ("torchao.prototype.quantization.int4", "torchao.prototype.int4_opaque_tensor"):
        try:
            return importlib.import_module(name).Int4OpaqueTensor
        except (ImportError, AttributeError):
            continue
    return None


# --- the forms ------------------------------------------------------------------------------------------------------


def _offset_codes(weight: Int4Tensor) -> torch.Tensor:
    """[N, K/2] uint8: q + 8 of the even columns in the low nibbles, of the odd ones in the high nibbles."""
    qdata: torch.Tensor = weight.qdata
    return qdata.view(torch.uint8) ^ _SIGN_BITS


def _opaque(weight: Int4Tensor) -> torch.Tensor:
    codes = unpack(_offset_codes(weight).view(-1), 4, weight.shape).to(torch.int32)
    made: torch.Tensor = _opaque_class()(
        qdata=torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1),  # the 1 means nothing on a CPU
        scale_and_zero=pack_tinygemm_scales_and_zeros(weight.scale.t(), weight.zero_point.t(), weight.dtype),
        block_size=list(weight.block_size),
        shape=weight.shape,
    )
    return made


def tile_packed(weight: Int4Tensor) -> Any:
    """weight: [N, K] on CUDA (or meta) → the same as an `Int4TilePackedTo4dTensor`."""
    from torchao.quantization import Int4TilePackedTo4dTensor

    codes, scale_and_zero = tile_padded(weight)
    return Int4TilePackedTo4dTensor(
        qdata=torch.ops.aten._convert_weight_to_int4pack(codes, _INNER_K_TILES),
        scale_and_zero=scale_and_zero,
        block_size=list(weight.block_size),
        shape=weight.shape,
    )


def tile_padded_shape(out_features: int, in_features: int) -> tuple[int, int]:
    """(N', K'): N up to a multiple of 8, K up to one of 1024."""
    return out_features + -out_features % _TILE_ROWS, in_features + -in_features % _TILE_COLUMNS


def tile_padded(weight: Int4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tinygemm's packing takes: codes [N', K'/2] uint8, scale_and_zero [K'/group_size, N', 2].

    N' and K' are `tile_padded_shape`. A byte has q + 8 of its even column in the high nibble.
    What is added is zero: q, scale and zero_point.
    """
    out_features, in_features = weight.shape
    padded_rows, padded_columns = tile_padded_shape(out_features, in_features)
    more_rows, more_columns = padded_rows - out_features, padded_columns - in_features
    pairs = _offset_codes(weight)
    swapped = (pairs << 4) | (pairs >> 4)
    codes = nn.functional.pad(swapped, (0, more_columns // 2, 0, more_rows), value=_SIGN_BITS)
    by_group = torch.stack([weight.scale, weight.zero_point], dim=-1)  # [K/group_size, N, 2]
    more_groups = more_columns // weight.block_size[1]
    return codes, nn.functional.pad(by_group, (0, 0, 0, more_rows, 0, more_groups))


def _low_bit(weight: Int4Tensor) -> LowBitTensor:
    return LowBitTensor(
        _offset_codes(weight).view(-1),
        weight.scale.t().contiguous(),
        "int4",
        weight.block_size,
        weight.shape,
        weight.dtype,
        weight.zero_point.t().contiguous(),
    )
