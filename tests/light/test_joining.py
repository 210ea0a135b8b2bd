"""`join`: several folders become what one run would have made, or nothing happens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aoquant
from aoquant.checkpoint.manifest import Manifest
from aoquant.errors import CheckpointError, UsageError
from aoquant.joining import join
from tests.light import schemas
from tests.light.bad_input import contents, run
from tests.light.checkpoints import LARGE, MADE, ORIGIN, WEIGHTS, checkpoint, write_texts

REST: Mapping[str, bytes] = {
    "model_index.json": b'{"_class_name": "FluxPipeline"}',
    "scheduler/scheduler_config.json": b"{}",
    "tokenizer/vocab.json": b"{}",
    "transformer/original.bin": b"what another folder quantizes",
}


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def together(folder: Path, *parts: tuple[Path, str], others: Mapping[str, bytes] | None = None) -> Path:
    """What one run would have made of the components of several folders."""
    for part, name in parts:
        shutil.copytree(part / name, folder / name)
    for path, content in (others or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return write_texts(folder, *(name for _, name in parts))


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """One folder with a transformer, of which the weights are large, and one with a text encoder."""
    one = checkpoint(tmp_path / "one", "transformer", rows=LARGE)
    return one, checkpoint(tmp_path / "two", "text_encoder")


def test_the_result_is_that_of_a_single_run(parts: tuple[Path, Path], tmp_path: Path) -> None:
    single = together(tmp_path / "single" / "out", (parts[0], "transformer"), (parts[1], "text_encoder"))
    before = [files(part) for part in parts]
    joined = join(tmp_path / "out", parts)
    assert files(tmp_path / "out") == files(single)
    assert [files(part) for part in parts] == before
    assert joined.num_bytes == sum(map(len, files(single).values())) - len(joined.manifest.text())
    assert aoquant.verify(tmp_path / "out").is_sound
    assert [part.name for part in aoquant.inspect(tmp_path / "out").components] == ["text_encoder", "transformer"]


def test_a_joined_folder_can_be_joined_again(parts: tuple[Path, Path], tmp_path: Path) -> None:
    third = checkpoint(tmp_path / "three", "unet")
    join(tmp_path / "half", parts)
    join(tmp_path / "out", [tmp_path / "half", third])
    assert set(json.loads((tmp_path / "out" / "aoquant.json").read_text())["components"]) == {
        "transformer", "text_encoder", "unet",
    }  # fmt: skip
    assert aoquant.verify(tmp_path / "out").is_sound


@pytest.mark.parametrize("both", [False, True], ids=["one is full", "both are"])
def test_the_other_components_of_a_full_one_come_along(both: bool, tmp_path: Path) -> None:
    """But for those that another folder has quantized."""
    parts = (tmp_path / "one", tmp_path / "two")
    rest = {name: content for name, content in REST.items() if not name.startswith("transformer/")}
    original = {"text_encoder/original.bin": b"too"}
    checkpoint(parts[0], "transformer", others=rest | original if both else {})
    checkpoint(parts[1], "text_encoder", others=REST)
    single = together(tmp_path / "single" / "out", (parts[0], "transformer"), (parts[1], "text_encoder"), others=rest)
    join(tmp_path / "out", parts)
    assert files(tmp_path / "out") == files(single)
    assert 'DiffusionPipeline.from_pretrained("out"' in (tmp_path / "out" / "README.md").read_text()


def test_large_files_are_links_and_small_ones_are_copies(parts: tuple[Path, Path], tmp_path: Path) -> None:
    joined = join(tmp_path / "out", parts)
    assert [str(path) for path in joined.linked] == [f"transformer/{WEIGHTS}"]
    assert (tmp_path / "out" / "transformer" / WEIGHTS).samefile(parts[0] / "transformer" / WEIGHTS)
    assert not (tmp_path / "out" / "transformer" / "config.json").samefile(parts[0] / "transformer" / "config.json")


def test_what_is_a_link_in_the_cache_becomes_a_file(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """A snapshot in the Hub's cache is a folder of links to its blobs."""
    weights = parts[0] / "transformer" / WEIGHTS
    blob = weights.rename(tmp_path / "blob")
    weights.symlink_to(blob)
    join(tmp_path / "out", parts)
    found = tmp_path / "out" / "transformer" / WEIGHTS
    assert not found.is_symlink() and found.samefile(blob)


def another_disk(tmp_path: Path) -> Path:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    return shm / f"aoquant-{os.getpid()}-{tmp_path.name}"


def test_across_file_systems_files_are_copied(parts: tuple[Path, Path], tmp_path: Path) -> None:
    place = another_disk(tmp_path)
    try:
        assert join(place, parts).linked == ()
        assert aoquant.verify(place).is_sound
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_progress_runs_once_through_all_folders(parts: tuple[Path, Path], tmp_path: Path) -> None:
    events: list[tuple[str, int, int]] = []
    join(tmp_path / "out", parts, on_progress=lambda *event: events.append(event))
    done = [event[1] for event in events]
    assert done == sorted(done) and done[-1] == events[0][2]
    assert len({event[2] for event in events}) == 1


def made(**changes: Any) -> Manifest:
    return replace(MADE, **changes)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (made(origin=replace(ORIGIN, repo_id="acme/other", model="acme/other")), "their source"),
        (made(origin=replace(ORIGIN, revision="f" * 40)), "the source's revision"),
        (made(origin=replace(ORIGIN, variant="fp16")), "the variant"),
        (made(origin=replace(ORIGIN, card={})), "the source's card"),
        (made(format="safetensors"), "the format: bin and safetensors"),
        (made(dtype="float16"), "the dtype: bfloat16 and float16"),
        (made(writer="0.2.0"), "the version of aoquant: 0.1.0 and 0.2.0"),
        (made(versions={"torch": "2.13.0", "torchao": "0.17.0"}), "the version of torchao: 0.18.0 and 0.17.0"),
    ],
    ids=lambda value: "" if isinstance(value, Manifest) else value.partition(":")[0],
)
def test_folders_of_different_making_are_refused(other: Manifest, words: str, tmp_path: Path) -> None:
    parts = checkpoint(tmp_path / "one", "transformer"), checkpoint(tmp_path / "two", "vae", made=other)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=words) as raised:
        join(tmp_path / "out", parts)
    assert "one" in raised.value.message and "two" in raised.value.message
    assert contents(tmp_path) == before


def test_other_versions_of_torch_are_named_both(tmp_path: Path) -> None:
    """A build for CUDA on one machine and one for CPUs on another."""
    other = made(versions={"torch": "2.13.0+cu130", "torchao": "0.18.0"})
    parts = checkpoint(tmp_path / "one", "transformer"), checkpoint(tmp_path / "two", "vae", made=other)
    joined = join(tmp_path / "out", parts)
    assert joined.manifest.versions == {"torch": "2.13.0 and 2.13.0+cu130", "torchao": "0.18.0"}


def same_component(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "two")
    checkpoint(tmp_path / "two", "transformer")


def flat(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "two")
    checkpoint(tmp_path / "two", "")


def two_rests(tmp_path: Path) -> None:
    checkpoint(tmp_path / "one", "transformer", others={"model_index.json": b"{}"})
    checkpoint(tmp_path / "two", "text_encoder", others={"model_index.json": b"[]"})


def damaged(tmp_path: Path) -> None:
    with (tmp_path / "two" / "text_encoder" / WEIGHTS).open("r+b") as file:
        file.write(b"XX")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (same_component, "both hold transformer"),
        (flat, "one component by itself"),
        (two_rests, "two versions of 'model_index.json'"),
        (damaged, "was changed"),
        (lambda tmp_path: (tmp_path / "two" / "aoquant.json").unlink(), "has no aoquant.json"),
    ],
    ids=["overlap", "flat", "two versions", "damaged", "no manifest"],
)
def test_what_does_not_belong_together_is_refused(
    spoil: Callable[[Path], Any], words: str, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    spoil(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        join(tmp_path / "out", parts)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["one", "one/inside", "one/../one", "."])
def test_the_folders_themselves_are_never_written_to(place: str, parts: tuple[Path, Path], tmp_path: Path) -> None:
    before = contents(tmp_path)
    with pytest.raises(UsageError):
        join(tmp_path / place, parts, overwrite=True)
    assert contents(tmp_path) == before


def test_an_output_of_ours_is_replaced_when_asked(parts: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint(tmp_path / "out", "unet")
    with pytest.raises(UsageError, match="exists") as raised:
        join(tmp_path / "out", parts)
    assert raised.value.hint == "choose another folder, or replace it with --overwrite"
    join(tmp_path / "out", parts, overwrite=True)
    assert not (tmp_path / "out" / "unet").exists()
    assert aoquant.verify(tmp_path / "out").is_sound


def test_the_command_prints_the_document_and_nothing_else(
    parts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["join", "out", "one", "two", "--json", "-q"], capsys)
    assert (code, err) == (0, "")
    document = schemas.validated(out, "join")
    assert (document["output"], document["folders"]) == ("out", ["one", "two"])
    assert [part["name"] for part in document["components"]] == ["transformer", "text_encoder"]
    code, out, _ = run(["join", "out", "one", "two", "--overwrite"], capsys)
    assert code == 0 and out.endswith(document["snippet"])
