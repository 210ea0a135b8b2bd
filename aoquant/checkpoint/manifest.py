"""aoquant.json: what a checkpoint was made from, by what, and every file with its size and SHA-256."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from aoquant.checkpoint.files import quoted, size
from aoquant.checkpoint.layout import MODEL_INDEX
from aoquant.errors import CheckpointError

MANIFEST = "aoquant.json"
CARD = "README.md"
SCHEMA = "aoquant.manifest/1"
CARRIED = ("license", "license_name", "license_link", "pipeline_tag")
"""What a model card takes over from the front matter of its source's."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[\w.-]*")


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
    """Where the weights came from.

    model: repository id or folder name. revision: exact commit, None if local. pipeline: its class, as its
    model_index.json names it; None for a single component. card: what of the front matter of its
    model card goes for what is made from it too, `CARRIED`.
    """

    model: str
    repo_id: str | None
    revision: str | None
    variant: str | None
    pipeline: str | None = None
    card: Mapping[str, str] = field(default_factory=dict)

    @property
    def pipeline_class(self) -> str:
        """The class of diffusers that puts the pipeline together: its own, as far as that is known.

        Given components that the pipeline could do without (one of WanPipeline's two transformers), diffusers 0.42's
        DiffusionPipeline drops them without a word and loads those of the folder.
        """
        return self.pipeline or "DiffusionPipeline"


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
                "pipeline": self.origin.pipeline,
                "card": dict(self.origin.card),
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

    def files_of(self, component: ComponentRecord) -> list[FileRecord]:
        """The files of one component: those in its folder, or all but the texts beside them where it has none."""
        if component.name:
            return [file for file in self.files if file.path.parts[0] == component.name]
        return [file for file in self.files if str(file.path) not in (CARD, MANIFEST)]

    def rest(self, folder: str) -> Origin | None:
        """Where the pipeline's other components are when the checkpoint is in `folder`: there too, or in its origin.

        None if it is no part of a pipeline.
        """
        if any(not record.name for record in self.components):
            return None
        if any(str(file.path) == MODEL_INDEX for file in self.files):
            return replace(self.origin, model=folder, repo_id=None, revision=None)
        return self.origin


def parse_manifest(content: Mapping[str, Any]) -> Manifest:
    """The Manifest that a parsed aoquant.json of anyone's making is. Raises CheckpointError if it is none."""
    schema = content.get("schema")
    if schema != SCHEMA:
        raise CheckpointError(
            f"{MANIFEST} is of the schema {quoted(schema)}, and this version knows {SCHEMA}",
            hint="update aoquant if a newer one wrote it",
        )
    try:
        return _manifest(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} is not as aoquant writes it", hint="make or download it again") from error


def _manifest(content: Mapping[str, Any]) -> Manifest:
    source = content["source"]
    files = tuple(_file(path, record) for path, record in listed_files(content))
    components = tuple(_component(name, record) for name, record in content["components"].items())
    if not (components and files) or not len({file.path for file in files}) == len(files) == len(content["files"]):
        raise ValueError
    return Manifest(
        origin=Origin(
            model=_text(source["model"]),
            repo_id=_text_or_none(source["repo_id"]),
            revision=_text_or_none(source["revision"]),
            variant=_text_or_none(source["variant"]),
            pipeline=None if source.get("pipeline") is None else _word(source["pipeline"]),
            card=_texts({key: value for key, value in source.get("card", {}).items() if key in CARRIED}),
        ),
        writer=_text(content["aoquant"]),
        versions=_texts(content["versions"]),
        format=_word(content["format"]),
        dtype=_word(content["dtype"]),
        components=components,
        files=files,
    )


def _component(name: str, record: Mapping[str, Any]) -> ComponentRecord:
    return ComponentRecord(
        name=_word(name),
        library=_word(record["library"]),
        class_name=_word(record["class"]),
        config=_text(record["config"]),
        needs=_word(record["needs"]),
        num_quantized=_count(record["quantized"]),
        kept={_text(reason): _count(count) for reason, count in record["kept"].items()},
        num_other=_count(record["other"]),
    )


def _file(path: PurePosixPath | None, record: Mapping[str, Any]) -> FileRecord:
    sha256 = _text(record["sha256"])
    if path is None or str(path) in (".", MANIFEST) or not _SHA256.fullmatch(sha256):
        raise ValueError
    return FileRecord(path=path, num_bytes=_count(record["bytes"]), sha256=sha256)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _word(value: Any) -> str:
    """Text that stands in a snippet as a part of its code."""
    if not _WORD.fullmatch(_text(value)):
        raise ValueError
    return str(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _texts(content: Mapping[str, Any]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in content.items()}


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError
    return value


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


def snippet(manifest: Manifest, *, folder: str, rest: Origin | None, on_hub: bool = False) -> str:
    """The Python lines with which plain diffusers and transformers load the checkpoint in `folder`.

    rest: where the other components of the pipeline are, None if it is not one. on_hub: `folder` is a repository's id.
    """
    records = manifest.components
    classes: dict[str, list[str]] = {"diffusers": [rest.pipeline_class]} if rest is not None else {}
    if on_hub and any(record.needs == "aoquant" for record in records):  # it loads folders
        classes["huggingface_hub"] = ["snapshot_download"]
    for record in records:
        if record.needs != "aoquant":
            classes.setdefault(record.library, []).append(record.class_name)
    lines = [*(f"import {module}" for module in _needed(records)), "import torch"]
    lines += [f"from {library} import {', '.join(sorted(set(names)))}" for library, names in sorted(classes.items())]
    lines.append("")
    for record in records:
        variable = record.name or "model"
        arguments = [_quote(folder)]
        if record.needs == "aoquant":
            arguments = [f"snapshot_download({_quote(folder)})"] if on_hub else arguments
            arguments += [f'component="{record.name}"'] if record.name else []
            lines.append(f"{variable} = aoquant.load({', '.join(arguments)})")
            continue
        if record.name:
            arguments.append(f'subfolder="{record.name}"')
        arguments.append(f"dtype=torch.{manifest.dtype}")
        if manifest.format == "bin" and record.library == "diffusers":
            arguments.append("use_safetensors=False")
        lines.append(f"{variable} = {record.class_name}.from_pretrained({', '.join(arguments)})")
    if rest is not None:
        arguments = [_quote(rest.repo_id or rest.model)]
        arguments += [f"{key}={_quote(text)}" for key in ("revision", "variant") if (text := getattr(rest, key))]
        arguments += [f"{record.name}={record.name}" for record in records]
        lines.append(
            f"pipeline = {rest.pipeline_class}.from_pretrained({', '.join(arguments)}, dtype=torch.{manifest.dtype})"
        )
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """A Python literal of `text`, which may come from anyone's manifest."""
    return json.dumps(text, ensure_ascii=False)


def _needed(components: Iterable[ComponentRecord]) -> list[str]:
    """What `components` need to be imported, each module once."""
    return sorted({record.needs for record in components if record.needs})


def model_card(manifest: Manifest, *, title: str) -> str:
    """A README.md: what this is, what was done, and how to load it from a folder called `title`."""
    origin = manifest.origin
    named = f"`{origin.model}`" + (f" at `{origin.revision}`" if origin.revision else "")
    front = ["---", "library_name: diffusers"]
    if origin.repo_id:
        front += [f"base_model: {origin.repo_id}", "base_model_relation: quantized"]
    # A JSON string is a YAML one.
    front += [f"{key}: {json.dumps(origin.card[key], ensure_ascii=False)}" for key in CARRIED if key in origin.card]
    front += ["tags:", "- torchao", "- aoquant", "---"]
    rows = [
        "| component | class | config | quantized | kept | other tensors | size |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in manifest.components:
        num_bytes = sum(file.num_bytes for file in manifest.files_of(record))
        rows.append(
            f"| {record.name or '(root)'} | {record.class_name} | {record.config} | {record.num_quantized} "
            f"| {sum(record.kept.values())} | {record.num_other} | {size(num_bytes)} |"
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
    body = [
        *front, "", f"# {title}", "", f"{named}, quantized with torchao by aoquant {manifest.writer}.", "",
        *rows, "", "## Loading", "", *loading, "```python",
        snippet(manifest, folder=title, rest=manifest.rest(title)).rstrip(), "```", "",
        f"Made with {versions}. `aoquant.json` lists every file with its SHA-256.", "",
    ]  # fmt: skip
    return "\n".join(body)


def card_on_hub(card: str, manifest: Manifest, *, repo_id: str) -> str:
    """The model card of a folder as it reads in the repository `repo_id`: its snippet loads from there.

    A card whose snippet someone has rewritten is left as it is, but for the name of the folder.
    """
    variable = manifest.components[0].name or "model"
    loaded = re.search(rf'^{re.escape(variable)} = [\w.]+\((?:snapshot_download\()?"([^"\n]*)"', card, re.MULTILINE)
    if loaded is None:
        return card
    folder = loaded[1]
    there = snippet(manifest, folder=repo_id, rest=manifest.rest(repo_id), on_hub=True).rstrip()
    for on_hub in (False, True):
        here = snippet(manifest, folder=folder, rest=manifest.rest(folder), on_hub=on_hub).rstrip()
        if here in card:
            break
    else:
        here, there = f'("{folder}"', f'("{repo_id}"'
    old, new = folder.rpartition("/")[2], repo_id.rpartition("/")[2]
    return card.replace(here, there).replace(f"\n# {old}\n", f"\n# {new}\n", 1)
