"""Checkpoint → modules, as plain diffusers and transformers load them, in classes that compute on their device."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from aoquant import unpickling, versions
from aoquant.checkpoint.files import read_json
from aoquant.checkpoint.layout import CONFIG, locate_weights
from aoquant.configs import parse_config
from aoquant.engine import component as components
from aoquant.engine import devices, libraries, support
from aoquant.engine.formats import parts
from aoquant.errors import CheckpointError, ResourceError, UnsafeError, UsageError, is_out_of_memory
from aoquant.inspection import inspect
from aoquant.report import ComponentReport, Report
from aoquant.source import ComponentSource

SCHEMA = "aoquant.load/1"

Unpickled = Literal["", "plain", "allow-listed", "trusted"]
"""By torch's weights-only unpickler as it is; with harmless names added for the call; or without any check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How one component loaded. weights: tensor class → number of parameters and buffers, those it computes with.

    num_bytes: all storages. unpickled: how far its `.bin` was trusted; empty for safetensors. allowed: the harmless
    globals that torch's allow-list lacked. speed: what to expect of it on this device, in words; empty if the config is
    not known.
    """

    name: str
    class_name: str
    library: str
    device: str
    dtype: str
    weights: Mapping[str, int]
    num_bytes: int
    seconds: float
    unpickled: Unpickled
    allowed: tuple[str, ...]
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
            "unpickled": self.unpickled,
            "allowed": list(self.allowed),
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

    Nothing is unpickled but what torch's weights-only unpickler allows, and what of torch and torchao is known to be
    harmless. trust_pickle: where that stops, unpickle without any check, which runs whatever the file says. Raises
    UsageError for a device or component that is not there; CheckpointError for a checkpoint that is damaged or does
    not load here; UnsafeError for a `.bin` that would run code; ResourceError if it does not fit the device.
    """
    place = devices.choose(device)
    with libraries.uncollected():
        report = inspect(folder)
        found = {component.name: component for component in _quantized(report, folder)}
        if name not in found:
            raise UsageError(f"{folder} has no quantized component {name}", hint=f"it has {', '.join(found)}")
        return _load(Path(folder), found[name], place, report.versions, trust_pickle=trust_pickle)


def load_each(
    folder: str | Path, *, device: str = "cpu", trust_pickle: bool = False, offloaded: bool = False
) -> Iterator[Loaded]:
    """Load every quantized component of a folder in turn. One at a time stays in memory if the caller lets go of it.

    offloaded: onto the CPU, to compute on `device` when it is moved there. Raises as `load_component`.
    """
    place = devices.choose(device)
    report = inspect(folder)
    if not trust_pickle:
        for component in report.components:
            _refuse_unsafe(component)
    for problem in report.problems:
        if problem.severity == "error":
            raise CheckpointError(problem.text, hint=f"`aoquant inspect {folder}` shows every problem")
    for component in _quantized(report, folder):
        with libraries.uncollected():
            held = [_load(
                Path(folder), component, place, report.versions, trust_pickle=trust_pickle, offloaded=offloaded
            )]  # fmt: skip
        yield held.pop()  # no name of this generator's keeps it
        gc.collect()  # diffusers makes cycles of modules


def _quantized(report: Report, folder: str | Path) -> list[ComponentReport]:
    found = [component for component in report.components if component.config or component.num_quantized]
    if report.kind == "file":
        raise CheckpointError(f"{folder} is a file", hint="name the folder that holds it and its config.json")
    if not found:
        raise CheckpointError(f"{folder} holds no quantized component", hint="`aoquant quantize` makes one")
    return found


def _load(
    folder: Path,
    report: ComponentReport,
    place: torch.device,
    writers: Mapping[str, str],
    *,
    trust_pickle: bool,
    offloaded: bool = False,
) -> Loaded:
    if not trust_pickle:
        _refuse_unsafe(report)
    if not report.entries:
        _refuse_unsound(folder, report)
    versions.refuse_others(folder, report, writers)  # says more than that config and tensors disagree
    _refuse_unsound(folder, report)
    dtype = dtype_of(report)
    libraries.find_class(_library(report), report.class_name)  # outside `quiet`, which stops bars of what is imported
    options: dict[str, Any] = {
        "torch_dtype" if report.library == "diffusers" else "dtype": dtype,
        "use_safetensors": report.format == "safetensors",
        "local_files_only": True,
        "output_loading_info": True,
    }
    home = torch.device("cpu") if offloaded else place
    if home.type != "cpu":
        options["device_map"] = {"": home}
    start = time.perf_counter()
    with _fitting(report, home), libraries.quiet():
        module, missing, added, unpickled = _module(folder, report, options, dtype, trust_pickle=trust_pickle)
        if unpickled == "trusted":
            module = module.to(home)
        state = module.state_dict(keep_vars=True)  # else every tensor is detached
        _refuse_incomplete(folder, report, writers, state)
        _check_loaded(report, state, missing=missing)
        if any(entry.kind == "Int4Tensor" for entry in report.entries.values()):
            from aoquant import int4  # torchao is talkative when it is first imported

            int4.to_runnable(module, place)
    tensors = [*module.parameters(), *module.buffers()]
    return Loaded(
        module=module,
        report=LoadReport(
            name=report.name,
            class_name=report.class_name,
            library=report.library,
            device=str(home),
            dtype=str(dtype).removeprefix("torch."),
            weights=Counter(_kind(tensor) for tensor in tensors),
            num_bytes=storage_bytes(tensors),
            seconds=time.perf_counter() - start,
            unpickled=unpickled,
            allowed=tuple(added),
            speed=_speed(report, place),
        ),
    )


def _module(
    folder: Path, report: ComponentReport, options: Mapping[str, Any], dtype: torch.dtype, *, trust_pickle: bool
) -> tuple[nn.Module, Collection[str], list[str], Unpickled]:
    """The module by the safest way there is: it, the names that were not filled, what was allow-listed, and the way."""
    if not report.suspicious:  # else it is trusted, or it was refused
        try:
            module, missing, added = _from_pretrained(folder, report, options)
        except UnsafeError:
            if not trust_pickle:
                raise
        else:
            return (
                module,
                missing,
                added,
                "" if report.format == "safetensors" else "allow-listed" if added else "plain",
            )
    return _trusted(folder, report, dtype), (), [], "trusted"


def _from_pretrained(
    folder: Path, report: ComponentReport, options: Mapping[str, Any]
) -> tuple[nn.Module, Collection[str], list[str]]:
    """The module, the names that it could not fill, and what torch's allow-list lacked."""
    model_class: Any = libraries.find_class(_library(report), report.class_name)
    with unpickling.allowed(report.named) as added:
        try:
            module, info = model_class.from_pretrained(str(folder / report.name), **options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if stopped := unpickling.blocked(error):
                raise UnsafeError(
                    f"{report.title}: torch {torch.__version__} does not unpickle {stopped} safely",
                    hint=f"a newer torch may; {unpickling.TRUST_HINT}",
                ) from error
            raise CheckpointError(
                f"{report.title} does not load: {' '.join(str(error).split())[:200]}",
                hint=f"it was made with {_versions(report)}; installed are {_installed(report)}",
            ) from error
    return module, info["missing_keys"], added


def _trusted(folder: Path, report: ComponentReport, dtype: torch.dtype) -> nn.Module:
    """The component without its library's loader: built empty, and given what unpickling its files makes."""
    where = folder / report.name
    weights = locate_weights(where).weights
    config = read_json(where / CONFIG)
    config.pop("quantization_config", None)
    source = ComponentSource(
        name=report.name,
        folder=where,
        library=_library(report),
        class_name=report.class_name,
        config=config,
        weights=weights,
    )
    component = components.build(source, report.entries, sharded=len(weights.files) > 1, dtype=dtype)
    return components.assemble(component, unpickling.load_trusted(weights.files))


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
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        available = devices.available_bytes(place)
        has = f", and there are {available:,}" if available is not None else ""
        raise ResourceError(
            f"{report.title} does not fit {place}: its weights take {report.weight_bytes:,} bytes{has}",
            hint="free memory, or load it on a larger machine"
            if place.type == "cpu"
            else "free memory, or choose another --device",
        ) from error


def _refuse_unsafe(report: ComponentReport) -> None:
    try:
        report.refuse_unsafe()
    except UnsafeError as error:
        raise UnsafeError(error.message, hint=f"{error.hint}; {unpickling.TRUST_HINT}") from error


def _refuse_unsound(folder: Path, report: ComponentReport) -> None:
    for problem in report.problems:
        if problem.severity == "error" and not problem.is_unsafe:
            raise CheckpointError(
                f"{report.title}: {problem.text}", hint=f"`aoquant inspect {folder}` shows every problem"
            )


def _refuse_incomplete(
    folder: Path, report: ComponentReport, writers: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> None:
    """A `.bin` gives tensors the attributes that their class had when it was written."""
    for name, tensor in state.items():
        if lacking := versions.lacks(_plain(tensor)):
            fault = f"{name} has no {lacking}, unlike the {_kind(tensor)} of the torchao here"
            raise versions.misfit(folder, report, writers, fault)


def _check_loaded(report: ComponentReport, state: Mapping[str, torch.Tensor], *, missing: Collection[str]) -> None:
    """What they could not fill, diffusers leaves on the meta device and transformers makes up; a log line says so."""
    empty = [name for name, tensor in state.items() if tensor.device.type == "meta"]
    if unfilled := sorted({*empty, *missing}):
        raise CheckpointError(
            f"{report.title}: {len(unfilled)} tensors were not filled, first {unfilled[0]}",
            hint="config.json and the weights do not belong together",
        )
    quantized = {name for name, tensor in state.items() if type(_plain(tensor)) is not torch.Tensor}
    stored = sum(not entry.is_plain for entry in report.entries.values())
    if len(quantized) != stored:
        raise CheckpointError(
            f"{report.title}: {stored} tensors are stored quantized, {len(quantized)} were loaded so",
            hint="config.json and the weights do not belong together",
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data if type(tensor) is nn.Parameter else tensor  # a parameter of another class stays of that class


def _kind(tensor: torch.Tensor) -> str:
    return type(_plain(tensor)).__name__


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        for part in _leaves(_plain(tensor)):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that make up `tensor`, whose parts may be made up of others (torchao 0.15)."""
    if type(tensor) is torch.Tensor:
        yield tensor
        return
    for part in parts(tensor).values():
        yield from _leaves(part)


def dtype_of(report: ComponentReport) -> torch.dtype:
    """What a component was made in: the logical dtype of its quantized weights."""
    logical = Counter(entry.dtype for entry in report.entries.values() if not entry.is_plain)
    name = logical.most_common(1)[0][0] if logical else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _library(report: ComponentReport) -> libraries.Library:
    if report.library not in ("diffusers", "transformers") or not report.class_name:
        raise CheckpointError(
            f"{report.title}: its config.json does not say which class of which library it is for",
            hint="a component's config.json has _class_name (diffusers) or architectures (transformers)",
        )
    return "diffusers" if report.library == "diffusers" else "transformers"


def _versions(report: ComponentReport) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items()) or "unknown versions"


def _installed(report: ComponentReport) -> str:
    versions = libraries.versions()
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "torchao", report.library))
