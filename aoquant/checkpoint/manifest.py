"""aoquant.json: what a checkpoint was made from, by what, and every file with its size and SHA-256."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from aoquant.checkpoint.files import quoted

MANIFEST = "aoquant.json"
CARD = "README.md"
SCHEMA = "aoquant.manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the output. path: relative to the folder. sha256: in hexadecimal."""

    path: PurePosixPath
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRecord:
    """What became of one component.

    kept: reason → number of Linear weights left unquantized for it. needs: the module that has to be imported before
    plain diffusers and transformers load it, empty if none; `aoquant` itself where only its own `load` gives a class
    that computes on any device.
    """

    name: str
    library: str
    class_name: str
    config: str
    needs: str
    num_quantized: int
    kept: Mapping[str, int]
    num_other: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the weights came from. model: repository id or folder name. revision: exact commit, None if local."""

    model: str
    repo_id: str | None
    revision: str | None
    variant: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that aoquant.json says."""

    origin: Origin
    writer: str
    versions: Mapping[str, str]
    format: str
    dtype: str
    components: tuple[ComponentRecord, ...]
    files: tuple[FileRecord, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "aoquant": self.writer,
            "source": {
                "model": self.origin.model,
                "repo_id": self.origin.repo_id,
                "revision": self.origin.revision,
                "variant": self.origin.variant,
            },
            "versions": dict(self.versions),
            "format": self.format,
            "dtype": self.dtype,
            "components": {
                record.name: {
                    "library": record.library,
                    "class": record.class_name,
                    "config": record.config,
                    "needs": record.needs,
                    "quantized": record.num_quantized,
                    "kept": dict(record.kept),
                    "other": record.num_other,
                }
                for record in self.components
            },
            "files": [
                {"path": str(file.path), "bytes": file.num_bytes, "sha256": file.sha256}
                for file in sorted(self.files, key=lambda file: file.path)
            ],
        }

    def text(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"


def listed_files(content: Mapping[str, Any]) -> Iterator[tuple[PurePosixPath | None, Mapping[str, Any]]]:
    """The files that a parsed aoquant.json of anyone's making lists: (path, the whole record).

    The path is None where it is no path within the folder, or none that could be printed.
    """
    records = content.get("files")
    for record in records if isinstance(records, list) else []:
        if not isinstance(record, dict):
            yield None, {}
            continue
        name = record.get("path")
        path = PurePosixPath(name) if isinstance(name, str) and quoted(name, quote=False, limit=1000) == name else None
        inside = path is not None and not path.is_absolute() and ".." not in path.parts
        yield path if inside else None, record


def snippet(
    components: Iterable[ComponentRecord],
    *,
    folder: str,
    format: str,
    dtype: str,
    rest: Origin | None = None,
    pipeline: str = "DiffusionPipeline",
) -> str:
    """The Python lines with which plain diffusers and transformers load the checkpoint in `folder`.

    rest: where the other components of the pipeline are, None if it is not one. pipeline: the class of diffusers that
    puts them together.
    """
    records = list(components)
    classes: dict[str, list[str]] = {"diffusers": [pipeline]} if rest is not None else {}
    for record in records:
        if record.needs != "aoquant":
            classes.setdefault(record.library, []).append(record.class_name)
    lines = [*(f"import {module}" for module in _needed(records)), "import torch"]
    lines += [f"from {library} import {', '.join(sorted(set(names)))}" for library, names in sorted(classes.items())]
    lines.append("")
    for record in records:
        variable = record.name or "model"
        arguments = [f'"{folder}"']
        if record.needs == "aoquant":
            arguments += [f'component="{record.name}"'] if record.name else []
            lines.append(f"{variable} = aoquant.load({', '.join(arguments)})")
            continue
        if record.name:
            arguments.append(f'subfolder="{record.name}"')
        arguments.append(f"dtype=torch.{dtype}")
        if format == "bin" and record.library == "diffusers":
            arguments.append("use_safetensors=False")
        lines.append(f"{variable} = {record.class_name}.from_pretrained({', '.join(arguments)})")
    if rest is not None:
        arguments = [f'"{rest.repo_id or rest.model}"']
        arguments += [f'{key}="{text}"' for key in ("revision", "variant") if (text := getattr(rest, key))]
        arguments += [f"{record.name}={record.name}" for record in records]
        lines.append(f"pipeline = {pipeline}.from_pretrained({', '.join(arguments)}, dtype=torch.{dtype})")
    return "\n".join(lines) + "\n"


def _needed(components: Iterable[ComponentRecord]) -> list[str]:
    """What `components` need to be imported, each module once."""
    return sorted({record.needs for record in components if record.needs})


def model_card(manifest: Manifest, *, title: str, rest: Origin | None, pipeline: str = "DiffusionPipeline") -> str:
    """A short README.md: what this is, what was done, and how to load it. rest, pipeline: as for `snippet`."""
    origin = manifest.origin
    named = f"`{origin.model}`" + (f" at `{origin.revision}`" if origin.revision else "")
    front = ["---", "library_name: diffusers"]
    if origin.repo_id:
        front += [f"base_model: {origin.repo_id}", "base_model_relation: quantized"]
    front += ["tags:", "- torchao", "- aoquant", "---"]
    rows = [
        "| component | class | config | quantized | kept | other tensors |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for record in manifest.components:
        rows.append(
            f"| {record.name or '(root)'} | {record.class_name} | {record.config} | {record.num_quantized} "
            f"| {sum(record.kept.values())} | {record.num_other} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    needed = _needed(manifest.components)
    loading = [
        f"`import {module}` comes first: the weights are of a class that aoquant brings (`pip install aoquant`)."
        for module in needed
        if module != "aoquant"
    ]
    if "aoquant" in needed:
        loading.append(
            "`aoquant.load` gives int4 weights the class that computes on their device (`pip install aoquant`). Plain "
            "`from_pretrained` gives torchao's plain class, which computes on CUDA with the mslk package."
        )
    if loading:
        loading.append("")
    lines = snippet(
        manifest.components,
        folder=title,
        format=manifest.format,
        dtype=manifest.dtype,
        rest=rest,
        pipeline=pipeline,
    )
    body = [
        *front, "", f"# {title}", "", f"{named}, quantized with torchao by aoquant {manifest.writer}.", "",
        *rows, "", "## Loading", "", *loading, "```python",
        lines.rstrip(),
        "```", "",
        f"Made with {versions}. `aoquant.json` lists every file with its SHA-256.", "",
    ]  # fmt: skip
    return "\n".join(body)
