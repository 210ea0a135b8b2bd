"""A finished folder → a repository on the Hub, in one commit. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoquant import hub
from aoquant.checkpoint.files import unreadable
from aoquant.checkpoint.manifest import CARD, MANIFEST, Manifest, card_on_hub
from aoquant.verification import verify

SCHEMA = "aoquant.push/1"

OnProgress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes that are done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Where a folder was uploaded to. pull_request: its address, empty where the commit went to main itself."""

    repo_id: str
    url: str
    commit: str
    pull_request: str
    private: bool
    num_files: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "repo_id": self.repo_id,
            "url": self.url,
            "commit": self.commit,
            "pull_request": self.pull_request or None,
            "private": self.private,
            "num_files": self.num_files,
            "num_bytes": self.num_bytes,
        }


def check(repo_id: str) -> None:
    """Raise SourceError where an upload to `repo_id` could not even begin: no such name, no token, offline."""
    hub.check_push(repo_id)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    on_progress: OnProgress | None = None,
) -> Pushed:
    """Verify `folder` and upload it. Its model card loads from the repository there, and from the folder here.

    What an earlier aoquant.json of the repository lists and this one does not is removed by the same commit. Raises
    CheckpointError if the folder does not verify, UsageError for a public repository that was to be private, and
    SourceError for all that the Hub objects to.
    """
    check(repo_id)
    found = verify(folder, on_progress=on_progress)
    found.require_sound()
    manifest = found.manifest
    files: dict[str, Path | bytes] = {str(file.path): found.path / file.path for file in manifest.files}
    files[MANIFEST] = (found.path / MANIFEST).read_bytes()
    if CARD in files:
        files[CARD] = _card(found.path / CARD, manifest, repo_id)
    commit = hub.push(
        repo_id,
        files,
        message=_message(manifest),
        listing=MANIFEST,
        private=private,
        create_pr=create_pr,
        on_progress=on_progress,
    )
    return Pushed(
        repo_id=repo_id,
        url=commit.repo_url,
        commit=commit.oid,
        pull_request=commit.pull_request,
        private=commit.private,
        num_files=len(files),
        num_bytes=sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values()),
    )


def _card(path: Path, manifest: Manifest, repo_id: str) -> bytes:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return card_on_hub(text, manifest, repo_id=repo_id).encode()


def _message(manifest: Manifest) -> str:
    made = ", ".join(f"{record.name or record.class_name} {record.config}" for record in manifest.components)
    return f"{manifest.origin.model}: {made} by aoquant {manifest.writer}"
