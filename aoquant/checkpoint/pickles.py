"""What a torch `.bin` file holds, without unpickling it.

The file is a zip: `NAME/data.pkl` is a pickled state dict, and `NAME/data/KEY` the bytes of one storage each,
stored uncompressed. The pickle is played by `opcodes` on inert values; of the calls in it, only torch's own
few that rebuild tensors are understood here, and they give descriptions. torch's side of this is
`torch/_utils.py` and `torch/_tensor.py` (seen in 2.6 and 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aoquant.checkpoint.archive import Archive
from aoquant.checkpoint.files import Opener, open_file, quoted, read_up_to, refuse_foreign
from aoquant.checkpoint.opcodes import (
    MAX_STREAM_BYTES,
    Call,
    Global,
    Opaque,
    Persistent,
    PickleError,
    interpret,
)
from aoquant.checkpoint.tensors import ITEM_BYTES, PLAIN, Entry, StoredTensor
from aoquant.errors import CheckpointError

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
_STORAGE_MODULES = frozenset({"torch", "torch.cuda", "torch.storage"})

_TENSOR_V1 = "torch._utils._rebuild_tensor"
_TENSOR_V2 = "torch._utils._rebuild_tensor_v2"
_TENSOR_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_META = "torch._utils._rebuild_meta_tensor_no_storage"

_PLAIN_TYPES = (
    "set", "frozenset", "bytearray", "complex", "int", "float", "bool", "list", "dict", "tuple", "slice"
)  # fmt: skip

# What torchao to 0.15 names in int8dq weights, to be called with activations. It takes and gives tensors.
_ACTIVATION_FUNCTIONS = ("_int8_asymm_per_token_quant", "_int8_symm_per_token_reduced_range_quant")

# Everything that a stream may name without being suspected. Exact names within torch, because torch also
# holds functions that run code (`torch.hub.load`, `torch.storage._load_from_bytes`, …) and scanners that
# trusted the package were led round by them. Within torchao only names shaped like its data classes.
_HARMLESS = frozenset({
    _TENSOR_V1, _TENSOR_V2, _TENSOR_V3, _PARAMETER, _PARAMETER_WITH_STATE, _WRAPPER, _FROM_TYPE, _META,
    "torch.Tensor", "torch.Size", "torch.device", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
    "torch.serialization._get_layout",
    "collections.OrderedDict", "collections.defaultdict", "collections.Counter", "_codecs.encode",
    *(f"torchao.quantization.quant_api.{name}" for name in _ACTIVATION_FUNCTIONS),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _PLAIN_TYPES),
    *(f"torch.{dtype}" for dtype in ITEM_BYTES),
    *(f"{module}.{name}" for module in _STORAGE_MODULES for name in _STORAGES),
})  # fmt: skip
_OTHER_DTYPE = re.compile(r"u?int[1-7]|quint8|qint8|qint32|quint4x2|quint2x4|bits(1x8|2x4|4x2|8|16)")
_DATA_CLASS = re.compile(
    r"[A-Z]\w*(Tensor|TensorImpl|Layout|Kwargs|Config|Granularity|Preference|Domain|Mode|Type|Format|DType|Algorithm)"
    r"|Per(Tensor|Row|Group|Axis|Block|Token|ChannelGroup)"
)

# Enums that torchao pickles by value, and a named tuple that it pickles by position (0.15 to 0.18).
_ENUM_NAMES: Mapping[str, Mapping[Any, str]] = {
    "MappingType": {1: "SYMMETRIC", 2: "SYMMETRIC_NO_CLIPPING_ERR", 3: "ASYMMETRIC"},
    "ZeroPointDomain": {1: "INT", 2: "FLOAT", 3: "NONE"},
    "KernelPreference": {
        "auto": "AUTO",
        "torch": "TORCH",
        "mslk": "MSLK",
        "fbgemm": "FBGEMM",
        "emulated": "EMULATED",
    },
}
_FIELDS: Mapping[str, tuple[str, ...]] = {"Float8MMConfig": ("emulate", "use_fast_accum", "pad_inner_dim")}

_MAX_ELEMENTS = 2**60
_MAX_DIMS = 64
_MAX_NESTING = 8
_DOWNLOAD_AGAIN = "download or copy it again"
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleContents:
    """What a `.bin` file holds. entries: its tensors, in the order of the state dict.

    suspicious: `module.name` of every global that is none of torch's, torchao's or Python's known harmless
    ones: unpickling would import, and may run it. named: every global of the pickle. other_values: names that hold
    no tensor data → what they hold.
    """

    entries: Mapping[str, Entry]
    suspicious: tuple[str, ...]
    named: tuple[str, ...]
    other_values: Mapping[str, str]
    file_bytes: int


def read_pickle_file(path: Path, *, opener: Opener = open_file) -> PickleContents:
    """Describe the state dict in a torch `.bin` file; nothing that the file names is imported or called.

    The state dict may lie one level down, under `state_dict`. Raises CheckpointError if the file is damaged,
    is no such file, or holds something else.
    """
    with opener(path) as (file, num_bytes):
        _check_start(path, read_up_to(file, 512))
        archive = Archive(path, file, num_bytes)
        root, named = _play(path, archive)
        suspicious = tuple(sorted({g.path + (" (changed)" if g.changed else "") for g in named if _is_odd(g)}))
        reader = _Reader(path, archive)
        # Of what is no state dict, that it would run code is the more to say; but a whole module is a mistake.
        is_hostile = any(not name.startswith("torch.nn.modules.") for name in suspicious)
        entries, other_values = reader.state_dict({} if is_hostile and not isinstance(root, dict) else root)
    return PickleContents(
        entries=entries,
        suspicious=suspicious,
        named=tuple(sorted(g.path for g in named)),
        other_values=other_values,
        file_bytes=num_bytes,
    )


def _check_start(path: Path, head: bytes) -> None:
    refuse_foreign(path, head)
    if head.startswith(b"PK\x03\x04"):
        return
    if head.startswith(_LEGACY_MAGIC):
        raise CheckpointError(
            f"{path.name} is in the format of torch before 1.6, which is not a zip",
            hint="torch.save(torch.load(file, weights_only=True), file) writes it in today's format",
        )
    if head[:1] == b"\x80":
        raise CheckpointError(
            f"{path.name} is a bare pickle, not a torch file", hint="do not unpickle it; ask for safetensors"
        )
    if head[8:9] == b"{":
        raise CheckpointError(f"{path.name} is a safetensors file", hint="rename it to end in .safetensors")
    raise CheckpointError(f"{path.name} is not a torch file: it is no zip", hint=_DOWNLOAD_AGAIN)


def _is_odd(named: Global) -> bool:
    if named.changed:
        return True
    if named.path in _HARMLESS:
        return False
    if named.module == "torch":
        return _OTHER_DTYPE.fullmatch(named.name) is None
    package = named.module.partition(".")[0]
    return package not in ("torchao", "aoquant") or _DATA_CLASS.fullmatch(named.name) is None


def _play(path: Path, archive: Archive) -> tuple[Any, tuple[Global, ...]]:
    stream = _pickle_stream(path, archive)
    try:
        return interpret(stream)
    except PickleError as error:
        reason = error.reason
        odd = sorted({named.path for named in error.globals_seen if _is_odd(named)})
    if odd:  # a real unpickler runs what comes before the damage
        reason += f"; before that it would run code: {quoted(', '.join(odd), quote=False)}"
    raise _damaged(path, reason)


def _pickle_stream(path: Path, archive: Archive) -> bytes:
    """The bytes of data.pkl. Raises CheckpointError for archives of another make or byte order."""
    if archive.get("constants.pkl") is not None:
        raise CheckpointError(
            f"{path.name} is a TorchScript program, not a state dict", hint="save the model's state_dict()"
        )
    order = archive.get("byteorder")
    if order is not None and archive.read(order, 16) != b"little":
        raise CheckpointError(f"{path.name} was written on a big-endian machine", hint="load and save it on another")
    record = archive.get("data.pkl")
    if record is None:
        raise CheckpointError(f"{path.name} is a zip without data.pkl, so not a torch file", hint=_DOWNLOAD_AGAIN)
    return archive.read(record, MAX_STREAM_BYTES)


class _Storage(NamedTuple):
    dtype: str
    offset: int
    num_bytes: int


class _Reader:
    """Turns the inert values of a stream into entries."""

    __slots__ = ("archive", "path", "places")

    def __init__(self, path: Path, archive: Archive) -> None:
        self.path = path
        self.archive = archive
        self.places: dict[str, tuple[int, int]] = {}

    def state_dict(self, root: Any) -> tuple[dict[str, Entry], dict[str, str]]:
        other_values: dict[str, str] = {}
        if not isinstance(root, dict):
            raise CheckpointError(
                f"{self.path.name} holds {_kind(root)}, not a state dict",
                hint="save the model's state_dict()",
            )
        inner = root.get("state_dict")
        if isinstance(inner, dict):
            other_values = {_name(key): _kind(value) for key, value in root.items() if value is not inner}
            root = inner
        entries: dict[str, Entry] = {}
        for key, value in root.items():
            entry = self.entry(key, value) if isinstance(key, str) and isinstance(value, Call) else None
            if entry is None:
                other_values[_name(key)] = _kind(value)
            else:
                entries[entry.name] = entry
        return entries, other_values

    def entry(self, name: str, value: Call) -> Entry | None:
        """The entry of one name, None if it holds no tensor data."""
        found = self.tensor(value, 0)
        if found is None:
            return None
        kind, module, dtype, shape, parts, attributes = found
        return Entry(name=name, kind=kind, module=module, dtype=dtype, shape=shape, parts=parts, attributes=attributes)

    def tensor(self, value: Any, nesting: int) -> _Tensor | None:
        if nesting > _MAX_NESTING:
            raise _damaged(self.path, f"a tensor is wrapped more than {_MAX_NESTING} times")
        if not isinstance(value, Call) or not isinstance(value.func, Global):
            return None
        func, args = value.func.path, value.args
        if func in _TENSOR_ARGS:
            return self.plain(func, args)
        if func in (_PARAMETER, _PARAMETER_WITH_STATE):
            return self.tensor(_argument(self.path, args, 0), nesting + 1)
        if func != _FROM_TYPE:
            return None
        inner, cls, inner_args, state = (_argument(self.path, args, index) for index in range(4))
        if not isinstance(inner, Global) or not isinstance(cls, Global) or not isinstance(inner_args, tuple):
            raise _damaged(self.path, "a tensor subclass is rebuilt from something else")
        if inner.path == _WRAPPER:
            return self.wrapper(cls, inner_args, state, nesting)
        found = self.tensor(Call(inner, inner_args), nesting + 1)
        if found is None or cls.module == "torch" or cls.module.startswith("torch."):
            return found
        return found._replace(kind=cls.name, module=cls.module)

    def plain(self, func: str, args: tuple[Any, ...]) -> _Tensor:
        width, metadata_at = _TENSOR_ARGS[func]
        if len(args) < width:
            raise _damaged(self.path, f"{func} has {len(args)} arguments, {width} are needed")
        storage = self.storage(args[0])
        dtype = _dtype(args[6]) if func == _TENSOR_V3 else storage.dtype
        if dtype not in ITEM_BYTES:
            raise _damaged(self.path, f"a tensor has the dtype {quoted(dtype)}, which is none that can be stored")
        item = ITEM_BYTES[dtype]
        start, shape, stride = _count(args[1]), _shape(args[2]), _shape(args[3])
        if start is None or shape is None or stride is None or len(shape) != len(stride):
            raise _damaged(self.path, "a tensor has no proper shape, stride and offset")
        num_elements, last = 1, start
        for size, step in zip(shape, stride, strict=True):
            num_elements *= size
            last += (size - 1) * step
        if num_elements > _MAX_ELEMENTS:
            raise _damaged(self.path, "a tensor claims more than 2**60 elements")
        if num_elements and (last + 1) * item > storage.num_bytes:
            raise _damaged(
                self.path,
                f"a {dtype} tensor {quoted(list(shape), quote=False)} reaches to byte {(last + 1) * item:,} "
                f"of a storage of {storage.num_bytes:,} bytes",
            )
        stored = StoredTensor(
            file=self.path,
            dtype=dtype,
            shape=shape,
            stride=stride,
            offset=storage.offset + start * item,
            storage_offset=storage.offset,
            storage_bytes=storage.num_bytes,
        )
        attributes: dict[str, str] = {}
        metadata = args[metadata_at] if 0 < metadata_at < len(args) else None
        if isinstance(metadata, dict):  # conj and neg bits: what the file holds is not yet the tensor
            attributes = {_name(key): "True" for key, value in metadata.items() if value is True}
        return _Tensor(PLAIN, "", dtype, shape, {"": stored}, attributes)

    def storage(self, value: Any) -> _Storage:
        key = value.key if isinstance(value, Persistent) else None
        if not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage":
            raise _damaged(self.path, "a tensor has no storage")
        _, cls, number, _, num_elements = key
        is_known = isinstance(cls, Global) and cls.module in _STORAGE_MODULES and cls.name in _STORAGES
        if not is_known:
            raise _damaged(self.path, f"a storage has the type {_kind(cls)}, which is none that is known")
        dtype, num_elements = _STORAGES[cls.name], _count(num_elements)
        if not isinstance(number, str) or num_elements is None:
            raise _damaged(self.path, "a storage has no proper name and size")
        num_bytes = num_elements * ITEM_BYTES[dtype]
        known = self.places.get(number)
        if known is None:
            record = self.archive.get(f"data/{number}")
            if record is None:
                shown = quoted(number, quote=False)
                raise _damaged(self.path, f"the record data/{shown} of a storage is missing")
            known = self.places[number] = (self.archive.place(record), record.num_bytes)
        offset, stored_bytes = known
        if stored_bytes < num_bytes:
            raise _damaged(
                self.path,
                f"the storage data/{quoted(number, quote=False)} has {stored_bytes:,} bytes, "
                f"the pickle wants {num_bytes:,}",
            )
        return _Storage(dtype, offset, num_bytes)

    def wrapper(self, cls: Global, args: tuple[Any, ...], state: Any, nesting: int) -> _Tensor:
        """A tensor subclass with its data in attributes. Parts of a part that is one too: `outer.inner`."""
        dtype = _dtype(_argument(self.path, args, 1))
        shape = _shape(_argument(self.path, args, 2))
        if isinstance(state, tuple) and state and isinstance(state[0], dict):  # (attributes, slots)
            state = state[0]
        if shape is None or not dtype or not isinstance(state, dict):
            raise _damaged(self.path, f"a {quoted(cls.name)} has no proper shape, dtype and attributes")
        parts: dict[str, StoredTensor] = {}
        attributes: dict[str, str] = {}
        for key, value in state.items():
            if not isinstance(key, str):
                continue
            found = self.tensor(value, nesting + 1)
            if found is None:
                if value is not None and not key.startswith("_"):
                    attributes[key] = _shown(value, [200])
                continue
            dotted = key if found.kind == PLAIN else f"{key}."
            parts.update({dotted + part: stored for part, stored in found.parts.items()})
            attributes.update({f"{key}.{name}": text for name, text in found.attributes.items()})
        if not parts:
            raise _damaged(self.path, f"a {quoted(cls.name)} holds no tensor")
        return _Tensor(cls.name, cls.module, dtype, shape, parts, attributes)


class _Tensor(NamedTuple):
    kind: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    parts: dict[str, StoredTensor]
    attributes: dict[str, str]


# Function → least number of arguments, and where the metadata may stand (0: nowhere).
_TENSOR_ARGS: Mapping[str, tuple[int, int]] = {_TENSOR_V1: (4, 0), _TENSOR_V2: (4, 6), _TENSOR_V3: (7, 7)}


def _argument(path: Path, args: tuple[Any, ...], index: int) -> Any:
    if index >= len(args):
        raise _damaged(path, f"a tensor is rebuilt with {len(args)} arguments, too few")
    return args[index]


def _shape(value: Any) -> tuple[int, ...] | None:
    """A tuple of sizes or strides, also as a `torch.Size`; None for anything else."""
    if isinstance(value, Call) and isinstance(value.func, Global) and value.func.path == "torch.Size":
        value = value.args[0] if value.args else ()
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMS:
        return None
    for size in value:
        if type(size) is not int or not 0 <= size <= _MAX_ELEMENTS:
            return None
    return tuple(value)


def _count(value: Any) -> int | None:
    """A sane number of elements, None for anything else."""
    return value if type(value) is int and 0 <= value <= _MAX_ELEMENTS else None


def _dtype(value: Any) -> str:
    """The name of `torch.<dtype>`, empty for anything else."""
    return value.name if isinstance(value, Global) and value.module == "torch" else ""


def _name(key: Any) -> str:
    return quoted(key, quote=False) if isinstance(key, (str, int)) else _kind(key)


def _kind(value: Any) -> str:
    """What a value is, in a few words."""
    if isinstance(value, Call):
        return f"the result of {_kind(value.func) if isinstance(value.func, Global) else 'a call'}"
    if isinstance(value, Global):
        return quoted(value.path, quote=False)
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Opaque):
        return f"a {value.kind}"
    if isinstance(value, Persistent):
        return "a storage"
    return quoted(value, quote=False)


def _shown(value: Any, budget: list[int]) -> str:
    """An attribute as Python would show it: `PerRow(dim=-1)`, `[1, 64]`, `KernelPreference.AUTO`, `int4`."""
    budget[0] -= 1
    if budget[0] < 0:
        return "…"
    if isinstance(value, (list, tuple)):
        inner = ", ".join([_shown(item, budget) for item in value[:64]] + ["…"] * (len(value) > 64))
        return f"[{inner}]"
    if isinstance(value, dict):
        return "{" + _shown_fields(value, budget) + "}"
    if isinstance(value, Global):
        return quoted(value.name, quote=False)
    if isinstance(value, Call) and isinstance(value.func, Global):
        name = value.func.name
        if value.func.path == "torch.Size":
            return _shown(value.args[0] if value.args else (), budget)
        if len(value.args) == 1 and name in _ENUM_NAMES and isinstance(value.args[0], (int, str)):
            member = _ENUM_NAMES[name].get(value.args[0])
            return f"{name}.{member}" if member else f"{name}({quoted(value.args[0], quote=False)})"
        fields = dict(zip(_FIELDS.get(name, ()), value.args, strict=False))
        shown = [_shown_fields(fields, budget)] if fields else [_shown(item, budget) for item in value.args[:64]]
        if isinstance(value.state, dict):
            shown.append(_shown_fields(value.state, budget))
        return f"{quoted(name, quote=False)}({', '.join(text for text in shown if text)})"
    return _kind(value)


def _shown_fields(fields: Mapping[Any, Any], budget: list[int]) -> str:
    return ", ".join(f"{_name(key)}={_shown(value, budget)}" for key, value in fields.items() if value is not None)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged: {what}", hint=_DOWNLOAD_AGAIN)
