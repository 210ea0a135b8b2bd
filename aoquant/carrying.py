"""One weight in a class of an earlier torchao → the same values in today's class, to the bit."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aoquant.checkpoint.files import quoted
from aoquant.checkpoint.tensors import LOW_BIT, Entry, StoredTensor
from aoquant.configs import parse_config
from aoquant.engine.formats import parts
from aoquant.engine.quantize import kernel_for
from aoquant.errors import CheckpointError

AGAIN = "`aoquant quantize` the original model again"

# torchao's own packing of X bits: (attribute, bits, their place in the value). Along a row, in 8 / bits runs.
_SHARDS: Mapping[int, tuple[tuple[str, int, int], ...]] = {
    1: (("int1_shard", 1, 0),),
    2: (("int2_shard", 2, 0),),
    3: (("int2_shard", 2, 0), ("int1_shard", 1, 2)),
    4: (("int4_shard", 4, 0),),
    5: (("int4_shard", 4, 0), ("int1_shard", 1, 4)),
    6: (("int4_shard", 4, 0), ("int2_shard", 2, 4)),
    7: (("int4_shard", 4, 0), ("int2_shard", 2, 4), ("int1_shard", 1, 6)),
}
# Activations to int8 per token, symmetric: as today's int8dq, but from -127, not -128, on.
_SYMMETRIC = "_int8_symm_per_token_reduced_range_quant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A weight on its way: the config that makes such weights today, and its class's parts.

    values: rows from and to → what they meant in the old class; None where the class is today's.
    """

    config: str
    parts: Mapping[str, torch.Tensor]
    values: Callable[[int, int], torch.Tensor] | None


class Storages:
    """One `.bin`, mapped: its tensors are views of the file, and share there what they share in it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants to be able to write
        self._known: dict[tuple[int, str], torch.Tensor] = {}

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not stored.num_elements:
            return torch.empty(stored.shape, dtype=dtype)
        key = (stored.storage_offset, stored.dtype)
        if key not in self._known:
            count = stored.storage_bytes // dtype.itemsize
            self._known[key] = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=stored.storage_offset)
        start = (stored.offset - stored.storage_offset) // dtype.itemsize
        return self._known[key].as_strided(stored.shape, stored.stride, start)


def carry(entry: Entry, storages: Storages, config_name: str) -> Carried:
    """Read one weight. config_name: what it was made as, if known. Raises CheckpointError where today has no class."""
    found = {name: storages.tensor(stored) for name, stored in entry.parts.items()}
    attributes = dict(entry.attributes)
    if entry.kind == "LinearActivationQuantizedTensor":
        function = attributes.pop("input_quant_func", "")
        if function != _SYMMETRIC:
            raise unknown(entry, f"quantizes activations by {quoted(function, quote=False)}")
        prefix = "original_weight_tensor."
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        attributes = {name.removeprefix(prefix): text for name, text in attributes.items()}
        return _affine(entry, found, attributes, dynamic=True)
    if entry.kind == "AffineQuantizedTensor":
        return _affine(entry, found, attributes, dynamic=False)
    if entry.kind == "Int8Tensor" and "zero_point" not in found:
        dynamic = "act_quant_kwargs" in attributes
        return _int8(entry, found["qdata"], found["scale"], dynamic=dynamic)
    if not config_name:
        raise unknown(entry, "is not of a class that has been replaced")
    refuse_other_activations(entry, config_name)
    return Carried(config=config_name, parts=found, values=None)  # only its config has a new form


def refuse_other_activations(entry: Entry, config: str) -> None:
    """Raise CheckpointError where int8 weights say other than `config` whether activations are quantized."""
    is_dynamic = parse_config(config).row.name == "int8dq"
    if entry.kind == "Int8Tensor" and is_dynamic != (entry.attributes.get("act_quant_kwargs", "None") != "None"):
        raise unknown(entry, f"is no weight of {config}")


def _affine(
    entry: Entry, found: Mapping[str, torch.Tensor], attributes: Mapping[str, str], *, dynamic: bool
) -> Carried:
    scale, zero_point = found.get("tensor_impl.scale"), found.get("tensor_impl.zero_point")
    codes = found.get("tensor_impl.int_data")
    block_size = _numbers(attributes.get("block_size", ""))
    if scale is None or len(entry.shape) != 2 or len(block_size) != 2 or block_size[0] != 1:
        raise unknown(entry, "is in a layout that is not understood")
    if attributes.get("zero_point_domain") == "ZeroPointDomain.FLOAT" or (
        zero_point is not None and zero_point.is_floating_point()
    ):
        raise unknown(entry, "has a zero point that is no integer")
    if codes is not None and codes.dtype == torch.int8:
        if zero_point is not None and bool(zero_point.any()):
            raise unknown(entry, "has zero points, and today's int8 weights have none")
        return _int8(entry, codes, scale, dynamic=dynamic)
    bits = int(attributes.get("tensor_impl.int_data.bit_width", "0"))
    along_rows = attributes.get("tensor_impl.int_data.pack_dim") in ("-1", "1")
    if bits not in _SHARDS or not along_rows or dynamic or zero_point is None:
        raise unknown(entry, "is in a layout that is not understood")
    from aoquant import lowbit  # torchao is talkative when it is first imported

    shards = [(found[f"tensor_impl.int_data.{name}"], width, shift) for name, width, shift in _SHARDS[bits]]
    half = 1 << (bits - 1)
    if any(tuple(shard.shape) != (entry.shape[0], entry.shape[1] * width // 8) for shard, width, _ in shards) or bool(
        ((zero_point < 0) | (zero_point >= 2 * half)).any()
    ):
        raise unknown(entry, "has codes or zero points that its width cannot hold")
    dtype: torch.dtype = getattr(torch, entry.dtype)
    per_group = (entry.shape[0], entry.shape[1] // block_size[1])
    scale, zero_point = scale.view(per_group), zero_point.view(per_group)
    wide = torch.zeros(entry.shape, dtype=torch.uint8)
    for start, end in _row_blocks(entry):
        for shard, width, shift in shards:
            wide[start:end] |= _unpacked(shard[start:end], width) << shift

    def values(start: int, end: int) -> torch.Tensor:
        grouped = wide[start:end].to(torch.int32).view(end - start, -1, block_size[1])
        shifted = grouped - zero_point[start:end].unsqueeze(-1)
        return (shifted.to(dtype) * scale[start:end].to(dtype).unsqueeze(-1)).view(end - start, -1)

    return Carried(
        config=f"uint{bits}wo:group_size={block_size[1]}",
        parts={
            "qdata": lowbit.pack(wide, bits),
            "scale": scale,
            "zero_point": (zero_point - half).to(torch.int8),
        },
        values=values,
    )


def _int8(entry: Entry, codes: torch.Tensor, scale: torch.Tensor, *, dynamic: bool) -> Carried:
    rows, columns = entry.shape
    groups = scale.numel() // max(rows, 1)
    if scale.numel() != rows * groups or not groups or columns % groups:
        raise unknown(entry, "has scales by neither the row nor the group")
    scale = scale.view(rows, groups)
    name = "int8dq" if dynamic else "int8wo"
    dtype: torch.dtype = getattr(torch, entry.dtype)

    def values(start: int, end: int) -> torch.Tensor:
        grouped = codes[start:end].view(end - start, groups, -1).to(dtype)
        return (grouped * scale[start:end].to(dtype).unsqueeze(-1)).view(end - start, columns)

    return Carried(
        config=name if groups == 1 else f"{name}:group_size={columns // groups}",
        parts={
            "qdata": codes,
            "scale": scale.to(torch.float32),
            "zero_point": torch.zeros(rows, groups, dtype=torch.int8),
        },
        values=values,
    )


def _unpacked(shard: torch.Tensor, width: int) -> torch.Tensor:
    """shard: [N, K * width / 8] uint8 → [N, K]: of each byte the lowest bits belong to the row's first run."""
    mask = (1 << width) - 1
    return torch.cat([(shard >> shift) & mask for shift in range(0, 8, width)], dim=-1)


def made(entry: Entry, carried: Carried) -> Any:
    """The weight in today's class. Raises CheckpointError if it would not mean the same numbers."""
    weight = _assembled(entry, carried.parts, carried.config)
    if carried.values is None:
        return weight
    integer = torch.int32 if entry.dtype == "float32" else torch.int16
    whole = weight.dequantize() if type(weight).__name__ == LOW_BIT else None  # block by block; its rows share bytes
    for start, end in _row_blocks(entry):
        found = whole[start:end] if whole is not None else weight[start:end].dequantize()
        expected = carried.values(start, end)
        if not torch.equal(found.contiguous().view(integer), expected.contiguous().view(integer)):
            raise unknown(entry, f"would not keep its values as {carried.config}")
    return weight


def _row_blocks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Rows of a weight in runs of about a million values: what is made of them is small, and its memory used again."""
    rows, columns = entry.shape
    step = max(1, (1 << 20) // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _assembled(entry: Entry, found: Mapping[str, torch.Tensor], config: str) -> Any:
    like = outline(entry, config)
    wanted = parts(like)
    if forms(wanted) != forms(found):
        raise unknown(entry, "has other parts than its config makes today")
    _, context = like.__tensor_flatten__()
    inner = {name: on_its_own(found[name]) for name in wanted}
    return type(like).__tensor_unflatten__(inner, context, like.shape, like.stride())


def on_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where it is a part of a storage: torch.save writes all of that."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def outline(entry: Entry, config: str) -> Any:
    """What `config` makes of a weight like `entry` today, without storage."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    try:
        return kernel_for(parse_config(config), dtype).outline(torch.empty(entry.shape, dtype=dtype, device="meta"))
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise unknown(entry, f"has a shape that {config} does not take") from error


def forms(inner: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Part → its shape and dtype."""
    return {name: (part.shape, part.dtype) for name, part in inner.items()}


def _numbers(text: str) -> list[int]:
    inner = text.strip("[]")
    return [int(number) for number in inner.split(", ")] if inner.replace(", ", "").isdigit() else []


def unknown(entry: Entry, why: str) -> CheckpointError:
    """The error for a weight that cannot be carried over."""
    return CheckpointError(f"{quoted(entry.name)} cannot be carried over: it {why}", hint=AGAIN)
