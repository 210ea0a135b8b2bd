"""How far a `.bin` is trusted: torch's allow-list, widened for one load by what is known to be harmless; or everything.

torch's weights-only unpickler makes nothing but what is on its list. torch 2.6 knows no sub-byte dtypes, and torchao
registers a class only where its module is imported. What a file names is looked up here: dtypes of torch, and classes
of torchao and aoquant that are plain data. Nothing else is added, and the list is afterwards as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aoquant.engine import libraries
from aoquant.errors import CheckpointError

TRUST_HINT = (
    "if you trust whoever made it, --trust-pickle (trust_pickle=True) unpickles it all the same and runs what it says"
)

_SUB_BYTE = re.compile(r"torch\.u?int[1-7]")
# Where torchao 0.15 to 0.18 keep their tensors, layouts, enums and configs. A file's word imports nothing else.
_DATA_MODULES = re.compile(
    r"aoquant\.lowbit"
    r"|torchao\.(dtypes|float8|quantization|utils|prototype\.(dtypes|quantization|safetensors|mx_formats"
    r"|int4_opaque_tensor|float8_opaque_tensor))(\.(?!_|scripts|pt2e)\w+)*"
)
_BLOCKED = (
    r"Unsupported global: GLOBAL (\S+)",
    r"[Uu]nsupported class (\S+)",
    r"(?:call reduce for unrecognized function|create new object for class|build instance of type) (\S+)",
)


class _MissingError(Exception):
    """The installed versions have no such name."""


def missing(named: Iterable[str]) -> list[str]:
    """What of the globals `named` is a class of torchao's or aoquant's that the installed ones lack."""
    found = []
    for path in named:
        try:
            _data(path)
        except _MissingError:
            found.append(path)
    return found


@contextlib.contextmanager
def allowed(named: Iterable[str]) -> Iterator[list[str]]:
    """Let the weights-only unpickler make what of `named` is harmless; gives what had to be added for that."""
    known = _allowed_already()
    added = {path: thing for path in named if path not in known and (thing := data(path)) is not None}
    with torch.serialization.safe_globals(_as_torch_takes_them(added)):
        yield list(added)


def _allowed_already() -> Collection[str]:
    # Private, and the only place that knows them all: `get_safe_globals` leaves torch's own out.
    unpickler: Any = importlib.import_module("torch._weights_only_unpickler")
    names: set[str] = unpickler._get_allowed_globals().keys() | unpickler._get_user_allowed_globals().keys()
    return names


def _as_torch_takes_them(added: Mapping[str, Any]) -> list[Any]:
    """torch 2.5 goes by an object's own name, so a dtype, which has none, cannot be added there."""
    if torch.__version__ >= torch.torch_version.TorchVersion("2.6"):
        return [(thing, path) for path, thing in added.items()]
    return [thing for path, thing in added.items() if f"{thing.__module__}.{getattr(thing, '__name__', '')}" == path]


@functools.cache
def data(path: str) -> Any:
    """The dtype or class at `path` if it is here, and data and nothing else; else None."""
    try:
        return _data(path)
    except _MissingError:
        return None


def _data(path: str) -> Any:
    """The dtype or class at `path` if it is data and nothing else; None for what is neither. Raises _MissingError."""
    module_name, _, name = path.rpartition(".")
    if _SUB_BYTE.fullmatch(path):
        return getattr(torch, name, None)
    if not _DATA_MODULES.fullmatch(module_name) or not name[:1].isupper():
        return None
    with libraries.quiet():
        try:
            found = getattr(importlib.import_module(module_name), name)
        except Exception as error:  # a module of torchao's may fail in its own ways on another torch
            raise _MissingError from error
    return found if _is_data(found) else None


def _is_data(found: Any) -> bool:
    if not isinstance(found, type) or found.__module__.partition(".")[0] not in ("torchao", "aoquant"):
        return False
    is_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return is_tuple or issubclass(found, torch.Tensor | enum.Enum) or dataclasses.is_dataclass(found)


def blocked(error: BaseException) -> str:
    """The global at which torch's weights-only unpickler stopped, or "" if `error` came from something else.

    diffusers raises an error of its own while that one is being handled, so the chain is searched.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
        if isinstance(current, pickle.UnpicklingError):
            for pattern in _BLOCKED:
                if match := re.search(pattern, str(current)):
                    return match[1].rstrip(",")
        if isinstance(current, ValueError) and "vulnerability issue in `torch.load`" in str(current):
            return "every .bin: transformers reads none on this torch"
    return ""


def load_trusted(files: Iterable[Path]) -> dict[str, Any]:
    """The state dict in `files`, unpickled without any check: what a file says is run. Mapped, not read.

    Raises CheckpointError where that fails; a class that the installed versions lack is named.
    """
    state: dict[str, Any] = {}
    for file in files:
        try:
            content = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        except (ModuleNotFoundError, AttributeError) as error:
            raise CheckpointError(
                f"{file.name} holds what the installed versions lack: {error}",
                hint="install the versions that wrote it; trusting it does not help",
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"{file.name} cannot be unpickled: {' '.join(str(error).split())[:200] or type(error).__name__}",
                hint="it is damaged, or was written by versions that do not fit",
            ) from error
        if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
            content = content["state_dict"]
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{file.name} holds no state dict", hint="save the model's state_dict()")
        state.update(content)
    return state
