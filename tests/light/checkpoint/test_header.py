"""safetensors headers: what they say, what torchao's metadata adds, and the ways in which they are wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aoquant.checkpoint.header import MAX_HEADER_BYTES, attribute_text, join_torchao, read_header
from aoquant.errors import CheckpointError
from tests.light import forge


def test_entries_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    path = forge.write_safetensors(
        tmp_path / "m.safetensors",
        {"b": ("BF16", (2, 3)), "a": ("F8_E4M3", (5,)), "e": ("F32", (0, 4)), "s": ("F32", ())},
        {"format": "pt"}, pad=40,
    )  # fmt: skip
    header = read_header(path)
    assert list(header.entries) == ["b", "a", "e", "s"]
    assert header.metadata == {"format": "pt"}
    assert (header.file_bytes, header.data_bytes, header.missing_bytes) == (path.stat().st_size, 21, 0)
    b, a, scalar = header.entries["b"], header.entries["a"], header.entries["s"]
    start = header.file_bytes - 21
    assert (b.dtype, b.shape, b.stride, b.offset) == ("bfloat16", (2, 3), (3, 1), start)
    assert (a.dtype, a.shape, a.offset, a.storage_bytes) == ("float8_e4m3fn", (5,), start + 12, 5)
    assert (scalar.dtype, scalar.shape, scalar.num_bytes) == ("float32", (), 4)


def test_packed_fours_have_the_shape_torch_gives_them(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [3, 8], "data_offsets": [0, 12]}
    header = read_header(forge.write_header(tmp_path / "m.safetensors", json.dumps({"x": entry}), 12))
    assert (header.entries["x"].dtype, header.entries["x"].shape) == ("float4_e2m1fn_x2", (3, 4))


def test_a_huge_file_costs_its_header(tmp_path: Path) -> None:
    path = forge.write_safetensors(tmp_path / "m.safetensors", {"x": ("BF16", (6_000_000_000,))})
    assert read_header(path).entries["x"].num_bytes == 12_000_000_000


def test_a_truncated_file_gives_its_header_if_asked(tmp_path: Path) -> None:
    path = forge.write_safetensors(tmp_path / "m.safetensors", {"a": ("F32", (4,)), "b": ("F32", (4,))})
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 20)
    header = read_header(path, allow_truncated=True)
    assert header.missing_bytes == 20 and list(header.entries) == ["a", "b"]
    with pytest.raises(CheckpointError, match=f"truncated: it has {whole - 20} bytes, its tensors need {whole}"):
        read_header(path)


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> str:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more})


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
# name → header, bytes of data, words of the error
BROKEN: dict[str, tuple[str, int, str]] = {
    "not JSON": ("{", 8, "not valid JSON"),
    "list": ("[]", 0, "not a JSON object"),
    "one name twice": ('{"x": %s, "x": %s}' % ((json.dumps(GOOD),) * 2), 8, "there twice"),
    "unknown dtype": (one("F6_E2M3"), 8, "'F6_E2M3', which is none that torch has"),
    "dtype of another kind": (one([1]), 8, "has the dtype"),
    "no dtype": (json.dumps({"x": {"shape": [2], "data_offsets": [0, 8]}}), 8, "has the dtype 'None'"),
    "negative size": (one(shape=[-2]), 8, "has the shape"),
    "fraction": (one(shape=[2.0]), 8, "has the shape"),
    "truth as size": (one(shape=[True, 2]), 8, "has the shape"),
    "shape of another kind": (one(shape="2"), 8, "has the shape"),
    "huge size": (one(shape=[2**60, 2**60]), 8, "has the shape"),
    "many dimensions": (one(shape=[1] * 100), 8, "has the shape"),
    "no offsets": (json.dumps({"x": {"dtype": "F32", "shape": [2]}}), 8, "data_offsets 'None'"),
    "three offsets": (one(offsets=[0, 4, 8]), 8, "data_offsets"),
    "backwards": (one(offsets=[8, 0]), 8, "data_offsets"),
    "negative offset": (one(offsets=[-8, 0]), 8, "data_offsets"),
    "too few bytes": (one(offsets=[0, 7]), 7, "needs 8 bytes, and its data_offsets give it 7"),
    "too many bytes": (one(offsets=[0, 9]), 9, "needs 8 bytes, and its data_offsets give it 9"),
    "gap at the start": (one(offsets=[4, 12]), 12, "leave a gap"),
    "gap": (one(y={**GOOD, "data_offsets": [9, 17]}), 17, "leave a gap"),
    "overlap": (one(y={**GOOD, "data_offsets": [4, 12]}), 12, "overlap"),
    "the same bytes": (one(y=GOOD), 8, "overlap"),
    "bytes at the end": (one(), 11, "3 bytes follow its last tensor"),
    "odd fours": (one("F4", [3], [0, 1]), 1, "packs two values a byte"),
    "entry of another kind": (json.dumps({"x": 1}), 0, "describes 'x' as '1'"),
    "metadata of another kind": (one(__metadata__=[1]), 8, "__metadata__"),
    "metadata with numbers": (one(__metadata__={"a": 1}), 8, "__metadata__"),
    "deep": ('{"x":' * 50_000, 0, "nested too deeply"),
    "long integer": (one().replace("[2]", "[" + "9" * 5000 + "]"), 8, "5000 digits"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers_are_checkpoint_errors(case: str, tmp_path: Path) -> None:
    header, num_bytes, words = BROKEN[case]
    path = forge.write_header(tmp_path / "m.safetensors", header, num_bytes)
    with pytest.raises(CheckpointError, match=words) as raised:
        read_header(path)
    assert "m.safetensors" in raised.value.message and "\n" not in raised.value.message and raised.value.hint


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    "web page": (b"\n<html><body>Not found</body></html>", "web page"),
    "text": (b"Entry not found", "not a safetensors file"),
    "five bytes": (b"\1\0\0\0\0", "not a safetensors file"),
    "header past the end": (struct.pack("<Q", 1000) + b"{}", "its header needs 1,008"),
    "header past the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "100,000,000 are allowed"),
    "torch file": (b"PK\3\4" + bytes(100), "not a safetensors file|truncated"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_other_files_are_told_apart(case: str, tmp_path: Path) -> None:
    content, words = FOREIGN[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_parts_are_joined_where_the_first_lies(tmp_path: Path) -> None:
    int4 = {
        "_type": "Int4Tensor",
        "_data": {"block_size": [1, 32], "shape": [4, 64]},
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }
    path = forge.write_safetensors(
        tmp_path / "m.safetensors",
        {
            "a.bias": ("BF16", (4,)), "b._weight_scale": ("BF16", (2, 4)), "a._weight_qdata": ("I8", (4, 8)),
            "table": ("F32", (3,)), "b._weight_qdata": ("I8", (4, 32)), "a._weight_scale": ("F32", (4, 1)),
            "b._weight_zero_point": ("BF16", (2, 4)),
        },
        forge.torchao_metadata(
            {"a.weight": forge.int8_record(8), "a.bias": None, "b.weight": int4, "table": None}
        ),
    )  # fmt: skip
    header = read_header(path)
    joined = join_torchao(header.entries, header.metadata)
    assert list(joined.entries) == ["a.bias", "b.weight", "a.weight", "table"]
    assert not joined.problems and not joined.incomplete
    a, b = joined.entries["a.weight"], joined.entries["b.weight"]
    assert (a.kind, a.dtype, a.shape, list(a.parts)) == ("Int8Tensor", "bfloat16", (4, 8), ["qdata", "scale"])
    assert a.attributes == {"block_size": "[1, 8]", "dtype": "bfloat16"}
    assert a.num_bytes == 32 + 16
    assert (b.kind, b.dtype, b.shape) == ("Int4Tensor", "bfloat16", (4, 64))
    assert joined.entries["table"].is_plain


def test_without_torchao_metadata_every_tensor_is_plain(tmp_path: Path) -> None:
    path = forge.write_safetensors(tmp_path / "m.safetensors", {"a._weight_qdata": ("I8", (4, 8))})
    joined = join_torchao(read_header(path).entries, {})
    assert [entry.kind for entry in joined.entries.values()] == ["Tensor"]


def test_parts_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = forge.write_safetensors(tmp_path / "m.safetensors", {"a._weight_qdata": ("I8", (4, 8))})
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(8), "b": None})
    joined = join_torchao(read_header(path).entries, metadata)
    assert joined.incomplete == {"a.weight": ("scale",)}
    assert list(joined.entries) == ["a._weight_qdata"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"tensor_names": "["},
        {"tensor_names": "[]"},
        {"tensor_names": "[1]"},
        {"tensor_names": '["a.weight"]'},
        {"tensor_names": '["a.weight"]', "a.weight": "1"},
        {"tensor_names": '["a.weight"]', "a.weight": '{"_type": "Int8Tensor"}'},
        {
            "tensor_names": '["a.weight"]',
            "a.weight": '{"_type": 5, "_data": {}, "_tensor_data_names": ["q"]}',
        },
        {
            "tensor_names": '["a.weight"]',
            "a.weight": '{"_type": "X", "_data": {}, "_tensor_data_names": [5]}',
        },
        {"tensor_names": '["a.weight"]', "a.weight": "[" * 50_000},
    ],
)
def test_broken_torchao_metadata_leaves_plain_tensors_and_a_problem(metadata: dict[str, str], tmp_path: Path) -> None:
    path = forge.write_safetensors(tmp_path / "m.safetensors", {"a._weight_qdata": ("I8", (4, 8))})
    joined = join_torchao(read_header(path).entries, metadata)
    assert list(joined.entries) == ["a._weight_qdata"] and len(joined.problems) == 1


def test_attribute_text_shows_objects_as_python_does() -> None:
    granularity = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
    enum = {"_type": "MappingType", "_data": "SYMMETRIC"}
    kwargs = {
        "_type": "QuantizeTensorToInt8Kwargs",
        "_data": {"granularity": granularity, "mapping_type": enum, "x": None},
    }
    shown = "QuantizeTensorToInt8Kwargs(granularity=PerRow(dim=-1), mapping_type=MappingType.SYMMETRIC)"
    assert attribute_text(kwargs) == shown
    assert attribute_text({"_type": "torch.dtype", "_data": "int4"}) == "int4"
    assert attribute_text([1, 64]) == "[1, 64]"
    assert len(attribute_text([[[1] * 64] * 64] * 64)) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from(["F32", "F4", "I8", "?"]) | JSON, "shape": JSON, "data_offsets": JSON}
)


@settings(max_examples=300, deadline=None)
@given(header=st.dictionaries(st.text(max_size=8), ENTRIES | JSON, max_size=4), num_bytes=st.integers(0, 64))
def test_random_headers_never_raise_anything_else(
    header: dict[str, object], num_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("random") / "m.safetensors"
    read_or_refuse(forge.write_header(path, json.dumps(header), num_bytes))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_and_cuts_never_raise_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "m.safetensors"
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(4), "b": None})
    tensors = {"a._weight_qdata": ("I8", (2, 4)), "a._weight_scale": ("F32", (2, 1)), "b": ("BF16", (3,))}
    content = bytearray(forge.write_safetensors(path, tensors, metadata).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    read_or_refuse(path)


def read_or_refuse(path: Path) -> None:
    try:
        header = read_header(path, allow_truncated=True)
        join_torchao(header.entries, header.metadata)
    except CheckpointError as error:
        assert "\n" not in error.message
