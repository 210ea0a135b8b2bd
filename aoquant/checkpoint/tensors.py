"""How a checkpoint's contents are described, whatever the file format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PLAIN = "Tensor"
"""The `kind` of an entry that is an ordinary tensor."""
LOW_BIT = "LowBitTensor"
"""The `kind` of aoquant's own tensor class."""
LOW_BIT_MODULE = "aoquant.lowbit"
"""What has to be imported before anything loads such a tensor."""

LEGACY_KINDS = frozenset({"AffineQuantizedTensor", "LinearActivationQuantizedTensor"})
"""The `kind`s of torchao's first tensor classes, gone in 0.18."""

# torch's dtype names → bytes per element. Sub-byte integers (torch.int4 …) are only ever attributes, never stored.
ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "float4_e2m1fn_x2": 1,
}  # fmt: skip


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major stride of `shape`, in elements, as torch gives it."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one plain tensor lies in one file.

    dtype is torch's name without the prefix (`bfloat16`). `offset` is the absolute position of its first element in
    the file, in bytes; `stride` is in elements. `storage_offset`/`storage_bytes` bound the stored run of bytes that
    the tensor views: two tensors of one file with equal `storage_offset` share memory when loaded.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_offset: int
    storage_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values themselves, whatever the storage they view."""
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        return self.num_elements == 0 or self.stride == contiguous_stride(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of a state dict: a plain tensor, or a tensor subclass made of several.

    kind: `Tensor`, or the subclass's name (`Int8Tensor`). module: the Python module that a `.bin` names for the class,
    empty otherwise. dtype, shape: the logical ones that a program sees (`bfloat16`, [N, K]). parts: attribute name →
    stored tensor (`qdata`, `scale` …; a plain tensor has the one part ``""``). attributes: the subclass's other
    attributes as readable text (`block_size` → `[1, 3072]`).
    """

    name: str
    kind: str
    module: str = ""
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.kind == PLAIN

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)
