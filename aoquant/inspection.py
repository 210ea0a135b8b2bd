"""A folder or file → a report on what it holds and what is wrong. No tensor data is read, no code is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from aoquant.checkpoint.config_block import ConfigBlock, disagreements, read_config_block, unknown_types
from aoquant.checkpoint.files import list_files, quoted, read_json
from aoquant.checkpoint.intact import check_file
from aoquant.checkpoint.layout import (
    CONFIG,
    MODEL_INDEX,
    Format,
    Located,
    WeightFiles,
    is_weight_name,
    locate_weights,
    variants,
)
from aoquant.checkpoint.manifest import CARD, MANIFEST, SCHEMA, listed_files
from aoquant.checkpoint.weights import WeightContents, read_weights
from aoquant.errors import CheckpointError, SourceError, UsageError
from aoquant.report import ComponentReport, FileReport, Kind, Problem, tally
from aoquant.report import Report as Report

_HASHED_BYTES = 1_000_000
_SUFFIXES: Mapping[str, Format] = {
    ".safetensors": "safetensors", ".bin": "bin", ".pt": "bin", ".pth": "bin", ".ckpt": "bin"
}  # fmt: skip
# Pipeline parts that have no weights, although some carry a config.json.
_WEIGHTLESS = ("Tokenizer", "TokenizerFast", "Processor", "ProcessorFast", "FeatureExtractor", "Scheduler")


def inspect(path: str | Path, *, variant: str | None = None) -> Report:
    """Report on a pipeline folder, a component folder, an aoquant checkpoint, or one weight file.

    Reads headers and pickles only: well under 0.1 s whatever the size of the weights. Without `variant`, a
    folder that holds only one variant of its weights is read as that. Raises SourceError if there is nothing at
    `path`, CheckpointError if there is no checkpoint; what is damaged yet can be told is among the report's problems.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{path!r} is no path", hint="name a folder or a file")
    path = Path(path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise SourceError(f"{quoted(str(path))} is no path: {error}", hint="check the path") from error
    if is_file:
        return _inspect_file(path)
    if not is_folder:
        what = "is neither a folder nor a file" if path.exists() else "does not exist"
        raise SourceError(f"{quoted(str(path))} {what}", hint="check the path: a folder or a weight file")
    names = list_files(path)
    problems: list[Problem] = []
    manifest = _read(path / MANIFEST, problems) if MANIFEST in names else {}
    model_index: dict[str, Any] = {}
    declared: dict[str, tuple[str, str]] = {}
    kind: Kind = "checkpoint"
    if MODEL_INDEX in names:
        kind = "pipeline"
        model_index = _read(path / MODEL_INDEX, problems)
        declared = _declared(model_index)
        folders = _pipeline_folders(path, declared, problems)
    elif _is_component(names):
        kind, folders = "component", {"": path}
    else:
        folders = {folder.name: folder for folder in _subfolders(path) if _is_component(list_files(folder))}
        if not folders and not manifest:
            raise CheckpointError(
                f"{path} holds no checkpoint: no {MODEL_INDEX}, {CONFIG} or weights, nor has a subfolder any",
                hint="name the folder of a pipeline or of one of its components",
            )
    problems += _manifest_problems(path, manifest)
    components = [
        _inspect_component(path, name, folder, declared.get(name, ("", "")), variant, _config_name(manifest, name))
        for name, folder in folders.items()
    ]
    return Report(
        path=path,
        kind=kind,
        class_name=_text(model_index, "_class_name"),
        components=tuple(components),
        versions=_writers(manifest) | _versions(model_index, None),
        source=_texts(manifest.get("source")),
        problems=tuple(problems),
    )


def _inspect_file(path: Path) -> Report:
    format_ = _SUFFIXES.get(path.suffix)
    if format_ is None:
        raise CheckpointError(
            f"{path.name} is no weight file: its name ends in neither .safetensors nor .bin",
            hint="name a .safetensors or .bin file, or the folder that holds it",
        )
    files = WeightFiles(format=format_, files=(path,), index=None, weight_map={}, total_bytes=path.stat().st_size)
    contents = read_weights(files)
    if contents.status[path] == "unreadable":
        contents.require_sound()
    component = _component(
        name="",
        config={},
        config_name="",
        declared=("", ""),
        weights=files,
        contents=contents,
        files=(FileReport(path=path.name, num_bytes=files.total_bytes, status=contents.status[path]),),
        problems=_contents_problems(contents),
    )
    return Report(path=path, kind="file", class_name="", components=(component,), versions={}, source={}, problems=())


def _inspect_component(
    root: Path, name: str, folder: Path, declared: tuple[str, str], variant: str | None, config_name: str
) -> ComponentReport:
    names = list_files(folder)
    problems: list[Problem] = []
    config: dict[str, Any] = {}
    if CONFIG in names:
        config = _read(folder / CONFIG, problems)
    else:
        problems.append(Problem(severity="error", text=f"there is no {CONFIG}: the stock loaders need it"))
    located = _locate(folder, names, variant, problems)
    if located is None:
        return _component(name=name, config=config, config_name=config_name, declared=declared, problems=problems)
    contents = read_weights(located.weights)
    problems += _located_problems(located)
    problems += _contents_problems(contents)
    problems += _config_problems(config, located.weights, contents)
    return _component(
        name=name,
        config=config,
        config_name=config_name,
        declared=declared,
        weights=located.weights,
        contents=contents,
        files=_file_reports(root, folder, located, contents, names),
        problems=problems,
    )


def _component(
    *,
    name: str,
    config: Mapping[str, Any],
    config_name: str,
    declared: tuple[str, str],
    problems: list[Problem],
    weights: WeightFiles | None = None,
    contents: WeightContents | None = None,
    files: tuple[FileReport, ...] = (),
) -> ComponentReport:
    block = read_config_block(config)
    entries = contents.entries if contents is not None else {}
    tallies, tied = tally(entries.values())
    return ComponentReport(
        name=name,
        class_name=_class_name(config) or declared[1],
        library=_library(config) or declared[0],
        format=weights.format if weights is not None else "",
        config=block.text if block is not None else "",
        config_name=config_name,
        entries=entries,
        tied=tied,
        tallies=tallies,
        files=files,
        versions=_versions(config, block),
        other_values=contents.other_values if contents is not None else {},
        suspicious=_suspicious(contents),
        named=contents.named if contents is not None else (),
        problems=tuple(problems),
    )


def _locate(folder: Path, names: Mapping[str, int], variant: str | None, problems: list[Problem]) -> Located | None:
    """The component's weights, those of its only variant if need be; None, and a problem, without any."""
    try:
        return locate_weights(folder, variant=variant)
    except CheckpointError as error:
        only = variants(names)
        if variant is not None or len(only) != 1 or any(_is_plain_weight(name) for name in names):
            problems.append(Problem(severity="error", text=error.message))
            return None
    text = f"only the variant {quoted(only[0])} is here: the stock loaders need variant={only[0]!r}"
    problems.append(Problem(severity="warning", text=text))
    return _locate(folder, names, only[0], problems)


def _is_plain_weight(name: str) -> bool:
    return is_weight_name(name) and not variants([name])


def _located_problems(located: Located) -> list[Problem]:
    index = located.choice.index
    problems = [
        Problem(severity="error", text=f"the shard {quoted(name)}, which {index} names, is missing")
        for name in located.missing
    ]
    if located.extra:
        what = f"{index} does not name" if index is not None else "no index names"
        text = f"{len(located.extra)} shards that {what} are left over, the first is {quoted(located.extra[0])}"
        problems.append(Problem(severity="warning", text=text))
    suffix = f".{located.choice.format}"
    other_format = [name for name in located.others if suffix not in name]
    if other_format:
        text = f"weights in several formats: read was {located.choice.format}, not {quoted(other_format[0])}"
        problems.append(Problem(severity="warning", text=text))
    return problems


def _contents_problems(contents: WeightContents) -> list[Problem]:
    problems = [Problem(severity="error", text=text) for text in contents.problems]
    for path, named in contents.suspicious.items():
        shown = ", ".join(quoted(name, quote=False) for name in named[:8])
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        text = f"{path.name} would run code when unpickled: {shown}{more}"
        problems.append(Problem(severity="error", text=text, is_unsafe=True))
    return problems


def _config_problems(config: Mapping[str, Any], weights: WeightFiles, contents: WeightContents) -> list[Problem]:
    block = read_config_block(config)
    if block is not None:
        # Where files could not be read, that no tensor is quantized says nothing.
        if not contents.entries:
            return []
        unknown = [
            Problem(severity="warning", text=f"{CONFIG} names {name}, no torchao config that is known here")
            for name in unknown_types(block)
        ]
        return unknown + [
            Problem(severity="error", text=text) for text in disagreements(block, contents.entries.values())
        ]
    num_quantized = sum(1 for entry in contents.entries.values() if not entry.is_plain)
    if not num_quantized:
        return []
    text = f"{num_quantized} tensors are quantized, and {CONFIG} has no quantization_config"
    if weights.format == "safetensors":
        text += ": stock diffusers then leaves its weights on the meta device, without an error"
        return [Problem(severity="error", text=text)]
    return [Problem(severity="warning", text=f"{text} to say so")]


def _file_reports(
    root: Path, folder: Path, located: Located, contents: WeightContents, names: Mapping[str, int]
) -> tuple[FileReport, ...]:
    status = {path.name: str(state) for path, state in contents.status.items()}
    status |= dict.fromkeys(located.missing, "missing")
    status |= dict.fromkeys((*located.extra, *located.others), "unread")
    inside = PurePosixPath(folder.relative_to(root).as_posix())
    return tuple(
        FileReport(path=(inside / name).as_posix(), num_bytes=names.get(name, 0), status=state)
        for name, state in sorted(status.items())
    )


def _declared(model_index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Component → (library, class) of a model_index.json, less those that the pipeline goes without."""
    found = {}
    for name, value in model_index.items():
        if isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value):
            found[name] = (quoted(value[0], quote=False), quoted(value[1], quote=False))
    return found


def _pipeline_folders(root: Path, declared: Mapping[str, tuple[str, str]], problems: list[Problem]) -> dict[str, Path]:
    """The folders of a pipeline's components that have weights, those of the index first."""
    there = {folder.name: folder for folder in _subfolders(root)}
    folders = {}
    for name, (_, class_name) in declared.items():
        if name not in there:
            text = f"{MODEL_INDEX} names the component {quoted(name)}, and its folder is missing"
            problems.append(Problem(severity="error", text=text))
        elif not class_name.endswith(_WEIGHTLESS) and _is_component(list_files(there[name])):
            folders[name] = there[name]
    for name, folder in there.items():
        if name not in declared and _is_component(list_files(folder)):
            text = f"the folder {quoted(name)} is not in {MODEL_INDEX}"
            problems.append(Problem(severity="warning", text=text))
            folders[name] = folder
    return folders


def _is_component(names: Mapping[str, int]) -> bool:
    return CONFIG in names or any(is_weight_name(name) for name in names)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}", hint="check its permissions") from error


def _manifest_problems(root: Path, manifest: Mapping[str, Any]) -> list[Problem]:
    """Where aoquant.json and the files disagree: in size, and in SHA-256 where a file is small."""
    if not manifest:
        return []
    schema = manifest.get("schema")
    if not isinstance(schema, str) or not schema.startswith(SCHEMA.partition("/")[0] + "/"):
        text = f"{MANIFEST} is of the schema {quoted(schema)}, which this version does not know"
        return [Problem(severity="warning", text=text)]
    problems = []
    for path, record in listed_files(manifest):
        if path is None:
            text = f"{MANIFEST} lists {quoted(record.get('path'))}, which is no path within the folder"
            problems.append(Problem(severity="warning", text=text))
        elif str(path) != CARD:  # a card is there to be edited
            checked = check_file(root, path, record, hash_up_to=_HASHED_BYTES)
            if checked.text:
                problems.append(Problem(severity="error", text=checked.text))
    return problems


def _config_name(manifest: Mapping[str, Any], component: str) -> str:
    """The config that aoquant.json says a component was made with, empty if it says nothing of the kind."""
    records = manifest.get("components")
    record = records.get(component) if isinstance(records, dict) else None
    return _text(record, "config") if isinstance(record, dict) else ""


def _read(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """A JSON file of the folder; empty, and a problem, if it is broken."""
    try:
        return read_json(path)
    except CheckpointError as error:
        problems.append(Problem(severity="error", text=error.message))
        return {}


def _suspicious(contents: WeightContents | None) -> tuple[str, ...]:
    if contents is None:
        return ()
    return tuple(sorted({name for names in contents.suspicious.values() for name in names}))


def _class_name(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if "_class_name" not in config and isinstance(architectures, list) and architectures:
        return quoted(architectures[0], quote=False)
    return _text(config, "_class_name")


def _library(config: Mapping[str, Any]) -> str:
    if "_class_name" in config or "_diffusers_version" in config:
        return "diffusers"
    return "transformers" if config.keys() & {"architectures", "model_type", "transformers_version"} else ""


def _versions(config: Mapping[str, Any], block: ConfigBlock | None) -> dict[str, str]:
    versions = {
        "diffusers": _text(config, "_diffusers_version"),
        "transformers": _text(config, "transformers_version"),
        "torchao config": block.version if block is not None else "",
    }
    return {name: version for name, version in versions.items() if version}


def _writers(manifest: Mapping[str, Any]) -> dict[str, str]:
    writer = _text(manifest, "aoquant")
    return ({"aoquant": writer} if writer else {}) | _texts(manifest.get("versions"))


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    return quoted(value, quote=False) if isinstance(value, str) else ""


def _texts(content: Any) -> dict[str, str]:
    """A flat JSON object as text to text; what is nested or null is left out."""
    if not isinstance(content, dict):
        return {}
    return {
        quoted(key, quote=False): quoted(value, quote=False)
        for key, value in content.items()
        if isinstance(value, (str, int, float))
    }
