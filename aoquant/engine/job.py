"""What one `quantize` would do in full: every component's plan, every file of the output folder to the byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

import aoquant
from aoquant.checkpoint.manifest import (
    CARD,
    MANIFEST,
    ComponentRecord,
    FileRecord,
    Manifest,
    Origin,
    model_card,
    snippet,
)
from aoquant.checkpoint.tensors import LOW_BIT_MODULE
from aoquant.checkpoint.weights import read_weights
from aoquant.configs import QuantConfig
from aoquant.engine import component as components
from aoquant.engine import libraries
from aoquant.engine.blocks import working_bytes
from aoquant.engine.formats import Format
from aoquant.engine.plan import ComponentPlan, SkipPatterns, plan_component
from aoquant.errors import UnsafeError
from aoquant.output import free_bytes
from aoquant.source import Source, open_component

_NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file of the output folder. origin: the file that it is a copy of, for `--full`."""

    path: PurePosixPath
    num_bytes: int
    kind: Literal["weights", "text", "copy"]
    origin: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `quantize` will do. `files` and `output_bytes` are exact; `working_bytes` is a bound on the tensor data in
    memory at one time, on top of what the libraries themselves take."""

    source: Source
    output: Path
    format: Format
    dtype: str
    components: tuple[ComponentPlan, ...]
    files: tuple[OutputFile, ...]
    warnings: tuple[str, ...]
    working_bytes: int

    @property
    def output_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def source_bytes(self) -> int:
        return sum(component.source_bytes for component in self.components)

    def folder_of(self, component: ComponentPlan) -> PurePosixPath:
        """Where in the output folder a component lies; the root for a source that is one component."""
        return PurePosixPath(component.source.name)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, `aoquant.plan/1`."""
        return {
            "schema": "aoquant.plan/1",
            "source": self.manifest(()).to_json()["source"],
            "output": self.output.as_posix(),
            "format": self.format,
            "dtype": self.dtype,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "working_bytes": self.working_bytes,
            "free_bytes": free_bytes(self.output),
            "components": [component.to_json() for component in self.components],
            "files": [
                {"path": str(file.path), "bytes": file.num_bytes, "kind": file.kind}
                for file in sorted(self.files, key=lambda file: file.path)
            ],
            "warnings": list(self.warnings),
        }

    def manifest(self, files: Sequence[FileRecord]) -> Manifest:
        return Manifest(
            origin=Origin(
                model=self.source.model,
                repo_id=self.source.repo_id,
                revision=self.source.revision,
                variant=self.source.variant,
            ),
            writer=aoquant.__version__,
            versions=libraries.versions(),
            format=self.format,
            dtype=self.dtype,
            components=tuple(
                ComponentRecord(
                    name=component.source.name,
                    library=component.source.library,
                    class_name=component.source.class_name,
                    config=str(component.config),
                    needs=_needs(component.config),
                    num_quantized=component.num_quantized,
                    kept=dict(sorted(component.kept.items())),
                    num_other=component.num_other,
                )
                for component in self.components
            ),
            files=tuple(files),
        )

    def card(self) -> str:
        folder = self.output.name
        rest = self._rest(folder, self.source.model)
        return model_card(self.manifest(()), title=folder, rest=rest, pipeline=self._pipeline)

    def snippet(self, *, folder: str, model: str) -> str:
        """The Python lines that load the result from `folder`, and the rest of its pipeline from there or `model`."""
        made = self.manifest(()).components
        rest = self._rest(folder, model)
        return snippet(made, folder=folder, format=self.format, dtype=self.dtype, rest=rest, pipeline=self._pipeline)

    @property
    def _pipeline(self) -> str:
        """The pipeline's own class, as far as it says.

        Given components that this class could do without (both of WanPipeline's transformers), diffusers 0.42's
        DiffusionPipeline drops them without a word and loads those of the folder.
        """
        name = (self.source.model_index or {}).get("_class_name")
        return name if isinstance(name, str) and name.isidentifier() else "DiffusionPipeline"

    def _rest(self, folder: str, model: str) -> Origin | None:
        if self.source.kind == "component":
            return None
        if any(file.kind == "copy" for file in self.files):
            return Origin(model=folder, repo_id=None, revision=None, variant=self.source.variant)
        return dataclasses.replace(self.manifest(()).origin, model=model)


def make_plan(
    source: Source,
    configs: Mapping[str, QuantConfig],
    *,
    output: Path,
    format: Format = "bin",
    dtype: str = "bfloat16",
    skip: Sequence[str] = (),
    max_shard_bytes: int = 10_000_000_000,
    full: bool = False,
) -> Plan:
    """Plan `configs` (component name → config) for an opened source. Reads configs and headers, no weights."""
    patterns = SkipPatterns(skip, components=tuple(configs))
    plans = []
    for name, config in configs.items():
        component_source = open_component(source, name)
        contents = read_weights(component_source.weights)
        contents.require_sound()
        for file, names in contents.suspicious.items():
            raise UnsafeError(
                f"{name}: unpickling {file.name} would run code: {', '.join(names[:3])}",
                hint="get the weights from a source you trust, as safetensors",
            )
        component = components.build(
            component_source,
            contents.entries,
            sharded=component_source.weights.index is not None,
            dtype=getattr(torch, dtype),
        )
        plans.append(
            plan_component(
                component,
                contents.entries,
                config,
                skip=patterns,
                format=format,
                max_shard_bytes=max_shard_bytes,
            )
        )
    patterns.check_used(
        [tensor.name.rpartition(".")[0] for plan in plans for tensor in plan.tensors if tensor.fate != "copy"]
    )
    plan = _with_texts(
        Plan(
            source=source,
            output=output,
            format=format,
            dtype=dtype,
            components=tuple(plans),
            files=tuple(_component_files(plans) + (_copies(source, configs) if full else [])),
            warnings=tuple(_warnings(source, configs, plans, dtype, format=format, full=full)),
            working_bytes=max(working_bytes(plan) for plan in plans),
        )
    )
    if (free := free_bytes(output)) >= plan.output_bytes:
        return plan
    warning = f"{plan.output_bytes:,} bytes would be written, {free:,} are free on the disk of {output}"
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


def _needs(config: QuantConfig) -> str:
    if config.row.family == "int4" and config.options["layout"] == "plain":
        return "aoquant"
    return LOW_BIT_MODULE if config.is_packed else ""


def _component_files(plans: Sequence[ComponentPlan]) -> list[OutputFile]:
    files = []
    for plan in plans:
        folder = PurePosixPath(plan.source.name)
        for name, text in plan.texts.items():
            files.append(OutputFile(path=folder / name, num_bytes=len(text.encode()), kind="text"))
        for shard in plan.shards:
            layout = shard.layout
            files.append(OutputFile(path=folder / layout.name, num_bytes=layout.num_bytes, kind="weights"))
    return files


def _copies(source: Source, configs: Mapping[str, QuantConfig]) -> list[OutputFile]:
    """Everything of a pipeline that is not being quantized, for `--full`."""
    files = []
    for relative, path in sorted(source.other_files(quantized=tuple(configs)).items()):
        files.append(OutputFile(path=relative, num_bytes=path.stat().st_size, kind="copy", origin=path))
    return files


def _with_texts(plan: Plan) -> Plan:
    """Add the model card and the manifest, whose lengths do not depend on the hashes in it."""
    card = OutputFile(path=PurePosixPath(CARD), num_bytes=len(plan.card().encode()), kind="text")
    files = (*plan.files, card)
    records = [FileRecord(path=file.path, num_bytes=file.num_bytes, sha256=_NO_HASH) for file in files]
    manifest_bytes = len(plan.manifest(records).text().encode())
    manifest = OutputFile(path=PurePosixPath(MANIFEST), num_bytes=manifest_bytes, kind="text")
    return dataclasses.replace(plan, files=(*files, manifest))


def _are_twins(source: Source, name: str, other: str) -> bool:
    """Whether two components share the work, as the two experts of Wan 2.2 do: one class, of diffusers."""
    parts = source.model_index or {}
    return parts.get(name) == parts.get(other) and (parts.get(name) or [None])[0] == "diffusers"


def _warnings(
    source: Source,
    configs: Mapping[str, QuantConfig],
    plans: Sequence[ComponentPlan],
    dtype: str,
    *,
    format: Format,
    full: bool,
) -> list[str]:
    warnings = []
    for twin in source.components:
        if twin not in configs and any(_are_twins(source, name, twin) for name in configs):
            warnings.append(f"{source.model} also has {twin}, which stays unquantized")
    for plan in plans:
        title = plan.source.name or plan.source.class_name
        if plan.component.whole_reason:
            warnings.append(f"{title} is loaded whole into memory: {plan.component.whole_reason}")
        if plan.ignored:
            warnings.append(
                f"{title}: {len(plan.ignored)} stored tensors are not part of {plan.source.class_name} and are left "
                f"out, first {plan.ignored[0]}"
            )
        if full and format == "bin" and plan.source.library == "diffusers" and len(plan.shards) > 1:
            warnings.append(
                f"{title} takes {len(plan.shards)} .bin files, which DiffusionPipeline.from_pretrained finds by the "
                "printed lines only; with --format safetensors it finds them by itself"
            )
        if plan.config.is_packed:
            warnings.append(f"{title}: {plan.config.row.name} loads after `import aoquant.lowbit` only")
        if plan.config.row.family == "int4":
            warnings.append(
                f"{title}: int4wo computes anywhere through aoquant.load; plain from_pretrained gives a class that "
                "computes only on CUDA with the mslk package"
            )
        if plan.config.row.wants_compile:
            warnings.append(f"{title}: {plan.config.row.name} is slow without torch.compile")
        if dtype == "float16" and plan.source.library == "transformers":
            warnings.append(f"{title}: float16 overflows in some text encoders (T5); bfloat16 is safer")
    return warnings
