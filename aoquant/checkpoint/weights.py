"""One component's weights, whatever their format and number of files: what they hold, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aoquant.checkpoint.files import Opener, open_file, quoted
from aoquant.checkpoint.header import join_torchao, read_header
from aoquant.checkpoint.layout import Format, WeightFiles, is_shard_name
from aoquant.checkpoint.pickles import read_pickle_file
from aoquant.checkpoint.tensors import Entry, StoredTensor
from aoquant.errors import CheckpointError

_DOWNLOAD_AGAIN = "download or copy the weights again, whole"

FileStatus = Literal["ok", "truncated", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightContents:
    """What a component's weight files hold together.

    entries: by name, file after file, in the order of each. metadata: that of the safetensors headers,
    merged. suspicious: `.bin` file → what unpickling it would import and may run. named: every global that a `.bin`
    names. other_values: names in a `.bin` that hold no tensor → what they hold. status: one for each file.
    problems: a line each; sound weights have none. hint: what to do about the first problem.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    suspicious: Mapping[Path, tuple[str, ...]]
    named: tuple[str, ...]
    other_values: Mapping[str, str]
    status: Mapping[Path, FileStatus]
    problems: tuple[str, ...]
    hint: str

    def require_sound(self) -> None:
        """Raise CheckpointError with the first problem, if there is one."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise CheckpointError(self.problems[0] + more, hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What one file gave: stored tensors (safetensors) or whole entries (bin)."""

    path: Path
    status: FileStatus = "ok"
    problem: str = ""
    hint: str = ""
    raw: Mapping[str, StoredTensor] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    suspicious: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    other_values: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Iterable[str]:
        return self.raw or self.entries


def read_weights(files: WeightFiles, *, opener: Opener = open_file) -> WeightContents:
    """Describe a component's weights; of safetensors only the headers are read, of `.bin` only the pickles.

    Raises nothing for what the files hold: a file that cannot be read, a tensor in two shards and any
    disagreement with the index are lines in `problems`. Shards that the index names and `files` leaves out
    are the caller's.
    """
    read = [_read(path, files.format, opener) for path in files.files]
    problems = [file.problem for file in read if file.problem]
    places, twice = _places(read)
    problems += twice + _index_problems(files, read, places)
    metadata = {key: text for file in read for key, text in file.metadata.items()}
    if files.format == "bin":
        entries = {name: entry for file in reversed(read) for name, entry in file.entries.items()}
        entries = {name: entries[name] for name in places}
    else:
        raw = {name: tensor for file in reversed(read) for name, tensor in file.raw.items()}
        joined = join_torchao({name: raw[name] for name in places}, metadata)
        entries = dict(joined.entries)
        problems += [*joined.problems, *_metadata_problems(files, read, joined.incomplete)]
    return WeightContents(
        entries=entries,
        metadata=metadata,
        suspicious={file.path: file.suspicious for file in read if file.suspicious},
        named=tuple(sorted({name for file in read for name in file.named})),
        other_values={name: what for file in read for name, what in file.other_values.items()},
        status={file.path: file.status for file in read},
        problems=tuple(problems),
        hint=next((file.hint for file in read if file.hint), _DOWNLOAD_AGAIN),
    )


def _read(path: Path, format_: Format, opener: Opener) -> _File:
    try:
        if format_ == "bin":
            contents = read_pickle_file(path, opener=opener)
            return _File(
                path=path,
                entries=contents.entries,
                suspicious=contents.suspicious,
                named=contents.named,
                other_values=contents.other_values,
            )
        header = read_header(path, allow_truncated=True, opener=opener)
    except CheckpointError as error:
        return _File(path=path, status="unreadable", problem=error.message, hint=error.hint)
    if header.missing_bytes:
        whole = header.file_bytes + header.missing_bytes
        problem = f"{path.name} is truncated: it has {header.file_bytes:,} bytes, its tensors need {whole:,}"
        return _File(path=path, status="truncated", problem=problem, raw=header.entries, metadata=header.metadata)
    return _File(path=path, raw=header.entries, metadata=header.metadata)


def _places(read: list[_File]) -> tuple[dict[str, str], list[str]]:
    """Stored name → file name, and a line for each pair of files that hold the same name."""
    places: dict[str, str] = {}
    doubles: dict[tuple[str, str], list[str]] = {}
    for file in read:
        for name in file.names:
            first = places.setdefault(name, file.path.name)
            if first != file.path.name:
                doubles.setdefault((first, file.path.name), []).append(name)
    problems = [f"{_count(names)} in {first} and again in {second}" for (first, second), names in doubles.items()]
    return places, problems


def _index_problems(files: WeightFiles, read: list[_File], places: Mapping[str, str]) -> list[str]:
    """Where the index and the files that could be read disagree, a line for each file and kind."""
    if files.index is None:
        return []
    readable = {file.path.name for file in read if file.status != "unreadable"}
    elsewhere = {name for file in read for name in file.other_values}
    dangling: dict[str, list[str]] = {}
    for name, shard in files.weight_map.items():
        if shard in readable and places.get(name) != shard and name not in elsewhere:
            dangling.setdefault(shard, []).append(name)
    unlisted: dict[str, list[str]] = {}
    for name, shard in places.items():
        if name not in files.weight_map:
            unlisted.setdefault(shard, []).append(name)
    index = files.index.name
    return [f"{_count(names)} not in {shard}, though {index} says so" for shard, names in dangling.items()] + [
        f"{_count(names)} in {shard} but not in {index}" for shard, names in unlisted.items()
    ]


def _metadata_problems(files: WeightFiles, read: list[_File], incomplete: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What torchao's metadata promises and the shards at hand lack."""
    problems = []
    described = {file.metadata["tensor_names"] for file in read if "tensor_names" in file.metadata}
    if len(described) > 1:
        problems.append("the shards' torchao metadata differ; the stock loaders use the last shard's alone")
    wanted = set(files.weight_map.values()) or {file.path.name for file in read}
    readable = {file.path.name for file in read if file.status != "unreadable"}
    is_one_of_many = files.index is None and any(is_shard_name(name) for name in readable)
    if incomplete and wanted <= readable and not is_one_of_many:
        name, parts = next(iter(incomplete.items()))
        lacks = ", ".join(quoted(part, quote=False) for part in parts)
        problems.append(
            f"{len(incomplete)} quantized tensors are not whole, the first is {quoted(name)}, which lacks {lacks}"
        )
    return problems


def _count(names: list[str]) -> str:
    if len(names) == 1:
        return f"{quoted(names[0])} is"
    return f"{len(names)} tensors, the first {quoted(names[0])}, are"
