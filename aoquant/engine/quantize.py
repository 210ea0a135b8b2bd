"""One weight → one torchao tensor, a block of rows at a time.

Per-row and per-group arithmetic does not cross rows, so blocks give the same bits as the whole tensor does, and the
intermediates of a block stay in the core's cache. Every kernel follows torchao's own operations in torchao's own
order and dtypes (torchao 0.18, `quantization/quant_primitives.py`): that, and not the formula, makes the bits equal.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aoquant.configs import Family, QuantConfig
from aoquant.engine import libraries
from aoquant.errors import UsageError

if TYPE_CHECKING:
    from aoquant.lowbit import Element

Parts = dict[str, torch.Tensor]


class Scratch:
    """Buffers that one thread uses for block after block, on one device. Not shared between threads."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor that is overwritten by the next call of the same dtype."""
        count = shape.numel()
        buffer = self._buffers.get((dtype, device))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype, device] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count].view(shape)


Rows = Callable[[torch.Tensor, torch.Tensor, Scratch, "torch.Tensor | None"], Parts]
"""(block [R, K] in the weight's dtype, bytes of the streamed part to fill, scratch, peak) → the other parts' rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How one config quantizes.

    stock: torchao's config object, as config.json names it. outline: weight [N, K] on the meta device → the torchao
    tensor it becomes, also on meta. rows: fills the streamed part of a block [R, K] and returns the other parts, rows
    first. streamed: the part whose rows lie one after the other in the file; the others are small, and `assemble` joins
    them. run_bytes: (rows, K) → bytes of the streamed part of a run of rows that begins at a multiple of row_step; what
    a part named `qdata.1` holds follows them in the file. peak: for configs with one scale per tensor, block → its
    largest magnitude; `rows` then gets the maximum over all blocks. refusal: shape → why torchao's class cannot hold
    such a weight, or "".
    """

    stock: Any
    outline: Callable[[torch.Tensor], torch.Tensor]
    rows: Rows
    refusal: Callable[[tuple[int, ...]], str]
    run_bytes: Callable[[int, int], int] = lambda rows, in_features: rows * in_features
    row_step: int = 1
    peak: Callable[[torch.Tensor, Scratch], torch.Tensor] | None = None
    transposed: bool = False
    streamed: str = "qdata"

    def assemble(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """Join one part's row blocks [R, G] to the part as stored: [N, G], or [G, N] for Int4Tensor."""
        whole = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return whole.transpose(0, 1).contiguous() if self.transposed else whole


def kernel_for(config: QuantConfig, dtype: torch.dtype) -> Kernel:
    """The kernel of `config` for weights in `dtype`. Raises UsageError where torchao cannot combine the two."""
    return _BUILDERS[config.row.family](config, dtype)


def stock_config(config: QuantConfig) -> Any:
    """torchao's config object for `config`, as a program would build it by hand."""
    libraries.load("torchao.quantization")
    module, _, name = config.torchao.rpartition(".")
    config_class = getattr(importlib.import_module(module), name)
    arguments = _ARGUMENTS[config.row.family](config)
    if config.row.family == "int8" and config_class.version == 1:
        arguments["version"] = 2  # torchao 0.15 makes Int8Tensor only when asked to
    return config_class(**arguments)


def _through_torchao(stock: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """An outline made by torchao's own quantize_ on a throw-away Linear, once for each shape: it takes 3 to 7 ms."""
    from torchao.quantization import quantize_

    if any(field.name == "set_inductor_config" for field in dataclasses.fields(stock)):
        stock = dataclasses.replace(stock, set_inductor_config=False)  # else quantize_ changes inductor's globals

    known: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def outline(weight: torch.Tensor) -> torch.Tensor:
        key = (weight.shape, weight.dtype)
        if key not in known:
            out_features, in_features = weight.shape
            linear = torch.nn.Linear(in_features, out_features, bias=False, device="meta", dtype=weight.dtype)
            quantize_(linear, stock)
            known[key] = linear.weight.detach()
        return known[key].clone()  # weights that shared one would be taken for tied

    return outline


def _grouped(block: torch.Tensor, group_size: int | None) -> torch.Tensor:
    rows, in_features = block.shape
    size = group_size or in_features
    return block.view(rows, in_features // size, size)


def _in_float32(block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """`block` as float32 in a scratch buffer."""
    return scratch.like(block.shape, torch.float32, block.device).copy_(block)


def _extremes(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of the last dimension of float32 `values`, kept as a dimension of 1, in `dtype`.

    torchao reduces in `dtype` itself; widened values have the same extremes, and on a CPU float32 reduces 2 to 4 times
    as fast as bfloat16 (and amin with amax 6 times as fast as aminmax; torch 2.13).
    """
    return torch.amin(values, -1, keepdim=True).to(dtype), torch.amax(values, -1, keepdim=True).to(dtype)


_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _magnitude(groups: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Largest magnitude of the last dimension, kept as a dimension of 1: max(−min, max), and NaN where there is one.

    Magnitudes are ordered like their bits, NaN above infinity, and a CPU reduces int16 7 times as fast as bfloat16.
    """
    magnitudes = torch.abs(groups, out=scratch.like(groups.shape, groups.dtype, groups.device))
    return torch.amax(magnitudes.view(_BITS[groups.dtype]), -1, keepdim=True).view(groups.dtype)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: their bits are the greatest. isfinite takes 5 times as long in bfloat16."""
    infinity = torch.tensor(torch.inf, dtype=values.dtype).view(_BITS[values.dtype])
    return not values.numel() or bool(values.abs().view(infinity.dtype).amax() < infinity)


def _extremes_around_zero(groups: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """min(least, 0) and max(greatest, 0) of the last dimension, kept as a dimension of 1. They show NaN and infinity.

    Positive values are ordered like their bits; so are negative ones, when the sign is flipped.
    """
    integer = _BITS[groups.dtype]
    words = groups.view(integer)
    flipped = torch.bitwise_xor(words, torch.iinfo(integer).min, out=scratch.like(groups.shape, integer, groups.device))
    least, greatest = (torch.amax(side, -1, keepdim=True).clamp_(min=0).view(groups.dtype) for side in (flipped, words))
    return least.neg_(), greatest


def _refuse_group(group_size: int | None) -> Callable[[tuple[int, ...]], str]:
    def refusal(shape: tuple[int, ...]) -> str:
        in_features = shape[-1]
        if group_size is None or in_features % group_size == 0:
            return ""
        fits = in_features & -in_features  # the largest power of two that divides it
        return f"in_features {in_features} is not a multiple of group_size {group_size} (largest that fits: {fits})"

    return refusal


# --- int8 → Int8Tensor ----------------------------------------------------------------------------------------------


def _int8_arguments(config: QuantConfig) -> dict[str, Any]:
    from torchao.quantization import PerGroup

    return {"granularity": PerGroup(config.group_size)} if config.group_size else {}


def _int8(config: QuantConfig, dtype: torch.dtype) -> Kernel:  # noqa: ARG001
    """Symmetric, scale = max|w| / 127.5 in the weight's dtype, kept as float32.

    torchao 0.15 keeps it in that dtype, as [N, 1], and no zero point. What it quantizes itself has no scale below 1/128
    in bfloat16, far above those of most weights; here the numbers are those of later versions.
    """
    stock = stock_config(config)
    from torchao.quantization.quantize_.workflows import Int8Tensor

    has_zero_point = "zero_point" in getattr(Int8Tensor, "optional_tensor_data_names", ())
    if config.group_size and not has_zero_point:
        raise UsageError(
            f"{config}: torchao {libraries.versions()['torchao']} scales int8 by the row only",
            hint="write int8wo, or pip install -U torchao",
        )

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, _peak: torch.Tensor | None) -> Parts:
        scale = (
            (_magnitude(_grouped(block, config.group_size), scratch) / 127.5)
            .clamp(min=torch.finfo(torch.float32).eps)
            .to(torch.float32)
        )
        values = _grouped(_in_float32(block, scratch), config.group_size)
        out.view(torch.int8).view(values.shape).copy_(values.mul_(1.0 / scale).round_().clamp_(-128, 127))
        scale = scale.squeeze(-1)
        if not has_zero_point:
            return {"scale": scale.to(block.dtype)}
        return {"scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}

    return Kernel(stock=stock, outline=_through_torchao(stock), rows=rows, refusal=_refuse_group(config.group_size))


# --- float8 → Float8Tensor ------------------------------------------------------------------------------------------

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _float8_arguments(config: QuantConfig) -> dict[str, Any]:
    from torchao.quantization import PerRow, PerTensor

    if "dynamic" in config.row.traits:
        return {"granularity": PerTensor() if "per_tensor" in config.row.traits else PerRow()}
    return {"weight_dtype": _FLOAT8[str(config.options["dtype"])]}


def _float8(config: QuantConfig, dtype: torch.dtype) -> Kernel:
    """Symmetric, scale = max|w| / the format's largest value in the weight's dtype, kept as float32."""
    stock = stock_config(config)
    float8: torch.dtype = stock.weight_dtype
    largest = torch.finfo(float8).max
    per_tensor = "per_tensor" in config.row.traits
    dynamic = "dynamic" in config.row.traits
    if dynamic and not per_tensor and dtype != torch.bfloat16:
        raise UsageError(f"{config} needs --dtype bfloat16", hint="torchao scales float8 rows from bfloat16 only")

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, peak: torch.Tensor | None) -> Parts:
        scale = ((_magnitude(block, scratch) if peak is None else peak) / largest).to(torch.float32)
        values = _in_float32(block, scratch).div_(scale).clamp_(-largest, largest)
        # torchao makes NaN of a row of zeros (0 / 0), and a model with one then draws black. Zeros are what they are.
        if bool((scale == 0).any()):
            values.nan_to_num_(nan=0.0)
        out.view(float8).view(block.shape).copy_(values)
        return {"scale": scale}

    def peak_of(block: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        return _magnitude(block, scratch).amax().view(1, 1)

    return Kernel(
        stock=stock,
        outline=_dynamic_float8_outline(stock) if dynamic else _through_torchao(stock),
        rows=rows,
        refusal=_refuse_not_16 if dynamic else lambda shape: "",  # noqa: ARG005
        peak=peak_of if per_tensor else None,
    )


def _dynamic_float8_outline(stock: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """As torchao's handler does, which asserts a GPU that the arithmetic does not need."""
    from torchao.quantization import Float8Tensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    activation_granularity, weight_granularity = stock.granularity

    def outline(weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Float8Tensor.from_hp(
            weight,
            float8_dtype=stock.weight_dtype,
            granularity=weight_granularity,
            mm_config=stock.mm_config,
            kernel_preference=stock.kernel_preference,
            act_quant_kwargs=QuantizeTensorToFloat8Kwargs(
                stock.activation_dtype,
                activation_granularity,
                hp_value_lb=stock.activation_value_lb,
                hp_value_ub=stock.activation_value_ub,
                kernel_preference=stock.kernel_preference,
            ),
        )
        return result

    return outline


def _refuse_not_16(shape: tuple[int, ...]) -> str:
    out_features, in_features = shape
    if in_features % 16 == 0 and out_features % 16 == 0:
        return ""
    return f"float8 matrix multiplication wants multiples of 16, not [{out_features}, {in_features}]"


# --- 1 to 7 bits → IntxUnpackedToInt8Tensor, a byte each, or LowBitTensor ---------------------------------------------


def _intx_arguments(config: QuantConfig) -> dict[str, Any]:
    from torchao.quantization import MappingType, PerGroup

    weight_dtype = getattr(torch, f"int{config.row.traits['weight_bits']}")
    granularity = PerGroup(config.group_size)
    if "dynamic" in config.row.traits:
        return {"weight_dtype": weight_dtype, "weight_granularity": granularity}
    return {"weight_dtype": weight_dtype, "granularity": granularity, "mapping_type": MappingType.ASYMMETRIC}


def _intx(config: QuantConfig, dtype: torch.dtype) -> Kernel:  # noqa: ARG001
    """Affine per group, all of it in the weight's dtype, with zero always exactly representable."""
    stock = stock_config(config)
    bits = int(config.row.traits["weight_bits"])
    lowest = -(1 << (bits - 1))

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, _peak: torch.Tensor | None) -> Parts:
        groups = _grouped(block, config.group_size)
        if "symmetric" in config.row.traits:
            values, small = _symmetric(groups, bits, scratch)
        else:
            values, small = _asymmetric(groups, bits, lowest, scratch)
        out.view(torch.int8).view(values.shape).copy_(values)
        return small

    return Kernel(stock=stock, outline=_through_torchao(stock), rows=rows, refusal=_refuse_group(config.group_size))


def _symmetric(groups: torch.Tensor, bits: int, scratch: Scratch) -> tuple[torch.Tensor, Parts]:
    """groups [R, G, size] → (q, of that shape and dtype, in a scratch buffer; scale and zero point [R, G])."""
    largest = (1 << (bits - 1)) - 1
    scale = _magnitude(groups, scratch) / ((2 * largest + 1) / 2)
    scale = scale.clamp(min=torch.finfo(groups.dtype).smallest_normal)
    values = scratch.like(groups.shape, groups.dtype, groups.device)
    torch.mul(groups, 1.0 / scale, out=values).round_().clamp_(-largest - 1, largest)
    scale = scale.squeeze(-1)
    return values, {"scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}


def _asymmetric(groups: torch.Tensor, bits: int, lowest: int, scratch: Scratch) -> tuple[torch.Tensor, Parts]:
    """The same, with q counted from `lowest`: -2^(bits-1) for q itself, 0 for codes. The zero point is q's."""
    qmin, qmax = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    least, greatest = _extremes_around_zero(groups, scratch)
    scale = ((greatest - least) / float(qmax - qmin)).clamp(min=torch.finfo(groups.dtype).smallest_normal)
    zero_point = (qmin - torch.round(least / scale)).clamp(qmin, qmax)
    values = scratch.like(groups.shape, groups.dtype, groups.device)
    torch.mul(groups, 1.0 / scale, out=values)
    offset = zero_point + (lowest - qmin)
    if groups.dtype == torch.bfloat16 and bits <= 6:
        # Integers are fast on a CPU, bfloat16 is not. No quotient leaves [-64, 64], and from 128 to 256 a bfloat16 has
        # no fraction: adding 192 rounds to nearest even, and the bits count from those of 128, which are 0x4300.
        values = values.add_(192).view(torch.int16).add_((offset - 64).to(torch.int16) - 0x4300)
    else:
        values.round_().add_(offset)
    values.clamp_(lowest, lowest + qmax - qmin)
    return values, {"scale": scale.squeeze(-1), "zero_point": zero_point.to(torch.int8).squeeze(-1)}


def _lowbit_arguments(config: QuantConfig) -> dict[str, Any]:
    if config.is_packed:
        return {"element": str(_element(config)), "group_size": config.group_size}
    return _intx_arguments(config)


def _element(config: QuantConfig) -> Element:
    from aoquant.lowbit import Element

    bits = config.row.traits["weight_bits"]
    return Element.parse(f"fp{bits}_{config.options['dtype']}" if "dtype" in config.options else f"int{bits}")


def _lowbit(config: QuantConfig, dtype: torch.dtype) -> Kernel:
    """The same integers, or floats with one scale per row, as codes of X bits: the first plane is streamed."""
    if not config.is_packed:
        return _intx(config, dtype)
    stock = stock_config(config)  # imports torchao quietly
    from aoquant import lowbit

    element = _element(config)
    first, *_ = lowbit.plane_widths(element.bits)

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, _peak: torch.Tensor | None) -> Parts:
        if element.exponent_bits:
            codes, scale = lowbit.quantize_float(_in_float32(block, scratch), element)
            small = {"scale": scale}
        else:
            values, small = _asymmetric(_grouped(block, config.group_size), element.bits, 0, scratch)
            codes = scratch.like(values.shape, torch.uint8, block.device).copy_(values)
        tails = lowbit.pack_planes(codes, element.bits, first=out)
        return {f"qdata.{number}": tail for number, tail in enumerate(tails, 1)} | small

    return Kernel(
        stock=stock,
        outline=_through_torchao(stock),
        rows=rows,
        refusal=_refuse_group(None if element.exponent_bits else config.group_size),
        run_bytes=lambda rows, in_features: lowbit.plane_bytes(first, rows * in_features),
        row_step=8,  # whole bytes in every plane, whatever in_features is
    )


# --- int4, two a byte → Int4Tensor ----------------------------------------------------------------------------------


def _int4_arguments(config: QuantConfig) -> dict[str, Any]:
    if config.options["layout"] == "plain":
        return {"group_size": config.group_size}
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    return {"group_size": config.group_size, "int4_packing_format": Int4PackingFormat.TILE_PACKED_TO_4D}


def _int4(config: QuantConfig, dtype: torch.dtype) -> Kernel:
    """scale = max(max − min, 1e-6) / 15, zero = min + 8·scale, q = clamp(round((w − min) / scale), 0, 15) − 8.

    In float32, per group; scale and zero are then kept in the weight's dtype. Two values a byte along K: the even
    column in the low nibble. torchao's own quantizer for this class is in the mslk package, which has no CPU build.
    """
    stock = stock_config(config)
    group_size = config.group_size
    assert group_size is not None
    if config.options["layout"] == "tile_packed" and dtype != torch.bfloat16:
        raise UsageError(f"{config} needs --dtype bfloat16", hint="tinygemm computes in bfloat16 only")

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, _peak: torch.Tensor | None) -> Parts:
        groups = _grouped(_in_float32(block, scratch), group_size)
        least, greatest = _extremes(groups, torch.float32)
        scale = (greatest - least).clamp(min=1e-6) / 15
        zero_point = least + scale * 8
        codes = groups.sub_(least).div_(scale).round_().clamp_(0, 15).sub_(8).to(torch.int8).view(block.shape)
        pairs = codes.view(torch.int16)  # the even column in the low byte
        out.view(torch.int8).view(pairs.shape).copy_((pairs & 0x0F) | ((pairs >> 4) & 0xF0))
        return {
            "scale": scale.squeeze(-1).to(block.dtype),
            "zero_point": zero_point.squeeze(-1).to(block.dtype),
        }

    plain = Kernel(
        stock=stock,
        outline=lambda weight: _int4_outline(weight, group_size),
        rows=rows,
        refusal=_refuse_group(group_size),
        run_bytes=lambda rows, in_features: rows * in_features // 2,
        transposed=True,
    )
    return plain if config.options["layout"] == "plain" else _tile_packed(plain, group_size)


def _tile_packed(plain: Kernel, group_size: int) -> Kernel:
    """The same numbers as tinygemm's tiles of 8 rows, which only CUDA can pack (torch 2.13)."""
    from aoquant import int4

    def tensor(qdata: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, shape: torch.Size) -> Any:
        from torchao.quantization import Int4Tensor

        return Int4Tensor(qdata.view(torch.int8), scale, zero_point, block_size=[1, group_size], shape=shape)

    def rows(block: torch.Tensor, out: torch.Tensor, scratch: Scratch, peak: torch.Tensor | None) -> Parts:
        nibbles = torch.empty(block.shape[0], block.shape[1] // 2, dtype=torch.uint8, device=block.device)
        small = plain.rows(block, nibbles.view(-1), scratch, peak)
        packed = int4.tile_packed(tensor(nibbles, small["scale"].t(), small["zero_point"].t(), block.shape))
        out.copy_(packed.qdata.view(torch.uint8).view(-1))
        return {"scale_and_zero": packed.scale_and_zero.transpose(0, 1)}

    return dataclasses.replace(
        plain,
        outline=lambda weight: int4.tile_packed(_int4_outline(weight, group_size)),
        rows=rows,
        run_bytes=lambda rows, in_features: math.prod(int4.tile_padded_shape(rows, in_features)) // 2,
        row_step=8,
    )


def _int4_outline(weight: torch.Tensor, group_size: int) -> Any:
    from torchao.quantization import Int4Tensor

    out_features, in_features = weight.shape
    per_group = (in_features // group_size, out_features)
    return Int4Tensor(
        qdata=torch.empty(out_features, in_features // 2, dtype=torch.int8, device="meta"),
        scale=torch.empty(per_group, dtype=weight.dtype, device="meta"),
        zero_point=torch.empty(per_group, dtype=weight.dtype, device="meta"),
        block_size=[1, group_size],
        shape=weight.shape,
    )


_BUILDERS: Mapping[Family, Callable[[QuantConfig, torch.dtype], Kernel]] = {
    "int8": _int8,
    "float8": _float8,
    "intx": _intx,
    "int4": _int4,
    "lowbit": _lowbit,
}

_ARGUMENTS: Mapping[Family, Callable[[QuantConfig], dict[str, Any]]] = {
    "int8": _int8_arguments,
    "float8": _float8_arguments,
    "intx": _intx_arguments,
    "int4": _int4_arguments,
    "lowbit": _lowbit_arguments,
}
