"""Checkpoint → modules, as plain diffusers and transformers load them, in classes that compute on their device."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aoquant.checkpoint.files import quoted, read_json
from aoquant.checkpoint.layout import CONFIG
from aoquant.configs import parse_config
from aoquant.engine import devices, libraries, pickled, support
from aoquant.engine.formats import parts
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UnsafeError, UsageError
from aoquant.inspection import inspect
from aoquant.report import ComponentReport, Report

SCHEMA = "aoquant.load/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How one component loaded. weights: tensor class → number of parameters and buffers, those it computes with.

    num_bytes: all storages. speed: what to expect of it on this device, in words; empty if the config is not known.
    """

    name: str
    class_name: str
    library: str
    device: str
    dtype: str
    weights: Mapping[str, int]
    num_bytes: int
    seconds: float
    speed: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": self.class_name,
            "library": self.library,
            "device": self.device,
            "dtype": self.dtype,
            "weights": dict(self.weights),
            "memory_bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "speed": self.speed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One component in memory, and how it got there."""

    module: nn.Module
    report: LoadReport


def component_names(folder: str | Path) -> tuple[str, ...]:
    """The quantized components of a checkpoint folder; `("",)` where the folder is one component.

    Raises CheckpointError if the folder cannot be read or holds none.
    """
    return tuple(component.name for component in _quantized(inspect(folder), folder))


def load_component(folder: str | Path, name: str, *, device: str = "cpu", trust_pickle: bool = False) -> Loaded:
    """Load one component onto `device`, in the dtype it was made in; int4wo as the class that computes there.

    Nothing is unpickled but what torch's weights-only unpickler takes, and what of torchao's and aoquant's is known to
    be harmless. trust_pickle: unpickle whatever a `.bin` holds, which may run code, where that is not enough. Raises
    UsageError for a device or component that is not there; CheckpointError for a checkpoint that is damaged or does
    not load here; UnsafeError for a `.bin` that would run code; ResourceError if it does not fit the device.
    """
    place = devices.choose(device)
    report = inspect(folder)
    found = {component.name: component for component in _quantized(report, folder)}
    if name not in found:
        raise UsageError(f"{folder} has no quantized component {name}", hint=f"it has {', '.join(found)}")
    return _load(Path(folder), found[name], place, trust_pickle=trust_pickle)


def load_each(folder: str | Path, *, device: str = "cpu", trust_pickle: bool = False) -> Iterator[Loaded]:
    """Load every quantized component of a folder in turn. One at a time stays in memory if the caller lets go of it."""
    place = devices.choose(device)
    report = inspect(folder)
    if not trust_pickle:
        _refuse_unsafe(report)
    for problem in report.problems:
        if problem.severity == "error":
            raise CheckpointError(problem.text, hint=f"`aoquant inspect {folder}` shows every problem")
    for component in _quantized(report, folder):
        yield _load(Path(folder), component, place, trust_pickle=trust_pickle)


def _quantized(report: Report, folder: str | Path) -> list[ComponentReport]:
    found = [component for component in report.components if component.config or component.num_quantized]
    if report.kind == "file":
        raise CheckpointError(f"{folder} is a file", hint="name the folder that holds it and its config.json")
    if not found:
        raise CheckpointError(f"{folder} holds no quantized component", hint="`aoquant quantize` makes one")
    return found


def _refuse_unsafe(report: Report | ComponentReport) -> None:
    try:
        report.refuse_unsafe()
    except UnsafeError as error:
        raise UnsafeError(error.message, hint=f"{error.hint}; --trust-pickle loads it all the same") from None


def _load(folder: Path, report: ComponentReport, place: torch.device, *, trust_pickle: bool) -> Loaded:
    _refuse_unsound(folder, report, trust_pickle=trust_pickle)
    if report.library == "diffusers" and report.format == "safetensors" and not libraries.reads_safetensors():
        raise CheckpointError(
            f"{_title(report)}: diffusers reads quantized safetensors with torchao 0.16 or newer, installed is "
            f"{libraries.versions()['torchao']}",
            hint="update torch and torchao, or make it again with --format bin",
        )
    _refuse_versions(folder / report.name, report)
    dtype = dtype_of(report)
    model_class: Any = libraries.find_class(_library(report), report.class_name)
    options: dict[str, Any] = {
        "torch_dtype" if report.library == "diffusers" else "dtype": dtype,
        "use_safetensors": report.format == "safetensors",
        "local_files_only": True,
        "output_loading_info": True,
    }
    if place.type != "cpu":
        options["device_map"] = {"": place}
    start = time.perf_counter()
    with _fitting(report, place), libraries.quiet(), pickled.harmless_allowed():
        try:
            module: nn.Module
            if trust_pickle and report.format == "bin":
                files = [Path(file.path).name for file in report.files if file.status == "ok"]
                module = pickled.load_trusted(model_class, report.library, folder / report.name, files).to(place)
                missing: Collection[str] = ()
            else:
                module, info = model_class.from_pretrained(str(folder / report.name), **options)
                missing = info["missing_keys"]
        except (torch.OutOfMemoryError, AoquantError):
            raise
        except Exception as error:
            if blocked := pickled.blocked_global(error):
                raise UnsafeError(
                    f"{_title(report)}: torch {torch.__version__} does not unpickle {blocked} unless it is trusted",
                    hint="if you trust the folder, --trust-pickle loads it; else make it again as safetensors",
                ) from error
            raise CheckpointError(
                f"{_title(report)} does not load: {' '.join(str(error).split())[:200]}",
                hint=f"it was made with {_versions(report)}; installed are {_installed(report)}",
            ) from error
        _check_loaded(report, module, missing=missing)
        from aoquant import int4  # torchao is talkative when it is first imported

        int4.to_runnable(module)
    tensors = [*module.parameters(), *module.buffers()]
    return Loaded(
        module=module,
        report=LoadReport(
            name=report.name,
            class_name=report.class_name,
            library=report.library,
            device=str(place),
            dtype=str(dtype).removeprefix("torch."),
            weights=Counter(_kind(tensor) for tensor in tensors),
            num_bytes=storage_bytes(tensors),
            seconds=time.perf_counter() - start,
            speed=_speed(report, place),
        ),
    )


def _speed(report: ComponentReport, place: torch.device) -> str:
    try:
        config = parse_config(report.config_name)
    except UsageError:  # not made by aoquant
        return ""
    return support.speed(config, place)


@contextlib.contextmanager
def _fitting(report: ComponentReport, place: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"{_title(report)} does not fit {place}: {report.weight_bytes:,} bytes",
            hint="free memory there, or choose another --device",
        ) from error


def _refuse_unsound(folder: Path, report: ComponentReport, *, trust_pickle: bool) -> None:
    if not trust_pickle:
        _refuse_unsafe(report)
    elif report.suspicious:
        return  # what is called cannot be described: it shows when it is loaded
    for problem in report.problems:
        if problem.severity == "error":
            raise CheckpointError(
                f"{_title(report)}: {problem.text}", hint=f"`aoquant inspect {folder}` shows every problem"
            )


def _refuse_versions(folder: Path, report: ComponentReport) -> None:
    """Raise CheckpointError where the quantization block is one that the installed libraries do not read.

    Said before a tensor is touched, for their own words name neither who wrote it nor what to do.
    """
    block = read_json(folder / CONFIG).get("quantization_config")
    if not isinstance(block, Mapping) or block.get("quant_method") != "torchao":
        return
    described = block.get("quant_type")
    if isinstance(described, str):
        raise CheckpointError(
            f"{_title(report)}: config.json says quant_type {quoted(described)}, as diffusers before 0.38 and "
            "transformers before 5 wrote it; the installed ones read torchao's own config objects",
            hint=f"quantize the model again, to {_todays_name(described)}, or load it with the versions that wrote it",
        )
    inner = described.get("default") if isinstance(described, Mapping) else None
    if not isinstance(inner, Mapping):
        raise CheckpointError(
            f"{_title(report)}: config.json has a quantization_config that names no config of torchao",
            hint="it is incomplete, or edited: download or make it again",
        )
    libraries.load("torchao.quantization")  # quietly
    from torchao.core.config import config_from_dict

    try:
        config_from_dict(dict(inner))
    except Exception as error:
        name, version = (quoted(inner.get(key), quote=False) for key in ("_type", "_version"))
        reason = quoted(" ".join(str(error).split()), quote=False, limit=250)
        installed = libraries.versions()["torchao"]
        raise CheckpointError(
            f"{_title(report)}: torchao {installed} does not read {name} version {version}: {reason}",
            hint=f"it was made with {_versions(report)}: install those, or update torchao, or make it again",
        ) from error


def _todays_name(spelling: str) -> str:
    try:
        return str(parse_config(spelling))
    except UsageError:
        return "a config of `aoquant configs`"


def _check_loaded(report: ComponentReport, module: nn.Module, *, missing: Collection[str]) -> None:
    """What they could not fill, diffusers leaves on the meta device and transformers makes up; a log line says so."""
    empty = [name for name, tensor in module.state_dict().items() if tensor.device.type == "meta"]
    if unfilled := sorted({*empty, *missing}):
        raise CheckpointError(
            f"{_title(report)}: {len(unfilled)} tensors were not filled, first {unfilled[0]}",
            hint="config.json and the weights do not belong together",
        )
    quantized = {name for name, tensor in module.state_dict().items() if len(parts(_plain(tensor))) > 1}
    stored = sum(not entry.is_plain for entry in report.entries.values())
    if len(quantized) != stored:
        raise CheckpointError(
            f"{_title(report)}: {stored} tensors are stored quantized, {len(quantized)} were loaded so",
            hint="config.json and the weights do not belong together",
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data if isinstance(tensor, nn.Parameter) else tensor


def _kind(tensor: torch.Tensor) -> str:
    return type(_plain(tensor)).__name__


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        for part in parts(_plain(tensor)).values():
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def dtype_of(report: ComponentReport) -> torch.dtype:
    """What a component was made in: the logical dtype of its quantized weights."""
    logical = Counter(entry.dtype for entry in report.entries.values() if not entry.is_plain)
    name = logical.most_common(1)[0][0] if logical else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _library(report: ComponentReport) -> libraries.Library:
    if report.library not in ("diffusers", "transformers") or not report.class_name:
        raise CheckpointError(
            f"{_title(report)}: its config.json does not say which class of which library it is for",
            hint="a component's config.json has _class_name (diffusers) or architectures (transformers)",
        )
    return "diffusers" if report.library == "diffusers" else "transformers"


def _versions(report: ComponentReport) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items()) or "unknown versions"


def _installed(report: ComponentReport) -> str:
    versions = libraries.versions()
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "torchao", report.library))


def _title(report: ComponentReport) -> str:
    return report.name or report.class_name
