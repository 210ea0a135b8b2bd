"""Several files as one state dict, and what they and their index disagree about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aoquant.checkpoint.layout import locate_weights
from aoquant.checkpoint.weights import WeightContents, read_weights
from aoquant.errors import CheckpointError
from tests.light import forge

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def sharded(
    folder: Path, first: Tensors, second: Tensors, weight_map: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WeightContents:  # fmt: skip
    for name, tensors in zip(SHARDS, (first, second), strict=True):
        forge.write_safetensors(folder / name, tensors, metadata)
    if weight_map is None:
        weight_map = {**dict.fromkeys(first, SHARDS[0]), **dict.fromkeys(second, SHARDS[1])}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return read_weights(locate_weights(folder).weights)


BIAS: Tensors = {"a.bias": ("BF16", (4,))}
TABLE: Tensors = {"table": ("F32", (3,))}


def test_shards_are_one_state_dict(tmp_path: Path) -> None:
    contents = sharded(tmp_path, BIAS, TABLE)
    assert list(contents.entries) == ["a.bias", "table"]
    assert contents.problems == ()
    assert [path.name for path in contents.status] == list(SHARDS)
    assert contents.entries["table"].parts[""].file.name == SHARDS[1]
    contents.require_sound()


def test_parts_may_lie_in_different_shards(tmp_path: Path) -> None:
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(8), "b": None})
    contents = sharded(
        tmp_path,
        {"a._weight_qdata": ("I8", (4, 8))},
        {"b": ("BF16", (2,)), "a._weight_scale": ("F32", (4, 1))},
        metadata=metadata,
    )
    assert contents.problems == ()
    assert list(contents.entries) == ["a.weight", "b"]
    parts = contents.entries["a.weight"].parts
    assert [part.file.name for part in parts.values()] == list(SHARDS)


@pytest.mark.parametrize(
    ("first", "second", "weight_map", "words"),
    [
        (BIAS, BIAS, {"a.bias": SHARDS[0], "x": SHARDS[1]}, f"'a.bias' is in {SHARDS[0]} and again in {SHARDS[1]}"),
        (BIAS, TABLE, {"a.bias": SHARDS[0], "table": SHARDS[0], "x": SHARDS[1]}, f"'table' is not in {SHARDS[0]}"),
        (BIAS, TABLE, {"a.bias": SHARDS[0], "table": SHARDS[1], "gone": SHARDS[1]}, f"'gone' is not in {SHARDS[1]}"),
        (
            {**BIAS, "b": ("F32", (1,)), "c": ("F32", (1,))},
            TABLE,
            {"a.bias": SHARDS[0], "table": SHARDS[1]},
            f"2 tensors, the first 'b', are in {SHARDS[0]} but not in model.safetensors.index.json",
        ),
    ],
)
def test_disagreements_with_the_index(
    first: Tensors, second: Tensors, weight_map: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    contents = sharded(tmp_path, first, second, weight_map)
    assert any(words in problem for problem in contents.problems), contents.problems
    with pytest.raises(CheckpointError):
        contents.require_sound()


def test_a_part_that_no_shard_has_is_a_problem(tmp_path: Path) -> None:
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(8), "table": None, "lost": None})
    contents = sharded(tmp_path, {"a._weight_qdata": ("I8", (4, 8))}, TABLE, metadata=metadata)
    (problem,) = contents.problems
    assert "1 quantized tensors are not whole, the first is 'a.weight', which lacks scale" in problem


def test_shards_whose_metadata_differ_are_a_problem(tmp_path: Path) -> None:
    sharded(tmp_path, BIAS, TABLE, metadata=forge.torchao_metadata({"a.bias": None, "table": None}))
    assert read_weights(locate_weights(tmp_path).weights).problems == ()
    forge.write_safetensors(tmp_path / SHARDS[0], BIAS, forge.torchao_metadata({"a.bias": None}))
    contents = read_weights(locate_weights(tmp_path).weights)
    assert any("metadata differ" in problem for problem in contents.problems)


def test_a_damaged_shard_leaves_the_others(tmp_path: Path) -> None:
    sharded(tmp_path, BIAS, TABLE)
    (tmp_path / SHARDS[0]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    contents = read_weights(locate_weights(tmp_path).weights)
    assert list(contents.entries) == ["table"]
    assert list(contents.status.values()) == ["unreadable", "ok"]
    (problem,) = contents.problems
    assert "Git LFS pointer" in problem
    with pytest.raises(CheckpointError) as raised:
        contents.require_sound()
    assert "git lfs pull" in raised.value.hint


def test_a_truncated_shard_still_lists_its_tensors(tmp_path: Path) -> None:
    sharded(tmp_path, BIAS, TABLE)
    path = tmp_path / SHARDS[1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5)
    contents = read_weights(locate_weights(tmp_path).weights)
    assert list(contents.entries) == ["a.bias", "table"]
    assert contents.status[path] == "truncated"
    assert "truncated" in contents.problems[0]


def test_bin_shards_with_values_that_are_no_tensors(tmp_path: Path) -> None:
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    weight_map: dict[str, Any] = {}
    for number, name in enumerate(names):
        file = forge.TorchFile()
        file.state = {f"w{number}": file.int8(2, 4), f"note{number}": "text"}
        weight_map.update(dict.fromkeys(file.state, name))
        file.write(tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    contents = read_weights(locate_weights(tmp_path).weights)
    assert list(contents.entries) == ["w0", "w1"]
    assert contents.problems == ()
    assert contents.other_values == {"note0": "text", "note1": "text"}
