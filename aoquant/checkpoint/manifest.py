"""aoquant.json: what a checkpoint was made from, by what, and every file with its size and SHA-256."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

MANIFEST = "aoquant.json"
SCHEMA = "aoquant.manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the output. path: relative to the folder. sha256: in hexadecimal."""

    path: PurePosixPath
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRecord:
    """What became of one component. kept: reason → number of Linear weights left unquantized for it."""

    name: str
    library: str
    class_name: str
    config: str
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


def snippet(components: Iterable[ComponentRecord], *, folder: str, format: str, dtype: str) -> str:
    """The Python lines with which plain diffusers and transformers load the checkpoint in `folder`."""
    records = list(components)
    classes: dict[str, list[str]] = {}
    for record in records:
        classes.setdefault(record.library, []).append(record.class_name)
    lines = ["import torch"]
    lines += [f"from {library} import {', '.join(sorted(set(names)))}" for library, names in sorted(classes.items())]
    lines.append("")
    for record in records:
        arguments = [f'"{folder}"']
        if record.name:
            arguments.append(f'subfolder="{record.name}"')
        arguments.append(f"dtype=torch.{dtype}")
        if format == "bin" and record.library == "diffusers":
            arguments.append("use_safetensors=False")
        variable = record.name or "model"
        lines.append(f"{variable} = {record.class_name}.from_pretrained({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def model_card(manifest: Manifest, *, title: str) -> str:
    """A short README.md: what this is, what was done, and how to load it."""
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
    body = [
        *front, "", f"# {title}", "", f"{named}, quantized with torchao by aoquant {manifest.writer}.", "",
        *rows, "", "## Loading", "", "```python",
        snippet(manifest.components, folder=title, format=manifest.format, dtype=manifest.dtype).rstrip(), "```", "",
        f"Made with {versions}. `aoquant.json` lists every file with its SHA-256.", "",
    ]  # fmt: skip
    return "\n".join(body)
