"""What is installed, which devices there are, and what they can make and run: fit to paste into a bug report."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

import aoquant
from aoquant.configs import CONFIGS, parse_config
from aoquant.engine import devices, libraries, support

SCHEMA = "aoquant.env/1"


def report() -> dict[str, Any]:
    """As JSON values, `aoquant.env/1`. Nothing of it names the user, the machine or a folder."""
    places = [torch.device(name) for name in devices.available()]
    return {
        "schema": SCHEMA,
        "aoquant": aoquant.__version__,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "versions": libraries.versions(),
        "devices": [_described(place) for place in places],
        "configs": [
            {"config": name, "on": {str(place): _verdict(name, place) for place in places}} for name in CONFIGS
        ],
    }


def _verdict(name: str, place: torch.device) -> dict[str, str]:
    config = parse_config(name)
    unmade, unrun = support.probe(config, place)
    return {"cannot_make": unmade, "cannot_run": unrun, "speed": "" if unrun else support.speed(config, place)}


def _described(place: torch.device) -> dict[str, Any]:
    """kind: what it is. memory_bytes: its own, None where it has none of its own."""
    found: dict[str, Any] = {"device": str(place), "kind": "", "memory_bytes": None}
    if place.type == "cuda":
        properties = torch.cuda.get_device_properties(place)
        major, minor = torch.cuda.get_device_capability(place)
        found["kind"] = f"{properties.name}, compute capability {major}.{minor}"
        found["memory_bytes"] = properties.total_memory
    elif place.type == "xpu":
        xpu = torch.xpu.get_device_properties(place)
        found["kind"], found["memory_bytes"] = xpu.name, xpu.total_memory
    elif place.type == "cpu":
        found["kind"] = f"{torch.backends.cpu.get_cpu_capability()}, {devices.num_cpus()} cores"
    return found
