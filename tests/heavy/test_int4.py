"""int4wo computes on every device: what becomes of torchao's plain `Int4Tensor` at load, and that nothing is lost."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int4Tensor
from torchao.quantization.utils import unpack_tinygemm_scales_and_zeros

import aoquant
from aoquant import int4, loading
from aoquant.int4 import Form, Kernels
from aoquant.lowbit import LowBitTensor
from tests.heavy import stock, tiny

Make = Callable[..., Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
GROUPS = pytest.mark.parametrize("group", [32, 64, 128, 256])

HAS_CPU_KERNEL = int4.kernels_of(torch.device("cpu")).cpu
cpu_kernel = pytest.mark.skipif(not HAS_CPU_KERNEL, reason="torch has no vector int4 kernel for this CPU")
TINYGEMM = torch.cuda.is_available() and int4.kernels_of(torch.device("cuda")).tile_packed


def cuda(test: Make) -> Make:
    return pytest.mark.gpu(pytest.mark.skipif(not TINYGEMM, reason="no CUDA device with tinygemm")(test))


def weight_of(rows: int, columns: int, group: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Int4Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return stock.int4_tensor((values * torch.logspace(-2, 1, rows)[:, None] + 0.3).to(dtype), group)


def q_of(weight: Int4Tensor) -> torch.Tensor:
    """[N, K] float64: the integers of `weight`, read nibble by nibble."""
    pairs = weight.qdata.to(torch.int64) & 0xFF
    nibbles = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(weight.shape)
    return torch.where(nibbles > 7, nibbles - 16, nibbles).double()


def values_of(weight: Int4Tensor) -> torch.Tensor:
    """[N, K] float64: q * scale + zero_point."""
    group = weight.block_size[1]
    scale, zero_point = (part.t().double().repeat_interleave(group, 1) for part in (weight.scale, weight.zero_point))
    values: torch.Tensor = q_of(weight) * scale + zero_point
    return values


def through_kernel(weight: torch.Tensor) -> torch.Tensor:
    """[N, K]: what the forward multiplies with, one column for each row of an identity matrix."""
    identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    return nn.functional.linear(identity, weight).t()


def replaced(weight: Int4Tensor, **parts: torch.Tensor) -> Int4Tensor:
    old = {"qdata": weight.qdata, "scale": weight.scale, "zero_point": weight.zero_point}
    return Int4Tensor(**(old | parts), block_size=weight.block_size, shape=weight.shape)


# --- which class ----------------------------------------------------------------------------------------------------

EVERYTHING = Kernels(cpu=True, tile_packed=True, mslk=True)


@pytest.mark.parametrize(
    ("shape", "group", "dtype", "kernels", "form"),
    [
        ((48, 256), 64, torch.bfloat16, Kernels(cpu=True), "opaque"),
        ((48, 256), 256, torch.float16, Kernels(cpu=True), "opaque"),
        ((16, 32), 32, torch.float32, Kernels(cpu=True), "opaque"),
        ((40, 256), 64, torch.bfloat16, Kernels(cpu=True), "low_bit"),
        ((48, 256), 16, torch.bfloat16, Kernels(cpu=True), "low_bit"),
        ((48, 512), 512, torch.bfloat16, Kernels(cpu=True), "low_bit"),
        ((48, 256), 64, torch.bfloat16, Kernels(), "low_bit"),
        ((48, 256), 64, torch.bfloat16, Kernels(tile_packed=True), "tile_packed"),
        ((7, 32), 32, torch.bfloat16, Kernels(tile_packed=True), "tile_packed"),
        ((48, 256), 64, torch.float16, Kernels(tile_packed=True), "low_bit"),
        ((48, 256), 16, torch.bfloat16, Kernels(tile_packed=True), "low_bit"),
        ((48, 256), 128, torch.bfloat16, EVERYTHING, "plain"),
        ((48, 256), 256, torch.bfloat16, EVERYTHING, "plain"),
        ((48, 256), 64, torch.bfloat16, EVERYTHING, "tile_packed"),
        ((44, 256), 128, torch.bfloat16, EVERYTHING, "tile_packed"),
        ((48, 256), 128, torch.float32, Kernels(tile_packed=True, mslk=True), "low_bit"),
    ],
)
def test_the_first_kernel_that_takes_the_weight(
    shape: tuple[int, int], group: int, dtype: torch.dtype, kernels: Kernels, form: Form
) -> None:
    assert int4.choose_form(weight_of(*shape, group, dtype), kernels) == form


@cpu_kernel
@DTYPES
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [1, 8, 16, 40, 112])
def test_what_the_cpu_kernel_refuses_is_what_falls_back(rows: int, group: int, dtype: torch.dtype) -> None:
    """Held against the kernel itself, so that a torch that takes more, or less, shows here."""
    weight = weight_of(rows, group, group, dtype)
    try:
        through_kernel(int4._opaque(weight))
        form = "opaque"
    except RuntimeError:
        form = "low_bit"
    assert int4.choose_form(weight, Kernels(cpu=True)) == form


def test_devices_without_a_kernel_of_their_own() -> None:
    for name in ("mps", "xpu", "meta"):
        assert int4.kernels_of(torch.device(name)) == Kernels()


def test_what_the_other_classes_cannot_hold_stays() -> None:
    weight = weight_of(48, 256, 64)
    parts = weight.qdata, weight.scale, weight.zero_point, weight.block_size, weight.shape
    prescaled = Int4Tensor(*parts, act_pre_scale=torch.ones(256))
    float8 = Int4Tensor(*parts, activation_dtype=torch.float8_e4m3fn)
    several = Int4Tensor(*(part[None] for part in parts[:3]), [1, 1, 64], torch.Size([1, 48, 256]))
    for tensor in (prescaled, float8, several):
        assert int4.converted(tensor) is tensor


# --- the values -----------------------------------------------------------------------------------------------------


@cpu_kernel
@DTYPES
@GROUPS
@pytest.mark.parametrize("rows", [16, 48, 64, 112])
def test_the_cpu_kernel_multiplies_with_the_very_codes_scales_and_zero_points(
    rows: int, group: int, dtype: torch.dtype
) -> None:
    """Bit by bit: with scale 1 and zero 0 the identity gives q itself, and what is not q is carried as it is."""
    weight = weight_of(rows, 2 * group, group, dtype)
    made = int4.converted(weight)
    assert stock.kind(made) == "Int4OpaqueTensor"
    assert (made.dtype, made.shape) == (weight.dtype, weight.shape)
    scale, zero_point = unpack_tinygemm_scales_and_zeros(made.scale_and_zero)  # type: ignore[attr-defined]
    assert stock.same_bits(scale.squeeze(-1).t(), weight.scale)
    assert stock.same_bits(zero_point.squeeze(-1).t(), weight.zero_point)
    ones, zeros = torch.ones_like(weight.scale), torch.zeros_like(weight.scale)
    bare = int4.converted(replaced(weight, scale=ones, zero_point=zeros))
    assert torch.equal(through_kernel(bare).double(), q_of(weight))
    only_zero_points = int4.converted(replaced(weight, qdata=torch.zeros_like(weight.qdata)))
    assert torch.equal(through_kernel(only_zero_points), weight.zero_point.t().repeat_interleave(group, 1))


@DTYPES
@GROUPS
@pytest.mark.parametrize("rows", [48, 17])
def test_the_values_are_q_scale_plus_zero(rows: int, group: int, dtype: torch.dtype) -> None:
    """In float32, then the dtype: whether multiply and add round once or twice shows in the last place of float32, of
    the product or of the sum, so half a place of the dtype and two of float32 are allowed."""
    weight = weight_of(rows, 2 * group, group, dtype)
    expected = values_of(weight)
    steps = torch.finfo(dtype).eps / 2 * expected.abs()
    largest = weight.scale.double().max() * 8 + weight.zero_point.double().abs().max()
    error = (through_kernel(int4.converted(weight)).double() - expected).abs()
    assert (error <= steps + 2 * torch.finfo(torch.float32).eps * largest).all()


@DTYPES
@pytest.mark.parametrize("rows", [17, 48])
def test_the_fallback_holds_the_same_bits(rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(rows, 96, 32, dtype)
    made = int4._low_bit(weight)
    assert torch.equal(made.codes().double() - 8, q_of(weight))
    assert stock.same_bits(made.scale, weight.scale.t())
    assert made.zero_point is not None
    assert stock.same_bits(made.zero_point, weight.zero_point.t())


@pytest.mark.parametrize(("rows", "columns"), [(48, 1024), (7, 32), (9, 1056), (16, 2048), (8, 3072)])
def test_tiles_are_padded_with_zeros(rows: int, columns: int) -> None:
    weight = weight_of(rows, columns, 32)
    codes, scale_and_zero = int4.tile_padded(weight)
    height, width = codes.shape[0], codes.shape[1] * 2
    assert (height, width) == (-(-rows // 8) * 8, -(-columns // 1024) * 1024)
    assert scale_and_zero.shape == (width // 32, height, 2)
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and scale_and_zero.is_contiguous()
    q = torch.stack([codes >> 4, codes & 15], dim=-1).view(height, width).double() - 8  # the even column is the high
    scale, zero_point = (part.squeeze(-1) for part in unpack_tinygemm_scales_and_zeros(scale_and_zero))
    values = q * scale.double().repeat_interleave(32, 1) + zero_point.double().repeat_interleave(32, 1)
    assert torch.equal(values[:rows, :columns], values_of(weight))
    values[:rows, :columns] = 0
    assert not values.any()
    packed = torch.ops.aten._convert_weight_to_int4pack(codes.to("meta"), 8)
    assert packed.shape == (height // 8, width // 128, 32, 4)


@cuda
@GROUPS
@pytest.mark.parametrize(("rows", "columns"), [(48, 1024), (17, 512), (64, 1280)])
def test_tinygemm_multiplies_with_the_very_values(rows: int, columns: int, group: int) -> None:
    """Its arithmetic is bfloat16's, so a sum may be off by a last place of its largest term."""
    weight = weight_of(rows, columns, group)
    made = int4.tile_packed(weight.to("cuda"))
    assert stock.kind(made) == "Int4TilePackedTo4dTensor"
    ones, zeros = torch.ones_like(weight.scale), torch.zeros_like(weight.scale)
    bare = int4.tile_packed(replaced(weight, scale=ones, zero_point=zeros).to("cuda"))
    assert torch.equal(through_kernel(bare).double().cpu(), q_of(weight))
    expected = values_of(weight)
    largest = weight.scale.double().max() * 8 + weight.zero_point.double().abs().max()
    assert ((through_kernel(made).double().cpu() - expected).abs() <= torch.finfo(torch.bfloat16).eps * largest).all()


@cuda
def test_a_component_loaded_on_cuda_computes(made: Make) -> None:
    folder = made("flux", CONFIG["flux"]).plan.output
    (loaded,) = loading.load_each(folder, device="cuda")
    assert loaded.report.weights["Int4TilePackedTo4dTensor"]
    inputs = tiny.MODELS["flux"].inputs(torch.bfloat16)
    with torch.no_grad():
        outputs = loaded.module(**{name: value.to("cuda") for name, value in inputs.items()}).sample.double().cpu()
    expected = tiny.forward(aoquant.load(folder), "flux").double()
    assert (outputs - expected).norm() <= 8 * torch.finfo(torch.bfloat16).eps * expected.norm()


@DTYPES
@pytest.mark.parametrize("rows", [48, 20], ids=["kernel", "fallback"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(1,), (2, 3), (70,), (0,)], ids=str)
def test_a_linear_computes_with_them(batch: tuple[int, ...], bias: bool, rows: int, dtype: torch.dtype) -> None:
    """Products are summed in float32, of which 256 terms lose a few places, and the sum and bias are rounded."""
    weight = weight_of(rows, 256, 64, dtype)
    linear = nn.Linear(256, rows, bias=bias, dtype=dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    int4.to_runnable(linear)
    inputs = torch.randn(*batch, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        expected = inputs.double() @ values_of(weight).t() + (linear.bias.double() if bias else 0)
        outputs = linear(inputs)
    assert outputs.dtype == dtype and outputs.shape == (*batch, rows)
    allowed = 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
    assert (outputs.double() - expected).norm() <= allowed * expected.norm()


# --- modules --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = (nn.Linear(64, 48, bias=False) for _ in range(3))
        shared = nn.Parameter(weight_of(48, 64, 32), requires_grad=False)
        self.first.weight = self.second.weight = shared
        self.other.weight = nn.Parameter(weight_of(48, 64, 32, seed=1), requires_grad=False)
        self.plain = nn.Linear(4, 4)


def test_shared_weights_stay_shared_and_the_rest_stays() -> None:
    module = Tied()
    plain, other = module.plain.weight, module.other.weight
    int4.to_runnable(module)
    assert module.first.weight is module.second.weight
    assert isinstance(module.first.weight, nn.Parameter) and not module.first.weight.requires_grad
    assert not isinstance(module.first.weight, Int4Tensor)
    assert module.plain.weight is plain
    assert module.other.weight is not other and module.other.weight is not module.first.weight
    assert len(list(module.parameters())) == 4


def test_each_weight_is_freed_before_the_next_is_made() -> None:
    module = nn.Sequential(*(nn.Linear(64, 48, bias=False) for _ in range(4)))
    left: list[int] = []

    def count() -> None:
        left.append(sum(isinstance(weight, Int4Tensor) for weight in module.parameters()))

    for seed, linear in enumerate(module):
        linear.weight = nn.Parameter(weight_of(48, 64, 32, seed=seed), requires_grad=False)
        weakref.finalize(linear.weight.qdata, count)  # type: ignore[attr-defined]
    del linear
    int4.to_runnable(module)
    assert left == [3, 2, 1, 0]


@cpu_kernel
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_a_converted_linear_compiles_in_one_graph() -> None:
    linear = nn.Linear(64, 48, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight_of(48, 64, 32), requires_grad=False)
    int4.to_runnable(linear)
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(linear, fullgraph=True)(inputs)
        torch.testing.assert_close(compiled, linear(inputs))


# --- whole components -----------------------------------------------------------------------------------------------

CONFIG = {"flux": "int4wo:group_size=32", "t5": "int4wo:group_size=32"}


@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize("name", CONFIG)
def test_a_loaded_component_computes_as_its_dequantized_weights_do(name: str, file_format: str, made: Make) -> None:
    """To bfloat16's accuracy: the kernel keeps float32 weights, a dequantized one is rounded to bfloat16 first."""
    row = tiny.MODELS[name]
    folder = made(name, CONFIG[name], format=file_format).plan.output
    module = aoquant.load(folder)
    plain = stock.load(folder, row.library, row.class_name)
    quantized = [key for key, value in plain.state_dict().items() if stock.kind(value) == "Int4Tensor"]
    for key in quantized:
        owner = plain.get_submodule(key.rpartition(".")[0])
        owner.weight = nn.Parameter(values_of(owner.weight.data).to(owner.weight.dtype), requires_grad=False)
    assert quantized
    expected = tiny.forward(plain, name).double()
    error = (tiny.forward(module, name).double() - expected).norm() / expected.norm()
    assert error <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize("name", CONFIG)
def test_it_is_what_stock_loads_with_each_weight_converted(name: str, file_format: str, made: Make) -> None:
    row = tiny.MODELS[name]
    folder = made(name, CONFIG[name], format=file_format).plan.output
    expected = stock.load(folder, row.library, row.class_name).state_dict()
    expected = {
        key: int4.converted(value) if isinstance(value, Int4Tensor) else value for key, value in expected.items()
    }
    stock.assert_same_state(aoquant.load(folder).state_dict(), expected)


@pytest.mark.parametrize("name", CONFIG)
def test_the_report_names_the_classes_and_the_bytes(name: str, made: Make) -> None:
    result = made(name, CONFIG[name])
    (loaded,) = loading.load_each(result.plan.output)
    (component,) = result.plan.components
    kinds = {kind: count for kind, count in loaded.report.weights.items() if kind != "Tensor"}
    assert kinds.keys() <= {"Int4OpaqueTensor", "LowBitTensor"}
    assert sum(kinds.values()) == component.num_quantized
    assert kinds.get("Int4OpaqueTensor", 0) > 0 or not HAS_CPU_KERNEL
    assert abs(loaded.report.num_bytes - component.tensor_bytes) <= 0.02 * component.tensor_bytes


def test_a_shape_that_the_kernel_refuses_is_the_fallbacks(made: Make) -> None:
    module = aoquant.load(made("flux", CONFIG["flux"]).plan.output)
    for parameter in module.parameters():
        if isinstance(parameter, LowBitTensor):
            assert not HAS_CPU_KERNEL or parameter.shape[0] % 16
