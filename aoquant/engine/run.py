"""Plan → checkpoint: all of it, or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

from aoquant import output
from aoquant.checkpoint.files import unreadable
from aoquant.checkpoint.manifest import CARD, MANIFEST, FileRecord
from aoquant.engine import component as components
from aoquant.engine.blocks import Workers, write_tensors
from aoquant.engine.job import OutputFile, Plan
from aoquant.engine.plan import ComponentPlan
from aoquant.engine.reader import FileReader, MemoryReader, Reader
from aoquant.engine.writer import FileWriter
from aoquant.errors import AoquantError
from aoquant.upload import Pushed

_COPY_BYTES = 1 << 20

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes of the output that are written, bytes in all)."""
Wait = Callable[[Path], None]
"""Returns when a file of the source is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished checkpoint.

    files: every file with its hash. on_cpu: tensors that the accelerator could not take. seconds: from the plan to the
    renamed folder. pushed: where it was uploaded to, if it was.
    """

    plan: Plan
    device: str
    files: tuple[FileRecord, ...]
    on_cpu: tuple[str, ...]
    seconds: float
    pushed: Pushed | None = None

    def to_json(self, *, snippet: str) -> dict[str, Any]:
        """The result as JSON values, `aoquant.quantize/1`. snippet: the Python lines that load it."""
        components = [component.to_json() for component in self.plan.components]
        for component in components:
            del component["tensors"]  # `plan` and `inspect --layers` list them
        return {
            "schema": "aoquant.quantize/1",
            "source": self.plan.manifest(()).to_json()["source"],
            "output": self.plan.output.as_posix(),
            "format": self.plan.format,
            "dtype": self.plan.dtype,
            "device": self.device,
            "seconds": round(self.seconds, 3),
            "source_bytes": self.plan.source_bytes,
            "output_bytes": self.plan.output_bytes,
            "components": components,
            "files": [
                {"path": str(file.path), "bytes": file.num_bytes, "sha256": file.sha256}
                for file in sorted(self.files, key=lambda file: file.path)
            ],
            "on_cpu": list(self.on_cpu),
            "warnings": list(self.plan.warnings),
            "snippet": snippet,
            "pushed": self.pushed.to_json() if self.pushed is not None else None,
        }


def write(
    plan: Plan, *, device: torch.device, overwrite: bool = False, on_progress: OnProgress | None = None
) -> Result:
    """Do what `plan` says. The output folder appears whole, or not at all.

    It is written beside its place, checked against the plan, and renamed. From the Hub, work begins on the files that
    have arrived. Raises UsageError if the output may not be written there; SourceError if a file cannot be had;
    ResourceError if the disk is, or gets, too full; CheckpointError if the source turns out damaged.
    An exception, a signal turned into one included, leaves nothing behind.
    """
    start = time.perf_counter()
    output.check_place(plan.output, overwrite=overwrite, source=plan.source.folder)
    plan.check_disk()
    progress = _Progress(plan.output_bytes, on_progress)
    with (
        output.staging(plan.output) as staging,
        Workers(device) as workers,
        plan.source.arriving(plan.needed, on_progress=on_progress) as wait,
    ):
        records = list(_write_files(plan, staging, workers, progress, wait))
        _check(plan, staging)
    return Result(
        plan=plan,
        device=str(device),
        files=tuple(records),
        on_cpu=tuple(sorted(workers.on_cpu)),
        seconds=time.perf_counter() - start,
    )


class _Progress:
    def __init__(self, total_bytes: int, callback: OnProgress | None) -> None:
        self._total = total_bytes
        self._callback = callback
        self._done = 0

    def add(self, stage: str, num_bytes: int) -> None:
        self._done += num_bytes
        if self._callback is not None:
            self._callback(stage, self._done, self._total)


def _write_files(plan: Plan, staging: Path, workers: Workers, progress: _Progress, wait: Wait) -> Iterator[FileRecord]:
    records = []
    for component in plan.components:
        records += list(_write_component(plan, component, staging, workers, progress, wait))
    for file in plan.files:
        if file.origin is not None:
            wait(file.origin)
            records.append(_copy(file, file.origin, staging, progress))
    records.append(_write_text(staging, PurePosixPath(CARD), plan.card(), progress))
    yield from records
    yield _write_text(staging, PurePosixPath(MANIFEST), plan.manifest(records).text(), progress)


def _write_component(
    plan: Plan, component: ComponentPlan, staging: Path, workers: Workers, progress: _Progress, wait: Wait
) -> Iterator[FileRecord]:
    where = plan.folder_of(component)
    folder = staging / where
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in component.texts.items():
        yield _write_text(staging, where / name, text, progress)
    title = f"{component.source.name or component.source.class_name} → {component.config}"
    reader = _reader(plan, component, wait)
    try:
        for shard in component.shards:
            with FileWriter(folder, shard.layout) as writer:
                write_tensors(
                    shard.tensors,
                    component.kernel,
                    reader,
                    workers,
                    writer,
                    on_bytes=functools.partial(progress.add, title),
                )
                written = writer.finish()
            progress.add(title, shard.layout.framing_bytes)
            yield dataclasses.replace(written, path=where / written.path)
    finally:
        reader.close()


def _reader(plan: Plan, component: ComponentPlan, wait: Wait) -> Reader:
    if component.component.whole_reason:
        for path in component.source.weights.files:
            wait(path)
        return MemoryReader(components.load_whole(component.component, variant=plan.source.variant))
    return FileReader({tensor.stored: component.entries[tensor.stored].parts[""] for tensor in component.tensors}, wait)


def _write_text(staging: Path, path: PurePosixPath, text: str, progress: _Progress) -> FileRecord:
    data = text.encode()
    (staging / path).write_bytes(data)
    progress.add(path.name, len(data))
    return FileRecord(path=path, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _copy(file: OutputFile, origin: Path, staging: Path, progress: _Progress) -> FileRecord:
    """Copy a file, or link it if it may be linked and can be."""
    target = staging / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    num_bytes = 0
    with _source(origin) as source, contextlib.ExitStack() as stack:
        copy = None
        if not (file.linked and output.link(origin, target)):
            copy = stack.enter_context(target.open("xb"))
        while data := _read_some(source, origin):
            if copy is not None:
                copy.write(data)
            digest.update(data)
            num_bytes += len(data)
            progress.add(str(file.path), len(data))
    return FileRecord(path=file.path, num_bytes=num_bytes, sha256=digest.hexdigest())


def _source(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:  # of the source; one of the output would be for output.staging to explain
        raise unreadable(path, error) from error


def _read_some(source: BinaryIO, path: Path) -> bytes:
    try:
        return source.read(_COPY_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def _check(plan: Plan, staging: Path) -> None:
    """Hold what lies on the disk against the plan, and read it the way `inspect` does."""
    from aoquant.inspection import inspect

    planned = {str(file.path): file.num_bytes for file in plan.files}
    found = {path.relative_to(staging).as_posix(): path.stat().st_size for path in staging.rglob("*") if path.is_file()}
    if found != planned:
        wrong = sorted(set(planned.items()) ^ set(found.items()))[0]
        raise AoquantError(f"the output differs from the plan, first at {wrong[0]}: this is a bug in aoquant")
    problems = [problem for component in inspect(staging).components for problem in component.problems]
    if problems:
        raise AoquantError(f"the output does not read back: {problems[0].text}: this is a bug in aoquant")
