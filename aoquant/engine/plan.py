"""Component × config → each tensor's fate, and every output file to the byte. No weight is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aoquant.checkpoint import layout
from aoquant.checkpoint.tensors import Entry
from aoquant.configs import QuantConfig
from aoquant.engine import component as components
from aoquant.engine import formats
from aoquant.engine.component import Component
from aoquant.engine.formats import FileLayout, Format, State
from aoquant.engine.quantize import Kernel, kernel_for
from aoquant.errors import CheckpointError, GateError, UsageError
from aoquant.source import ComponentSource

Fate = Literal["quantize", "keep", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What becomes of one tensor.

    name: in the module. stored: in the source's files. saved: in the output's, which are the module's own for diffusers
    and the source's for transformers, as each library saves. fate: `quantize`; `keep`, a Linear weight
    that stays as it is, for `reason`; or `copy`, anything else. dtype: what its values are cast to first. kind: the
    class it ends in. num_bytes: its data in the output.
    """

    name: str
    stored: str
    saved: str
    fate: Fate
    reason: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One weight file and the tensors in it, in the order in which they are made."""

    layout: FileLayout
    tensors: tuple[TensorPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """Everything about one component that can be known without its weights.

    texts: small files beside the weights, name → content (config.json, and the index of a sharded checkpoint).
    ignored: stored names that the library does not read. tied: names that are not stored, and the name each repeats.
    source_bytes: the tensors that are read; unquantized_bytes: what they would take in `dtype`, unquantized.
    """

    component: Component
    entries: Mapping[str, Entry]
    config: QuantConfig
    kernel: Kernel
    format: Format
    tensors: tuple[TensorPlan, ...]
    shards: tuple[ShardPlan, ...]
    texts: Mapping[str, str]
    ignored: tuple[str, ...]
    source_bytes: int
    unquantized_bytes: int

    @property
    def source(self) -> ComponentSource:
        return self.component.source

    @property
    def tied(self) -> Mapping[str, str]:
        return self.component.tied

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_quantized(self) -> int:
        return sum(tensor.fate == "quantize" for tensor in self.tensors)

    @property
    def kept(self) -> Counter[str]:
        """Reason → number of Linear weights kept for it."""
        return Counter(tensor.reason for tensor in self.tensors if tensor.fate == "keep")

    @property
    def num_other(self) -> int:
        return sum(tensor.fate == "copy" for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.source.name,
            "library": self.source.library,
            "class": self.source.class_name,
            "config": str(self.config),
            "streamed": not self.component.whole_reason,
            "whole_reason": self.component.whole_reason,
            "quantized": self.num_quantized,
            "kept": dict(self.kept),
            "other": self.num_other,
            "source_bytes": self.source_bytes,
            "tensor_bytes": self.tensor_bytes,
            "tied": dict(self.tied),
            "ignored": list(self.ignored),
            "tensors": [
                {
                    "name": tensor.name,
                    "fate": tensor.fate,
                    "reason": tensor.reason,
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "kind": tensor.kind,
                    "bytes": tensor.num_bytes,
                }
                for tensor in self.tensors
            ],
        }


class SkipPatterns:
    """The `--skip` patterns, and which of them have matched something so far.

    A pattern is a whole dotted module name in which `*` stands for any run of characters; a module that matches takes
    everything inside it along. `component:pattern` speaks of one component only.
    """

    def __init__(self, patterns: Sequence[str], *, components: Collection[str]) -> None:
        self._patterns: list[tuple[str, str, re.Pattern[str]]] = []
        self._used: set[str] = set()
        for text in patterns:
            scope, colon, pattern = text.rpartition(":")
            if colon and scope not in components:
                raise UsageError(
                    f"--skip {text}: {scope} is not being quantized",
                    hint=f"quantized are: {', '.join(sorted(filter(None, components))) or 'the component itself'}",
                )
            if not pattern:
                raise UsageError(f"--skip '{text}' names no module", hint="write for example --skip proj_out")
            expression = ".*".join(re.escape(piece) for piece in pattern.split("*"))
            self._patterns.append((text, scope, re.compile(expression)))

    def match(self, component: str, module: str) -> str:
        """The first pattern that covers `module` (or a module around it), or an empty string.

        component: empty where the source is a single one, whatever it was called.
        """
        found = ""
        names = [module]
        while "." in names[-1]:
            names.append(names[-1].rpartition(".")[0])
        for text, scope, expression in self._patterns:
            if (scope in ("", component) or not component) and any(expression.fullmatch(name) for name in names):
                self._used.add(text)
                found = found or text
        return found

    def check_used(self, linear_names: Collection[str]) -> None:
        """Raise UsageError for a pattern that covered no Linear."""
        import difflib

        for text, _, _ in self._patterns:
            if text not in self._used:
                near = difflib.get_close_matches(text.rpartition(":")[2], linear_names, n=1, cutoff=0.4)
                raise UsageError(
                    f"--skip {text} matches no Linear module",
                    hint=f"did you mean {near[0]}?" if near else "`aoquant plan --json` lists every module",
                )


def plan_component(
    component: Component,
    entries: Mapping[str, Entry],
    config: QuantConfig,
    *,
    skip: SkipPatterns,
    format: Format,
    max_shard_bytes: int,
) -> ComponentPlan:
    """Decide every tensor's fate and lay out the files.

    entries: what the source's weight files hold. Raises CheckpointError for a source that is already quantized or
    does not fit its class; UsageError if nothing would be quantized; GateError if the result would not be smaller.
    """
    kernel = kernel_for(config, component.dtype)
    _refuse_quantized(component, entries)
    outlines = _Outlines(kernel)
    tensors: list[TensorPlan] = []
    state: dict[str, torch.Tensor] = {}
    unquantized_bytes = 0
    for name, stored, stored_dtype in _in_source_order(component, entries):
        target = component.targets[name]
        dtype = target.dtype or stored_dtype
        weight = torch.empty(target.shape, dtype=dtype, device="meta")
        fate, reason = _decide(target, skip, component.source.name)
        state[name] = weight
        if fate == "quantize":
            outline, reason = outlines.of(weight)
            if outline is None:
                fate = "keep"
            else:
                state[name] = outline
        unquantized_bytes += formats.tensor_bytes(weight)
        tensors.append(
            TensorPlan(
                name=name,
                stored=stored,
                saved=name if component.library == "diffusers" else stored,
                fate=fate,
                reason=reason,
                shape=target.shape,
                dtype=dtype,
                kind=type(state[name]).__name__,
                num_bytes=formats.tensor_bytes(state[name]),
            )
        )
    plan = ComponentPlan(
        component=component,
        entries=entries,
        config=config,
        kernel=kernel,
        format=format,
        tensors=tuple(tensors),
        shards=(shards := _lay_out(component, tensors, state, format, max_shard_bytes)),
        texts=_texts(component, tensors, shards, kernel, format),
        ignored=tuple(component.unexpected),
        source_bytes=sum(_stored_bytes(entries, tensor.stored) or tensor.num_bytes for tensor in tensors),
        unquantized_bytes=unquantized_bytes,
    )
    _refuse_pointless(plan)
    return plan


class _Outlines:
    """What weights become, on the meta device; made once for each shape and dtype."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._known: dict[tuple[torch.Size, torch.dtype], tuple[torch.Tensor | None, str]] = {}

    def of(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, str]:
        """The torchao tensor that `weight` becomes; or None, and why it cannot."""
        key = weight.shape, weight.dtype
        if key not in self._known:
            self._known[key] = self._make(weight)
        outline, reason = self._known[key]
        # A wrapper of its own for each name: pickle writes an object that it meets again as a reference.
        return outline if outline is None else outline.detach(), reason

    def _make(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, str]:
        refusal = self._kernel.refusal(tuple(weight.shape)) if weight.numel() else "it is empty"
        if refusal:
            return None, refusal
        try:
            return self._kernel.outline(weight), ""
        except (RuntimeError, ValueError, AssertionError) as error:  # torchao 0.18 on in_features 1, for one
            return None, f"torchao fails on shape {list(weight.shape)}: {' '.join(str(error).split())}"


def _decide(target: components.Target, skip: SkipPatterns, component_name: str) -> tuple[Fate, str]:
    """What becomes of a tensor as far as the library and the user say; the config may still refuse its shape."""
    if not target.linear:
        return "copy", ""
    pattern = skip.match(component_name, target.name.rpartition(".")[0])
    if not target.quantizable:
        return "keep", target.reason
    return ("keep", f"--skip {pattern}") if pattern else ("quantize", "")


def _in_source_order(component: Component, entries: Mapping[str, Entry]) -> Iterable[tuple[str, str, torch.dtype]]:
    """(module name, stored name, stored dtype) of what is to be written, in the order in which it lies on disk."""
    if component.whole_reason:
        for name, tensor in component.module.state_dict().items():
            if name not in component.tied:
                yield name, name, tensor.dtype
        return
    found = []
    for stored, name in component.renames.items():
        if name in component.tied:
            continue
        part = entries[stored].parts[""]
        target = component.targets[name]
        if part.shape != target.shape:
            raise CheckpointError(
                f"{stored} has shape {list(part.shape)}, {component.source.class_name} wants {list(target.shape)}",
                hint="config.json and the weights do not belong together",
            )
        found.append((str(part.file), part.offset, name, stored, getattr(torch, part.dtype)))
    for _, _, name, stored, dtype in sorted(found, key=lambda item: item[:3]):
        yield name, stored, dtype


def _stored_bytes(entries: Mapping[str, Entry], stored: str) -> int:
    entry = entries.get(stored)
    return entry.num_bytes if entry else 0


def _refuse_quantized(component: Component, entries: Mapping[str, Entry]) -> None:
    hint = "quantize the original model instead"
    for stored, entry in entries.items():
        if not entry.is_plain:
            raise CheckpointError(f"already quantized: {stored} is a {entry.kind}", hint=hint)
        target = component.targets.get(component.renames.get(stored, ""))
        dtype = entry.parts[""].dtype
        if target is not None and target.linear and dtype not in ("float64", "float32", "float16", "bfloat16"):
            raise CheckpointError(f"already quantized: {stored} is stored as {dtype}", hint=hint)


def _refuse_pointless(plan: ComponentPlan) -> None:
    title = plan.source.name or plan.source.class_name
    if not plan.num_quantized:
        kept = plan.kept
        why = f": {kept.most_common(1)[0][0]}" if kept else ": it has no Linear weight"
        raise UsageError(
            f"{title}: {plan.config} would quantize none of its {sum(kept.values())} Linear weights{why}",
            hint="leave out fewer modules" if "--skip" in why else "choose another config, or a smaller group_size",
        )
    if plan.tensor_bytes >= plan.unquantized_bytes:
        raise GateError(
            f"{title}: {plan.config} would not make it smaller ({plan.tensor_bytes:,} bytes, "
            f"{plan.unquantized_bytes:,} unquantized)",
            hint="choose a config with fewer bits, or a larger group_size",
        )


def _lay_out(
    component: Component,
    tensors: list[TensorPlan],
    state: State,
    format: Format,
    max_shard_bytes: int,
) -> tuple[ShardPlan, ...]:
    groups: list[list[TensorPlan]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if tensor.num_bytes > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    names = layout.shard_names(component.library, format, len(groups))
    build = _file_builder(component, tensors, state, format)
    return tuple(
        ShardPlan(layout=build(name, group), tensors=tuple(group)) for name, group in zip(names, groups, strict=True)
    )


def _file_builder(
    component: Component,
    tensors: Sequence[TensorPlan],
    state: State,
    format: Format,
) -> Callable[[str, Sequence[TensorPlan]], FileLayout]:
    saved_names = {tensor.name: tensor.saved for tensor in tensors}
    if format == "safetensors":
        flattened = formats.flatten(state, saved_names, describe_roots=component.library == "diffusers")
        return lambda file_name, group: formats.safetensors_layout(
            file_name, {tensor.name: state[tensor.name] for tensor in group}, flattened
        )
    return lambda file_name, group: formats.bin_layout(
        file_name, {tensor.name: state[tensor.name] for tensor in group}, saved_names
    )


def _texts(
    component: Component,
    tensors: Sequence[TensorPlan],
    shards: Sequence[ShardPlan],
    kernel: Kernel,
    format: Format,
) -> dict[str, str]:
    kept = _kept_unlike_stock(component, tensors)
    texts = {layout.CONFIG: components.config_text(component, kernel.stock, kept=kept)}
    if len(shards) > 1:
        weight_map = {key: shard.layout.name for shard in shards for key in shard.layout.keys}
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        texts[layout.index_name(component.library, format)] = json.dumps(index, indent=2) + "\n"
    return texts


def _kept_unlike_stock(component: Component, tensors: Sequence[TensorPlan]) -> list[str]:
    """Modules that stock would quantize, or stumble over, and that this plan keeps."""
    return [
        tensor.name.rpartition(".")[0]
        for tensor in tensors
        if tensor.fate == "keep" and component.targets[tensor.name].quantizable
    ]
