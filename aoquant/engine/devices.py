"""Where the arithmetic runs."""

from __future__ import annotations

import contextlib
import os

import torch

from aoquant.errors import UsageError


def choose(name: str | torch.device) -> torch.device:
    """`auto` (an accelerator if there is one) or a device's own name → a device that exists. Raises UsageError."""
    name = str(name)
    if name == "auto":
        return torch.device(available()[0])
    have = available()
    if name in have or f"{name}:0" in have:
        return torch.device(name)
    raise UsageError(f"there is no device {name} here", hint=f"--device is one of auto, {', '.join(have)}")


def available() -> list[str]:
    """The devices of this machine, fastest kind first, `cpu` last."""
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.xpu.is_available():
        found += [f"xpu:{index}" for index in range(torch.xpu.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def available_bytes(place: torch.device) -> int | None:
    """The memory of an accelerator that this process holds or may have; None where that is not known, as for CPUs."""
    if place.type not in ("cuda", "xpu"):
        return None
    backend = getattr(torch, place.type)
    free: int = backend.mem_get_info(place)[0]
    held: int = backend.memory_reserved(place)
    return free + held


def synchronize(place: torch.device) -> None:
    """Wait until all that was asked of `place` is done. The first time, that sets it up."""
    if place.type in ("cuda", "xpu"):
        getattr(torch, place.type).synchronize(place)
    elif place.type == "mps":
        torch.mps.synchronize()


def num_cpus() -> int:
    """The cores that this process may use."""
    with contextlib.suppress(AttributeError):  # not on macOS and Windows
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
