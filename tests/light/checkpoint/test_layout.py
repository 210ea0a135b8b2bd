"""Names of weight files: what is chosen of a listing, and what of a folder's index is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from aoquant.checkpoint import layout
from aoquant.errors import CheckpointError

D = "diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("names", "variant", "chosen"),
    [
        ([f"{D}.safetensors", f"{D}.bin"], None, f"{D}.safetensors"),
        ([f"{D}.bin"], None, f"{D}.bin"),
        (["pytorch_model.bin", "model.safetensors"], None, "model.safetensors"),
        (["pytorch_model.bin", "model.fp16.safetensors"], None, "pytorch_model.bin"),
        ([f"{D}.safetensors", f"{D}.safetensors.index.json"], None, f"{D}.safetensors.index.json"),
        (["model.safetensors", "model.safetensors.index.json"], None, "model.safetensors"),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
            None,
            "pytorch_model.bin.index.json",
        ),
        ([f"{D}.fp16.safetensors", f"{D}.safetensors"], "fp16", f"{D}.fp16.safetensors"),
        ([f"{D}.fp16.safetensors", f"{D}.safetensors"], None, f"{D}.safetensors"),
        ([f"{D}.safetensors.index.fp16.json"], "fp16", f"{D}.safetensors.index.fp16.json"),
        ([f"{D}.safetensors.fp16.index.json"], "fp16", f"{D}.safetensors.fp16.index.json"),
        (
            ["model.safetensors.index.fp16.json", "model.safetensors"],
            "fp16",
            "model.safetensors.index.fp16.json",
        ),
    ],
)
def test_choose_takes_what_the_stock_loaders_take(names: list[str], variant: str | None, chosen: str) -> None:
    choice = layout.choose(names, variant=variant)
    assert (choice.index or choice.file) == chosen
    assert (choice.index is None) != (choice.file is None)
    assert choice.format == ("safetensors" if "safetensors" in chosen else "bin")
    assert chosen.startswith(choice.stem) and choice.variant == variant


@pytest.mark.parametrize(
    ("names", "variant", "words", "hint"),
    [
        ([], None, "no weight file at all", "expected"),
        (["config.json", "flux1-dev.safetensors"], None, "there is flux1-dev.safetensors", "expected"),
        (["model.fp16.safetensors"], None, "only variants", "--variant fp16"),
        (["model.safetensors.index.bf16.json"], None, "only variants", "--variant bf16"),
        (["model-00001-of-00002.fp16.safetensors"], None, "only variants", "--variant fp16"),
        (["model.fp16.safetensors", "model.bf16-00001-of-00002.safetensors"], "fp8", "'fp8'", "bf16, fp16"),
        (["model.safetensors"], "fp16", "variant 'fp16'", "leave --variant out"),
        (["model-00001-of-00002.safetensors"], None, "without an index", "whole"),
    ],
)
def test_choose_says_what_there_is(names: list[str], variant: str | None, words: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=words) as raised:
        layout.choose(names, variant=variant)
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("library", "format_", "count", "names", "index"),
    [
        ("diffusers", "bin", 1, [f"{D}.bin"], f"{D}.bin.index.json"),
        (
            "diffusers",
            "safetensors",
            2,
            [f"{D}-00001-of-00002.safetensors", f"{D}-00002-of-00002.safetensors"],
            f"{D}.safetensors.index.json",
        ),
        ("transformers", "bin", 1, ["pytorch_model.bin"], "pytorch_model.bin.index.json"),
        ("transformers", "safetensors", 1, ["model.safetensors"], "model.safetensors.index.json"),
    ],
)
def test_names_for_writing(library: Any, format_: Any, count: int, names: list[str], index: str) -> None:
    assert list(layout.shard_names(library, format_, count)) == names
    assert layout.index_name(library, format_) == index
    assert all(layout.is_weight_name(name) for name in [*names, index])


def folder_with(folder: Path, index: object, files: dict[str, int]) -> Path:
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    for name, size in files.items():
        (folder / name).write_bytes(bytes(size))
    return folder


def test_find_weights_lists_the_shards_of_an_index(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder_with(tmp_path, {"weight_map": {"a": second, "b": first}}, {first: 3, second: 4})
    found = layout.find_weights(tmp_path)
    assert [path.name for path in found.files] == [first, second]
    assert found.total_bytes == 7
    assert found.index == tmp_path / "model.safetensors.index.json"
    assert found.weight_map == {"a": second, "b": first}


def test_find_weights_names_missing_shards_and_locate_weights_returns_them(tmp_path: Path) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    folder_with(tmp_path, {"weight_map": dict(zip("abc", shards, strict=True))}, {shards[1]: 1})
    (tmp_path / "model-00004-of-00004.safetensors").write_bytes(b"x")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"2 of the 3 shards .* missing, the first is '{shards[0]}'"):
        layout.find_weights(tmp_path)
    located = layout.locate_weights(tmp_path)
    assert located.missing == (shards[0], shards[2])
    assert located.extra == ("model-00004-of-00004.safetensors",)
    assert located.others == ("pytorch_model.bin",)


def test_links_count_as_what_they_lead_to_and_pipes_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "gone")
    os.mkfifo(folder / "diffusion_pytorch_model.safetensors")
    found = layout.find_weights(folder)
    assert [path.name for path in found.files] == ["model.safetensors"]
    assert found.total_bytes == 5


HOSTILE_INDEXES: dict[str, tuple[object, str]] = {
    "not JSON": ("{", "not valid JSON"),
    "empty": ("", "is empty"),
    "LFS pointer": ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    "web page": ("<!DOCTYPE html><html></html>", "web page"),
    "list": ([], "JSON array"),
    "number": ("1", "JSON number"),
    "null": ("null", "JSON null"),
    "no map": ({}, "no weight_map"),
    "empty map": ({"weight_map": {}}, "no weight_map"),
    "map of another kind": ({"weight_map": ["a"]}, "no weight_map"),
    "number as file": ({"weight_map": {"a": 1}}, "'1', not a file name"),
    "absolute": ({"weight_map": {"a": "/etc/passwd.safetensors"}}, "not the name"),
    "parent": ({"weight_map": {"a": "../x.safetensors"}}, "not the name"),
    "subfolder": ({"weight_map": {"a": "x/y.safetensors"}}, "not the name"),
    "backslash": ({"weight_map": {"a": "x\\y.safetensors"}}, "not the name"),
    "drive": ({"weight_map": {"a": "c:x.safetensors"}}, "not the name"),
    "hidden": ({"weight_map": {"a": ".safetensors"}}, "not the name"),
    "null byte": ({"weight_map": {"a": "x\0.safetensors"}}, "not the name"),
    "line end": ({"weight_map": {"a": "x\n.safetensors"}}, "not the name"),
    "other format": ({"weight_map": {"a": "pytorch_model.bin"}}, "not the name"),
    "one name twice": ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "twice"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "long integer": ('{"a": ' + "9" * 10_000 + "}", "10000 digits"),
    "no text": (b"\xff\xfe".decode("latin1"), "not valid JSON"),
}


@pytest.mark.parametrize("case", HOSTILE_INDEXES)
def test_hostile_indexes_are_checkpoint_errors(case: str, tmp_path: Path) -> None:
    index, words = HOSTILE_INDEXES[case]
    folder_with(tmp_path, index, {})
    with pytest.raises(CheckpointError, match=words) as raised:
        layout.find_weights(tmp_path)
    assert "\n" not in raised.value.message and raised.value.hint


def test_read_json_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        layout.read_json(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        layout.read_json(tmp_path)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(CheckpointError, match="100,000,000 bytes"):
        layout.read_json(large)
    config = tmp_path / "config.json"
    config.write_text('{"a": NaN, "b": [1, 2.5, null]}')
    assert layout.read_json(config)["b"] == [1, 2.5, None]
