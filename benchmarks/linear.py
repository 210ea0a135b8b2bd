"""One Linear [12288 out, 3072 in] in bfloat16 and in each quantized form: the time of a forward.

    python benchmarks/linear.py [--rows 16 1024] [--rounds 7] [--device cuda] [--threads 1] [--compile]

The forms take turns, round by round, so that each call finds the weights of the others in the caches, as a layer of a
model does. Medians of the rounds; the ratios are taken round by round. A call of a GPU is shorter than its start, so
there a turn is 50 calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torchao.quantization import Int4Tensor, IntxUnpackedToInt8Tensor, MappingType, quantize_

from aoquant.configs import parse_config
from aoquant.engine.formats import tensor_bytes
from aoquant.engine.quantize import Scratch, kernel_for, stock_config
from aoquant.int4 import converted
from aoquant.lowbit import Element, LowBitTensor

OUT_FEATURES, IN_FEATURES = 12288, 3072
GROUP_SIZE = 64
GPU_CALLS = 50


def int8(weight: torch.Tensor) -> torch.Tensor:
    linear = nn.Linear(1, 1, bias=False, device=weight.device)
    linear.weight = nn.Parameter(weight)
    quantize_(linear, stock_config(parse_config("int8wo")))
    return linear.weight.detach()


def packed(element: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: LowBitTensor.from_hp(weight, Element.parse(element), GROUP_SIZE)


def unpacked(element: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(weight: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = IntxUnpackedToInt8Tensor.from_hp(
            weight, (1, GROUP_SIZE), getattr(torch, element), mapping_type=MappingType.ASYMMETRIC
        )
        return wide

    return make


def int4(weight: torch.Tensor) -> torch.Tensor:
    """Quantized by the engine, on a CPU, then turned into what `aoquant.load` makes of it on the weight's device."""
    config = parse_config("int4wo")
    kernel = kernel_for(config, weight.dtype)
    codes = torch.empty(kernel.run_bytes(OUT_FEATURES, IN_FEATURES), dtype=torch.uint8)
    small = kernel.rows(weight.cpu(), codes, Scratch(), None)
    plain = Int4Tensor(
        qdata=codes.view(torch.int8).view(OUT_FEATURES, -1),
        scale=kernel.assemble([small["scale"]]),
        zero_point=kernel.assemble([small["zero_point"]]),
        block_size=[1, config.group_size],
        shape=weight.shape,
    )
    return converted(plain.to(weight.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of the weight. unpacked: the form with the same values in a byte each, which it is also held against."""

    make: Callable[[torch.Tensor], torch.Tensor]
    unpacked: str = ""


FORMS: Mapping[str, Form] = {
    "bf16": Form(make=lambda weight: weight),
    "int8wo": Form(make=int8),
    "int4wo": Form(make=int4),
    "uint4wo": Form(make=packed("int4"), unpacked="uint4wo unpacked"),
    "uint4wo unpacked": Form(make=unpacked("int4")),
    "uint3wo": Form(make=packed("int3"), unpacked="uint3wo unpacked"),
    "uint3wo unpacked": Form(make=unpacked("int3")),
    "fp6wo": Form(make=packed("fp6_e2m3")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; on a machine that others use too, 1 is the steadiest")
    parser.add_argument("--compile", action="store_true", help="torch.compile each form, as one graph")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        bench(torch.device(arguments.device), arguments)


def bench(device: torch.device, arguments: argparse.Namespace) -> None:
    weight = torch.randn(OUT_FEATURES, IN_FEATURES, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weights = {name: form.make(weight.to(device)) for name, form in FORMS.items()}
    if arguments.compile:
        # The forms share one line of nn.Linear, and torch counts compilations by the line.
        torch._dynamo.config.recompile_limit = len(FORMS) * len(arguments.rows)
    forwards = {name: forward(weight, compiled=arguments.compile) for name, weight in weights.items()}
    for rows in arguments.rows:
        inputs = torch.randn(rows, IN_FEATURES, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
        for call in forwards.values():
            seconds(call, inputs)  # compiles, and fills what is filled once
        rounds = [{name: seconds(call, inputs) for name, call in forwards.items()} for _ in range(arguments.rounds)]
        Console(width=120).print(table(rows, rounds, weights))


def forward(weight: torch.Tensor, *, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    linear = nn.Linear(1, 1, bias=False, device=weight.device)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    call: Callable[[torch.Tensor], torch.Tensor] = linear
    if compiled:
        call = torch.compile(linear, fullgraph=True, dynamic=False)  # each number of rows for itself
    return call


def seconds(call: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> float:
    """Seconds of one call, whatever was started before it finished."""
    on_gpu = inputs.device.type != "cpu"
    calls = GPU_CALLS if on_gpu else 1
    if on_gpu:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call(inputs)
    if on_gpu:
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / calls


def table(rows: int, rounds: list[dict[str, float]], weights: Mapping[str, torch.Tensor]) -> Table:
    def ratio(name: str, other: str) -> str:
        return f"{statistics.median(one[name] / one[other] for one in rounds):.2f}" if other else ""

    made = Table("form", "weight is", title=f"{rows} rows, threads: {torch.get_num_threads()}", title_justify="left")
    for column in ("MB", "ms", "/ bf16", "/ unpacked"):
        made.add_column(column, justify="right")
    for name, form in FORMS.items():
        middle = statistics.median(one[name] for one in rounds)
        size = tensor_bytes(weights[name]) / 1e6
        cells = (f"{size:.1f}", f"{1e3 * middle:.2f}", ratio(name, "bf16"), ratio(name, form.unpacked))
        made.add_row(name, type(weights[name]).__name__, *cells)
    return made


if __name__ == "__main__":
    main()
