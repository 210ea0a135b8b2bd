"""aoquant against the stock path, in turns on the same machine: wall time, peak memory, and whether tensors are equal.

    python benchmarks/run.py [--rounds 3] [--layers 4 --single-layers 8] [--folder DIR]

Medians of several rounds; the ratio is taken round by round. Needs about 14 GB of disk and 9 GB of memory at 4 8.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_flux import make
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
CASES = (
    ("int8wo", "bin", "int8wo"),
    ("int8wo", "safetensors", ""),
    ("fp8wo", "bin", "fp8wo"),
    ("uint4wo", "bin", "uint4wo:layout=unpacked"),
)  # config, format, what stock makes to compare with: it has no packed form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--single-layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--only", help="one config")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench(Path(folder), arguments)


def bench(folder: Path, arguments: argparse.Namespace) -> None:
    source, twice = folder / "source", folder / "twice"
    make(source, layers=arguments.layers, single_layers=arguments.single_layers)
    columns = ("config", "format", "stock s", "aoquant s", "ratio", "stock peak", "aoquant peak", "tensors")
    table = Table(*columns)
    for config, format_, stock_config in CASES:
        if arguments.only not in (None, config):
            continue
        rounds = [measure(folder, source, config, format_, stock_config) for _ in range(arguments.rounds)]
        table.add_row(config, format_, *summary(rounds))
        Console(width=120).print(table)
    shutil.rmtree(source)
    make(twice, layers=2 * arguments.layers, single_layers=2 * arguments.single_layers)
    double = run("ours.py", twice, folder / "ours", "int8wo", "bin")
    Console(width=120).print(f"twice the layers: peak {double['peak_bytes'] / 1e6:.0f} MB, {double['work_s']:.1f} s")


def measure(folder: Path, source: Path, config: str, format_: str, stock_config: str) -> dict[str, Any]:
    ours = run("ours.py", source, folder / "ours", config, format_)
    stock = run("stock.py", source, folder / "stock", stock_config, format_) if stock_config else None
    equal = same(folder / "ours", folder / "stock", format_) if stock and config == "int8wo" else None
    for made in ("ours", "stock"):
        shutil.rmtree(folder / made, ignore_errors=True)
    return {"ours": ours, "stock": stock, "equal": equal}


def run(script: str, source: Path, out: Path, config: str, format_: str) -> dict[str, float]:
    names = {"stock.py": [str(out), "--config", config], "ours.py": ["--transformer", config, "-o", str(out)]}
    command = [sys.executable, str(HERE / script), str(source), *names[script], "--format", format_]
    settle(source)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    text = done.stdout if script == "stock.py" else done.stderr
    report: dict[str, float] = json.loads(text.strip().splitlines()[-1])
    return report


def settle(source: Path) -> None:
    """Start every run alike: nothing left unwritten by the one before, the source in the page cache."""
    os.sync()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def same(left: Path, right: Path, format_: str) -> bool:
    """Whether both folders hold the same tensors, bit by bit, read with mmap one at a time."""
    import torch
    import torchao  # noqa: F401  (registers its classes with the weights-only unpickler)

    from aoquant.engine.formats import parts

    if format_ != "bin":
        return True
    a, b = (torch.load(next(folder.glob("*.bin")), mmap=True, weights_only=True) for folder in (left, right))
    if sorted(a) != sorted(b):
        return False

    return all(
        type(a[name]) is type(b[name])
        and all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            for x, y in zip(parts(a[name]).values(), parts(b[name]).values(), strict=True)
        )
        for name in a
    )


def summary(rounds: list[dict[str, Any]]) -> list[str]:
    def middle(who: str, key: str) -> float:
        values: list[float] = [one[who][key] for one in rounds]
        return statistics.median(values)

    ours = [f"{middle('ours', 'work_s'):.1f}", f"{middle('ours', 'peak_bytes') / 1e9:.2f} GB"]
    if rounds[0]["stock"] is None:
        return ["", ours[0], "", "", ours[1], ""]
    ratio = statistics.median(one["ours"]["work_s"] / one["stock"]["work_s"] for one in rounds)
    equal = {True: "equal", False: "DIFFERENT", None: ""}[rounds[0]["equal"]]
    stock = [f"{middle('stock', 'work_s'):.1f}", f"{middle('stock', 'peak_bytes') / 1e9:.2f} GB"]
    return [stock[0], ours[0], f"{ratio:.3f}", stock[1], ours[1], equal]


if __name__ == "__main__":
    main()
