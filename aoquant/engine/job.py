"""What one `quantize` would do in full: every component's plan, every file of the output folder to the byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch

import aoquant
from aoquant import output
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
from aoquant.errors import ResourceError, UnsafeError, UsageError
from aoquant.source import Source, open_component

_NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file of the output folder.

    origin: the file that it is a copy of, for `--full`. linked: it may be a hard link to its origin, and take no room.
    """

    path: PurePosixPath
    num_bytes: int
    kind: Literal["weights", "text", "copy"]
    origin: Path | None = None
    linked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `quantize` will do.

    `files` and `output_bytes` are exact; `working_bytes` is a bound on the tensor data in memory at one time, on top of
    what the libraries themselves take. needed: the source's files, in the order in which they are read; download_bytes:
    those of them that are not on this disk.
    """

    source: Source
    output: Path
    format: Format
    dtype: str
    components: tuple[ComponentPlan, ...]
    files: tuple[OutputFile, ...]
    warnings: tuple[str, ...]
    working_bytes: int
    needed: tuple[Path, ...]
    download_bytes: int

    @property
    def output_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def check_disk(self) -> None:
        """Raise ResourceError if the disks have no room for what is downloaded and written."""
        written = sum(file.num_bytes for file in self.files if not file.linked)
        output.check_disk(self.output, written, cache=self.source.cache, download_bytes=self.download_bytes)

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
            "download_bytes": self.download_bytes,
            "output_bytes": self.output_bytes,
            "working_bytes": self.working_bytes,
            "free_bytes": output.free_bytes(self.output),
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
                pipeline=self.source.pipeline_class,
                card=self.source.card,
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
                    needs=needs(component.config),
                    num_quantized=component.num_quantized,
                    kept=dict(sorted(component.kept.items())),
                    num_other=component.num_other,
                )
                for component in self.components
            ),
            files=tuple(files),
        )

    def card(self) -> str:
        return model_card(self._unhashed(), title=self.output.name)

    def snippet(self, *, folder: str, model: str) -> str:
        """The Python lines that load the result from `folder`, and the rest of its pipeline from there or `model`."""
        made = self._unhashed()
        rest = dataclasses.replace(made, origin=dataclasses.replace(made.origin, model=model)).rest(folder)
        return snippet(made, folder=folder, rest=rest)

    def _unhashed(self) -> Manifest:
        """The manifest as far as it is known before the work."""
        return self.manifest(
            [FileRecord(path=file.path, num_bytes=file.num_bytes, sha256=_NO_HASH) for file in self.files]
        )


def make_plan(
    source: Source,
    configs: Mapping[str, QuantConfig],
    *,
    folder: Path,
    format: Format = "bin",
    dtype: str = "bfloat16",
    skip: Sequence[str] = (),
    max_shard_bytes: int = 10_000_000_000,
    full: bool = False,
) -> Plan:
    """Plan `configs` (component name → config) for an opened source, to be written into `folder`.

    Reads configs and headers, no weights.
    """
    if format == "safetensors" and not libraries.has_safetensors():
        raise UsageError(
            f"torchao {libraries.versions()['torchao']} writes no safetensors that diffusers loads again",
            hint="leave out --format safetensors, or pip install 'torchao>=0.16'",
        )
    patterns = SkipPatterns(skip, components=tuple(configs))
    plans = []
    for name, config in configs.items():
        component_source = open_component(source, name)
        contents = read_weights(component_source.weights, opener=source.opener)
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
    copies = _copies(source, configs, folder) if full else []
    needed = [
        *(path for plan in plans for path in _files_in_order(plan)),
        *(copy.origin for copy in copies if copy.origin),
    ]
    plan = _with_texts(
        Plan(
            source=source,
            output=folder,
            format=format,
            dtype=dtype,
            components=tuple(plans),
            files=tuple(_component_files(plans) + copies),
            warnings=tuple(_warnings(source, configs, plans, dtype, format=format, full=full)),
            working_bytes=max(working_bytes(plan) for plan in plans),
            needed=tuple(needed),
            download_bytes=source.bytes_to_download(needed),
        )
    )
    try:
        plan.check_disk()
    except ResourceError as error:
        return dataclasses.replace(plan, warnings=(*plan.warnings, error.message))
    return plan


def _files_in_order(plan: ComponentPlan) -> list[Path]:
    """A component's weight files, in the order in which their tensors are read."""
    files = list(plan.source.weights.files)
    if plan.component.whole_reason:
        return files
    read = [plan.entries[tensor.stored].parts[""].file for shard in plan.shards for tensor in shard.tensors]
    return list(dict.fromkeys([*read, *files]))


def needs(config: QuantConfig) -> str:
    """What has to be imported before such weights are loaded, as `ComponentRecord.needs`."""
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


def _copies(source: Source, configs: Mapping[str, QuantConfig], folder: Path) -> list[OutputFile]:
    """Everything of a pipeline that is not being quantized, for `--full`.

    Weights become links to the Hub's cache where that is on the same disk. Small files do not, for people edit them;
    nor do the files of a local folder, which are no cache.
    """
    can_link = source.cache is not None and output.same_disk(source.cache, folder)
    files = []
    for path, (origin, num_bytes) in sorted(source.other_files(quantized=tuple(configs)).items()):
        linked = can_link and num_bytes >= output.LINKED_FROM
        files.append(OutputFile(path=path, num_bytes=num_bytes, kind="copy", origin=origin, linked=linked))
    return files


def _with_texts(plan: Plan) -> Plan:
    """Add the model card and the manifest, whose lengths do not depend on the hashes in it."""
    card = OutputFile(path=PurePosixPath(CARD), num_bytes=len(plan.card().encode()), kind="text")
    plan = dataclasses.replace(plan, files=(*plan.files, card))
    manifest_bytes = len(plan._unhashed().text().encode())
    manifest = OutputFile(path=PurePosixPath(MANIFEST), num_bytes=manifest_bytes, kind="text")
    return dataclasses.replace(plan, files=(*plan.files, manifest))


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
    warnings = [f"{source.alias} is {source.repo_id}"] if source.alias is not None else []
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
