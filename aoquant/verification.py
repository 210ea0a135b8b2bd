"""A folder that aoquant wrote, held against its manifest to the last byte, and read as `inspect` reads it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoquant.checkpoint.files import quoted, read_json
from aoquant.checkpoint.intact import FileCheck, check_file, unlisted_files
from aoquant.checkpoint.manifest import CARD, MANIFEST, Manifest, parse_manifest
from aoquant.errors import CheckpointError, SourceError
from aoquant.inspection import inspect
from aoquant.report import Problem, Report

SCHEMA = "aoquant.verify/1"

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes that are done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What holds and what does not. files: all that the manifest lists, then those that it does not.

    problems: what `inspect` finds beyond that. notes: differences that are none of damage.
    """

    path: Path
    manifest: Manifest
    files: tuple[FileCheck, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def bad_files(self) -> list[FileCheck]:
        return [file for file in self.files if file.text]

    @property
    def is_sound(self) -> bool:
        return not self.bad_files and all(problem.severity != "error" for problem in self.problems)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that the manifest lists."""
        return sum(file.num_bytes for file in self.files if file.status != "unlisted")

    def require_sound(self) -> None:
        """Raise CheckpointError that names the first bad file, and how many there are."""
        hint = "make or download it again; `aoquant verify --json` lists every file"
        if bad := self.bad_files:
            raise CheckpointError(
                f"{self.path}: {bad[0].text} ({len(bad)} of {len(self.files)} files are bad)", hint=hint
            )
        errors = [problem.text for problem in self.problems if problem.severity == "error"]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise CheckpointError(f"{self.path}: {errors[0]}{more}", hint=hint)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "path": self.path.as_posix(),
            "is_sound": self.is_sound,
            "num_bytes": self.num_bytes,
            "files": [{"path": file.path, "bytes": file.num_bytes, "status": file.status} for file in self.files],
            "problems": [
                *({"severity": "error", "text": file.text} for file in self.bad_files),
                *({"severity": problem.severity, "text": problem.text} for problem in self.problems),
            ],
            "notes": list(self.notes),
        }


def verify(folder: str | Path, *, on_progress: OnProgress | None = None) -> Verification:
    """Check every file of `folder` against aoquant.json: there, of the size, of the SHA-256, and no other beside them.

    Reads all of it, once. Raises SourceError if there is no such folder, CheckpointError if it has no manifest of
    aoquant's, UnsafeError if unpickling one of its files would run code. Everything else is in what it gives.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    report = inspect(folder)
    report.refuse_unsafe()
    total = sum(record.num_bytes for record in manifest.files)
    done = 0
    files: list[FileCheck] = []
    for record in manifest.files:
        start, name = done, str(record.path)

        def count(num_bytes: int, name: str = name) -> None:
            nonlocal done
            done += num_bytes
            if on_progress is not None:
                on_progress(f"verifying {name}", min(done, total), total)

        said = {"bytes": record.num_bytes, "sha256": record.sha256}
        files.append(check_file(folder, record.path, said, on_bytes=count))
        done = start + record.num_bytes
    notes = [f"{CARD} was edited, which is what it is there for" for file in files if file.status == "edited"]
    files += unlisted_files(folder, [record.path for record in manifest.files])
    return Verification(
        path=folder,
        manifest=manifest,
        files=tuple(files),
        problems=tuple(_beyond(report, {file.text for file in files})),
        notes=tuple(notes),
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises SourceError if there is no such folder, CheckpointError if it has none."""
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:  # a name too long, or with a null byte
        raise SourceError(f"{quoted(str(folder))} is no path: {error}", hint="check the path") from error
    if not is_folder:
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise SourceError(f"{quoted(str(folder))} {what}", hint="name a folder that `aoquant quantize` wrote")
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: aoquant did not write it, or not this part of it",
            hint="name the folder that `aoquant quantize` wrote; `aoquant inspect` reads any",
        )
    return parse_manifest(read_json(folder / MANIFEST, unique_keys=True))


def _beyond(report: Report, known: set[str]) -> list[Problem]:
    """What `inspect` has found, less what is said of the files already."""
    found = list(report.problems)
    for component in report.components:
        prefix = f"{component.name}: " if component.name else ""
        for problem in component.problems:
            text = problem.text if problem.text.startswith(prefix) else prefix + problem.text
            found.append(Problem(severity=problem.severity, text=text))
    return [problem for problem in found if problem.text not in known]
