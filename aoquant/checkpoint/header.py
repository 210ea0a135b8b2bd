"""What a .safetensors file holds, from its header alone.

The format: 8 bytes of little-endian header length, a JSON object `name → {dtype, shape, data_offsets}` (and
`__metadata__`, text to text), then the tensors' bytes without gaps. torchao flattens a tensor subclass into
parts `module._weight_qdata`, and describes it in the metadata (`torchao/prototype/safetensors`, 0.16 to
0.18).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aoquant.checkpoint.files import Opener, open_file, parse_json, quoted, read_up_to, refuse_foreign
from aoquant.checkpoint.tensors import ITEM_BYTES, PLAIN, Entry, StoredTensor, contiguous_stride
from aoquant.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

# The format's names → torch's. F4 packs two values in a byte; torch's dtype of that name counts the bytes.
_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_MAX_ELEMENTS = 2**60
_MAX_DIMS = 64
_MAX_DEPTH = 64  # dotted parts of a name that is looked for under another; honest ones have about ten
_MAX_SIGNATURES = 16
_METADATA = "__metadata__"
_DOWNLOAD_AGAIN = "download or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A safetensors header. entries: by the stored names, in the order of their bytes.

    data_bytes: what the tensors need after the header. missing_bytes: how much of that the file lacks at its
    end, 0 for a whole file.
    """

    entries: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    file_bytes: int
    data_bytes: int
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Stored tensors put together to what a program loads.

    incomplete: names of which some parts are there → the parts that are not. problems: what is wrong with the
    metadata itself.
    """

    entries: Mapping[str, Entry]
    incomplete: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...]


def read_header(path: Path, *, allow_truncated: bool = False, opener: Opener = open_file) -> Header:
    """Read and check the header of a .safetensors file; of the tensors' bytes only their number is looked at.

    Raises CheckpointError if the file is damaged, or is something else. With allow_truncated a file that
    merely ends too early gives its header, with `missing_bytes`.
    """
    with opener(path) as (file, num_bytes):
        head = read_up_to(file, 512)
        refuse_foreign(path, head)
        length = int.from_bytes(head[:8], "little")
        if num_bytes < 8 or (length > MAX_HEADER_BYTES and not head[8:9] == b"{"):
            raise CheckpointError(
                f"{path.name} is not a safetensors file ({num_bytes:,} bytes, no header)",
                hint=_DOWNLOAD_AGAIN,
            )
        if length > MAX_HEADER_BYTES:
            raise _damaged(path, f"its header claims {length:,} bytes, {MAX_HEADER_BYTES:,} are allowed")
        if 8 + length > num_bytes:
            raise CheckpointError(
                f"{path.name} is truncated: it has {num_bytes:,} bytes, its header needs {8 + length:,}",
                hint=_DOWNLOAD_AGAIN,
            )
        file.seek(8)
        text = read_up_to(file, length)
    content = parse_json(text, f"the header of {path.name}", unique_keys=True)
    if not isinstance(content, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = _metadata(path, content.pop(_METADATA, {}))
    data_offset = 8 + length
    found = [_stored(path, name, described, data_offset) for name, described in content.items()]
    found.sort(key=lambda item: (item[1].offset, item[1].storage_bytes))
    end = _check_tiling(path, found, data_offset)
    missing = max(end - num_bytes, 0)
    if end < num_bytes:
        raise _damaged(path, f"{num_bytes - end:,} bytes follow its last tensor, which belong to none")
    if missing and not allow_truncated:
        raise CheckpointError(
            f"{path.name} is truncated: it has {num_bytes:,} bytes, its tensors need {end:,}",
            hint=_DOWNLOAD_AGAIN,
        )
    return Header(
        entries=dict(found),
        metadata=metadata,
        file_bytes=num_bytes,
        data_bytes=end - data_offset,
        missing_bytes=missing,
    )


def join_torchao(raw: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> Joined:
    """Put the parts that torchao flattened back together; without its metadata every tensor stays plain.

    raw and metadata may be those of several shards merged, as the stock loaders merge them. A joined entry
    stands where its first part does.
    """
    try:
        described = _described(metadata)
    except ValueError as error:
        plain = {name: plain_entry(name, tensor) for name, tensor in raw.items()}
        return Joined(entries=plain, incomplete={}, problems=(f"torchao's metadata is broken: {error}",))
    places = {name: _part_names(name, record) for name, record in described.items()}
    renamed = _renamed(raw, described, places)
    owner: dict[str, str] = {}
    incomplete: dict[str, tuple[str, ...]] = {}
    joined: dict[str, Entry] = {}
    for described_name, record in described.items():
        name = renamed.get(described_name, described_name)
        stored = _part_names(name, record) if described_name in renamed else places[name]
        absent = tuple(part for part, raw_name in stored.items() if raw_name not in raw)
        if len(absent) == len(stored):
            continue  # in another shard, or left out as a tied name: transformers describes those too
        if absent:
            incomplete[name] = absent
        elif stored.keys() != {""}:
            joined[name] = _joined_entry(name, record, {part: raw[key] for part, key in stored.items()})
            owner.update(dict.fromkeys(stored.values(), name))
    entries: dict[str, Entry] = {}
    for raw_name, tensor in raw.items():
        name = owner.get(raw_name, raw_name)
        if name not in entries:
            entries[name] = joined[name] if raw_name in owner else plain_entry(raw_name, tensor)
    return Joined(entries=entries, incomplete=incomplete, problems=())


def plain_entry(name: str, tensor: StoredTensor) -> Entry:
    """The entry of an ordinary tensor."""
    return Entry(name=name, kind=PLAIN, dtype=tensor.dtype, shape=tensor.shape, parts={"": tensor})


def attribute_text(value: Any, *, budget: int = 200) -> str:
    """A JSON value as torchao encodes attributes and configs (`_type`, `_data`), as Python would show the
    object.

    `{"_type": "PerRow", "_data": {"dim": -1}}` → `PerRow(dim=-1)`; a dtype by its name; an enum as
    `Class.NAME`. Settings that are null are left out. About `budget` values are shown at most.
    """
    return _text(value, [budget])


def _text(value: Any, budget: list[int]) -> str:
    budget[0] -= 1
    if budget[0] < 0:
        return "…"
    if isinstance(value, dict):
        kind, data = value.get("_type"), value.get("_data")
        if isinstance(kind, str) and "_data" in value:
            name = quoted(kind, quote=False)
            if isinstance(data, dict):
                return f"{name}({_fields(data, budget)})"
            if kind == "torch.dtype":
                return quoted(data, quote=False)
            return f"{name}.{quoted(data, quote=False)}"
        return "{" + _fields(value, budget) + "}"
    if isinstance(value, list):
        shown = [_text(item, budget) for item in value[:64]] + ["…"] * (len(value) > 64)
        return f"[{', '.join(shown)}]"
    return quoted(value, quote=False)


def _fields(data: Mapping[str, Any], budget: list[int]) -> str:
    shown = [f"{quoted(key, quote=False)}={_text(item, budget)}" for key, item in data.items() if item is not None]
    return ", ".join(shown)


def _stored(path: Path, name: str, described: Any, data_offset: int) -> tuple[str, StoredTensor]:
    if not isinstance(described, dict):
        raise _damaged(path, f"its header describes {quoted(name)} as {quoted(described)}")
    code, shape = described.get("dtype"), sizes(described.get("shape"))
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise _damaged(path, f"{quoted(name)} has the dtype {quoted(code)}, which is none that torch has")
    if shape is None:
        raise _damaged(path, f"{quoted(name)} has the shape {quoted(described.get('shape'))}")
    offsets = described.get("data_offsets")
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        raise _damaged(path, f"{quoted(name)} has the data_offsets {quoted(offsets)}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise _damaged(path, f"{quoted(name)} has the data_offsets {quoted(offsets)}")
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise _damaged(path, f"{quoted(name)} packs two values a byte in the shape {quoted(list(shape))}")
        shape = (*shape[:-1], shape[-1] // 2)
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes != end - begin:
        raise _damaged(
            path,
            f"{quoted(name)} ({dtype} {quoted(list(shape), quote=False)}) needs {num_bytes:,} bytes, "
            f"and its data_offsets give it {end - begin:,}",
        )
    return name, StoredTensor(
        file=path,
        dtype=dtype,
        shape=shape,
        stride=contiguous_stride(shape),
        offset=data_offset + begin,
        storage_offset=data_offset + begin,
        storage_bytes=num_bytes,
    )


def sizes(value: Any) -> tuple[int, ...] | None:
    """`value` as a shape, or None unless it is a short sequence of non-negative ints of a sane product."""
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_DIMS:
        return None
    if not all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value):
        return None
    return tuple(value) if math.prod(value) <= _MAX_ELEMENTS else None


def _check_tiling(path: Path, found: list[tuple[str, StoredTensor]], data_offset: int) -> int:
    """Check that the sorted tensors lie one behind the other; returns where in the file the last ends."""
    end = data_offset
    for name, tensor in found:
        if tensor.offset != end:
            what = "overlap the tensor before it" if tensor.offset < end else "leave a gap before it"
            raise _damaged(path, f"the data_offsets of {quoted(name)} {what}")
        end += tensor.storage_bytes
    return end


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"its {_METADATA} is not a map from text to text")
    return metadata


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged: {what}", hint=_DOWNLOAD_AGAIN)


def _described(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """torchao's record of each name, empty if it wrote none. ValueError if stock would not accept them."""
    if "tensor_names" not in metadata:
        return {}
    names = _json(metadata["tensor_names"])
    if not _is_texts(names):
        raise ValueError("tensor_names is not a list of names")
    described = {}
    for name in names:
        record = _json(metadata.get(name, "null"))
        kind = record.get("_type") if isinstance(record, dict) else None
        if kind != PLAIN:
            is_whole = isinstance(kind, str) and isinstance(record.get("_data"), dict)
            if not is_whole or not _is_texts(record.get("_tensor_data_names")):
                raise ValueError(f"it does not describe {quoted(name)}")
        described[name] = record
    return described


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{quoted(text, limit=40)} is not JSON") from None


def _part_names(name: str, record: Mapping[str, Any]) -> dict[str, str]:
    """Part → stored name. torchao writes the part `qdata` of `a.weight` as `a._weight_qdata`."""
    if record["_type"] == PLAIN:
        return {"": name}
    module, dot, last = name.rpartition(".")
    return {part: f"{module}{dot}_{last}_{part}" for part in record["_tensor_data_names"]}


def _renamed(
    raw: Mapping[str, StoredTensor],
    described: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, Mapping[str, str]],
) -> dict[str, str]:
    """Described name → the name that it is stored under, for those that go by another.

    transformers 5 describes a module's names and stores a checkpoint's (`text_model.` in front, say). Their ends tell
    which belong together, the longest first; several of one end go by their order.
    """
    claimed = {key for stored in places.values() for key in stored.values()}
    signatures: dict[str, tuple[str, tuple[str, ...]]] = {}  # described name → last part of the name, parts
    for name, record in described.items():
        if record["_type"] != PLAIN and not any(key in raw for key in places[name].values()):
            signatures[name] = name.rpartition(".")[2], tuple(record["_tensor_data_names"])
    kinds = set(signatures.values())
    if not kinds or len(kinds) > _MAX_SIGNATURES:
        return {}
    stored: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key in raw:
        module, dot, last = key.rpartition(".")
        if not dot or key in claimed:
            continue
        for tail, parts in kinds:
            keys = (f"{module}._{tail}_{part}" for part in parts)
            if last == f"_{tail}_{parts[0]}" and all(other in raw for other in keys):
                stored[f"{module}.{tail}"] = tail, parts
    return _paired_by_end(signatures, stored)


def _paired_by_end(names: Mapping[str, object], others: Mapping[str, object]) -> dict[str, str]:
    """Pair names of equal value by the longest run of dotted parts at their ends, two parts or more."""
    left = {name: pieces for name in names if len(pieces := name.split(".")) <= _MAX_DEPTH}
    right = {name: pieces for name in others if len(pieces := name.split(".")) <= _MAX_DEPTH}
    found: dict[str, str] = {}
    for length in range(max(map(len, left.values()), default=0), 1, -1):
        ends: dict[tuple[object, ...], tuple[list[str], list[str]]] = {}
        for side, values, which in ((left, names, 0), (right, others, 1)):
            for name, pieces in side.items():
                if len(pieces) >= length:
                    ends.setdefault((values[name], *pieces[-length:]), ([], []))[which].append(name)
        for ours, theirs in ends.values():
            if len(ours) == len(theirs):
                found.update(zip(ours, theirs, strict=True))
        left = {name: pieces for name, pieces in left.items() if name not in found}
        taken = set(found.values())
        right = {name: pieces for name, pieces in right.items() if name not in taken}
    return found


def _joined_entry(name: str, record: Mapping[str, Any], parts: dict[str, StoredTensor]) -> Entry:
    data: dict[str, Any] = record["_data"]
    main = parts.get("qdata") or max(parts.values(), key=lambda part: part.num_bytes)
    scale = parts.get("scale", main)
    dtype = _dtype_name(data.get("dtype")) or _dtype_name(data.get("orig_dtype")) or scale.dtype
    attributes = {key: attribute_text(value) for key, value in data.items() if value is not None}
    return Entry(
        name=name,
        kind=record["_type"],
        dtype=dtype,
        shape=_logical_shape(data, main),
        parts=parts,
        attributes=attributes,
    )


def _logical_shape(data: Mapping[str, Any], main: StoredTensor) -> tuple[int, ...]:
    """`shape` where the class has it; otherwise qdata's, two values a byte in the 4-bit float formats."""
    shape = sizes(data.get("shape"))
    if shape is not None:
        return shape
    two_a_byte = main.dtype == "uint8" and "block_size" in data and isinstance(data["block_size"], int)
    if main.shape and (main.dtype == "float4_e2m1fn_x2" or two_a_byte):
        return (*main.shape[:-1], main.shape[-1] * 2)
    return main.shape


def _dtype_name(value: Any) -> str:
    """The dtype in `{"_type": "torch.dtype", "_data": "bfloat16"}`, empty for anything else."""
    if not isinstance(value, dict) or value.get("_type") != "torch.dtype":
        return ""
    return quoted(value.get("_data"), quote=False)
