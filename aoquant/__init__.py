"""Turn a diffusers pipeline into a torchao-quantized checkpoint, streamed.

    >>> import aoquant
    >>> aoquant.quantize("org/pipeline", {"transformer": "int8wo"}, output="pipeline-int8wo")
    >>> transformer = aoquant.load("pipeline-int8wo", component="transformer")

Importing this package imports nothing heavy; `quantize`, `plan` and `load` import torch when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aoquant.api import inspect, join, load, load_pipeline, plan, push, quantize, upgrade, verify
    from aoquant.errors import (
        AoquantError,
        CheckpointError,
        GateError,
        ResourceError,
        SourceError,
        UnsafeError,
        UsageError,
    )

__all__ = [
    "AoquantError",
    "CheckpointError",
    "GateError",
    "ResourceError",
    "SourceError",
    "UnsafeError",
    "UsageError",
    "__version__",
    "inspect",
    "join",
    "load",
    "load_pipeline",
    "plan",
    "push",
    "quantize",
    "upgrade",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aoquant' has no attribute '{name}'")
    from importlib import import_module

    home = "aoquant.errors" if name.endswith("Error") else "aoquant.api"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
