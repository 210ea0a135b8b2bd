"""Whether the installed versions can load a checkpoint at all, judged from its texts and what its tensors are called.

Nothing is unpickled, and no class that a file names is called with what the file says.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aoquant import unpickling
from aoquant.checkpoint.config_block import ConfigBlock, read_config_block
from aoquant.checkpoint.files import quoted, read_json
from aoquant.checkpoint.layout import CONFIG
from aoquant.checkpoint.tensors import LEGACY_KINDS, Entry
from aoquant.configs import parse_config
from aoquant.engine import libraries
from aoquant.errors import CheckpointError, UsageError
from aoquant.report import ComponentReport

# In torchao 0.15 the default of both is 1.
_MADE_WHEN_ASKED = {"Int8WeightOnlyConfig": 2, "Int8DynamicActivationInt8WeightConfig": 2}
_PROTOCOL = (
    "tensor_data_names", "tensor_attribute_names", "optional_tensor_data_names", "optional_tensor_attribute_names"
)  # fmt: skip


def refuse_others(folder: Path, report: ComponentReport, writers: Mapping[str, str]) -> None:
    """Raise CheckpointError where these versions cannot load the component: who wrote it, what is here, the way out.

    folder: the checkpoint's. writers: the versions that its aoquant.json names, if it has one.
    """
    fault = next(_faults(read_json(folder / report.name / CONFIG), report), "")
    if fault:
        raise misfit(folder, report, writers, fault)


def misfit(folder: Path, report: ComponentReport, writers: Mapping[str, str], fault: str) -> CheckpointError:
    """The error for a checkpoint of versions that do not fit, `fault` being what shows it."""
    known = {**report.versions, **writers}
    by = ", ".join(f"{name} {known[name]}" for name in ("torchao", "diffusers", "transformers") if name in known)
    ways = [f"`aoquant quantize` the original model again with torchao {_installed()}"]
    if "torchao" in writers and writers["torchao"] != _installed():
        ways.append(f"pip install 'torchao=={writers['torchao']}'")
    if upgradable(report) or config_name(folder, report):  # of the latter only config.json may be old
        ways.insert(0, f"`aoquant upgrade {folder}` rewrites it where every value carries over")
    return CheckpointError(
        f"{report.name or report.class_name}: {fault} (written by {by or 'unknown versions'}; "
        f"installed: torchao {_installed()}, torch {torch.__version__})",
        hint=", or ".join(ways),
    )


def upgradable(report: ComponentReport) -> bool:
    """Whether `aoquant upgrade` is worth a try: the tensors are of classes that it knows."""
    return any(
        entry.kind in LEGACY_KINDS or (entry.kind == "Int8Tensor" and "zero_point" not in entry.parts)
        for entry in report.entries.values()
    )


def config_name(folder: Path, report: ComponentReport) -> str:
    """The config of a component of `folder` as aoquant names it, by aoquant.json or by the words of older libraries."""
    if report.config_name:
        return report.config_name
    block = read_config_block(read_json(folder / report.name / CONFIG))
    try:
        return str(parse_config(block.legacy_name)) if block is not None and block.legacy_name else ""
    except UsageError:
        return ""


def lacks(tensor: torch.Tensor) -> str:
    """An attribute that `tensor`'s class, as it is here, gives every tensor and this one has not; or ""."""
    names = [name for group in _PROTOCOL for name in getattr(type(tensor), group, ())]
    return next((name for name in names if not hasattr(tensor, name)), "")


def _faults(config: Mapping[str, Any], report: ComponentReport) -> Iterator[str]:
    block = read_config_block(config)
    if block is not None:
        yield from _form_faults(block)
    for path in unpickling.missing(report.named):
        yield f"its .bin holds {quoted(path, quote=False)}, which is not in the torchao here"
    quantized = [entry for entry in report.entries.values() if not entry.is_plain]
    if report.format == "safetensors" and quantized:
        yield from _safetensors_faults(quantized)
    if block is not None:
        yield from _config_faults(config["quantization_config"])
    for entry in quantized:
        yield from _part_faults(entry)


def _form_faults(block: ConfigBlock) -> Iterator[str]:
    if block.method != "torchao":
        yield f"{CONFIG} says {block.method}, and what torchao did not quantize is for plain diffusers to load"
    if block.legacy_name:
        yield f"{CONFIG} says quant_type {quoted(block.legacy_name)}, as diffusers before 0.38 wrote it"
    elif not block.types:
        yield f"{CONFIG} has a quantization_config in no form that torchao reads"


def _config_faults(block: Mapping[str, Any]) -> Iterator[str]:
    for name, version in _types(block):
        found = _config_class(name)
        if found is None:
            yield f"{CONFIG} names {quoted(name)}, which is not in the torchao here"
            continue
        newest = max(getattr(found, "version", 1), _MADE_WHEN_ASKED.get(name, 1))
        if type(version) is not int or not hasattr(found, "version") or version == newest:
            continue
        if version > newest:
            yield f"{CONFIG} has version {version} of {name}, later than {newest}, the latest here"
        elif _is_removed(found, version):
            yield f"{CONFIG} has version {version} of {name}, which the torchao here has dropped"


def _types(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, version) of everything that torchao would look up and call, from the outside in."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("_type"), str) and name != "torch.dtype":
            yield name, value.get("_version")
        for inner in value.values():
            yield from _types(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _types(inner)


def _config_class(name: str) -> Any:
    """The class that torchao would call for a `_type`, if it is a config, an enum or a layout; else None.

    torchao calls whatever has the name in one of its modules.
    """
    with libraries.quiet():
        for module_name in libraries.config_modules():
            try:
                found = getattr(importlib.import_module(module_name), name)
            except (ImportError, AttributeError):
                continue
            is_data = isinstance(found, type) and (
                dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or hasattr(found, "_fields")
            )
            return found if is_data else None
    return None


def _is_removed(config_class: Any, version: int) -> bool:
    try:
        with libraries.quiet():
            config_class(version=version)
    except (ValueError, AssertionError):
        return True
    except TypeError:  # it wants more arguments, and might take them
        return False
    return False


def _safetensors_faults(quantized: list[Entry]) -> Iterator[str]:
    if not libraries.has_safetensors():
        yield "it is in safetensors, which torchao reads from 0.16 on"
    known = libraries.safetensors_classes()
    for entry in quantized:
        if entry.kind not in known:
            yield f"its safetensors hold {quoted(entry.kind, quote=False)}, which the torchao here does not read"


def _part_faults(entry: Entry) -> Iterator[str]:
    found = unpickling.data(f"{entry.module}.{entry.kind}") if entry.module else None
    found = found or libraries.safetensors_classes().get(entry.kind)
    needed = set(getattr(found, "tensor_data_names", ()))
    stored = {part.partition(".")[0] for part in entry.parts}
    if not needed:
        return
    more = stored - needed - set(getattr(found, "optional_tensor_data_names", ()))
    for names, verb in ((more, "has"), (needed - stored, "lacks")):
        if names:
            name = quoted(sorted(names)[0], quote=False)
            yield f"{quoted(entry.name)} {verb} a {name}, unlike the {entry.kind} of the torchao here"


def _installed() -> str:
    return libraries.versions()["torchao"]
