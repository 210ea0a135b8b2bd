"""The stock way: what torchao, diffusers and transformers make, save and load themselves.

Everything that aoquant writes is compared with this, tensor by tensor and bit by bit. Nothing here imports aoquant but
its tensor class, whose values tests/heavy/test_lowbit.py holds against torchao's.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import accelerate
import diffusers
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4Tensor,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    PerRow,
    PerTensor,
)

from aoquant.lowbit import AoquantLowBitConfig

Library = Literal["diffusers", "transformers"]

CONFIGS = (
    "int8wo", "int8wo:group_size=32", "int8dq", "fp8wo", "fp8dq", "fp8dqrow", "uint1wo", "uint2wo", "uint3wo",
    "uint4wo", "uint5wo", "uint6wo", "uint7wo", "uint3wo:layout=unpacked", "uint4wo:layout=unpacked", "fp3wo", "fp4wo",
    "fp5wo", "fp6wo", "fp7wo", "int4dq", "int4wo",
)  # fmt: skip
"""Every config text that `stock_config` is asked for."""

CPU_CONFIGS = tuple(text for text in CONFIGS if text != "int4wo")
"""Those that `quantize` can make here: stock int4wo needs the mslk package (see `int4_tensor`)."""


_SPLITS = {"fp3wo": "e2m0", "fp4wo": "e2m1", "fp5wo": "e2m2", "fp6wo": "e2m3", "fp7wo": "e2m4"}


def _split(config_text: str) -> tuple[str, int | None]:
    """The name, with `:layout=unpacked` if there, and the group size."""
    name, _, option = config_text.partition(":group_size=")
    return name, int(option) if option else None


def stock_config(config_text: str) -> AOBaseConfig:
    """The torchao config object that `config_text` (`NAME`, `NAME:group_size=G`, `fp8wo:dtype=e5m2`) stands for."""
    name, size = _split(config_text)
    match name:
        case "int8wo":
            granularity = PerGroup(size) if size else PerRow()
            return Int8WeightOnlyConfig(granularity=granularity, version=2)  # torchao 0.15 would take 1
        case "int8dq":
            return Int8DynamicActivationInt8WeightConfig(version=2)
        case "fp8wo":
            return Float8WeightOnlyConfig()
        case "fp8wo:dtype=e5m2":
            return Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2)
        case "fp8dq":
            return Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor())
        case "fp8dqrow":
            return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        case "int4dq":
            return Int8DynamicActivationIntxWeightConfig(
                weight_dtype=torch.int4,  # type: ignore[attr-defined]  # torch's stubs leave it out
                weight_granularity=PerGroup(size or 32),
            )
        case "int4wo":
            return Int4WeightOnlyConfig(group_size=size or 128)
    if re.fullmatch("uint[1-7]wo", name):
        return AoquantLowBitConfig(element=f"int{name[4]}", group_size=size or 64)
    if match := re.fullmatch("(fp[3-7]wo)(?::dtype=(.*))?", name):
        return AoquantLowBitConfig(element=f"{name[:3]}_{match[2] or _SPLITS[match[1]]}", group_size=None)
    if re.fullmatch("uint[1-7]wo:layout=unpacked", name):
        return IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{name[4]}"),
            granularity=PerGroup(size or 64),
            mapping_type=MappingType.ASYMMETRIC,
        )
    raise KeyError(config_text)


def group_size(config_text: str) -> int | None:
    """How many weights of a row share a scale, or None where a whole row or matrix does."""
    name, size = _split(config_text)
    defaults = {"int4wo": 128, "int4dq": 32} | {f"uint{bits}wo": 64 for bits in range(1, 8)}
    return size or defaults.get(name.partition(":")[0])


def component_class(library: Library, class_name: str) -> Any:
    return getattr(diffusers if library == "diffusers" else transformers, class_name)


def empty_model(folder: Path, library: Library, class_name: str) -> Any:
    """The component with its parameters on the meta device, from config.json alone."""
    cls = component_class(library, class_name)
    with accelerate.init_empty_weights():
        if library == "diffusers":
            return cls.from_config(cls.load_config(str(folder)))
        return cls(cls.config_class.from_pretrained(str(folder)))


def linear_shapes(folder: Path, library: Library, class_name: str) -> dict[str, tuple[int, int]]:
    """Module name → (out_features, in_features) of every `nn.Linear`, in the model's order."""
    modules = empty_model(folder, library, class_name).named_modules()
    return {
        name: (module.out_features, module.in_features) for name, module in modules if isinstance(module, nn.Linear)
    }


def indivisible(folder: Path, library: Library, class_name: str, group: int | None) -> list[str]:
    """The Linears whose in_features `group` does not divide, which stock refuses with an AssertionError."""
    if group is None:
        return []
    shapes = linear_shapes(folder, library, class_name)
    return [name for name, (_, width) in shapes.items() if width % group]


@contextlib.contextmanager
def without_hardware_check() -> Iterator[None]:
    """Let torchao's float8 dynamic handler run without the GPU that it asserts and does not need."""
    with mock.patch("torchao.quantization.quant_api._check_hardware_support"):
        yield


def quantize(
    folder: Path,
    library: Library,
    class_name: str,
    config_text: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    modules_to_not_convert: list[str] | None = None,
    skip: Collection[str] = (),
    **options: Any,
) -> Any:
    """The component as stock `from_pretrained(quantization_config=…)` quantizes it on loading, on the CPU.

    modules_to_not_convert goes to the library as it is, to be matched as that library does. skip: whole
    module names, matched exactly. options go to `from_pretrained` (`variant=…`, `use_safetensors=False`).
    """
    config = stock_config(config_text)
    if library == "diffusers" and skip:
        config = FqnToConfig({**dict.fromkeys(skip), "_default": config})
    elif skip:
        # transformers hands biases to an FqnToConfig's _default too, so exact names go in as patterns. A
        # list of any kind replaces its own default list (lm_head, tied modules), which therefore goes along.
        if modules_to_not_convert is None:
            modules_to_not_convert = default_skips(folder, class_name)
        modules_to_not_convert = [*modules_to_not_convert, *map(re.escape, skip)]
    with without_hardware_check():
        return _from_pretrained(
            folder,
            library,
            class_name,
            dtype=dtype,
            quantization_config=(diffusers if library == "diffusers" else transformers).TorchAoConfig(
                config, modules_to_not_convert=modules_to_not_convert
            ),
            **options,
        )


def default_skips(folder: Path, class_name: str) -> list[str]:
    """The modules that transformers leaves alone when it is given no `modules_to_not_convert`."""
    from transformers.quantizers.base import get_keys_to_not_convert

    return cast("list[str]", get_keys_to_not_convert(empty_model(folder, "transformers", class_name)))


def load(
    folder: Path, library: Library, class_name: str, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Any:
    """The component in `folder`, quantized or not, as stock `from_pretrained` loads it."""
    return _from_pretrained(folder, library, class_name, dtype=dtype, **options)


def _from_pretrained(folder: Path, library: Library, class_name: str, *, dtype: torch.dtype, **options: Any) -> Any:
    if library == "diffusers":
        options["torch_dtype"] = dtype
        if any(folder.glob("*.bin")):
            options.setdefault("use_safetensors", False)
    else:
        options["dtype"] = dtype
    return component_class(library, class_name).from_pretrained(str(folder), **options).eval()


def save(model: Any, folder: Path, library: Library, file_format: str, *, max_shard_bytes: int | None = None) -> Path:
    """Save `model` in `folder` and return `folder`: by `save_pretrained`, or a transformers `.bin` by hand.

    transformers 5 writes no `.bin`; by hand means config.json beside `torch.save(model.state_dict())`, under
    module names, tied names included.
    """
    options = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
    if library == "diffusers":
        model.save_pretrained(str(folder), safe_serialization=file_format == "safetensors", **options)
    elif file_format == "safetensors":
        model.save_pretrained(str(folder), **options)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(str(folder))
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def int4_reference(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """The parts of a plain `Int4Tensor` of `weight` [N, K], by its own quantizer's formula, group by group.

    qdata [N, K/2] int8, even column in the low nibble; scale and zero_point [K/group, N] in the weight's
    dtype. value = (nibble as a signed number) * scale + zero_point.
    """
    rows, columns = weight.shape
    quantized = torch.empty(rows, columns, dtype=torch.int64)
    scales, zeros = [], []
    for start in range(0, columns, group):
        block = weight[:, start : start + group].float()
        low = block.amin(dim=1)
        scale = (block.amax(dim=1) - low).clamp(min=1e-6) / 15
        steps = ((block - low[:, None]) / scale[:, None]).round().clamp(0, 15)
        quantized[:, start : start + group] = steps.long() - 8
        scales.append(scale)
        zeros.append(low + 8 * scale)
    nibbles = quantized & 15
    return {
        "qdata": (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8).view(torch.int8),
        "scale": torch.stack(scales).to(weight.dtype),
        "zero_point": torch.stack(zeros).to(weight.dtype),
    }


def int4_tensor(weight: torch.Tensor, group: int) -> Int4Tensor:
    """`int4_reference` as torchao's class, as its `from_hp` would return it were mslk there."""
    values = int4_reference(weight, group)
    return Int4Tensor(values["qdata"], values["scale"], values["zero_point"], block_size=[1, group], shape=weight.shape)


def parts(tensor: torch.Tensor) -> dict[str, object]:
    """A torchao tensor's inner tensors and attributes by name; a plain one is the part `""`."""
    if not hasattr(tensor, "tensor_data_names"):
        return {"": tensor.detach()}
    names = [
        name
        for group in ("data", "attribute")
        for kind in ("tensor", "optional_tensor")
        for name in getattr(tensor, f"{kind}_{group}_names", ())
    ]
    return {"dtype": tensor.dtype, "shape": tensor.shape} | {name: getattr(tensor, name) for name in names}


def kind(tensor: torch.Tensor) -> str:
    """The name of the tensor's class; `Tensor` for a plain one, parameter or not."""
    return type(tensor).__name__ if hasattr(tensor, "tensor_data_names") else "Tensor"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte agree (two NaNs of the same bits do)."""
    if left.dtype != right.dtype or left.shape != right.shape or kind(left) != kind(right):
        return False
    if kind(left) != "Tensor":
        return all(_same(value, parts(right)[name]) for name, value in parts(left).items())
    left, right = (value.detach().contiguous().reshape(-1) for value in (left, right))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return list(left) == list(right)
    return type(left) is type(right) and left == right


def assert_same_state(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Fail, naming the tensor, unless both have the same names, classes, bits and attributes."""
    assert actual, "no tensors"
    assert actual.keys() == expected.keys(), (
        f"too many: {sorted(actual.keys() - expected.keys())}, missing: {sorted(expected.keys() - actual.keys())}"
    )
    for name, tensor in actual.items():
        assert kind(tensor) == kind(expected[name]), f"{name}: {kind(tensor)} against {kind(expected[name])}"
        ours, theirs = parts(tensor), parts(expected[name])
        for part, value in ours.items():
            assert _same(value, theirs[part]), (
                f"{name}: {part or 'values'} differ: {_brief(value)} against {_brief(theirs[part])}"
            )


def _brief(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    first = value.detach().reshape(-1)[:4].double().tolist()
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {first}…"


def read_state_dict(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a component folder, `.bin` or safetensors, sharded or not, torchao's put together
    again.

    Fails where torchao's metadata and the stored names disagree, as in the safetensors that transformers
    writes of a model whose checkpoint names are not its module names: compare the loaded models' state dicts
    there.
    """
    bins = sorted(folder.glob("*.bin"))
    if bins:
        state: dict[str, torch.Tensor] = {}
        for file in bins:
            state |= torch.load(file, map_location="cpu", weights_only=False)
        return state
    stored: dict[str, torch.Tensor] = {}
    notes: dict[str, str] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has neither .bin nor .safetensors")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            stored |= {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            notes |= handle.metadata() or {}
    if "tensor_names" not in notes:
        return stored
    # torchao's helper cannot split the name of a tensor at the root, which is never a subclass: those go
    # around.
    roots = {key: value for key, value in stored.items() if "." not in key}
    names = [name for name in json.loads(notes["tensor_names"]) if "." in name]
    nested = {key: value for key, value in stored.items() if "." in key}
    built, left = unflatten_tensor_state_dict(nested, notes | {"tensor_names": json.dumps(names)})
    assert not left, f"no tensor claims {sorted(left)}"
    return {**built, **roots}


def stored_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all inner tensors, each name counted."""
    return sum(
        math.prod(part.shape) * part.element_size()
        for tensor in state.values()
        for part in parts(tensor).values()
        if isinstance(part, torch.Tensor)
    )
