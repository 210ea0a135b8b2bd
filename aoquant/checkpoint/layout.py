"""Names and folders: which files of a component hold its weights, and what their index says.

A component's weights are called `diffusion_pytorch_model` by diffusers, and `model` (safetensors) or
`pytorch_model` (bin) by transformers. They lie in one file, or in shards `STEM-00001-of-00002.EXT` named by
an index `STEM.EXT.index.json`. A variant (`fp16`) adds itself to each name: `STEM.fp16.EXT`,
`STEM.EXT.index.fp16.json`, `STEM.fp16-00001-of-00002.EXT`, and in an older style `STEM.EXT.fp16.index.json`,
`STEM-00001-of-00002.fp16.EXT`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aoquant.checkpoint.files import list_files as list_files
from aoquant.checkpoint.files import quoted
from aoquant.checkpoint.files import read_json as read_json
from aoquant.errors import CheckpointError

Library = Literal["diffusers", "transformers"]
Format = Literal["safetensors", "bin"]

MODEL_INDEX = "model_index.json"
CONFIG = "config.json"

_DIFFUSERS_STEM = "diffusion_pytorch_model"
# In the order in which the loaders look.
_STEMS: Mapping[tuple[Library, Format], str] = {
    ("diffusers", "safetensors"): _DIFFUSERS_STEM,
    ("transformers", "safetensors"): "model",
    ("diffusers", "bin"): _DIFFUSERS_STEM,
    ("transformers", "bin"): "pytorch_model",
}
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_WEIGHT = re.compile(
    rf"(?P<stem>{_DIFFUSERS_STEM}|model|pytorch_model)"
    r"(?:\.(?P<variant>[^./\\]+?))?(?P<shard>-\d{5}-of-\d{5})?(?:\.(?P<legacy>[^./\\]+))?"
    r"\.(?P<format>safetensors|bin)"
)
_INDEX = re.compile(
    rf"(?P<stem>{_DIFFUSERS_STEM}|model|pytorch_model)\.(?P<format>safetensors|bin)"
    r"(?:\.(?P<legacy>[^./\\]+))?\.index(?:\.(?P<variant>[^./\\]+))?\.json"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which of a component's names to read: either `index` or `file` is a name, the other None."""

    format: Format
    stem: str
    variant: str | None
    index: str | None
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """A shard index: tensor name → file name, and the free metadata beside it."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]

    @property
    def files(self) -> tuple[str, ...]:
        """The shards' names, each once, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """One component's weights on disk. If one file holds them all, `weight_map` is empty and `index` None."""

    format: Format
    files: tuple[Path, ...]
    index: Path | None
    weight_map: Mapping[str, str]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A component's weights as they are, gaps included.

    weights: what is there. missing: shards that the index names and the folder lacks. extra: shards of the
    same format and variant that the index does not name. others: weight files of another format or variant,
    not read.
    """

    weights: WeightFiles
    choice: Choice
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    others: tuple[str, ...]


def choose(names: Collection[str], *, variant: str | None = None) -> Choice:
    """Choose what the stock loaders would read of a component folder that lists `names` (no folders in them).

    safetensors goes before bin. Of an index and a single file, diffusers takes the index, transformers the
    file. Without a variant only names without one count. Raises CheckpointError, listing what there is, if
    none matches.
    """
    listed = set(names)
    for (library, format_), stem in _STEMS.items():
        file = _with_variant(f"{stem}.{format_}", variant)
        indexes = [_with_variant(f"{stem}.{format_}.index.json", variant)]
        if variant is not None:
            indexes.append(f"{stem}.{format_}.{variant}.index.json")
        index = next((name for name in indexes if name in listed), None)
        if index is not None and (library == "diffusers" or file not in listed):
            return Choice(format=format_, stem=stem, variant=variant, index=index, file=None)
        if file in listed:
            return Choice(format=format_, stem=stem, variant=variant, index=None, file=file)
    raise _no_match(listed, variant)


def variants(names: Collection[str]) -> tuple[str, ...]:
    """The variants that some weight file or index among `names` is of, sorted; none counts as no variant."""
    found = {parsed[2] for parsed in map(_parse, names) if parsed is not None}
    return tuple(sorted(variant for variant in found if variant is not None))


def is_weight_name(name: str) -> bool:
    """Whether `name` is how diffusers or transformers would call a weight file or its index."""
    return _parse(name) is not None


def is_shard_name(name: str) -> bool:
    """Whether `name` is a numbered shard's."""
    parsed = _parse(name)
    return parsed is not None and parsed[3] == "shard"


def find_weights(folder: Path, *, variant: str | None = None, listing: Mapping[str, int] | None = None) -> WeightFiles:
    """A component folder's weight files. Raises CheckpointError if there are none, or a shard is missing.

    listing: as for `locate_weights`.
    """
    located = locate_weights(folder, variant=variant, listing=listing)
    if located.missing:
        total = len(located.missing) + len(located.weights.files)
        raise CheckpointError(
            f"{folder.name}: {len(located.missing)} of the {total} shards that {located.choice.index} names "
            f"are missing, the first is {quoted(located.missing[0])}",
            hint="download or copy the folder again, whole",
        )
    return located.weights


def locate_weights(folder: Path, *, variant: str | None = None, listing: Mapping[str, int] | None = None) -> Located:
    """A component folder's weight files, and what is missing or left over. CheckpointError without any.

    listing: name → bytes of the files in the folder, where some are yet to come; an index has to be there.
    """
    names = list_files(folder) if listing is None else listing
    try:
        choice = choose(names, variant=variant)
    except CheckpointError as error:
        raise CheckpointError(f"{folder.name}: {error.message}", hint=error.hint) from None
    weight_map: Mapping[str, str] = {}
    if choice.index is not None:
        weight_map = read_index(folder / choice.index).weight_map
        wanted = tuple(sorted(set(weight_map.values())))
    else:
        wanted = (choice.file,) if choice.file is not None else ()
    present = tuple(name for name in wanted if name in names)
    unread = [name for name in sorted(names) if name not in wanted and name != choice.index and is_weight_name(name)]
    shard_of_choice = (choice.format, choice.stem, choice.variant, "shard")
    extra = tuple(name for name in unread if _parse(name) == shard_of_choice)
    weights = WeightFiles(
        format=choice.format,
        files=tuple(folder / name for name in present),
        index=folder / choice.index if choice.index is not None else None,
        weight_map=weight_map,
        total_bytes=sum(names[name] for name in present),
    )
    return Located(
        weights=weights,
        choice=choice,
        missing=tuple(name for name in wanted if name not in names),
        extra=extra,
        others=tuple(name for name in unread if name not in extra),
    )


def read_index(path: Path) -> ShardIndex:
    """Read a shard index. Raises CheckpointError unless it maps tensors to names of files in its folder."""
    content = read_json(path, unique_keys=True)
    weight_map = content.get("weight_map")
    metadata = content.get("metadata", {})
    hint = "download the index again; it must map tensor names to the shards beside it"
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map", hint=hint)
    extension = ".safetensors" if ".safetensors." in path.name else ".bin"
    checked: set[str] = set()
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path.name} maps {quoted(tensor)} to {quoted(file)}, not a file name", hint=hint)
        if file in checked:
            continue
        if not file.endswith(extension) or not _is_plain_name(file):
            raise CheckpointError(
                f"{path.name} maps {quoted(tensor)} to {quoted(file)}, which is not the name of "
                f"a {extension} file in its folder",
                hint=hint,
            )
        checked.add(file)
    return ShardIndex(weight_map=weight_map, metadata=metadata if isinstance(metadata, dict) else {})


def shard_names(library: Library, format: Format, num_shards: int) -> tuple[str, ...]:
    """The names that the stock savers give to `num_shards` files, in order; one file carries no number."""
    stem = _STEMS[library, format]
    if num_shards == 1:
        return (f"{stem}.{format}",)
    return tuple(f"{stem}-{number:05d}-of-{num_shards:05d}.{format}" for number in range(1, num_shards + 1))


def index_name(library: Library, format: Format) -> str:
    """The name that the stock savers give to the index of several shards."""
    return f"{_STEMS[library, format]}.{format}.index.json"


def _with_variant(name: str, variant: str | None) -> str:
    if variant is None:
        return name
    stem, _, extension = name.rpartition(".")
    return f"{stem}.{variant}.{extension}"


def _parse(name: str) -> tuple[Format, str, str | None, Literal["file", "shard", "index"]] | None:
    """Format, stem, variant and role of a weight file's or index's name; None for any other name."""
    match = _INDEX.fullmatch(name)
    if match is None:
        match = _WEIGHT.fullmatch(name)
        if match is None or (match["legacy"] and not match["shard"]):
            return None
    role: Literal["file", "shard", "index"] = "file"
    if match.re is _INDEX:
        role = "index"
    elif match["shard"]:
        role = "shard"
    format_: Format = "safetensors" if match["format"] == "safetensors" else "bin"
    return format_, match["stem"], match["variant"] or match["legacy"], role


def _no_match(names: set[str], variant: str | None) -> CheckpointError:
    weights = sorted(n for n in names if is_weight_name(n) or n.endswith((".safetensors", ".bin")))
    there = f"there is {_listing(weights)}" if weights else "there is no weight file at all"
    found = variants(names)
    if variant is not None:
        hint = "leave --variant out"
        if found:
            hint = f"the variants there are: {', '.join(found)}"
        return CheckpointError(f"no weights of variant {quoted(variant)}: {there}", hint=hint)
    if found:
        return CheckpointError(f"only variants of the weights: {there}", hint=f"--variant {found[0]}")
    if any(_SHARD.search(name) for name in weights):
        return CheckpointError(f"shards without an index: {there}", hint="download the folder again, whole")
    hint = f"expected {_DIFFUSERS_STEM}.safetensors, model.safetensors, pytorch_model.bin or an index"
    return CheckpointError(f"no weights: {there}", hint=hint)


def _listing(names: list[str], limit: int = 6) -> str:
    shown = ", ".join(quoted(name, quote=False) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _is_plain_name(name: str) -> bool:
    return name.isprintable() and not name.startswith(".") and not any(char in name for char in "/\\:")
