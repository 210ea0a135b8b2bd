"""The packed tensor class: its bytes, its numbers against torchao's, torch's protocol, and stock loading of it."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear
from torchao.core.config import config_from_dict, config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

from aoquant import lowbit
from aoquant.lowbit import AoquantLowBitConfig, Element, LowBitTensor, pack, packed_bytes, unpack
from tests.heavy import stock, tiny
from tests.light import processes

Folder = Callable[..., Path]

BITS = pytest.mark.parametrize("bits", range(1, 8))
INTEGERS = tuple(f"int{bits}" for bits in range(1, 8))
FLOATS = tuple(
    f"fp{bits}_e{exponent}m{bits - 1 - exponent}" for bits in range(2, 8) for exponent in range(1, bits)
)  # fmt: skip
EACH_FLOAT = pytest.mark.parametrize("text", FLOATS)
EACH_FORM = pytest.mark.parametrize("text", ["int1", "int3", "int4", "int7", "fp4_e2m1", "fp6_e3m2", "int4_float_zero"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])
LARGEST = torch.finfo(torch.float32).max
TINIEST = 2.0**-149


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return stock.same_bits(left, right)


def intx(weight: torch.Tensor, text: str, group_size: int) -> IntxUnpackedToInt8Tensor:
    return IntxUnpackedToInt8Tensor.from_hp(
        weight, (1, group_size), getattr(torch, text), mapping_type=MappingType.ASYMMETRIC
    )


def made(text: str, weight: torch.Tensor, group_size: int = 16) -> LowBitTensor:
    """One of each form: integers, floats, and `int4_float_zero` with zero points in the weight's dtype."""
    if text != "int4_float_zero":
        return LowBitTensor.from_hp(weight, Element.parse(text), group_size)
    rows, columns = weight.shape
    codes = torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    scale = noise(rows, columns // group_size, dtype=weight.dtype, seed=4)
    zero_point = noise(rows, columns // group_size, dtype=weight.dtype, seed=5)
    return LowBitTensor(pack(codes, 4), scale, "int4", [1, group_size], weight.shape, weight.dtype, zero_point)


# --- packing --------------------------------------------------------------------------------------------------------


def bit_stream(codes: Sequence[int], bits: int) -> bytes:
    """The layout of the module's docstring, bit by bit."""
    packed, low = b"", 0
    for width in (4, 2, 1):
        if not bits & width:
            continue
        stream = 0
        for place, code in enumerate(codes):
            stream |= ((code >> low) & ((1 << width) - 1)) << (place * width)
        packed += stream.to_bytes(math.ceil(len(codes) * width / 8), "little")
        low += width
    return packed


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(bits).integers(0, 1 << bits, shape, dtype=np.uint8))


@BITS
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_packed_bytes_are_the_documented_stream_of_bits(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=41))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert bytes(packed.tolist()) == bit_stream(codes, bits)
    assert packed.dtype == torch.uint8 and packed.numel() == packed_bytes(bits, len(codes))
    assert unpack(packed, bits, (len(codes),)).tolist() == codes


@BITS
@pytest.mark.parametrize("shape", [(0,), (1,), (1, 7), (7, 1), (1, 64), (3, 5), (13, 17), (64, 48), (0, 8), (8, 0)])
@pytest.mark.parametrize("content", ["random", "zeros", "ones"])
def test_unpack_gives_back_what_was_packed(bits: int, shape: tuple[int, ...], content: str) -> None:
    codes = random_codes(bits, *shape)
    if content != "random":
        codes.fill_(0 if content == "zeros" else (1 << bits) - 1)
    packed = pack(codes, bits)
    assert bytes(packed.tolist()) == bit_stream(codes.flatten().tolist(), bits)
    assert packed.untyped_storage().nbytes() == packed.numel()
    assert same_bits(unpack(packed, bits, shape), codes)


@BITS
def test_codes_are_packed_from_views_of_any_offset_and_stride(bits: int) -> None:
    whole = random_codes(bits, 19, 24)
    for view in (whole.flatten()[1:], whole.flatten()[3:67], whole[1:9, :], whole[:, 5:], whole.t(), whole[::2]):
        assert same_bits(pack(view, bits), pack(view.clone().contiguous(), bits))


@BITS
@pytest.mark.parametrize("columns", [1, 3, 10, 16])
def test_a_range_of_rows_unpacks_alone(bits: int, columns: int) -> None:
    codes = random_codes(bits, 29, columns)
    packed = pack(codes, bits)
    for start in range(0, 29, 8):
        for end in (start, start + 1, start + 5, 29):
            part = lowbit._joined(
                packed, bits, total=29 * columns, start=start * columns, count=(end - start) * columns
            )
            assert same_bits(part.view(-1, columns), codes[start:end])


def test_a_weight_costs_its_bits() -> None:
    assert [packed_bytes(bits, 12288 * 3072) * 8 for bits in range(1, 8)] == [
        bits * 12288 * 3072 for bits in range(1, 8)
    ]


# --- elements -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS])
def test_an_element_is_read_as_it_is_written(text: str) -> None:
    assert str(Element.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["int0", "int8", "uint4", "fp8_e4m3", "fp6_e3m3", "fp1_e1m0", "fp4_e0m3", "fp3_e3m0", "int4 ", "INT4", ""]
)
def test_other_elements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an element|has not"):
        Element.parse(text)


def defined_value(code: int, text: str) -> float:
    """OCP MX v1.0, section 5.3: (-1)^S * 2^(E - bias) * (1 + 2^-m * M), or 2^(1 - bias) * 2^-m * M where E is 0."""
    bits, e, m = (int(digit) for digit in text if digit.isdigit())
    sign, exponent, mantissa = code >> (bits - 1), (code >> m) % 2**e, code % 2**m
    bias = 2 ** (e - 1) - 1
    whole = math.ldexp(mantissa + (2**m if exponent else 0), max(exponent, 1) - bias - m)
    return -whole if sign else whole


def table(text: str) -> torch.Tensor:
    """[2^bits] float32, exact: values by code."""
    return torch.tensor([defined_value(code, text) for code in range(1 << Element.parse(text).bits)])


@EACH_FLOAT
def test_every_code_decodes_to_its_definition(text: str) -> None:
    element = Element.parse(text)
    codes = torch.arange(1 << element.bits, dtype=torch.uint8).view(2, -1)
    assert same_bits(lowbit.decode_float(codes, element), table(text).view(2, -1))
    assert element.largest == table(text).max()


@pytest.mark.parametrize(
    ("text", "largest", "smallest_normal", "smallest"),
    [("fp6_e3m2", 28.0, 0.25, 0.0625), ("fp6_e2m3", 7.5, 1.0, 0.125), ("fp4_e2m1", 6.0, 1.0, 0.5)],
)
def test_limits_are_those_of_the_specification(
    text: str, largest: float, smallest_normal: float, smallest: float
) -> None:
    element = Element.parse(text)
    values = element.values()
    assert element.largest == largest
    assert values[1] == smallest
    assert values[1 << element.mantissa_bits] == smallest_normal
    if text == "fp4_e2m1":
        assert values[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest_even(values: torch.Tensor, text: str) -> torch.Tensor:
    """The nearest code by distance over the whole table in float64, the even one of two; the value's own sign."""
    half = (1 << Element.parse(text).bits) // 2
    distance = (values.double().abs().clamp(max=2.0**40)[:, None] - table(text)[:half].double()).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)
    even_first = torch.where(torch.arange(half) % 2 == 0, 2, 1)
    codes = (nearest * even_first).argmax(dim=1)
    return (codes + half * torch.signbit(values)).to(torch.uint8)


@EACH_FLOAT
def test_encode_rounds_every_midpoint_and_its_neighbours_to_nearest_even(text: str) -> None:
    values = table(text)[: (1 << Element.parse(text).bits) // 2]
    midpoints = (values[1:] + values[:-1]) / 2
    edges = torch.tensor([0.0, TINIEST, 2.0**-126, 1e-30, float(values[-1]) * 1.01, 1e38, LARGEST, math.inf])
    near = torch.cat([midpoints, values, edges])
    zero, infinity = torch.tensor(0.0), torch.tensor(math.inf)
    near = torch.cat([near, torch.nextafter(near, infinity), torch.nextafter(near, zero)])
    near = torch.cat([near, -near])
    assert same_bits(lowbit.encode_float(near, Element.parse(text)), nearest_even(near, text))


@EACH_FLOAT
def test_encode_is_exact_on_every_value_and_keeps_the_sign_of_zero(text: str) -> None:
    codes = torch.arange(1 << Element.parse(text).bits, dtype=torch.uint8)
    assert same_bits(lowbit.encode_float(table(text), Element.parse(text)), codes)


@given(
    text=st.sampled_from(FLOATS),
    values=st.lists(st.floats(width=32, allow_nan=False) | st.floats(-40, 40, width=32), min_size=1, max_size=20),
)
@example(text="fp6_e3m2", values=[-0.0, -1e-30, 1e-30])
@settings(max_examples=300, deadline=None)
def test_encode_is_the_nearest_of_all_codes(text: str, values: list[float]) -> None:
    given_values = torch.tensor(values)
    assert same_bits(lowbit.encode_float(given_values, Element.parse(text)), nearest_even(given_values, text))


@EACH_FLOAT
@pytest.mark.parametrize("order", [1e-4, 1.0, 1e30], ids=str)
def test_a_row_scale_puts_the_largest_weight_on_the_largest_value(text: str, order: float) -> None:
    element, weight = Element.parse(text), noise(6, 33) * order
    codes, scale = lowbit.quantize_float(weight.clone(), element)
    expected = weight.abs().amax(dim=1, keepdim=True) / torch.tensor(element.largest)
    assert same_bits(scale, expected)
    assert same_bits(codes.flatten(), nearest_even((weight / expected).flatten(), text))
    assert ((codes & ((1 << (element.bits - 1)) - 1)).amax(dim=1) == (1 << (element.bits - 1)) - 1).all()


@EACH_FLOAT
def test_rows_of_zeros_stay_zeros(text: str) -> None:
    weight = noise(4, 8)
    weight[1], weight[3] = 0, -0.0
    packed = LowBitTensor.from_hp(weight, Element.parse(text))
    assert packed.scale[[1, 3]].view(torch.int32).tolist() == [[0], [0]]
    assert packed.codes()[1].tolist() == [0] * 8
    assert (packed.dequantize()[[1, 3]] == 0).all()
    assert packed.dequantize().isfinite().all()


@EACH_FLOAT
@pytest.mark.parametrize("steps", [1, 2, 3, 30, 1000])
def test_rows_as_small_as_float32_goes_are_finite_and_as_near_as_their_scale(text: str, steps: int) -> None:
    """A scale below 2^-126 is rounded to whole steps of 2^-149, down to 0; nothing turns to infinity or NaN."""
    weight = torch.tensor([[steps * TINIEST, -steps * TINIEST, 0.0, TINIEST]])
    packed = LowBitTensor.from_hp(weight, Element.parse(text))
    values, largest = packed.dequantize(), Element.parse(text).largest
    assert packed.scale.item() == float(np.float32(steps * TINIEST) / np.float32(largest))
    assert values.isfinite().all()
    if packed.scale.item() == 0:
        assert (values == 0).all()
    else:
        assert values[0, 0] == -values[0, 1] > 0


@EACH_FLOAT
def test_rows_as_large_as_float32_goes_stay_finite(text: str) -> None:
    peaks = (torch.tensor([LARGEST]).view(torch.int32) - torch.arange(4000, dtype=torch.int32)).view(torch.float32)
    weight = torch.stack([peaks, -peaks / 3, peaks * 1e-5], dim=1)
    values = LowBitTensor.from_hp(weight, Element.parse(text)).dequantize()
    assert values.isfinite().all()
    torch.testing.assert_close(values[:, 0], peaks, rtol=1e-6, atol=0)


@DTYPES
def test_float_elements_are_cast_once_at_the_end(dtype: torch.dtype) -> None:
    weight = noise(7, 40, dtype=dtype)
    packed = LowBitTensor.from_hp(weight, Element.parse("fp6_e3m2"))
    codes, scale = lowbit.quantize_float(weight.to(torch.float32, copy=True), Element.parse("fp6_e3m2"))
    assert packed.scale.dtype == torch.float32 and packed.dtype == dtype
    assert same_bits(packed.codes(), codes)
    assert same_bits(packed.dequantize(), (table("fp6_e3m2")[codes.int()] * scale).to(dtype))
    assert (packed.dequantize().float() - weight.float()).norm() < 0.1 * weight.float().norm()


# --- integers against torchao ---------------------------------------------------------------------------------------

BLOCKS = (lowbit._BLOCK // 256 * 5 // 2 + 3, 256)  # two and a half blocks and three rows


@DTYPES
@pytest.mark.parametrize("text", INTEGERS)
@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((48, 256), 64), ((48, 256), 32), ((48, 256), 256), ((5, 48), 16), ((1, 8), 8), ((3, 9), 3), ((2, 6), 2),
     (BLOCKS, 64)],
    ids=str,
)  # fmt: skip
def test_integers_dequantize_to_torchaos_bits(
    text: str, shape: tuple[int, int], group_size: int, dtype: torch.dtype
) -> None:
    weight = noise(*shape, dtype=dtype)
    weight[0] = 0
    weight[-1] = weight[-1].abs() + 3  # far from zero: zero points at their limit
    weight[-1, 0] = 200
    wide, packed = intx(weight, text, group_size), LowBitTensor.from_hp(weight, Element.parse(text), group_size)
    assert same_bits(packed.dequantize(), wide.dequantize())
    assert packed.qdata.numel() == packed_bytes(int(text[3:]), weight.numel())
    assert packed.element == text and packed.dtype == dtype and packed.shape == weight.shape


@DTYPES
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_output_dtype_is_torchaos_too(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    wide = intx(noise(8, 64, dtype=dtype), "int5", 32)
    expected = torch.ops.torchao.dequantize_affine(
        wide.qdata, (1, 32), wide.scale, wide.zero_point, torch.int8, -16, 15, output_dtype=output_dtype
    )
    assert same_bits(LowBitTensor.from_unpacked(wide).dequantize(output_dtype), expected)


@pytest.mark.parametrize("bits", range(1, 8))
def test_every_code_with_every_zero_point_is_exact_in_bfloat16(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.uint8).expand(256, -1).contiguous()
    zero_point = torch.arange(-128, 128, dtype=torch.int8)[:, None]
    scale = torch.ones(256, 1, dtype=torch.bfloat16)
    size = [1, 1 << bits]
    packed = LowBitTensor(pack(codes, bits), scale, f"int{bits}", size, codes.shape, torch.bfloat16, zero_point)
    assert torch.equal(packed.dequantize().int(), codes.int() - (1 << (bits - 1)) - zero_point.int())


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)], ids=str)
def test_linear_gives_torchaos_bits(leading: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    wide = intx(noise(24, 64, dtype=dtype), "int4", 32)
    inputs, vector = noise(*leading, 64, dtype=dtype, seed=1), noise(24, dtype=dtype, seed=2) if bias else None
    packed = LowBitTensor.from_unpacked(wide)
    expected = linear(inputs, wide, vector)
    assert same_bits(linear(inputs, packed, vector), expected)
    assert same_bits(linear(inputs, weight=packed, bias=vector), expected)
    assert same_bits(linear(input=inputs, weight=packed, bias=vector), expected)
    with torch.inference_mode():
        assert same_bits(linear(inputs, packed, vector), expected)


def test_a_gradient_reaches_the_inputs() -> None:
    packed = made("int4", noise(24, 64))
    inputs = noise(3, 64, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad(linear(inputs, packed).sum(), inputs)
    torch.testing.assert_close(gradient, packed.dequantize().sum(dim=0).expand(3, -1))


def test_whole_rows_are_one_group_where_none_is_asked_for() -> None:
    weight = noise(4, 40)
    packed = LowBitTensor.from_hp(weight, Element(4))
    assert packed.block_size == [1, 40]
    assert same_bits(packed.dequantize(), intx(weight, "int4", 40).dequantize())


def test_a_tensor_that_quantizes_activations_is_refused() -> None:
    wide = intx(noise(4, 32), "int4", 32)
    wide.activation_quantization = "int8_asym_per_token"
    with pytest.raises(ValueError, match="activations"):
        LowBitTensor.from_unpacked(wide)


@DTYPES
def test_floating_zero_points_are_added_in_float32(dtype: torch.dtype) -> None:
    weight = noise(BLOCKS[0], 256, dtype=dtype)
    packed = made("int4_float_zero", weight, 64)
    assert packed.zero_point is not None
    q = packed.codes().float().view(weight.shape[0], -1, 64) - 8
    expected = q * packed.scale.float()[..., None] + packed.zero_point.float()[..., None]
    assert same_bits(packed.dequantize(), expected.view(weight.shape).to(dtype))


@EACH_FORM
def test_a_weight_of_no_rows_dequantizes(text: str) -> None:
    assert made(text, noise(8, 32))[8:].dequantize().shape == (0, 32)


# --- torch's protocol -----------------------------------------------------------------------------------------------


@EACH_FORM
@pytest.mark.parametrize(
    "act",
    [
        torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.cpu, copy.deepcopy, copy.copy,
        lambda tensor: nn.Parameter(tensor, requires_grad=False), lambda tensor: tensor.requires_grad_(False),
        lambda tensor: tensor.to("cpu"), lambda tensor: tensor.to("cpu", copy=True),
        lambda tensor: tensor.to(tensor.dtype), lambda tensor: copy.deepcopy(nn.Parameter(tensor, requires_grad=False)),
        lambda tensor: tensor[:], lambda tensor: tensor.data,
    ],
    ids=[
        "detach", "clone", "contiguous", "cpu", "deepcopy", "copy", "parameter", "requires_grad_", "to_device",
        "to_copy", "to_own_dtype", "deepcopied_parameter", "whole_slice", "data",
    ],
)  # fmt: skip
def test_what_only_passes_a_tensor_on_keeps_all_of_it(text: str, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = made(text, noise(12, 32, dtype=torch.bfloat16))
    result = act(tensor)
    assert isinstance(result, LowBitTensor) and not result.requires_grad
    assert same_bits(result, tensor)


def test_it_can_be_asked_for_pinned_memory() -> None:
    """As diffusers does where it offloads with streams. Where there is no accelerator, there is no such memory."""
    tensor = made("int4", noise(16, 32, dtype=torch.bfloat16))
    assert tensor.is_pinned() is False
    if torch.accelerator.is_available():
        pinned = tensor.pin_memory()
        assert pinned.is_pinned() and same_bits(pinned.dequantize(), tensor.dequantize())
    else:
        with pytest.raises(RuntimeError, match="accelerator"):
            tensor.pin_memory()


@pytest.mark.parametrize("act", [torch.clone, copy.deepcopy, lambda tensor: tensor.to("cpu", copy=True)])
def test_a_copy_shares_no_memory(act: Callable[[LowBitTensor], LowBitTensor]) -> None:
    tensor = made("int4", noise(12, 32))
    before, copied = tensor.dequantize(), act(tensor)
    copied.qdata.zero_()
    copied.scale.zero_()
    assert torch.equal(tensor.dequantize(), before)


@EACH_FORM
def test_it_looks_like_the_weight_it_stands_for(text: str) -> None:
    tensor = made(text, noise(12, 32, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((12, 32), torch.bfloat16, "cpu")
    assert (tensor.ndim, tensor.numel(), tensor.element_size()) == (2, 384, 2)
    assert tensor.is_floating_point() and tensor.is_contiguous() and tensor.stride() == (32, 1)
    assert f"element={tensor.element}" in repr(tensor) and "LowBitTensor" in repr(nn.Parameter(tensor))


@EACH_FORM
def test_it_goes_to_meta_and_quantizes_there(text: str) -> None:
    tensor = made(text, noise(12, 32, dtype=torch.bfloat16))
    meta = tensor.to("meta")
    assert isinstance(meta, LowBitTensor) and meta.device.type == meta.qdata.device.type == "meta"
    assert meta.dequantize().shape == (12, 32) and linear(torch.empty(3, 32, device="meta").bfloat16(), meta).is_meta
    if text != "int4_float_zero":
        outline = LowBitTensor.from_hp(noise(12, 32, dtype=torch.bfloat16).to("meta"), Element.parse(text), 16)
        assert [part.shape for part in (outline.qdata, outline.scale)] == [tensor.qdata.shape, tensor.scale.shape]


@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference_mode"])
def test_it_moves_in_inference_mode_too(inference: bool) -> None:
    tensor = made("int4", noise(12, 32))
    with torch.inference_mode(inference):
        assert tensor.to("meta").is_meta and tensor.to("meta", torch.float16).dtype == torch.float16
        assert tensor.to(device="meta", non_blocking=True).is_meta
        assert tensor.to(torch.float16).dequantize().dtype == torch.float16


@pytest.mark.parametrize("text", INTEGERS)
@pytest.mark.parametrize("target", [torch.float32, torch.float16], ids=str)
def test_integers_change_their_dtype_as_torchaos_do(text: str, target: torch.dtype) -> None:
    wide = intx(noise(12, 32, dtype=torch.bfloat16), text, 16)
    changed = LowBitTensor.from_unpacked(wide).to(target)
    assert changed.dtype == target
    assert same_bits(changed, LowBitTensor.from_unpacked(wide.to(target)))
    assert same_bits(changed.dequantize(), wide.to(target).dequantize())


@EACH_FORM
@pytest.mark.parametrize("act", [nn.Module.half, nn.Module.float, lambda module: module.to("cpu", torch.float16)])
def test_a_module_that_changes_its_dtype_still_runs(text: str, act: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Linear(32, 12).bfloat16()
    module.weight = nn.Parameter(made(text, module.weight.detach()), requires_grad=False)
    inputs = noise(3, 32, dtype=torch.bfloat16)
    expected = module(inputs).float()
    act(module)
    assert module.weight.dtype == module.bias.dtype != torch.bfloat16
    torch.testing.assert_close(module(inputs.to(module.bias.dtype)).float(), expected, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_torchao_cannot_compute_in_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="not supported"):
        made("int4", noise(12, 32)).to(dtype)


@EACH_FORM
def test_copy_fills_a_tensor_of_the_same_form_and_no_other(text: str) -> None:
    tensor, source = made(text, noise(12, 32)), made(text, noise(12, 32, seed=9) * 3)
    tensor.copy_(source)
    assert same_bits(tensor, source)
    for other in (made("int2", noise(12, 32)), made(text, noise(12, 48)), made("int6", noise(12, 32), 8)):
        with pytest.raises(ValueError, match="metadata mismatch"):
            tensor.copy_(other)


@EACH_FORM
def test_a_state_dict_is_assigned(text: str) -> None:
    tensor = made(text, noise(12, 32))
    source, target = nn.Linear(32, 12), nn.Linear(32, 12, device="meta")
    source.weight = nn.Parameter(tensor, requires_grad=False)
    target.load_state_dict(source.state_dict(), assign=True)
    stock.assert_same_state(target.state_dict(), source.state_dict())
    assert same_bits(target(noise(2, 32)), source(noise(2, 32)))


@EACH_FORM
def test_torchaos_safetensors_form_comes_back(text: str) -> None:
    state: dict[str, torch.Tensor] = {"a.b.weight": made(text, noise(12, 32)), "a.b.bias": noise(12)}
    flat, notes = flatten_tensor_state_dict(state)
    assert all(type(value) is torch.Tensor for value in flat.values())
    back, left = unflatten_tensor_state_dict(flat, notes)
    assert not left
    stock.assert_same_state(back, state)


def run_python(code: str, folder: Path) -> str:
    """What `code` prints in an interpreter of its own, whose working folder is `folder`."""
    done = processes.run(["-c", code], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pickle_names_the_module_to_import_and_loads_after_that(tmp_path: Path) -> None:
    forms = ("int1", "int3", "int4", "int7", "fp6_e3m2", "int4_float_zero")
    state = {text: made(text, noise(12, 32, dtype=torch.bfloat16)) for text in forms}
    parameters = {f"{text} parameter": nn.Parameter(tensor, requires_grad=False) for text, tensor in state.items()}
    torch.save(state | parameters, tmp_path / "state.bin")
    printed = run_python(
        "import pickle, torch\n"
        "try:\n"
        "    torch.load('state.bin', weights_only=True)\n"
        "except pickle.UnpicklingError as error:\n"
        "    print(error)\n"
        "import aoquant.lowbit\n"
        "state = torch.load('state.bin', weights_only=True)\n"
        "torch.save({name: tensor.dequantize() for name, tensor in state.items()}, 'plain.bin')\n",
        tmp_path,
    )
    assert "aoquant.lowbit.LowBitTensor" in printed
    plain = torch.load(tmp_path / "plain.bin")
    assert plain.keys() == (state | parameters).keys()
    for name, tensor in (state | parameters).items():
        assert same_bits(plain[name], tensor.dequantize())


@EACH_FORM
@pytest.mark.parametrize("columns", [16, 48])
@pytest.mark.parametrize(
    "where",
    [slice(0, 8), slice(1, None), slice(3, 8), slice(-3, None), slice(5, 5), slice(9, 2), slice(0, 99)],
    ids=str,
)
def test_rows_are_sliced(text: str, columns: int, where: slice) -> None:
    tensor = made(text, noise(11, columns, dtype=torch.bfloat16))
    assert same_bits(tensor[where].dequantize(), tensor.dequantize()[where])
    assert tensor[where].qdata.numel() == packed_bytes(Element.parse(tensor.element).bits, tensor[where].numel())


@pytest.mark.parametrize("text", ["int1", "int3", "int4", "int4_float_zero"])
@pytest.mark.parametrize("where", [slice(0, 4), slice(4, 12), slice(-4, None), slice(8, 8), slice(0, 99)], ids=str)
def test_whole_groups_of_columns_are_sliced(text: str, where: slice) -> None:
    tensor = made(text, noise(11, 20, dtype=torch.bfloat16), 4)
    assert same_bits(tensor[:, where].dequantize(), tensor.dequantize()[:, where])
    assert same_bits(tensor[2:7, where].dequantize(), tensor.dequantize()[2:7, where])
    assert same_bits(linear(noise(2, 20).bfloat16()[:, where], tensor[:, where]), linear(
        noise(2, 20).bfloat16()[:, where], tensor.dequantize()[:, where]
    ))  # fmt: skip


def test_a_slice_is_a_copy_of_all_its_parts() -> None:
    tensor = made("int4", noise(12, 32))
    before, part = tensor.dequantize(), tensor[:8]
    part.copy_(made("int4", noise(8, 32, seed=7)))
    assert torch.equal(tensor.dequantize(), before)


@pytest.mark.parametrize(
    "act",
    [
        lambda tensor: tensor[::2], lambda tensor: tensor[:, 2:], lambda tensor: tensor[:, :6],
        lambda tensor: tensor[0], lambda tensor: tensor.t(), lambda tensor: tensor + 1, lambda tensor: tensor.view(-1),
    ],
    ids=["steps", "from_within_a_group", "to_within_a_group", "one_row", "transposed", "sum", "view"],
)  # fmt: skip
def test_what_is_not_a_weights_work_is_refused(act: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(NotImplementedError):
        act(made("int4", noise(12, 32), 4))


def test_columns_of_a_float_weight_are_only_sliced_whole() -> None:
    tensor = made("fp6_e3m2", noise(12, 32))
    assert same_bits(tensor[:, :], tensor)
    with pytest.raises(NotImplementedError, match="whole groups of 32 columns"):
        tensor[:, :16]


# --- stock loading --------------------------------------------------------------------------------------------------

CHECKPOINTS = pytest.mark.parametrize(
    ("name", "element", "group_size"),
    [("flux", "int4", 16), ("flux", "fp6_e3m2", None), ("t5", "int4", 4), ("t5", "fp6_e3m2", None)],
)


@pytest.mark.parametrize("config", [AoquantLowBitConfig(), AoquantLowBitConfig(element="fp6_e3m2", group_size=None)])
def test_the_config_survives_json(config: AoquantLowBitConfig) -> None:
    assert config_from_dict(config_to_dict(config)) == config


@pytest.fixture(scope="module")
def packed_model(tiny_folder: Folder) -> Callable[..., Any]:
    """`packed_model(name, element, group_size)` → that tiny model as stock quantizes it, once. Do not change it."""
    models: dict[tuple[Any, ...], Any] = {}

    def get(name: str, element: str, group_size: int | None) -> Any:
        key = (name, element, group_size)
        if key not in models:
            row = tiny.MODELS[name]
            library: Any = diffusers if row.library == "diffusers" else transformers
            models[key] = stock.load(
                tiny_folder(name), row.library, row.class_name,
                quantization_config=library.TorchAoConfig(AoquantLowBitConfig(element, group_size)),
            )  # fmt: skip
        return models[key]

    return get


@pytest.fixture(scope="module")
def packed_folder(packed_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """`packed_folder(name, element, group_size, file_format)` → it, saved by `stock.save`."""

    def get(name: str, element: str, group_size: int | None, file_format: str) -> Path:
        model = packed_model(name, element, group_size)
        return stock.save(model, tmp_path_factory.mktemp(name), tiny.MODELS[name].library, file_format)

    return get


@FORMATS
@CHECKPOINTS
def test_stock_quantizes_saves_and_loads_it(
    name: str,
    element: str,
    group_size: int | None,
    file_format: str,
    packed_model: Callable[..., Any],
    packed_folder: Folder,
) -> None:
    row, model = tiny.MODELS[name], packed_model(name, element, group_size)
    loaded = stock.load(packed_folder(name, element, group_size, file_format), row.library, row.class_name)
    kinds = {type(module.weight).__name__ for module in loaded.modules() if isinstance(module, nn.Linear)}
    assert "LowBitTensor" in kinds
    stock.assert_same_state(loaded.state_dict(), model.state_dict())
    assert same_bits(tiny.forward(loaded, name), tiny.forward(model, name))


@pytest.mark.parametrize(("name", "file_format"), [("flux", "bin"), ("flux", "safetensors"), ("t5", "bin")])
def test_stock_loads_it_in_another_dtype(name: str, file_format: str, packed_folder: Folder) -> None:
    """transformers' safetensors is missing: it keeps the checkpoint's dtype for every torchao class."""
    row, group_size = tiny.MODELS[name], {"flux": 16, "t5": 4}[name]
    folder = packed_folder(name, "int4", group_size, file_format)
    expected = tiny.forward(stock.load(folder, row.library, row.class_name), name).float()
    output = tiny.forward(stock.load(folder, row.library, row.class_name, dtype=torch.float32), name)
    assert (output - expected).norm() < 0.05 * expected.norm()


def test_without_lowbit_imported_stock_names_aoquant(packed_folder: Folder, tmp_path: Path) -> None:
    for name, group_size in (("flux", 16), ("t5", 4)):
        for file_format in ("bin", "safetensors"):
            folder = packed_folder(name, "int4", group_size, file_format)
            shutil.copytree(folder, tmp_path / f"{name}-{file_format}")
    printed = run_python(
        "from diffusers import FluxTransformer2DModel\n"
        "from transformers import T5EncoderModel\n"
        "for name, cls in (('flux', FluxTransformer2DModel), ('t5', T5EncoderModel)):\n"
        "    for file_format in ('bin', 'safetensors'):\n"
        "        try:\n"
        "            cls.from_pretrained(f'{name}-{file_format}', use_safetensors=file_format == 'safetensors')\n"
        "        except ValueError as error:\n"
        "            print(str(error)[:60])\n",
        tmp_path,
    )
    assert printed.splitlines() == ["Failed to find class AoquantLowBitConfig in any of the allow"] * 4


# --- torch.compile --------------------------------------------------------------------------------------------------

COMPILER = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("text", ["int4", "int3", "fp6_e3m2", "int4_float_zero"])
def test_a_linear_compiles_whole(text: str) -> None:
    torch.compiler.reset()
    module = nn.Linear(128, 24).bfloat16()
    module.weight = nn.Parameter(made(text, noise(24, 128, dtype=torch.bfloat16), 64), requires_grad=False)
    inputs = noise(5, 128, dtype=torch.bfloat16)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(module, fullgraph=True)
        torch.testing.assert_close(compiled(inputs), module(inputs), atol=0.05, rtol=0.02)
        torch.testing.assert_close(compiled(inputs * 2), module(inputs * 2), atol=0.05, rtol=0.02)


@pytest.mark.slow
def test_a_flux_transformer_is_traced_whole(packed_model: Callable[..., Any]) -> None:
    """By all of torch.compile but inductor, whose C++ for a whole model takes a minute and a half."""
    torch.compiler.reset()
    model = packed_model("flux", "int4", 16)
    expected = tiny.forward(model, "flux").float()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        first, second = (tiny.forward(compiled, "flux").float() for _ in range(2))
    assert torch.equal(first, second)
    assert (first - expected).norm() < 0.03 * expected.norm()


# --- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("text", [*INTEGERS, *FLOATS, "int4_float_zero"])
def test_a_gpu_has_the_cpus_values(text: str) -> None:
    weight = noise(40, 256, dtype=torch.bfloat16)
    tensor = made(text, weight, 64)
    moved = tensor.to("cuda")
    assert moved.device.type == moved.qdata.device.type == "cuda"
    assert same_bits(moved.dequantize().cpu(), tensor.dequantize())
    assert same_bits(moved.cpu(), tensor)
    assert same_bits(moved[3:17].cpu(), tensor[3:17])
    inputs = noise(5, 256, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(inputs.cuda(), moved).cpu(), linear(inputs, tensor), atol=0.2, rtol=0.02)
    if text != "int4_float_zero":
        assert same_bits(made(text, weight.cuda(), 64).cpu(), tensor)
