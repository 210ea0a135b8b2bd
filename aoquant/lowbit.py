"""Weights of 1 to 7 bits in 1 to 7 bits: aoquant's own tensor class, for integer and float elements.

torchao 0.18 keeps an element of fewer than 8 bits in a byte of its own. `LowBitTensor` keeps X bits in X bits, and its
values are those of torchao's arithmetic to the bit. Importing this module is all that plain diffusers and transformers
need in order to load such a checkpoint, in both file formats.

Storage. An element's code is cut into planes of 4, 2 and 1 bits (7 = 4 + 2 + 1, 3 = 2 + 1), lowest bits first. A plane
is one stream of bits over the whole weight in row-major order, least significant bits of a byte first, padded to a byte
at its end only. `qdata` holds the planes one after the other. So packing costs nothing per row or group, and a plane
unpacks with a few whole-tensor integer operations, on any device that has them.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import TorchAOBaseTensor, fill_defaults

__all__ = ["AoquantLowBitConfig", "Element", "LowBitTensor", "pack", "packed_bytes", "unpack"]

aten = torch.ops.aten

_BLOCK = 1 << 18  # elements that a CPU unpacks at a time, so that what lies between stays in its cache
_TEXT = re.compile(r"int([1-7])|fp([2-7])_e([1-6])m([0-5])")


@dataclass(frozen=True, slots=True)
class Element:
    """What the code of one weight means. exponent_bits 0: an integer; else a sign, an exponent and a mantissa.

    Integers q in [-2^(bits-1), 2^(bits-1) - 1] are stored as q + 2^(bits-1). Floats have no infinities and no NaN:
    with bias = 2^(e-1) - 1, exponent field E and mantissa field M, the value is 2^(E-bias) * (1 + M/2^m), and for E = 0
    it is 2^(1-bias) * M/2^m. That is the form of FP6 e3m2, FP6 e2m3 and FP4 e2m1 in the OCP Microscaling Formats
    specification, version 1.0, section 5.3, taken to the other widths.
    """

    bits: int
    exponent_bits: int = 0

    @property
    def mantissa_bits(self) -> int:
        return self.bits - 1 - self.exponent_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest value of a float element."""
        return self.values()[(1 << (self.bits - 1)) - 1]

    def values(self) -> list[float]:
        """The value of each code of a float element, by the definition above."""
        found = []
        for field in range(1 << (self.bits - 1)):
            exponent, mantissa = divmod(field, 1 << self.mantissa_bits)
            fraction = mantissa / (1 << self.mantissa_bits)
            found.append(
                2.0 ** (exponent - self.bias) * (1 + fraction) if exponent else 2.0 ** (1 - self.bias) * fraction
            )
        return found + [-value for value in found]

    def __str__(self) -> str:
        return f"fp{self.bits}_e{self.exponent_bits}m{self.mantissa_bits}" if self.exponent_bits else f"int{self.bits}"

    @classmethod
    def parse(cls, text: str) -> Element:
        """`int4` or `fp6_e3m2`. Raises ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an element such as int4 or fp6_e3m2")
        if match[1]:
            return cls(int(match[1]))
        element = cls(int(match[2]), int(match[3]))
        if element.mantissa_bits != int(match[4]):
            raise ValueError(f"{text!r} has not {element.bits} bits")
        return element


# --- packing --------------------------------------------------------------------------------------------------------

# plane width → (a dtype with room for one byte's elements, (shift, mask) steps that gather them into its low byte)
_GATHER: dict[int, tuple[torch.dtype, tuple[tuple[int, int], ...]]] = {
    4: (torch.int16, ((4, 0x00FF),)),
    2: (torch.int32, ((6, 0x000F000F), (12, 0x000000FF))),
    1: (torch.int64, ((7, 0x0003000300030003), (14, 0x0000000F0000000F), (28, 0x00000000000000FF))),
}
# plane width → the same dtype, and the steps that spread a byte over it again
_SPREAD: dict[int, tuple[torch.dtype, tuple[tuple[int, int], ...]]] = {
    4: (torch.int16, ((4, 0x0F0F),)),
    2: (torch.int32, ((12, 0x000F000F), (6, 0x03030303))),
    1: (torch.int64, ((28, 0x0000000F0000000F), (14, 0x0003000300030003), (7, 0x0101010101010101))),
}


def plane_widths(bits: int) -> tuple[int, ...]:
    """The widths of the planes of a code of `bits` bits: 7 → (4, 2, 1)."""
    return tuple(width for width in (4, 2, 1) if bits & width)


def plane_bytes(width: int, count: int) -> int:
    """Bytes of one plane of `count` elements."""
    return -(-count * width // 8)


def packed_bytes(bits: int, count: int) -> int:
    """Bytes of `count` packed codes: bits * count / 8, and less than a byte more for each plane."""
    return sum(plane_bytes(width, count) for width in plane_widths(bits))


def pack_planes(codes: torch.Tensor, bits: int, *, first: torch.Tensor | None = None) -> list[torch.Tensor]:
    """codes: any shape, uint8, each below 2^bits → its planes, each [plane_bytes] uint8.

    first: where the first of them is put, if given, and not returned.
    """
    flat = codes.reshape(-1)
    missing = -flat.numel() % 8
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    elif flat.stride(0) != 1 or flat.storage_offset() % 8:  # a view as words has to begin at a whole word
        flat = flat.clone(memory_format=torch.contiguous_format)
    planes, shift = [], 0
    for width in plane_widths(bits):
        plane = _gather(flat, width) if width == bits else _gather(_cut(flat, width, shift), width)
        plane = plane[: plane_bytes(width, codes.numel())]
        if first is not None and not shift:
            first.copy_(plane)
        else:
            planes.append(plane.to(torch.uint8))
        shift += width
    return planes


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes: any shape, uint8, each below 2^bits → [packed_bytes] uint8, the planes one after the other."""
    return torch.cat(pack_planes(codes, bits))


def unpack(packed: torch.Tensor, bits: int, shape: Sequence[int]) -> torch.Tensor:
    """What `pack` was given: codes of `shape`, uint8."""
    count = math.prod(shape)
    return _joined(packed, bits, total=count, start=0, count=count).view(tuple(shape))


def _joined(packed: torch.Tensor, bits: int, *, total: int, start: int, count: int) -> torch.Tensor:
    """Codes `start` to `start + count` of the `total` that were packed: [count] uint8. start: a multiple of 8."""
    codes: torch.Tensor | None = None
    base = shift = 0
    for width in plane_widths(bits):
        first = base + start * width // 8
        plane = _spread(packed[first : first + plane_bytes(width, count)], width, shift)[:count]
        codes = plane if codes is None else codes.bitwise_or_(plane)
        base, shift = base + plane_bytes(width, total), shift + width
    assert codes is not None
    return codes


def _cut(codes: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    """Bits `shift` to `shift + width` of codes, [n] uint8 with n a multiple of 8: [n] uint8."""
    dtype, steps = _SPREAD[width]
    _, every_element = steps[-1]
    return (codes.view(dtype) >> shift).bitwise_and_(every_element).view(torch.uint8)


def _gather(codes: torch.Tensor, width: int) -> torch.Tensor:
    """codes: [n] uint8 with n a multiple of 8, each below 2^width → [n * width / 8] bytes, in wider integers."""
    dtype, steps = _GATHER[width]
    words = codes.view(dtype)
    for step, mask in steps:
        words = (words >> step).bitwise_or_(words).bitwise_and_(mask)
    return words


def _spread(packed: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    """packed: [n] uint8 → [n * 8 / width] uint8, each element shifted to the left by `shift`."""
    dtype, steps = _SPREAD[width]
    words = packed.to(dtype)
    for step, mask in steps:
        words = (words << step).bitwise_or_(words).bitwise_and_(mask)
    return (words << shift if shift else words).view(torch.uint8)


# --- float elements -------------------------------------------------------------------------------------------------


def encode_float(values: torch.Tensor, element: Element) -> torch.Tensor:
    """values: float32 → codes, uint8: rounded to nearest, ties to even, saturating, signs kept, -0.0's too.

    NaN is undefined. A float32 above the smallest normal is rounded in its own bits; below it, adding a power of two
    whose last place is the subnormal step lets float32 addition do the rounding. Of the two codes the second is the
    greater one below the smallest normal, and is held to it above. All in place, as integers: they are fast everywhere.
    """
    mantissa_bits, bias = element.mantissa_bits, element.bias
    highest, dropped = (1 << (element.bits - 1)) - 1, 23 - mantissa_bits
    words = values.view(torch.int32)
    magnitude = (words & 0x7FFFFFFF).clamp_(max=(highest << dropped) + ((127 - bias) << 23))
    codes = (magnitude >> dropped).bitwise_and_(1).add_(magnitude).add_((1 << (dropped - 1)) - 1)
    codes.bitwise_right_shift_(dropped).sub_((127 - bias) << mantissa_bits)
    exponent = 1 - bias - mantissa_bits + 23
    subnormal = magnitude.view(torch.float32).add_(2.0**exponent).view(torch.int32).sub_((127 + exponent) << 23)
    codes = torch.maximum(codes, subnormal.clamp_(max=1 << mantissa_bits), out=codes).clamp_(max=highest)
    signs = torch.bitwise_right_shift(words, 31 - (element.bits - 1), out=subnormal).bitwise_and_(highest + 1)
    return codes.bitwise_or_(signs).to(torch.uint8)


def decode_float(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """codes: uint8 → values, float32, exact: a table is faster than bit operations, and on every device the same."""
    return _looked_up(codes, _table(element, codes.device))


def _table(element: Element, device: torch.device) -> torch.Tensor:
    return torch.tensor(element.values(), dtype=torch.float32, device=device)


def _looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def quantize_float(values: torch.Tensor, element: Element) -> tuple[torch.Tensor, torch.Tensor]:
    """values [R, K] float32, overwritten → (codes [R, K] uint8, scale [R, 1] float32).

    scale = max|w| of the row / the element's largest value, and never so large that their product is infinite. A row
    of zeros has scale 0; one that holds NaN or infinity shows it in its scale.
    """
    scale = torch.maximum(values.amax(dim=-1, keepdim=True), -values.amin(dim=-1, keepdim=True)).abs_()
    scale.div_(element.largest)
    limit = torch.finfo(torch.float32).max / element.largest * (1 - 2.0**-24)
    scale = torch.where(scale.isinf(), scale, scale.clamp(max=limit))
    values.div_(torch.where(scale == 0, 1.0, scale))
    return encode_float(values, element), scale


# --- the tensor -----------------------------------------------------------------------------------------------------


class LowBitTensor(TorchAOBaseTensor):  # type: ignore[misc]
    """A weight [N, K] whose elements take 1 to 7 bits each.

    qdata: [packed_bytes(bits, N * K)] uint8. scale: [N, K / group_size] in `dtype` for integers, [N, 1] float32 for
    floats. zero_point: like scale; None for floats. element: text of an `Element`. block_size: [1, group_size].

    Values, q being an integer element: (q - zero_point) * scale in `dtype` where zero_point is int8, as torchao's
    IntxUnpackedToInt8Tensor has them; q * scale + zero_point in float32, then `dtype`, where it is a float, as
    torchao's Int4Tensor is defined. A float element is multiplied by scale in float32 and then cast, as torchao's
    Float8Tensor is.
    """

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012  (torchao's protocol)
    tensor_attribute_names = ["element", "block_size", "shape", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["zero_point"]  # noqa: RUF012

    qdata: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    element: str
    block_size: list[int]

    def __new__(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        element: str,
        block_size: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        zero_point: torch.Tensor | None = None,
    ) -> LowBitTensor:
        made: LowBitTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=qdata.device, requires_grad=False
        )
        return made

    def __init__(
        self,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        element: str,
        block_size: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        zero_point: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.qdata = qdata
        self.scale = scale
        self.zero_point = zero_point
        self.element = element
        self.block_size = list(block_size)

    @classmethod
    def from_hp(cls, weight: torch.Tensor, element: Element, group_size: int | None = None) -> LowBitTensor:
        """Quantize weight [N, K] on its own device. group_size: of integers, whole rows if None; a float's is the row.

        Integers follow torchao's asymmetric affine arithmetic. Takes several times the weight's memory; aoquant's
        engine makes the same tensor block by block.
        """
        if element.exponent_bits:
            codes, scale = quantize_float(weight.to(torch.float32, copy=True), element)
            block_size = [1, weight.shape[-1]]
            return cls(pack(codes, element.bits), scale, str(element), block_size, weight.shape, weight.dtype)
        from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

        wide = IntxUnpackedToInt8Tensor.from_hp(
            weight,
            (1, group_size or weight.shape[-1]),
            getattr(torch, str(element)),
            mapping_type=MappingType.ASYMMETRIC,
        )
        return cls.from_unpacked(wide)

    @classmethod
    def from_unpacked(cls, wide: Any) -> LowBitTensor:
        """Pack torchao's IntxUnpackedToInt8Tensor: the same values in fewer bits. ValueError if it has activations'."""
        if wide.activation_quantization is not None:
            raise ValueError("a tensor that quantizes activations cannot be packed")
        element = Element.parse(str(wide.target_dtype).removeprefix("torch."))
        codes = (wide.qdata + (1 << (element.bits - 1))).view(torch.uint8)
        packed = pack(codes, element.bits)
        return cls(packed, wide.scale, str(element), wide.block_size, wide.shape, wide.dtype, wide.zero_point)

    def codes(self) -> torch.Tensor:
        """[N, K] uint8: the code of each element."""
        return unpack(self.qdata, Element.parse(self.element).bits, self.shape)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[N, K] in `dtype`, or in `output_dtype`."""
        element = Element.parse(self.element)
        dtype = output_dtype or self.dtype
        rows, columns = self.shape
        table = _table(element, self.device) if element.exponent_bits else None
        step = max(8, _BLOCK // max(columns, 1) // 8 * 8)  # whole bytes of every plane
        if self.device.type != "cpu" or torch.compiler.is_compiling() or rows <= step:
            return self._values(0, rows, element.bits, table, dtype)
        values = torch.empty(self.shape, dtype=dtype)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            values[start:end] = self._values(start, end, element.bits, table, dtype)
        return values

    def _values(self, start: int, end: int, bits: int, table: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Rows `start` (a multiple of 8) to `end` of the dequantized weight. table: of float elements."""
        rows, columns = self.shape
        codes = _joined(
            self.qdata, bits, total=rows * columns, start=start * columns, count=(end - start) * columns
        ).view(end - start, columns)
        scale = self.scale[start:end]
        if table is not None:
            return _looked_up(codes, table).mul_(scale).to(dtype)
        half = 1 << (bits - 1)
        assert self.zero_point is not None
        scale, zero_point = scale.unsqueeze(-1), self.zero_point[start:end].unsqueeze(-1)
        grouped = codes.view(end - start, columns // self.block_size[1], self.block_size[1])
        if zero_point.dtype.is_floating_point:
            values = grouped.to(torch.float32).sub_(half).mul_(scale.float()).add_(zero_point.float())
        else:
            # torchao's dequantize_affine, in place. Up to 255 all is exact in bfloat16: code - (zero_point + half) is
            # (code - half) - zero_point.
            values = grouped.to(dtype).sub_(zero_point.to(dtype).add_(half)).mul_(scale)
        return values.view(end - start, columns).to(dtype)

    def _moved(self, device: torch.device, dtype: torch.dtype, *, non_blocking: bool) -> LowBitTensor:
        """A copy on `device` whose values are in `dtype`, as torchao's IntxUnpackedToInt8Tensor changes both."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"values in {dtype} are not supported")

        is_float = Element.parse(self.element).exponent_bits > 0

        def moved(part: torch.Tensor) -> torch.Tensor:
            part_dtype = dtype if part.is_floating_point() and not is_float else part.dtype
            return part.to(device, part_dtype, non_blocking=non_blocking, copy=True)

        zero_point = None if self.zero_point is None else moved(self.zero_point)
        scale = moved(self.scale)
        return LowBitTensor(moved(self.qdata), scale, self.element, self.block_size, self.shape, dtype, zero_point)

    def _quantization_type(self) -> str:
        return f"element={self.element}, block_size={self.block_size}, shape={tuple(self.shape)}, device={self.device}"


# torchao has no types: hence the ignores on what is made from it.
implements = LowBitTensor.implements
implements_torch_function = LowBitTensor.implements_torch_function


@implements([aten.linear.default])  # type: ignore[untyped-decorator]
@implements_torch_function([torch.nn.functional.linear])  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _linear(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: LowBitTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight.dequantize(), bias)


# Inference mode does not take `to` apart, so its overloads come here too.
@implements([aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout])  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    self = args[0]
    wanted = self._get_to_kwargs(*args[1:], **(kwargs or {}))
    device, dtype = wanted["device"], wanted["dtype"]
    if func is not aten._to_copy.default and (device, dtype) == (self.device, self.dtype):
        return self
    return self._moved(device, dtype, non_blocking=wanted["non_blocking"])


@implements([aten.is_pinned.default])  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return all(func(part, *args[1:], **(kwargs or {})) for part in _parts(args[0]))


@implements([aten._pin_memory.default])  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    self = args[0]
    qdata, scale, *zero_point = (func(part, *args[1:], **(kwargs or {})) for part in _parts(self))
    return LowBitTensor(qdata, scale, self.element, self.block_size, self.shape, self.dtype, *zero_point)


def _parts(tensor: LowBitTensor) -> list[torch.Tensor]:
    return [part for part in (tensor.qdata, tensor.scale, tensor.zero_point) if part is not None]


@implements([aten.slice.Tensor])  # type: ignore[untyped-decorator]
def _(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Rows, or columns in whole groups. A copy, not a view: bits of a row may share a byte with the next one's."""
    self, dim, start, end, step = fill_defaults(args, 5, [0, None, None, 1])
    dim %= 2
    first, last, stride = slice(start, end, step).indices(self.shape[dim])
    group = self.block_size[1]
    if stride != 1 or (dim == 1 and (first % group or (last % group and last != self.shape[1]))):
        raise NotImplementedError(f"only steps of 1 and whole groups of {group} columns, not {start}:{end}:{step}")
    kept = slice(first, max(first, last))
    codes = self.codes()[kept] if dim == 0 else self.codes()[:, kept]
    groups = kept if dim == 0 else slice(kept.start // group, -(-kept.stop // group))
    where = groups if dim == 0 else (slice(None), groups)
    scale = self.scale[where].clone()
    zero_point = None if self.zero_point is None else self.zero_point[where].clone()
    packed = pack(codes, Element.parse(self.element).bits)
    return LowBitTensor(packed, scale, self.element, self.block_size, codes.shape, self.dtype, zero_point)


# --- making plain diffusers and transformers load it ----------------------------------------------------------------


@dataclass
class AoquantLowBitConfig(AOBaseConfig):  # type: ignore[misc]
    """The torchao config of such checkpoints; with it, quantize_ and `from_pretrained` make them too.

    element: `int4`, `fp6_e3m2` …. group_size: for integers; None for one group a row.
    """

    element: str = "int4"
    group_size: int | None = 64
    version: int = 1


@register_quantize_module_handler(AoquantLowBitConfig)  # type: ignore[untyped-decorator]
def _quantize_module(module: torch.nn.Module, config: AoquantLowBitConfig) -> torch.nn.Module:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    packed = LowBitTensor.from_hp(weight.detach(), Element.parse(config.element), config.group_size)
    module.weight = torch.nn.Parameter(packed, requires_grad=False)
    return module


@functools.cache
def register() -> None:
    """Make this class known to the three places that stock loading asks. Importing the module has done it."""
    ALLOWED_AO_MODULES.add(__name__)
    torch.serialization.add_safe_globals([LowBitTensor])
    try:
        known = importlib.import_module("torchao.prototype.safetensors.safetensors_utils")
    except ImportError:  # torchao below 0.16 has no safetensors
        return
    known.ALLOWED_CLASSES[LowBitTensor.__name__] = LowBitTensor
    known.ALLOWED_TENSORS_SUBCLASSES.append(LowBitTensor.__name__)


register()
