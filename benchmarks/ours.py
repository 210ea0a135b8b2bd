"""Quantize one component with `aoquant quantize`, in this process, and report like benchmarks/stock.py."""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import json
import sys

from diffusers import FluxTransformer2DModel
from diffusers.quantizers import DiffusersAutoQuantizer
from peak import peak_bytes

from aoquant.cli import main
from aoquant.engine import job, libraries, run

if __name__ == "__main__":
    # Imported first, so that `work_s` means the same here as for stock: what the libraries take to import is left out.
    _ = FluxTransformer2DModel, DiffusersAutoQuantizer, job, run
    libraries.load("torchao.quantization")
    started = time.perf_counter()
    code = main(["quantize", *sys.argv[1:], "--quiet", "--json"])
    ended = time.perf_counter()
    report = {
        "work_s": ended - started,
        "process_s": ended - STARTED,
        "peak_bytes": peak_bytes(),
    }
    sys.stderr.write(json.dumps(report) + "\n")
    sys.exit(code)
