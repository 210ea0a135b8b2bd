"""What an inspection finds, as data, and its JSON form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aoquant.checkpoint.tensors import LOW_BIT, LOW_BIT_MODULE, PLAIN, Entry
from aoquant.errors import UnsafeError

SCHEMA = "aoquant.inspect/1"

Severity = Literal["error", "warning"]
Kind = Literal["pipeline", "component", "checkpoint", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong: an `error` keeps the checkpoint from loading right, a `warning` need not.

    is_unsafe: what is wrong is that a file would run code.
    """

    severity: Severity
    text: str
    is_unsafe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One weight file. path: in the inspected folder. status: ok, truncated, unreadable, missing, unread."""

    path: str
    num_bytes: int
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The tensors of one class and stored dtype: how many, their logical parameters, the bytes they take."""

    kind: str
    dtype: str
    count: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentReport:
    """One component. name: its folder's, empty where there is but one. config: its quantization in words, or
    empty; config_name: the same as aoquant's manifest names it (`int8wo`), or empty.

    Tensors that share their bytes count once: `tied` maps the other names to the one that counts. versions:
    of what wrote it, as its files tell. other_values: names in a `.bin` that hold no tensor. suspicious: what
    its `.bin` files would import and may run when unpickled. named: every global that they name.
    """

    name: str
    class_name: str
    library: str
    format: str
    config: str
    config_name: str
    entries: Mapping[str, Entry]
    tied: Mapping[str, str]
    tallies: tuple[Tally, ...]
    files: tuple[FileReport, ...]
    versions: Mapping[str, str]
    other_values: Mapping[str, str]
    suspicious: tuple[str, ...]
    named: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def title(self) -> str:
        """Its name, or what it is where it has none."""
        return self.name or self.class_name or "the component"

    @property
    def file_bytes(self) -> int:
        """Bytes of the weight files that were read."""
        return sum(file.num_bytes for file in self.files if file.status != "unread")

    @property
    def weight_bytes(self) -> int:
        return sum(tally.num_bytes for tally in self.tallies)

    @property
    def num_parameters(self) -> int:
        return sum(tally.num_parameters for tally in self.tallies)

    @property
    def num_quantized(self) -> int:
        return sum(tally.count for tally in self.tallies if tally.kind != PLAIN)

    @property
    def needs(self) -> str:
        """The module to import before plain diffusers and transformers load it; empty if none."""
        return LOW_BIT_MODULE if any(tally.kind == LOW_BIT for tally in self.tallies) else ""

    @property
    def bits_per_weight(self) -> float:
        """Bits that a parameter takes on average, scales included; 0 without any."""
        return _bits(self.tallies)

    @property
    def quantized_bits_per_weight(self) -> float:
        """The same over the quantized tensors alone; 0 without any."""
        return _bits([tally for tally in self.tallies if tally.kind != PLAIN])

    def refuse_unsafe(self) -> None:
        """Raise UnsafeError if unpickling one of its files would run code."""
        if self.suspicious:
            raise UnsafeError(
                f"{self.title}: unpickling it would run code: " + ", ".join(self.suspicious[:3]),
                hint="do not load it; get the checkpoint from a source you trust",
            )

    def to_json(self, *, layers: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "class": self.class_name,
            "library": self.library,
            "format": self.format,
            "config": self.config,
            "config_name": self.config_name,
            "needs": self.needs,
            "file_bytes": self.file_bytes,
            "weight_bytes": self.weight_bytes,
            "num_parameters": self.num_parameters,
            "num_tensors": len(self.entries),
            "num_quantized": self.num_quantized,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "quantized_bits_per_weight": round(self.quantized_bits_per_weight, 4),
            "tallies": [
                {
                    "kind": tally.kind,
                    "dtype": tally.dtype,
                    "count": tally.count,
                    "num_parameters": tally.num_parameters,
                    "num_bytes": tally.num_bytes,
                }
                for tally in self.tallies
            ],
            "tied": dict(self.tied),
            "files": [{"path": file.path, "num_bytes": file.num_bytes, "status": file.status} for file in self.files],
            "versions": dict(self.versions),
            "other_values": dict(self.other_values),
            "suspicious": list(self.suspicious),
            "problems": _problems_json(self.problems),
        }
        if layers:
            found["layers"] = [_layer_json(entry) for entry in self.entries.values()]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `path` holds. kind: a whole pipeline, one component, a checkpoint of some components, or one file.

    versions, source: what the manifest says of the writer and of the model. problems: those of the whole;
    each component has its own.
    """

    path: Path
    kind: Kind
    class_name: str
    components: tuple[ComponentReport, ...]
    versions: Mapping[str, str]
    source: Mapping[str, str]
    problems: tuple[Problem, ...]

    @property
    def is_sound(self) -> bool:
        """Whether there is no error, of the whole or of a component."""
        every = [self.problems, *(component.problems for component in self.components)]
        return all(problem.severity != "error" for problems in every for problem in problems)

    def refuse_unsafe(self) -> None:
        """Raise UnsafeError if unpickling a file of any component would run code."""
        for component in self.components:
            component.refuse_unsafe()

    def to_json(self, *, layers: bool = False) -> dict[str, Any]:
        """The report as JSON values in a stable order, files relative to `path`; with layers, all tensors."""
        return {
            "schema": SCHEMA,
            "path": self.path.as_posix(),
            "kind": self.kind,
            "class": self.class_name,
            "is_sound": self.is_sound,
            "versions": dict(self.versions),
            "source": dict(self.source),
            "components": [component.to_json(layers=layers) for component in self.components],
            "problems": _problems_json(self.problems),
        }


def tally(entries: Iterable[Entry]) -> tuple[tuple[Tally, ...], dict[str, str]]:
    """Tallies by class and stored dtype, largest first, and each tied name → the earlier one of its bytes."""
    owners: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    sums: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        parts = entry.parts.values()
        key = tuple((part.file, part.offset, part.dtype, part.shape, part.stride) for part in parts)
        owner = owners.setdefault(key, entry.name) if entry.num_bytes else entry.name
        if owner != entry.name:
            tied[entry.name] = owner
            continue
        main = entry.parts.get("qdata") or max(parts, key=lambda part: part.num_bytes)
        row = sums.setdefault((entry.kind, main.dtype), [0, 0, 0])
        row[0] += 1
        row[1] += entry.num_elements
        row[2] += entry.num_bytes
    tallies = [
        Tally(kind=kind, dtype=dtype, count=count, num_parameters=parameters, num_bytes=num_bytes)
        for (kind, dtype), (count, parameters, num_bytes) in sums.items()
    ]
    return tuple(sorted(tallies, key=lambda row: (-row.num_bytes, row.kind, row.dtype))), tied


def _bits(tallies: Iterable[Tally]) -> float:
    rows = list(tallies)
    num_parameters = sum(row.num_parameters for row in rows)
    return 8 * sum(row.num_bytes for row in rows) / num_parameters if num_parameters else 0.0


def _problems_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"severity": problem.severity, "text": problem.text} for problem in problems]


def _layer_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "num_bytes": entry.num_bytes,
        "file": next(iter(entry.parts.values())).file.name,
        "parts": {name: {"dtype": part.dtype, "shape": list(part.shape)} for name, part in entry.parts.items() if name},
        "attributes": dict(entry.attributes),
    }
