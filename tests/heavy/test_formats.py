"""The files themselves: a `.bin` as torch.save writes it, a `.safetensors` that its own library reads in place."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import quantize_

import aoquant
from aoquant.configs import CONFIGS, parse_config
from aoquant.engine import blocks, formats
from aoquant.engine.formats import FileLayout, Fixed, Hole, Slot
from aoquant.engine.quantize import kernel_for
from aoquant.engine.writer import FileWriter
from tests.heavy import stock

Make = Callable[..., Any]
CONFIG_TEXTS = (*CONFIGS, "int8wo:group_size=32", "fp8wo:dtype=e5m2", "int4wo:group_size=32")
FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])


def plain_state() -> dict[str, torch.Tensor]:
    """Plain tensors of many dtypes and of odd sizes, at the root and below, an empty one and a scalar too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(60, generator=generator)
    return {
        "table": values[:7].clone(),
        "a.bias": values[:5].to(torch.bfloat16),
        "a.half": values[:3].to(torch.float16),
        "b.double": values[:9].to(torch.float64),
        "b.steps": torch.arange(3),
        "b.small": torch.arange(5, dtype=torch.int8),
        "b.bytes": torch.arange(7, dtype=torch.uint8),
        "b.flags": torch.tensor([True, False, True]),
        "c.float8": values[:11].to(torch.float8_e4m3fn),
        "c.e5m2": values[:2].to(torch.float8_e5m2),
        "c.ints": torch.arange(3, dtype=torch.int32),
        "c.shorts": torch.arange(3, dtype=torch.int16),
        "c.scalar": torch.tensor(3.0),
        "c.empty": torch.empty(0, 5),
        "d.weight": values.view(2, 5, 6).to(torch.bfloat16),
    }


def quantized_state(config_text: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two quantized weights between plain tensors: what stock makes, and the same without data, as the plan has it."""
    kernel = kernel_for(parse_config(config_text), torch.bfloat16)
    real, outlined = {}, {}
    for number, (rows, columns) in enumerate(((48, 256), (32, 128))):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(weight)
        name = f"blocks.{number}.weight"
        if config_text.startswith("int4wo"):
            real[name] = stock.int4_tensor(weight, stock.group_size(config_text) or 0)
        else:
            with stock.without_hardware_check():
                quantize_(linear, stock.stock_config(config_text))
            real[name] = linear.weight.detach()
        outlined[name] = kernel.outline(weight.to("meta"))
        real[f"blocks.{number}.bias"] = torch.randn(5, dtype=torch.bfloat16)
        outlined[f"blocks.{number}.bias"] = torch.empty(5, dtype=torch.bfloat16, device="meta")
    return real, outlined


def with_data(outline: Any, real: torch.Tensor) -> torch.Tensor:
    """`real`, with the very attribute objects of `outline`: pickle writes an object that it meets again in short."""
    if type(outline) is torch.Tensor:
        return real
    _, context = outline.__tensor_flatten__()
    built: torch.Tensor = type(outline).__tensor_unflatten__(formats.parts(real), context, real.shape, real.stride())
    return built


def write(folder: Path, layout: FileLayout, state: Mapping[str, torch.Tensor]) -> Path:
    """Fill `layout` with the data of `state`, slot by slot in the order of `state`."""
    with FileWriter(folder, layout) as writer:
        for name, tensor in state.items():
            for part, values in formats.parts(tensor).items():
                put(writer, Slot(name, part), values)
        written = writer.finish()
    path = folder / written.path
    content = path.read_bytes()
    assert (len(content), len(content)) == (written.num_bytes, layout.num_bytes)
    assert hashlib.sha256(content).hexdigest() == written.sha256
    return path


def put(writer: FileWriter, slot: Slot, values: torch.Tensor) -> None:
    array: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    data = memoryview(array)
    writer.seal(slot, data, writer.place(slot, 0, data))


def pickled(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def assert_sound_zip(path: Path) -> None:
    """Fail unless python's zipfile and `unzip` find every CRC right, and every record's data is 64-byte aligned."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        content = path.read_bytes()
        for record in archive.infolist():
            assert record.compress_type == zipfile.ZIP_STORED
            name_bytes, extra_bytes = struct.unpack_from("<2H", content, record.header_offset + 26)
            assert (record.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0, record.filename
    if unzip := shutil.which("unzip"):
        done = subprocess.run([unzip, "-tq", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# --- .bin -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_text", CONFIG_TEXTS)
def test_bin_is_what_torch_save_writes(config_text: str, tmp_path: Path) -> None:
    """data.pkl to the byte, for every tensor class: a torch that writes another one makes this fail."""
    real, outlined = quantized_state(config_text)
    names = {name: name for name in outlined}
    path = write(tmp_path, formats.bin_layout("model.bin", outlined, names), real)
    torch.save(OrderedDict((name, with_data(outlined[name], real[name])) for name in real), tmp_path / "theirs.bin")
    assert pickled(path) == pickled(tmp_path / "theirs.bin")
    assert_sound_zip(path)
    stock.assert_same_state(torch.load(path, weights_only=True, mmap=True), real)
    stock.assert_same_state(torch.load(path, weights_only=True), real)


def test_plain_tensors_of_every_dtype_are_what_torch_save_writes(tmp_path: Path) -> None:
    state = plain_state()
    outlined = {name: value.to("meta") for name, value in state.items()}
    path = write(tmp_path, formats.bin_layout("model.bin", outlined, {name: name for name in state}), state)
    torch.save(OrderedDict(state), tmp_path / "theirs.bin")
    assert pickled(path) == pickled(tmp_path / "theirs.bin")
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(tmp_path / "theirs.bin") as theirs:
        extra = {".format_version", ".storage_alignment", ".data/serialization_id"}  # torch's, and it does not ask
        names = {name.partition("/")[2] for name in ours.namelist()}
        assert names == {name.partition("/")[2] for name in theirs.namelist()} - extra
        for name in names:
            assert ours.read(f"model/{name}") == theirs.read(f"theirs/{name}"), name
    assert_sound_zip(path)
    stock.assert_same_state(torch.load(path, weights_only=True, mmap=True), state)


@pytest.mark.parametrize("config_text", ["int8wo", "fp8wo", "uint4wo", "int4dq"])
@pytest.mark.parametrize("name", ["flux", "t5", "clip_text"])
def test_a_whole_component_is_what_torch_save_writes(
    name: str, config_text: str, made: Make, stock_model: Make, tmp_path: Path
) -> None:
    result = made(name, config_text)
    (shard,) = result.plan.components[0].shards
    path = result.plan.output / shard.layout.name
    loaded = torch.load(path, weights_only=True, mmap=True)
    expected = stock_model(name, config_text).state_dict()
    stock.assert_same_state(loaded, {tensor.saved: expected[tensor.name] for tensor in shard.tensors})
    torch.save(loaded, tmp_path / "theirs.bin")
    assert pickled(path) == pickled(tmp_path / "theirs.bin")
    assert_sound_zip(path)


def test_a_bin_of_more_than_4_gib_by_its_directory(tmp_path: Path) -> None:
    """A record longer than 4 GiB, and records that begin after it, in a sparse file."""
    five_gib = 5 * 2**30
    state = {
        "small.weight": torch.empty(3, dtype=torch.bfloat16, device="meta"),
        "huge.weight": torch.empty(five_gib // 1024, 1024, dtype=torch.int8, device="meta"),
        "after.weight": torch.empty(1000, dtype=torch.float32, device="meta"),
        "last.bias": torch.empty(5, dtype=torch.float32, device="meta"),
    }
    layout = formats.bin_layout("huge.bin", state, {name: name for name in state})
    path = tmp_path / "huge.bin"
    offset = 0
    places: dict[Slot, int] = {}
    with path.open("wb") as file:
        for piece in layout.pieces:
            if isinstance(piece, Hole):
                places[piece.slot] = offset
            else:
                data = piece.data if isinstance(piece, Fixed) else piece.build({})
                assert len(data) == piece.num_bytes
                file.seek(offset)
                file.write(data)
            offset += piece.num_bytes
        last = torch.arange(5, dtype=torch.float32)
        file.seek(places[Slot("last.bias", "")])
        file.write(last.numpy().tobytes())
    assert layout.num_bytes == path.stat().st_size > five_gib
    assert path.stat().st_blocks * 512 < 2**20, "the file system has no sparse files"
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: record for record in archive.infolist()}
        assert records["huge/data/1"].file_size == five_gib
        assert records["huge/data/2"].header_offset > five_gib
        assert [records[f"huge/data/{key}"].file_size for key in (0, 2, 3)] == [6, 4000, 20]
        assert archive.read("huge/version") == b"3\n"
        assert archive.read("huge/byteorder") == b"little"
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert {name: value.shape for name, value in loaded.items()} == {name: value.shape for name, value in state.items()}
    assert torch.equal(loaded["last.bias"], last)
    report = aoquant.inspect(path)
    assert [entry.shape for entry in report.components[0].entries.values()] == [tuple(v.shape) for v in state.values()]


@pytest.mark.slow
def test_a_bin_of_more_than_65535_records(tmp_path: Path) -> None:
    """The old end record counts in 16 bits."""
    state = {f"m.{number}": torch.empty(1, dtype=torch.uint8, device="meta") for number in range(66_000)}
    layout = formats.bin_layout("many.bin", state, {name: name for name in state})
    values = {name: torch.tensor([number % 251], dtype=torch.uint8) for number, name in enumerate(state)}
    path = write(tmp_path, layout, values)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == 66_003
    reader: Any = torch._C.PyTorchFileReader(str(path))  # torch.load takes 13 s
    assert len(reader.get_all_records()) == 66_003
    assert reader.get_record("data/65999") == bytes([65_999 % 251])


# --- .safetensors ---------------------------------------------------------------------------------------------------


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the parsed header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    return 8 + length, header


def assert_aligned(path: Path) -> None:
    start, header = safetensors_header(path)
    assert start % 8 == 0
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
    for name, tensor in header.items():
        if name != "__metadata__":
            assert (start + tensor["data_offsets"][0]) % sizes.get(tensor["dtype"], 1) == 0, name


def test_tensors_of_odd_sizes_are_aligned_and_read_by_the_real_library(tmp_path: Path) -> None:
    state = plain_state()
    outlined = {name: value.to("meta") for name, value in state.items()}
    names = {name: name for name in state}
    layout = formats.safetensors_layout("model.safetensors", outlined, formats.flatten(outlined, names))
    path = write(tmp_path, layout, state)
    assert_aligned(path)
    with safe_open(path, framework="pt") as handle:
        assert set(handle.keys()) == set(state)
        assert handle.metadata()["format"] == "pt"
        stock.assert_same_state({name: handle.get_tensor(name) for name in state}, state)


@pytest.mark.parametrize("config_text", CONFIG_TEXTS)
def test_safetensors_is_what_torchao_flattens(config_text: str, tmp_path: Path) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    real, outlined = quantized_state(config_text)
    flattened = formats.flatten(outlined, {name: name for name in outlined})
    path = write(tmp_path, formats.safetensors_layout("model.safetensors", outlined, flattened), real)
    assert_aligned(path)
    tensors, metadata = flatten_tensor_state_dict(dict(real))
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={**metadata, "format": "pt"})
    with safe_open(path, "pt") as ours, safe_open(tmp_path / "theirs.safetensors", "pt") as theirs:
        assert ours.metadata() == theirs.metadata()
        assert set(ours.keys()) == set(theirs.keys())
        for key in theirs.keys():  # noqa: SIM118
            assert stock.same_bits(ours.get_tensor(key), theirs.get_tensor(key)), key


@pytest.mark.parametrize("name", ["flux", "qwen2_5_vl"])
def test_each_shard_carries_the_metadata_of_the_whole(name: str, made: Make) -> None:
    """As stock's do: the loaders use that of one shard alone."""
    whole = made(name, "int8wo", format="safetensors")
    split = made(name, "int8wo", format="safetensors", max_shard_size=20_000)
    (single,) = whole.plan.output.glob("*.safetensors")
    shards = sorted(split.plan.output.glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        assert_aligned(shard)
        assert safetensors_header(shard)[1]["__metadata__"] == safetensors_header(single)[1]["__metadata__"]
    assert_aligned(single)


# --- both -----------------------------------------------------------------------------------------------------------


@FORMATS
def test_slots_may_be_filled_in_any_order(file_format: str, tmp_path: Path) -> None:
    """The hash is that of the file, although the front comes last."""
    state = plain_state()
    outlined = {name: value.to("meta") for name, value in state.items()}
    names = {name: name for name in state}
    if file_format == "bin":
        layout = formats.bin_layout("model.bin", outlined, names)
    else:
        layout = formats.safetensors_layout("model.safetensors", outlined, formats.flatten(outlined, names))
    for folder, order in (("forward", state), ("backward", dict(reversed(state.items())))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, layout, order)
    first, second = (next((tmp_path / folder).iterdir()).read_bytes() for folder in ("forward", "backward"))
    assert first == second


def test_a_writer_takes_neither_more_nor_less_than_was_planned(tmp_path: Path) -> None:
    outlined = {"a": torch.empty(4, dtype=torch.uint8, device="meta"), "b": torch.empty(1, device="meta")}
    layout = formats.bin_layout("model.bin", outlined, {"a": "a", "b": "b"})
    with FileWriter(tmp_path, layout) as writer:
        with pytest.raises(ValueError, match="more data"):
            writer.place(Slot("a", ""), 2, memoryview(b"123"))
        put(writer, Slot("a", ""), torch.zeros(4, dtype=torch.uint8))
        with pytest.raises(ValueError, match="was not filled"):
            writer.finish()


@FORMATS
def test_same_input_same_bytes_however_many_workers(
    file_format: str, wide_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for workers, block in ((1, 1 << 18), (5, 3000), (2, 1 << 18)):
        monkeypatch.setattr(blocks, "_num_workers", lambda workers=workers: workers)
        monkeypatch.setattr(blocks, "CPU_BLOCK", block)
        output = tmp_path / f"{workers}" / "out"
        options: dict[str, Any] = {"format": file_format, "max_shard_size": "600kB"}
        aoquant.quantize(wide_folder, {"transformer": "int8wo"}, output=output, **options)
        contents.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.iterdir()})
    assert len(contents[0]) > 5
    assert contents[0] == contents[1] == contents[2]


@FORMATS
def test_the_manifest_has_every_files_size_and_hash(file_format: str, made: Make) -> None:
    output = made("flux", "int8wo", format=file_format, max_shard_size=50_000).plan.output
    manifest = json.loads((output / "aoquant.json").read_text())
    listed = {file["path"]: (file["bytes"], file["sha256"]) for file in manifest["files"]}
    found = {
        path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in output.iterdir()
        if path.name != "aoquant.json"
    }
    assert listed == found
