"""Where every byte of an output file will lie, known from shapes alone.

A file is a sequence of pieces: bytes known now, holes that tensor data fills later, and seals (checksums) that are
known when the holes are full. Both formats are laid out so that holes fill from front to back in the order in which
weights are made.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch

from aoquant.engine import libraries
from aoquant.errors import UsageError

Format = Literal["bin", "safetensors"]


class Slot(NamedTuple):
    """The place of one stored tensor: the name in the state dict, and the attribute (empty for a plain tensor)."""

    name: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Bytes that are known before any tensor is."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Room for one stored tensor."""

    slot: Slot
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Bytes of a known length that depend on the CRC-32 of the tensors before them."""

    num_bytes: int
    build: Callable[[Mapping[Slot, int]], bytes]


Piece = Fixed | Hole | Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """One output file, to the byte. keys: the names under which its tensors stand in the format's index."""

    name: str
    pieces: tuple[Piece, ...]
    keys: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def framing_bytes(self) -> int:
        """Bytes that are no tensor's data."""
        return sum(piece.num_bytes for piece in self.pieces if not isinstance(piece, Hole))


State = Mapping[str, torch.Tensor]
"""Names → tensors on the meta device, plain or torchao's: shapes and attributes without data."""


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that make up `tensor`: attribute → tensor, in the order of its class; "" if it is plain."""
    if type(tensor) is torch.Tensor:
        return {"": tensor}
    names: Sequence[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of all parts of `tensor`."""
    return sum(part.numel() * part.element_size() for part in parts(tensor).values())


# --- .bin: a zip as torch.save writes it (torch 2.13) ---------------------------------------------------------------

_ALIGNMENT = 64  # torch aligns every record's data to this
_ZIP64 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_FLAGS = 0x0808  # sizes and CRC follow the data; names are UTF-8
_DOS_DATE = 0x21  # 1980-01-01, so that the same input gives the same bytes


def bin_layout(file_name: str, state: State, saved_names: Mapping[str, str]) -> FileLayout:
    """Lay out a torch `.bin` of `state`: `data.pkl` first, then one record for each part, in order.

    saved_names: module name → the name in the file.
    """
    pickled, slots = _pickle_state(state, saved_names)
    root = file_name.rpartition(".")[0]
    archive = _Archive(root)
    archive.add_fixed("data.pkl", pickled)
    archive.add_fixed("byteorder", b"little")
    for key, (slot, num_bytes) in enumerate(slots):
        archive.add_hole(f"data/{key}", slot, num_bytes)
    archive.add_fixed("version", b"3\n")
    return FileLayout(name=file_name, pieces=archive.finish(), keys=tuple(saved_names[name] for name in state))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Storage:
    """Stands for a storage while pickling; written as torch's persistent id."""

    kind: Any
    key: str
    num_elements: int


def _pickle_state(state: State, saved_names: Mapping[str, str]) -> tuple[bytes, list[tuple[Slot, int]]]:
    """`data.pkl` for `state`, as torch.save would write it if the tensors were on the CPU, and the storages' slots."""
    stream = io.BytesIO()
    pickler = _StatePickler(stream)
    pickler.slots_of = {
        id(part): Slot(name, attribute) for name, tensor in state.items() for attribute, part in parts(tensor).items()
    }
    pickler.dump(OrderedDict((saved_names[name], tensor) for name, tensor in state.items()))
    return stream.getvalue(), pickler.storages


class _StatePickler(pickle.Pickler):
    slots_of: dict[int, Slot]

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.storages: list[tuple[Slot, int]] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.num_elements)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if type(obj) is torch.Tensor:
            return self._reduce_plain(obj)
        # As torch.Tensor.__reduce_ex__ does for a wrapper subclass, but on the CPU instead of the meta device.
        like = (
            type(obj), obj.dtype, tuple(obj.size()), obj.stride(), obj.storage_offset(), obj.layout,
            torch.device("cpu"), obj.requires_grad,
        )  # fmt: skip
        rebuild = torch._utils._rebuild_wrapper_subclass
        state = torch._utils._get_obj_state(obj)  # type: ignore[no-untyped-call]
        return torch._tensor._rebuild_from_type_v2, (rebuild, type(obj), like, state)

    def _reduce_plain(self, tensor: torch.Tensor) -> Any:
        num_bytes = tensor.numel() * tensor.element_size()
        key = str(len(self.storages))
        self.storages.append((self.slots_of[id(tensor)], num_bytes))
        where: tuple[Any, ...] = (0, tuple(tensor.size()), tensor.stride(), tensor.requires_grad, OrderedDict())
        kinds: Mapping[torch.dtype, str] = torch.storage._dtype_to_storage_type_map()
        if tensor.dtype in torch.storage._new_dtypes():
            storage = _Storage(kind=torch.UntypedStorage, key=key, num_elements=num_bytes)
            return torch._utils._rebuild_tensor_v3, (storage, *where, tensor.dtype)
        storage = _Storage(kind=getattr(torch, kinds[tensor.dtype]), key=key, num_elements=tensor.numel())
        return torch._utils._rebuild_tensor_v2, (storage, *where)


class _Archive:
    """Collects the pieces of an uncompressed zip whose records' data are aligned."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._offset = 0
        self._pieces: list[Piece] = []
        self._records: list[_Record] = []

    def add_fixed(self, name: str, data: bytes) -> None:
        import zlib

        self._open(name, len(data), slot=None, crc=zlib.crc32(data))
        self._append(Fixed(data=data))
        self._close()

    def add_hole(self, name: str, slot: Slot, num_bytes: int) -> None:
        self._open(name, num_bytes, slot=slot, crc=0)
        self._append(Hole(slot=slot, num_bytes=num_bytes))
        self._close()

    def finish(self) -> tuple[Piece, ...]:
        start = self._offset
        records = tuple(self._records)
        directory_bytes = len(_central_directory(records, {}))
        self._append(Seal(num_bytes=directory_bytes, build=lambda crcs: _central_directory(records, crcs)))
        self._append(Fixed(data=_end_of_directory(len(records), start, directory_bytes)))
        return tuple(self._pieces)

    def _append(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._offset += piece.num_bytes

    def _open(self, name: str, num_bytes: int, *, slot: Slot | None, crc: int) -> None:
        path = f"{self._root}/{name}".encode()
        record = _Record(path=path, offset=self._offset, num_bytes=num_bytes, slot=slot, crc=crc)
        self._records.append(record)
        self._append(Fixed(data=_local_header(record)))

    def _close(self) -> None:
        record = self._records[-1]
        num_bytes = len(_descriptor(record, 0))
        self._append(Seal(num_bytes=num_bytes, build=lambda crcs: _descriptor(record, record.crc_in(crcs))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    path: bytes
    offset: int
    num_bytes: int
    slot: Slot | None
    crc: int

    @property
    def is_large(self) -> bool:
        return self.num_bytes >= _ZIP64

    def crc_in(self, crcs: Mapping[Slot, int]) -> int:
        return self.crc if self.slot is None else crcs.get(self.slot, 0)


def _local_header(record: _Record) -> bytes:
    size = _ZIP64 if record.is_large else 0
    extra = struct.pack("<2H2Q", 1, 16, 0, 0) if record.is_large else b""
    start = record.offset + _LOCAL.size + len(record.path) + len(extra) + 4
    padding = -start % _ALIGNMENT
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    version = 45 if record.is_large else 0
    header = _LOCAL.pack(
        b"PK\3\4", version, _FLAGS, 0, 0, _DOS_DATE, 0, size, size, len(record.path), len(extra)
    )  # fmt: skip
    return header + record.path + extra


def _descriptor(record: _Record, crc: int) -> bytes:
    layout = "<4sI2Q" if record.is_large else "<4s3I"
    return struct.pack(layout, b"PK\7\10", crc, record.num_bytes, record.num_bytes)


def _central_directory(records: Sequence[_Record], crcs: Mapping[Slot, int]) -> bytes:
    directory = bytearray()
    for record in records:
        wide = [record.num_bytes] * 2 if record.is_large else []
        far = [record.offset] if record.offset >= _ZIP64 else []
        values = wide + far
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        size = _ZIP64 if wide else record.num_bytes
        offset = _ZIP64 if far else record.offset
        version = 45 if values else 0
        directory += _CENTRAL.pack(
            b"PK\1\2", version, version, _FLAGS, 0, 0, _DOS_DATE, record.crc_in(crcs), size, size,
            len(record.path), len(extra), 0, 0, 0, 0, offset,
        )  # fmt: skip
        directory += record.path + extra
    return bytes(directory)


def _end_of_directory(num_records: int, start: int, num_bytes: int) -> bytes:
    end = b""
    if num_records >= 0xFFFF or start >= _ZIP64 or num_bytes >= _ZIP64:
        end += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, num_records, num_records, num_bytes, start)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, start + num_bytes, 1)
    count = min(num_records, 0xFFFF)
    return end + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, min(num_bytes, _ZIP64), min(start, _ZIP64), 0)


# --- .safetensors ---------------------------------------------------------------------------------------------------

_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """torchao's safetensors form of a whole state dict: every stored tensor's key, and the metadata of all of them."""

    keys: Mapping[Slot, str]
    metadata: Mapping[str, str]


def flatten(state: State, saved_names: Mapping[str, str], *, describe_roots: bool = True) -> Flattened:
    """Ask torchao how it flattens `state`. saved_names: module name → the name that stock saves it under.

    The metadata speaks of module names, as stock's does; the keys of the file are the stored ones. describe_roots:
    whether it speaks of names without a dot. diffusers fills no tensor that it leaves out; transformers 5.24 hands all
    that it names to a helper of torchao 0.18 which cannot split those, and fills plain tensors without being told.
    """
    libraries.load("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    try:
        _, metadata = flatten_tensor_state_dict(
            {name: tensor for name, tensor in state.items() if describe_roots or "." in name}
        )
    except ValueError as error:
        kinds = sorted({type(tensor).__name__ for tensor in state.values()} - {"Tensor"})
        raise UsageError(
            f"torchao {version('torchao')} does not write {', '.join(kinds)} into safetensors",
            hint="write --format bin, or update torchao",
        ) from error
    keys: dict[Slot, str] = {}
    for name, tensor in state.items():
        stored = saved_names[name]
        head, dot, tail = stored.rpartition(".")
        for part in parts(tensor):
            keys[Slot(name, part)] = f"{head}{dot}_{tail}_{part}" if part else stored
    return Flattened(keys=keys, metadata={"format": "pt", **metadata})


def safetensors_layout(file_name: str, state: State, flattened: Flattened) -> FileLayout:
    """Lay out one `.safetensors` shard. Every shard carries the metadata of the whole checkpoint, as stock's do.

    Readers view the data in place, so each tensor must be aligned to its item size, without gaps. Tensors whose size
    is a multiple of 8 keep any order; the few others go last, widest items first.
    """
    tensors = {Slot(name, part): value for name, tensor in state.items() for part, value in parts(tensor).items()}
    sizes = {slot: value.numel() * value.element_size() for slot, value in tensors.items()}
    ordered = sorted(tensors, key=lambda slot: -tensors[slot].element_size() if sizes[slot] % 8 else -16)
    header: dict[str, Any] = {"__metadata__": dict(flattened.metadata)}
    offset = 0
    for slot in ordered:
        value = tensors[slot]
        header[flattened.keys[slot]] = {
            "dtype": _SAFETENSORS_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + sizes[slot]],
        }
        offset += sizes[slot]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    holes: list[Piece] = [Hole(slot=slot, num_bytes=sizes[slot]) for slot in ordered]
    pieces = (Fixed(data=struct.pack("<Q", len(text)) + text), *holes)
    return FileLayout(name=file_name, pieces=pieces, keys=tuple(flattened.keys[slot] for slot in ordered))
