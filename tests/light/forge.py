"""Weight files built by hand, right and wrong ones, without torch or safetensors."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ITEM = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "I64": 8}
STORAGE = {"BFloat16Storage": 2, "FloatStorage": 4, "CharStorage": 1, "HalfStorage": 2}


@dataclass(frozen=True)
class Named:
    """A global of the stream."""

    module: str
    name: str


@dataclass(frozen=True)
class Called:
    """`func(*args)`, then its state; made by NEWOBJ where `new` is set."""

    func: Any
    args: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False


@dataclass(frozen=True)
class Stored:
    """A persistent id."""

    key: Any


@dataclass
class TorchFile:
    """A torch zip in the making: its state dict and its storages."""

    prefix: str = "archive"
    state: dict[Any, Any] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)

    def tensor(
        self, storage: str, shape: Sequence[int], stride: Sequence[int] | None = None, *, start: int = 0,
        key: str | None = None,
    ) -> Called:  # fmt: skip
        """A tensor; with `key` one on a storage that is there already."""
        if key is None:
            key = str(len(self.records))
            self.records[key] = bytes(product(shape) * STORAGE[storage])
        num = len(self.records[key]) // STORAGE[storage]
        pid = Stored(("storage", Named("torch", storage), key, "cpu", num))
        rows = tuple(stride) if stride is not None else strides(shape)
        hooks = Called(Named("collections", "OrderedDict"))
        return Called(Named("torch._utils", "_rebuild_tensor_v2"), (pid, start, tuple(shape), rows, False, hooks))

    def subclass(self, kind: str, shape: Sequence[int], state: Mapping[str, Any], **named: str) -> Called:
        """A torchao tensor of bfloat16."""
        cls = Named(named.get("module", "torchao.quantization"), kind)
        args = (cls, Named("torch", "bfloat16"), tuple(shape), strides(shape), 0, None, None, False)
        wrapper = Named("torch._utils", "_rebuild_wrapper_subclass")
        return Called(Named("torch._tensor", "_rebuild_from_type_v2"), (wrapper, cls, args, dict(state)))

    def int8(self, rows: int, columns: int, **more: Any) -> Called:
        parts = {
            "qdata": self.tensor("CharStorage", (rows, columns)),
            "scale": self.tensor("FloatStorage", (rows, 1)),
        }
        return self.subclass("Int8Tensor", (rows, columns), {**parts, "block_size": [1, columns], **more})

    def write(self, path: Path, *, pickle: bytes | None = None) -> Path:
        records = {f"data/{key}": content for key, content in self.records.items()}
        stream = pickle if pickle is not None else encode(self.state)
        return write_zip(
            path, {"data.pkl": stream, "byteorder": b"little", "version": b"3\n", **records}, prefix=self.prefix
        )


def write_zip(
    path: Path, records: Mapping[str, bytes], *, prefix: str = "archive", method: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(f"{prefix}/{name}", content)
    return path


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    pad: int = 0,
) -> Path:
    """A file of zeros. tensors: name → (dtype, shape)."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + product(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return write_header(path, json.dumps(header) + " " * pad, end)


def write_header(path: Path, header: str | bytes, num_bytes: int) -> Path:
    """A safetensors file of this header and so many bytes of data, sparse."""
    text = header.encode() if isinstance(header, str) else header
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + num_bytes)
    return path


def torchao_metadata(records: Mapping[str, Mapping[str, Any] | None]) -> dict[str, str]:
    """torchao's metadata. records: name → `_type`, `_data`, `_tensor_data_names`; None for a plain tensor."""
    metadata = {name: json.dumps(record or {"_type": "Tensor"}) for name, record in records.items()}
    return {"format": "pt", **metadata, "tensor_names": json.dumps(list(records))}


def int8_record(columns: int, **data: Any) -> dict[str, Any]:
    bfloat16 = {"_type": "torch.dtype", "_data": "bfloat16"}
    return {
        "_type": "Int8Tensor",
        "_data": {"block_size": [1, columns], "dtype": bfloat16, "act_quant_kwargs": None, **data},
        "_tensor_data_names": ["qdata", "scale"],
    }


def encode(value: Any) -> bytes:
    """A whole protocol-2 stream of one value."""
    return b"\x80\x02" + body(value) + b"."


def body(value: Any) -> bytes:
    """The opcodes that push one value."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(value, str):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw
    if isinstance(value, tuple):
        return b"(" + b"".join(map(body, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(body, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(body(key) + body(item) for key, item in value.items()) + b"u"
    if isinstance(value, Named):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Stored):
        return body(value.key) + b"Q"
    assert isinstance(value, Called)
    made = body(value.func) + body(value.args) + (b"\x81" if value.new else b"R")
    return made + (body(value.state) + b"b" if value.state is not None else b"")


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(product(shape[axis + 1 :]) for axis in range(len(shape)))


def product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
