"""Folders of different components of one pipeline → one folder, as if a single run had made it. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from aoquant import output
from aoquant.checkpoint.files import quoted
from aoquant.checkpoint.manifest import CARD, MANIFEST, FileRecord, Manifest, model_card, snippet
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UsageError
from aoquant.verification import read_manifest, verify

SCHEMA = "aoquant.join/1"

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes that are done, bytes in all)."""

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A finished folder. linked: the files that take no room of their own."""

    output: Path
    folders: tuple[Path, ...]
    manifest: Manifest
    linked: tuple[PurePosixPath, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)

    @property
    def snippet(self) -> str:
        """The Python lines that load it."""
        folder = str(self.output)
        return snippet(self.manifest, folder=folder, rest=self.manifest.rest(folder))

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest.to_json()
        return {
            "schema": SCHEMA,
            "source": manifest["source"],
            "output": self.output.as_posix(),
            "folders": [folder.as_posix() for folder in self.folders],
            "format": self.manifest.format,
            "dtype": self.manifest.dtype,
            "output_bytes": self.num_bytes,
            "components": [{"name": name, **record} for name, record in manifest["components"].items()],
            "files": manifest["files"],
            "linked": [str(path) for path in self.linked],
            "snippet": self.snippet,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    folder: Path
    manifest: Manifest


def join(
    place: str | Path, folders: Sequence[str | Path], *, overwrite: bool = False, on_progress: OnProgress | None = None
) -> Joined:
    """Make one folder at `place` of `folders`, which aoquant made of different components of the same source.

    Each is verified first. Large files become hard links where the file system allows it. What `--full` brought along
    comes too, less what another folder has quantized. All or nothing, as `quantize`.

    Raises UsageError if that is no request; SourceError for a folder that is not there; CheckpointError if one does
    not verify, or they do not belong together; ResourceError if the disk is too full.
    """
    place, parts = Path(place), [Path(folder) for folder in folders]
    if len(parts) < 2:
        raise UsageError(f"{len(parts)} folder to join", hint="name the folder to write, then two or more to join")
    for folder in parts:
        if Path(os.path.realpath(folder)) in Path(os.path.realpath(place)).parents:
            raise UsageError(f"{place} would lie in {folder}, which is to be joined", hint="name a folder beside it")
        with _folders_for_options():
            output.check_place(place, overwrite=overwrite, source=folder)
    found = [_Part(folder=folder, manifest=read_manifest(folder)) for folder in parts]
    _check_same_source(found)
    owners = _owners(found)
    chosen = _choose(found, owners)
    _verify_all(found, on_progress)
    written = sum(file.num_bytes for part, file in chosen.values() if not _links(part, file, place))
    with _folders_for_options():
        output.check_disk(place, written)
    with _folders_for_options(), output.staging(place) as staging:
        linked = [path for path, (part, file) in chosen.items() if _put(part, file, staging)]
        manifest = _joined_manifest(found, [file for _, file in chosen.values()])
        card = model_card(manifest, title=place.name).encode()
        (staging / CARD).write_bytes(card)
        record = FileRecord(path=PurePosixPath(CARD), num_bytes=len(card), sha256=hashlib.sha256(card).hexdigest())
        manifest = replace(manifest, files=(*manifest.files, record))
        (staging / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        _check(staging, manifest)
    return Joined(output=place, folders=tuple(parts), manifest=manifest, linked=tuple(linked))


@contextlib.contextmanager
def _folders_for_options() -> Iterator[None]:
    """Let hints that are written for `quantize --output` fit a command that takes its output as an argument."""
    try:
        yield
    except (UsageError, ResourceError) as error:
        raise type(error)(error.message, hint=re.sub("(an?|another) --output", r"\1 folder", error.hint)) from error


def _verify_all(parts: Sequence[_Part], on_progress: OnProgress | None) -> None:
    sizes = [sum(file.num_bytes for file in part.manifest.files) for part in parts]
    for number, part in enumerate(parts):
        before = sum(sizes[:number])

        def report(stage: str, done: int, _: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(stage, before + done, sum(sizes))

        verify(part.folder, on_progress=report).require_sound()


def _check_same_source(parts: Sequence[_Part]) -> None:
    """Raise CheckpointError if the folders are not of one pipeline, made in one way by the same versions."""
    first = parts[0]
    for part in parts:
        if any(not record.name for record in part.manifest.components):
            raise CheckpointError(
                f"{part.folder} is one component by itself, which belongs to no pipeline",
                hint="quantize the component out of its pipeline: aoquant quantize PIPELINE --COMPONENT CONFIG",
            )
        for what, one, other in _traits(first.manifest, part.manifest):
            if one != other:
                raise CheckpointError(
                    f"{first.folder} and {part.folder} differ in {what}: "
                    f"{quoted(str(one), quote=False)} and {quoted(str(other), quote=False)}",
                    hint="make them again from the same source, in the same way",
                )


def _traits(one: Manifest, other: Manifest) -> list[tuple[str, Any, Any]]:
    return [
        ("their source", one.origin.repo_id or one.origin.model, other.origin.repo_id or other.origin.model),
        ("the source's revision", one.origin.revision, other.origin.revision),
        ("the variant", one.origin.variant, other.origin.variant),
        ("what the source's card says", dict(one.origin.card), dict(other.origin.card)),
        ("the format", one.format, other.format),
        ("the dtype", one.dtype, other.dtype),
        ("the version of aoquant", one.writer, other.writer),
        ("the version of torchao", one.versions.get("torchao"), other.versions.get("torchao")),
    ]


def _owners(parts: Sequence[_Part]) -> dict[str, _Part]:
    """Component → the folder that quantized it. Raises CheckpointError if two did."""
    owners: dict[str, _Part] = {}
    for part in parts:
        for record in part.manifest.components:
            if (other := owners.setdefault(record.name, part)) is not part:
                raise CheckpointError(
                    f"{other.folder} and {part.folder} both hold {record.name}",
                    hint="join folders of different components",
                )
    return owners


def _choose(parts: Sequence[_Part], owners: dict[str, _Part]) -> dict[PurePosixPath, tuple[_Part, FileRecord]]:
    """Path → whose file it is: of a quantized component its maker's, of the others any, for they have to agree."""
    chosen: dict[PurePosixPath, tuple[_Part, FileRecord]] = {}
    for part in parts:
        for file in part.manifest.files:
            if str(file.path) == CARD or owners.get(file.path.parts[0], part) is not part:
                continue
            other, record = chosen.setdefault(file.path, (part, file))
            if record != file:
                raise CheckpointError(
                    f"{other.folder} and {part.folder} hold two versions of {quoted(str(file.path))}",
                    hint="they are not of the same source: make them again from one",
                )
    return chosen


def _joined_manifest(parts: Sequence[_Part], files: Sequence[FileRecord]) -> Manifest:
    """Libraries but torchao may differ between machines: then the manifest names both versions."""
    versions: dict[str, list[str]] = {}
    for part in parts:
        for name, version in part.manifest.versions.items():
            if version not in versions.setdefault(name, []):
                versions[name].append(version)
    return replace(
        parts[0].manifest,
        versions={name: " and ".join(found) for name, found in versions.items()},
        components=tuple(record for part in parts for record in part.manifest.components),
        files=tuple(files),
    )


def _links(part: _Part, file: FileRecord, place: Path) -> bool:
    """Whether a file can become a link, as far as that is known before it is tried."""
    if file.num_bytes < output.LINKED_FROM:
        return False
    origin = part.folder / file.path
    above = next(folder for folder in Path(os.path.realpath(place)).parents if folder.is_dir())
    return origin.stat().st_dev == above.stat().st_dev


def _put(part: _Part, file: FileRecord, staging: Path) -> bool:
    """Bring one file of a folder into `staging`. True if it has become a link."""
    origin, target = part.folder / file.path, staging / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.num_bytes >= output.LINKED_FROM and output.link(origin, target):
        return True
    digest = hashlib.sha256()
    with origin.open("rb") as source, target.open("xb") as copy:
        while block := source.read(_BLOCK_BYTES):
            copy.write(block)
            digest.update(block)
        copy.flush()
        os.fsync(copy.fileno())
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(f"{origin} changed while it was copied", hint="run it again when nothing writes there")
    return False


def _check(staging: Path, manifest: Manifest) -> None:
    """Hold what lies on the disk against the new manifest, and read it the way `inspect` does."""
    from aoquant.inspection import inspect

    found = {path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()}
    if found != {MANIFEST, *(str(file.path) for file in manifest.files)}:
        raise AoquantError("the joined folder is not as planned: this is a bug in aoquant")
    report = inspect(staging)
    problems = [*report.problems, *(problem for part in report.components for problem in part.problems)]
    for problem in problems:
        if problem.severity == "error":
            raise CheckpointError(
                f"the joined folder would not be sound: {problem.text}", hint="verify and inspect the folders"
            )
