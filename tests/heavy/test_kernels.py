"""Each config's arithmetic against torchao's own, on weights that are nasty on purpose, split anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchao.quantization import quantize_

from aoquant import int4
from aoquant.configs import CONFIGS, parse_config
from aoquant.engine.formats import parts
from aoquant.engine.quantize import Kernel, Scratch, kernel_for
from aoquant.errors import UsageError
from tests.heavy import stock

CONFIG_TEXTS = (
    *CONFIGS, "int8wo:group_size=16", "int8wo:group_size=64", "fp8wo:dtype=e5m2", "int4wo:group_size=32",
    "uint1wo:group_size=16", "uint4wo:group_size=256", "int4dq:group_size=128",
)  # fmt: skip
ALL_CONFIGS = pytest.mark.parametrize("config_text", CONFIG_TEXTS)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def _normal(rows: int = 48, columns: int = 256, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _outliers() -> torch.Tensor:
    weight = _normal()
    weight.view(-1)[::97] *= 50
    return weight


def _ties() -> torch.Tensor:
    """Multiples of half a step of many grids, where rounding decides."""
    return (torch.arange(48 * 256) % 255 - 127).view(48, 256) / 2


def _sparse() -> torch.Tensor:
    weight = _normal()
    weight[weight.abs() < 1.5] = 0
    weight[:, 0] = 1  # no row is all zero
    return weight


WEIGHTS: Mapping[str, Callable[[], torch.Tensor]] = {
    "normal": _normal,
    "outliers": _outliers,
    "small": lambda: _normal() * 1e-4,
    "large": lambda: _normal() * 1e4,
    "positive": lambda: _normal().abs() + 0.1,
    "negative": lambda: -_normal().abs() - 0.1,
    "constant": lambda: torch.full((48, 256), -0.7),
    "ties": _ties,
    "sparse": _sparse,
    "one_value_a_row": lambda: torch.eye(48, 256) * 3,
    "rows_of_all_sizes": lambda: _normal() * torch.logspace(-3.5, 3.5, 48)[:, None],
}


def expected(weight: torch.Tensor, config_text: str) -> torch.Tensor:
    """What torchao makes of `weight`, on the CPU; for int4wo, what its formula says.

    The one deliberate difference is laid over it: where a float8 scale is 0, so that torchao divides 0 by 0, the NaN
    is a 0.
    """
    result = torchao_tensor(weight, config_text)
    if config_text.startswith("fp8") and (result.scale == 0).any():  # type: ignore[attr-defined]
        qdata = result.qdata  # type: ignore[attr-defined]
        is_nan = qdata.float().isnan() & (result.scale == 0)  # type: ignore[attr-defined]
        qdata.view(torch.uint8)[is_nan] = 0
    return result


def torchao_tensor(weight: torch.Tensor, config_text: str) -> torch.Tensor:
    if config_text.startswith("int4wo"):
        group = stock.group_size(config_text)
        assert group is not None
        int4: torch.Tensor = stock.int4_tensor(weight, group)
        return int4
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.clone())
    with stock.without_hardware_check():
        quantize_(linear, stock.stock_config(config_text))
    result: torch.Tensor = linear.weight.detach()
    return result


def run(kernel: Kernel, weight: torch.Tensor, *, step: int = 1 << 30) -> dict[str, torch.Tensor]:
    """The parts of `weight`, made in blocks of `step` rows on the weight's device, on the CPU."""
    scratch = Scratch()
    num_rows, in_features = weight.shape
    out = torch.empty(kernel.run_bytes(num_rows, in_features), dtype=torch.uint8, device=weight.device)
    peak = None
    step = -(-step // kernel.row_step) * kernel.row_step
    ends = [min(end, num_rows) for end in range(step, num_rows + step, step)]
    starts = [0, *ends[:-1]]
    places = [
        out[kernel.run_bytes(a, in_features) : kernel.run_bytes(b, in_features)]
        for a, b in zip(starts, ends, strict=True)
    ]
    blocks = list(zip(torch.split(weight, step), places, strict=True))
    if kernel.peak is not None:
        peak = torch.stack([kernel.peak(block, scratch) for block, _ in blocks]).amax(dim=0)
    small: dict[str, list[torch.Tensor]] = {}
    for block, rows in blocks:
        for part, values in kernel.rows(block, rows, scratch, peak).items():
            small.setdefault(part, []).append(values)
    if kernel.peak is not None:
        small = {part: values[:1] for part, values in small.items()}
    joined = {part: kernel.assemble(values) for part, values in small.items()}
    streamed = torch.cat([out, *(joined.pop(part) for part in list(joined) if "." in part)])
    like = parts(kernel.outline(weight.to("meta")))[kernel.streamed]
    streamed = streamed.view(like.dtype).view(like.shape)
    return {part: values.cpu() for part, values in {kernel.streamed: streamed, **joined}.items()}


def assert_same_parts(made: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> None:
    wanted = parts(tensor)
    assert made.keys() == wanted.keys()
    for part, values in made.items():
        assert stock.same_bits(values, wanted[part]), f"{part}: {values} against {wanted[part]}"


def kernel_or_skip(config_text: str, dtype: torch.dtype) -> Kernel:
    if config_text == "fp8dqrow" and dtype != torch.bfloat16:
        pytest.skip("torchao scales float8 rows from bfloat16 only")
    return kernel_for(parse_config(config_text), dtype)


@ALL_CONFIGS
@DTYPES
@pytest.mark.parametrize("kind", WEIGHTS)
def test_bits_are_torchaos(config_text: str, dtype: torch.dtype, kind: str) -> None:
    kernel = kernel_or_skip(config_text, dtype)
    weight = WEIGHTS[kind]().to(dtype)
    assert_same_parts(run(kernel, weight), expected(weight, config_text))


@ALL_CONFIGS
@DTYPES
def test_blocks_change_no_bit(config_text: str, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(config_text, dtype)
    weight = _outliers().to(dtype)
    wanted = expected(weight, config_text)
    for step in (1, 7, 16, 47):
        assert_same_parts(run(kernel, weight, step=step), wanted)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    config_text=st.sampled_from(CONFIG_TEXTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    spread=st.floats(0, 6),
    step=st.integers(1, 32),
)
def test_bits_are_torchaos_whatever_the_weights(
    seed: int, config_text: str, dtype: torch.dtype, spread: float, step: int
) -> None:
    if config_text == "fp8dqrow" and dtype != torch.bfloat16:
        return
    generator = torch.Generator().manual_seed(seed)
    exponents = (torch.rand(32, 256, generator=generator) - 0.5) * spread
    weight = (_normal(32, seed=seed) * 10**exponents).to(dtype)
    kernel = kernel_for(parse_config(config_text), dtype)
    assert_same_parts(run(kernel, weight, step=step), expected(weight, config_text))


@ALL_CONFIGS
@DTYPES
def test_zero_rows_become_zeros(config_text: str, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(config_text, dtype)
    weight = _normal().to(dtype)
    weight[[0, 5, 47]] = 0
    assert_same_parts(run(kernel, weight), expected(weight, config_text))
    if config_text.startswith("fp8") and config_text != "fp8dq":
        assert torchao_tensor(weight, config_text).qdata[[0, 5, 47]].float().isnan().all()  # type: ignore[attr-defined]
        assert run(kernel, weight)["qdata"][[0, 5, 47]].view(torch.uint8).eq(0).all()


@ALL_CONFIGS
@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_in_a_scale(config_text: str, dtype: torch.dtype, bad: float) -> None:
    """That is where the engine looks, as no scale of sound weights is anything but finite."""
    kernel = kernel_or_skip(config_text, dtype)
    weight = _normal().to(dtype)
    assert run(kernel, weight)["scale"].isfinite().all()
    weight[17, 100] = bad
    assert not run(kernel, weight, step=10)["scale"].isfinite().all()


@ALL_CONFIGS
@DTYPES
def test_outline_is_the_result_without_data(config_text: str, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(config_text, dtype)
    weight = _normal().to(dtype)
    outline, wanted = kernel.outline(weight.to("meta")), expected(weight, config_text)
    assert type(outline) is type(wanted)
    assert (outline.dtype, outline.shape, outline.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    ours, theirs = stock.parts(outline), stock.parts(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert value.device.type == "meta"
            assert (value.dtype, value.shape, value.stride()) == (other.dtype, other.shape, other.stride()), name
        else:
            assert repr(value) == repr(other), name


@pytest.mark.parametrize(
    ("config_text", "shape", "words"),
    [
        ("int8wo", (16, 100), ""),
        (
            "int8wo:group_size=32",
            (16, 100),
            "in_features 100 is not a multiple of group_size 32 (largest that fits: 4)",
        ),
        ("uint4wo", (16, 96), "in_features 96 is not a multiple of group_size 64 (largest that fits: 32)"),
        ("uint4wo", (16, 64), ""),
        ("int4wo", (16, 320), "in_features 320 is not a multiple of group_size 128 (largest that fits: 64)"),
        ("fp8wo", (17, 19), ""),
        ("fp8dq", (16, 100), "float8 matrix multiplication wants multiples of 16, not [16, 100]"),
        ("fp8dqrow", (100, 16), "float8 matrix multiplication wants multiples of 16, not [100, 16]"),
        ("fp8dqrow", (32, 16), ""),
    ],
)
def test_refusals_name_the_widths(config_text: str, shape: tuple[int, int], words: str) -> None:
    assert kernel_for(parse_config(config_text), torch.bfloat16).refusal(shape) == words


@pytest.mark.parametrize(
    ("config_text", "shape"),
    [("uint4wo", (64, 100)), ("int8wo:group_size=32", (64, 100)), ("fp8dq", (64, 100)), ("fp8dqrow", (100, 64))],
)
def test_what_is_refused_is_what_torchao_cannot_quantize(config_text: str, shape: tuple[int, int]) -> None:
    """It raises, or for float8 leaves the layer as it is with a line in the log."""
    linear = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
    try:
        with stock.without_hardware_check():
            quantize_(linear, stock.stock_config(config_text))
    except (AssertionError, ValueError):
        return
    assert stock.kind(linear.weight) == "Tensor"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_float8_rows_want_bfloat16_as_torchao_does(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="fp8dqrow needs --dtype bfloat16"):
        kernel_for(parse_config("fp8dqrow"), dtype)
    with pytest.raises(AssertionError):
        expected(_normal().to(dtype), "fp8dqrow")


def test_planning_leaves_inductors_settings_alone() -> None:
    from torch._inductor import config as inductor

    before = inductor.get_config_copy()
    for config_text in CONFIG_TEXTS:
        kernel_for(parse_config(config_text), torch.bfloat16).outline(torch.empty(64, 256, device="meta"))
    assert inductor.get_config_copy() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@ALL_CONFIGS
@DTYPES
def test_cuda_makes_the_same_bits(config_text: str, dtype: torch.dtype) -> None:
    kernel = kernel_or_skip(config_text, dtype)
    for kind, step in itertools.product(WEIGHTS, (7, 48)):
        weight = WEIGHTS[kind]().to(dtype)
        on_cpu = run(kernel, weight, step=step)
        for part, values in run(kernel, weight.to("cuda"), step=step).items():
            assert stock.same_bits(values, on_cpu[part]), (kind, part)


TILE_PACKED = "int4wo:layout=tile_packed"


@pytest.mark.parametrize("shape", [(48, 256), (13, 256), (16, 1024), (24, 1280)])
def test_tile_packed_weights_are_planned_to_the_byte(shape: tuple[int, int]) -> None:
    kernel = kernel_for(parse_config(TILE_PACKED), torch.bfloat16)
    outline = kernel.outline(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    assert type(outline).__name__ == "Int4TilePackedTo4dTensor"
    assert outline.shape == torch.Size(shape)
    qdata, scale_and_zero = parts(outline).values()
    padded_rows, padded_columns = -(-shape[0] // 8) * 8, -(-shape[1] // 1024) * 1024
    assert qdata.numel() * 4 == padded_rows * padded_columns // 2 == kernel.run_bytes(*shape)
    assert scale_and_zero.shape == (padded_columns // 128, padded_rows, 2)


def test_tile_packed_wants_bfloat16() -> None:
    with pytest.raises(UsageError, match="needs --dtype bfloat16"):
        kernel_for(parse_config(TILE_PACKED), torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tile_packed_blocks_are_the_whole_weight_packed() -> None:
    weight = _outliers().to(torch.bfloat16).cuda()
    kernel = kernel_for(parse_config(TILE_PACKED), torch.bfloat16)
    whole = int4.tile_packed(cast("Any", stock.int4_tensor(weight.cpu(), 128)).to("cuda"))
    for step in (8, 16, 48):
        made = run(kernel, weight, step=step)
        for name, values in parts(whole).items():
            assert stock.same_bits(made[name], values.cpu()), name
