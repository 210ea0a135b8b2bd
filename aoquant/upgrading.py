"""A checkpoint of torchao's earlier tensor classes → the same values in today's, without the original model.

Nothing is unpickled: the files are read as `inspect` reads them, and every weight is written anew. A weight is carried
over only if it dequantizes to the same bits as its old class said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

import aoquant
from aoquant import output, versions
from aoquant.carrying import (
    AGAIN,
    Storages,
    carry,
    forms,
    made,
    on_its_own,
    outline,
    refuse_other_activations,
    unknown,
)
from aoquant.checkpoint.config_block import read_config_block
from aoquant.checkpoint.files import quoted, read_json
from aoquant.checkpoint.intact import sha256_of
from aoquant.checkpoint.layout import CONFIG, MODEL_INDEX, locate_weights
from aoquant.checkpoint.manifest import (
    CARD,
    MANIFEST,
    ComponentRecord,
    FileRecord,
    Manifest,
    Origin,
    model_card,
    parse_manifest,
    snippet,
)
from aoquant.configs import parse_config
from aoquant.engine import libraries
from aoquant.engine.formats import parts
from aoquant.engine.job import needs
from aoquant.engine.quantize import Kernel, kernel_for
from aoquant.errors import AoquantError, CheckpointError, UsageError
from aoquant.inspection import inspect
from aoquant.report import ComponentReport, Report

SCHEMA = "aoquant.upgrade/1"

OnProgress = Callable[[str, int, int], None]

_MAX_DEPTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """A finished upgrade. components: what was written anew. snippet: the lines that load it; empty where there is a
    component whose config is not known."""

    folder: Path
    output: Path
    components: tuple[ComponentRecord, ...]
    snippet: str

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "folder": self.folder.as_posix(),
            "output": self.output.as_posix(),
            "components": [
                {
                    "name": component.name,
                    "class": component.class_name,
                    "config": component.config,
                    "upgraded": component.num_quantized,
                }
                for component in self.components
            ],
            "snippet": self.snippet,
        }


def upgrade(
    folder: str | Path,
    target: str | Path | None = None,
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Upgraded:
    """Write a checkpoint folder anew at `target` (default: `FOLDER-upgraded`), in the tensor classes of this torchao.

    The new weights dequantize to the same bits. All or nothing, as `quantize`. Memory: what one weight file holds in
    the new classes, and one weight in full; files are mapped. on_progress: called with what is being done, bytes done,
    and bytes in all.

    Raises UsageError if the output may not be written, or nothing is to be done; CheckpointError for a folder that is
    damaged or holds a weight that cannot be carried over; UnsafeError for a `.bin` that would run code.
    """
    folder = Path(folder)
    report = inspect(folder)
    report.refuse_unsafe()
    if report.kind == "file":
        raise CheckpointError(f"{folder} is a file", hint="name the folder that holds it and its config.json")
    for problem in [*report.problems, *(problem for part in report.components for problem in part.problems)]:
        if problem.severity == "error":
            raise CheckpointError(problem.text, hint=f"`aoquant inspect {folder}` shows every problem")
    for name in ("torchao.quantization", "diffusers", "transformers"):
        libraries.load(name)  # quietly, and before there is anything to be removed
    old = [component for component in report.components if _is_old(folder, component, report)]
    if not old:
        for component in report.components:
            if component.num_quantized:
                versions.refuse_others(folder, component, report.versions)
        raise UsageError(f"{folder} holds nothing to upgrade", hint="`aoquant load` it as it is")
    place = Path(target) if target is not None else folder.resolve().with_name(f"{folder.resolve().name}-upgraded")
    output.check_place(place, overwrite=overwrite, source=folder)
    if folder.resolve() in place.resolve().parents:
        raise UsageError(f"{place} lies in {folder}, which is copied", hint="choose another --output")
    every = _files(folder)
    output.check_disk(place, sum(path.stat().st_size for path in every))
    records: list[ComponentRecord] = []
    with output.staging(place) as staging:
        rewritten = {path for component in old for path in _rewritten(folder, component)}
        for path in every:
            if path not in rewritten:
                _copy(path, staging / path.relative_to(folder))
        done, total = 0, sum(component.weight_bytes for component in old)

        def advance(component: ComponentReport, num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if on_progress is not None:
                on_progress(f"upgrading {component.name or component.class_name}", done, total)

        for component in old:
            records.append(_write_component(folder, component, staging, advance))
        manifest = _manifest(folder, report, records)
        if manifest is not None:
            manifest = _write_manifest(manifest, staging, place.name)
        _check(staging)
    lines = snippet(manifest, folder=str(place), rest=manifest.rest(str(place))) if manifest is not None else ""
    return Upgraded(folder=folder, output=place, components=tuple(records), snippet=lines)


def _files(folder: Path) -> list[Path]:
    """All files but hidden ones, those of linked folders too. Raises CheckpointError where that has no end."""
    found = []
    for root, folders, names in os.walk(folder, followlinks=True):
        if len(Path(root).relative_to(folder).parts) > _MAX_DEPTH:
            raise CheckpointError(f"{folder} holds folders within folders without end", hint="remove links to folders")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(root) / name for name in sorted(names) if not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
    return found


def _is_old(folder: Path, component: ComponentReport, report: Report) -> bool:
    if versions.upgradable(component):
        return True
    if not component.num_quantized:
        return False
    block = read_config_block(read_json(folder / component.name / CONFIG))
    if block is not None and block.legacy_name:
        return True
    try:
        versions.refuse_others(folder, component, report.versions)
    except CheckpointError:
        return bool(component.config_name)
    return False


def _manifest(folder: Path, report: Report, upgraded: Sequence[ComponentRecord]) -> Manifest | None:
    """What aoquant.json says of the new folder, but for its files; None if there is a weight of an unknown config."""
    if (folder / MANIFEST).exists():
        old = parse_manifest(read_json(folder / MANIFEST))
        return dataclasses.replace(old, writer=aoquant.__version__, versions=libraries.versions(), files=())
    if {record.name for record in upgraded} != {part.name for part in report.components if part.num_quantized}:
        return None
    index = folder / MODEL_INDEX
    pipeline = read_json(index).get("_class_name") if index.exists() else None
    return Manifest(
        origin=Origin(
            model=folder.resolve().name,
            repo_id=None,
            revision=None,
            variant=None,
            pipeline=pipeline if isinstance(pipeline, str) else None,
        ),
        writer=aoquant.__version__,
        versions=libraries.versions(),
        format="bin"
        if all(part.format == "bin" for part in report.components if part.num_quantized)
        else "safetensors",
        dtype=_dtype(report),
        components=tuple(upgraded),
        files=(),
    )


def _dtype(report: Report) -> str:
    logical = Counter(
        entry.dtype for part in report.components for entry in part.entries.values() if not entry.is_plain
    )
    return logical.most_common(1)[0][0]


def _rewritten(folder: Path, component: ComponentReport) -> list[Path]:
    where = folder / component.name
    weights = locate_weights(where).weights
    return [where / CONFIG, *weights.files, *([weights.index] if weights.index is not None else []), folder / MANIFEST]


def _copy(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if origin.stat().st_size < output.LINKED_FROM or not output.link(origin, target):
        shutil.copyfile(origin, target)


def _write_component(
    folder: Path, component: ComponentReport, staging: Path, advance: Callable[[ComponentReport, int], None]
) -> ComponentRecord:
    """Write one component's files anew, and say what they hold."""
    where = folder / component.name
    (staging / component.name).mkdir(parents=True, exist_ok=True)
    try:
        if component.format == "safetensors":
            config, dtype, count = _keep_safetensors(folder, component, staging, advance)
        else:
            config, dtype, count = _write_bin(folder, component, staging, advance)
    except CheckpointError as error:
        title = component.name or component.class_name
        raise CheckpointError(f"{title}: {error.message}" if title else error.message, hint=error.hint) from error
    text = _config_text(where, component, kernel_for(parse_config(config), dtype))
    (staging / component.name / CONFIG).write_text(text, encoding="utf-8")
    return ComponentRecord(
        name=component.name,
        library=component.library,
        class_name=component.class_name,
        config=config,
        needs=needs(parse_config(config)),
        num_quantized=count,
        kept={},
        num_other=len(component.entries) - count,
    )


def _keep_safetensors(
    folder: Path, component: ComponentReport, staging: Path, advance: Callable[[ComponentReport, int], None]
) -> tuple[str, torch.dtype, int]:
    """Of safetensors, which hold no class of old, only config.json is: copy them. Gives config, dtype and how many."""
    config = versions.config_name(folder, component)
    if not config:
        raise CheckpointError("config.json does not say what its safetensors are", hint=AGAIN)
    quantized = [entry for entry in component.entries.values() if not entry.is_plain]
    for entry in quantized:
        found = {name: (torch.Size(part.shape), getattr(torch, part.dtype)) for name, part in entry.parts.items()}
        like = outline(entry, config)
        if type(like).__name__ != entry.kind or found != forms(parts(like)):
            raise unknown(entry, f"is no weight of {config}")
        refuse_other_activations(entry, config)
    weights = locate_weights(folder / component.name).weights
    for path in (*weights.files, *([weights.index] if weights.index is not None else [])):
        _copy(path, staging / path.relative_to(folder))
    advance(component, component.weight_bytes)
    return config, getattr(torch, quantized[0].dtype), len(quantized)


def _write_bin(
    folder: Path, component: ComponentReport, staging: Path, advance: Callable[[ComponentReport, int], None]
) -> tuple[str, torch.dtype, int]:
    """Write its weights in today's classes. Gives their config and dtype, and how many there are."""
    if component.other_values:
        name = quoted(next(iter(component.other_values)), quote=False)
        raise CheckpointError(f"{name} holds no tensor, and would be lost", hint=AGAIN)
    config_name = versions.config_name(folder, component)
    configs: Counter[tuple[str, torch.dtype]] = Counter()
    weights = locate_weights(folder / component.name).weights
    total_size = 0
    for file in weights.files:
        storages = Storages(file)
        state: dict[str, torch.Tensor] = {}
        for entry in component.entries.values():
            if next(iter(entry.parts.values())).file != file:
                continue
            advance(component, entry.num_bytes)
            if entry.is_plain:
                state[entry.name] = on_its_own(storages.tensor(entry.parts[""]))
                continue
            try:
                carried = carry(entry, storages, config_name)
                state[entry.name] = made(entry, carried)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise unknown(entry, "is not laid out as its class is") from error
            except UsageError as error:
                raise unknown(entry, f"has a form that aoquant has no config for: {error.message}") from error
            configs[carried.config, getattr(torch, entry.dtype)] += 1
        torch.save(state, staging / file.relative_to(folder))
        total_size += sum(part.nbytes for tensor in state.values() for part in parts(tensor).values())
    if len(configs) != 1:
        raise CheckpointError(f"it holds weights of {len(configs)} configs, and one is understood", hint=AGAIN)
    ((config, dtype),) = configs
    if weights.index is not None:
        index = {**read_json(weights.index), "metadata": {"total_size": total_size}}
        (staging / weights.index.relative_to(folder)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return config, dtype, configs.total()


def _config_text(where: Path, component: ComponentReport, kernel: Kernel) -> str:
    config = read_json(where / CONFIG)
    library: Any = libraries.load("diffusers" if component.library == "diffusers" else "transformers")
    block = config.get("quantization_config") or {}
    with libraries.quiet():
        new = library.TorchAoConfig(kernel.stock, modules_to_not_convert=block.get("modules_to_not_convert"))
        config["quantization_config"] = json.loads(json.dumps(new.to_dict(), default=str))
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _write_manifest(manifest: Manifest, staging: Path, title: str) -> Manifest:
    manifest = dataclasses.replace(manifest, files=tuple(_records(staging, skip=(CARD, MANIFEST))))
    (staging / CARD).unlink(missing_ok=True)  # it may be a link
    card = model_card(manifest, title=title).encode()
    (staging / CARD).write_bytes(card)
    record = FileRecord(path=PurePosixPath(CARD), num_bytes=len(card), sha256=hashlib.sha256(card).hexdigest())
    manifest = dataclasses.replace(manifest, files=(*manifest.files, record))
    (staging / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    return manifest


def _records(staging: Path, *, skip: tuple[str, ...]) -> Iterator[FileRecord]:
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_file() and name not in skip:
            yield FileRecord(path=PurePosixPath(name), num_bytes=path.stat().st_size, sha256=sha256_of(path))


def _check(staging: Path) -> None:
    report = inspect(staging)
    problems = [*report.problems, *(problem for part in report.components for problem in part.problems)]
    for problem in problems:
        if problem.severity == "error":
            raise AoquantError(f"the upgraded folder is not sound: {problem.text}: this is a bug in aoquant")
    for component in report.components:
        if component.num_quantized:
            versions.refuse_others(staging, component, report.versions)
