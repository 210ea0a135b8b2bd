"""`aoquant.load` against the stock loader on the same checkpoint: time to load, time until every byte was read too, and
peak memory then. Left of each pair is stock.

    python benchmarks/loading.py [--rounds 5] [--layers 4 --single-layers 8] [--folder DIR]

Each load is a process of its own, both in turns; medians, the ratio round by round. Needs 11 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = (("int8wo", "bin"), ("int8wo", "safetensors"), ("int4wo", "bin"))  # the stock int4wo is not made to compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--single-layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--one", nargs=2, metavar=("HOW", "CHECKPOINT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(load(*arguments.one)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench(Path(folder), arguments)


def bench(folder: Path, arguments: argparse.Namespace) -> None:
    from make_flux import make
    from rich.console import Console
    from rich.table import Table

    import aoquant

    make(folder / "source", layers=arguments.layers, single_layers=arguments.single_layers)
    columns = (
        "config",
        "format",
        "on disk",
        "stock s",
        "aoquant s",
        "ratio",
        "with every byte",
        "",
        "ratio",
        "peak",
        "",
    )
    table = Table(*columns)
    for config, format_ in CASES:
        made = folder / f"{config}-{format_}"
        aoquant.quantize(folder / "source", {"transformer": config}, output=made, format=format_)
        rounds = [(run("stock", made), run("aoquant", made)) for _ in range(arguments.rounds)]
        stock, ours = zip(*rounds, strict=True)
        load = statistics.median(one["load_s"] / other["load_s"] for other, one in rounds)
        ready = statistics.median(one["ready_s"] / other["ready_s"] for other, one in rounds)
        size = sum(path.stat().st_size for path in made.iterdir())
        table.add_row(
            config, format_, f"{size / 1e9:.2f} GB", *pair(stock, ours, "load_s"), f"{load:.2f}",
            *pair(stock, ours, "ready_s"), f"{ready:.2f}", *pair(stock, ours, "peak_bytes", 1e9),
        )  # fmt: skip
    Console(width=120).print(table)


def pair(stock: Any, ours: Any, key: str, unit: float = 1.0) -> tuple[str, str]:
    """The medians of both."""
    first, second = (statistics.median(found[key] for found in rounds) / unit for rounds in (stock, ours))
    return f"{first:.2f}", f"{second:.2f}"


def run(how: str, checkpoint: Path) -> dict[str, float]:
    for path in checkpoint.iterdir():
        path.read_bytes()  # both find the files in the page cache
    command = [sys.executable, __file__, "--one", how, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def load(how: str, checkpoint: str) -> dict[str, float]:
    """Load and read every byte. The libraries are imported before the clock starts."""
    import torch
    from diffusers import FluxTransformer2DModel
    from diffusers.quantizers import DiffusersAutoQuantizer
    from peak import peak_bytes

    from aoquant import loading
    from aoquant.engine import libraries
    from aoquant.engine.formats import parts

    _ = DiffusersAutoQuantizer
    libraries.load("torchao.quantization")
    start = time.perf_counter()
    if how == "stock":
        is_safetensors = any(Path(checkpoint).glob("*.safetensors"))
        module = FluxTransformer2DModel.from_pretrained(
            checkpoint, dtype=torch.bfloat16, use_safetensors=is_safetensors
        )
    else:
        module = loading.load_component(checkpoint, "").module
    loaded = time.perf_counter()
    for parameter in module.parameters():
        for part in parts(parameter.data).values():
            part.view(-1).view(torch.uint8)[::4096].sum()
    return {"load_s": loaded - start, "ready_s": time.perf_counter() - start, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    main()
