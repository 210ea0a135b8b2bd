"""What is read without torch against what torch and safetensors load: the same names, classes, shapes, bytes."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_

from aoquant.checkpoint.layout import find_weights
from aoquant.checkpoint.pickles import read_pickle_file
from aoquant.checkpoint.tensors import Entry, StoredTensor
from aoquant.checkpoint.weights import read_weights
from aoquant.inspection import inspect
from tests.heavy import stock, tiny

Folder = Callable[..., Path]


def quantized(config: str, *, out_features: int = 64, in_features: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)
    if config == "int4wo":
        int4: torch.Tensor = stock.int4_tensor(linear.weight.detach(), 128)
        return int4
    with stock.without_hardware_check():
        quantize_(linear, stock.stock_config(config))
    weight: torch.Tensor = linear.weight.detach()
    return weight


def plain_tensors() -> dict[str, torch.Tensor]:
    """Tensors of every kind that shares, skips or turns its storage."""
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    return {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "view": base[1:, 2:4],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": nn.Parameter(torch.ones(3, dtype=torch.float16)),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "float8_e5m2": torch.randn(4).to(torch.float8_e5m2),
        "e8m0": torch.ones(4).to(torch.float8_e8m0fnu),
        "fp4": torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "uint16": torch.arange(3).to(torch.uint16),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "int64": torch.arange(5),
        "double": torch.randn(2, dtype=torch.float64),
    }


def stored(part: StoredTensor) -> torch.Tensor:
    """The tensor at a place in a file, read by plain means."""
    dtype = getattr(torch, part.dtype)
    with part.file.open("rb") as file:
        file.seek(part.storage_offset)
        content = bytearray(file.read(part.storage_bytes))
    if not content:
        return torch.empty(part.shape, dtype=dtype)
    flat = torch.frombuffer(content, dtype=dtype)
    start = (part.offset - part.storage_offset) // flat.element_size()
    return flat.as_strided(part.shape, part.stride, start)


def assert_describes(entry: Entry, tensor: torch.Tensor) -> None:
    """Fail unless `entry` has the tensor's class, dtype, shape, parts and their bits, and names its attributes."""
    assert entry.kind == stock.kind(tensor), entry.name
    assert entry.dtype == str(tensor.dtype).removeprefix("torch."), entry.name
    assert entry.shape == tuple(tensor.shape), entry.name
    if entry.is_plain:
        assert stock.same_bits(stored(entry.parts[""]), tensor.detach()), entry.name
        assert entry.parts[""].stride == tensor.stride() or 0 in tensor.shape or not tensor.is_contiguous()
        return
    parts = stock.parts(tensor)
    inner = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    assert entry.parts.keys() == inner.keys(), entry.name
    for name, part in inner.items():
        assert stock.same_bits(stored(entry.parts[name]), part), (entry.name, name)
    for name, value in parts.items():
        if isinstance(value, torch.Tensor) or value is None or name not in entry.attributes:
            continue
        if isinstance(value, torch.dtype):
            assert entry.attributes[name] == str(value).removeprefix("torch.")
        elif isinstance(value, (list, tuple)) and all(isinstance(size, int) for size in value) and name != "mm_config":
            assert entry.attributes[name] == str(list(value))


CONFIGS = pytest.mark.parametrize("config", stock.CONFIGS)


@CONFIGS
def test_bin_files_of_every_config(config: str, tmp_path: Path) -> None:
    state = {"a.weight": quantized(config), "a.bias": torch.randn(64, dtype=torch.bfloat16)}
    path = tmp_path / "m.bin"
    torch.save(OrderedDict(state), path)
    contents = read_pickle_file(path)
    assert contents.suspicious == () and not contents.other_values
    assert list(contents.entries) == list(state)
    for name, entry in contents.entries.items():
        assert_describes(entry, state[name])
    assert contents.entries["a.weight"].module.startswith(("torchao.", "aoquant.lowbit"))
    assert contents.entries["a.weight"].num_bytes == sum(
        part.numel() * part.element_size()
        for part in stock.parts(state["a.weight"]).values()
        if isinstance(part, torch.Tensor)
    )


@CONFIGS
def test_safetensors_files_of_every_config(config: str, tmp_path: Path) -> None:
    state = {"a.weight": quantized(config), "a.bias": torch.randn(64, dtype=torch.bfloat16)}
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata={**metadata, "format": "pt"})
    contents = read_weights(find_weights(tmp_path))
    assert contents.problems == ()
    assert contents.entries.keys() == state.keys()
    for name, entry in contents.entries.items():
        assert_describes(entry, state[name])


@CONFIGS
def test_both_formats_name_the_attributes_alike(config: str, tmp_path: Path) -> None:
    state = {"a.weight": quantized(config)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    tensors, metadata = flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    safe = read_weights(find_weights(tmp_path)).entries["a.weight"].attributes
    pickled = read_pickle_file(tmp_path / "pytorch_model.bin").entries["a.weight"].attributes
    assert {name: safe[name] for name in pickled if name in safe} == {
        name: text for name, text in pickled.items() if name in safe
    }
    assert {"block_size"} <= pickled.keys() & safe.keys()


def test_readable_attributes(tmp_path: Path) -> None:
    state = {config: quantized(config) for config in ("int8dq", "fp8dqrow", "uint4wo:layout=unpacked", "fp6wo")}
    torch.save(state, tmp_path / "m.bin")
    entries = read_pickle_file(tmp_path / "m.bin").entries
    assert (
        entries["int8dq"]
        .attributes["act_quant_kwargs"]
        .startswith("QuantizeTensorToInt8Kwargs(granularity=PerRow(dim=-1), mapping_type=MappingType.SYMMETRIC")
    )
    assert entries["fp8dqrow"].attributes["mm_config"] == (
        "Float8MMConfig(emulate=False, use_fast_accum=True, pad_inner_dim=False)"
    )
    assert entries["fp8dqrow"].attributes["kernel_preference"] == "KernelPreference.AUTO"
    assert entries["uint4wo:layout=unpacked"].attributes["target_dtype"] == "int4"
    assert entries["fp6wo"].attributes["element"] == "fp6_e2m3"
    assert entries["uint4wo:layout=unpacked"].attributes["block_size"] == "[1, 64]"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_tensors_under_every_protocol(protocol: int, tmp_path: Path) -> None:
    state = plain_tensors()
    path = tmp_path / "m.bin"
    torch.save(OrderedDict(state), path, pickle_protocol=protocol)
    contents = read_pickle_file(path)
    assert contents.suspicious == ()
    assert list(contents.entries) == list(state)
    # torch's safe unpickler knows protocol 2 and little more, and this file is ours
    loaded = torch.load(path, weights_only=protocol == 2)
    for name, entry in contents.entries.items():
        assert entry.parts[""].stride == loaded[name].stride(), name
        assert_describes(entry, loaded[name])
    part = {name: entry.parts[""] for name, entry in contents.entries.items()}
    assert part["base"] == part["tied"]
    assert part["base"].storage_offset == part["view"].storage_offset == part["transposed"].storage_offset
    assert not part["transposed"].is_contiguous and not part["view"].is_contiguous


def test_every_plain_dtype_in_safetensors(tmp_path: Path) -> None:
    state = {
        name: tensor.detach().clone()
        for name, tensor in plain_tensors().items()
        if tensor.is_contiguous() and name not in ("tied", "fp4")
    }
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    contents = read_weights(find_weights(tmp_path))
    assert contents.problems == ()
    for name, tensor in state.items():
        assert_describes(contents.entries[name], tensor)


def test_conjugated_and_meta_tensors_are_told(tmp_path: Path) -> None:
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    torch.save({"c": conjugated, "m": torch.empty(3, device="meta"), "steps": 4}, tmp_path / "m.bin")
    contents = read_pickle_file(tmp_path / "m.bin")
    assert contents.entries["c"].attributes == {"conj": "True"}
    assert contents.other_values.keys() == {"m", "steps"}


def test_a_whole_module_is_not_a_state_dict(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "m.bin")
    with pytest.raises(Exception, match=r"torch\.nn\.modules\.linear\.Linear, not a state dict"):
        read_pickle_file(tmp_path / "m.bin")


def test_torch_before_1_6(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(Exception, match=r"torch before 1\.6"):
        read_pickle_file(tmp_path / "m.bin")


class Explosive:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_what_torch_save_wrote_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(2), "x": Explosive()}, "m.bin")
    contents = read_pickle_file(Path("m.bin"))
    assert contents.suspicious == (f"{os.mkdir.__module__}.mkdir",)
    assert list(contents.entries) == ["a"]
    assert not Path("exploded").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load("m.bin", weights_only=True)


@pytest.mark.parametrize("name", ["flux", "t5"])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("max_shard_size", ["10GB", "100KB"])
def test_what_stock_saves_is_read_whole(
    name: str, safe: bool, max_shard_size: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    row = tiny.MODELS[name]
    source = tiny_folder(name)
    expected = stock.read_state_dict(source)
    contents = read_weights(find_weights(source))
    assert contents.problems == ()
    assert contents.entries.keys() == expected.keys()
    for key, entry in contents.entries.items():
        assert_describes(entry, expected[key])
    if row.library == "transformers" and not safe:
        return  # transformers writes no `.bin`
    model = stock.quantize(source, row.library, row.class_name, "int8wo")
    model.save_pretrained(tmp_path / "out", safe_serialization=safe, max_shard_size=max_shard_size)
    expected = stock.read_state_dict(tmp_path / "out")
    report = inspect(tmp_path / "out")
    (part,) = report.components
    assert report.is_sound, part.problems
    assert part.class_name == row.class_name and part.library == row.library
    assert part.config.startswith("torchao Int8WeightOnlyConfig(granularity=PerRow(dim=-1)")
    assert part.entries.keys() == expected.keys() and part.num_quantized > 0
    for key, entry in part.entries.items():
        assert_describes(entry, expected[key])
    assert part.weight_bytes == stock.stored_bytes(expected)
