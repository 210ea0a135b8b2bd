"""`verify`: every way in which a folder can differ from its manifest, and none that is not a difference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aoquant
from aoquant.checkpoint.manifest import Manifest, parse_manifest
from aoquant.errors import CheckpointError, UnsafeError
from aoquant.verification import verify
from tests.light import forge
from tests.light.bad_input import contents, run
from tests.light.checkpoints import LARGE, WEIGHTS, checkpoint, write_texts
from tests.light.forge import Called, Named, TorchFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "out", "transformer", "vae", rows=LARGE, others={"model_index.json": b"{}"})


def flip(path: Path, at: int) -> None:
    """Change one bit, and leave size and time of the last change as they are."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("names", [("transformer", "vae"), ("",)], ids=["components", "flat"])
def test_a_folder_as_it_was_written_verifies(names: tuple[str, ...], tmp_path: Path) -> None:
    found = verify(checkpoint(tmp_path / "out", *names))
    assert found.is_sound and not found.problems and not found.notes
    assert {file.status for file in found.files} == {"ok"}
    assert aoquant.verify(tmp_path / "out") == found


def test_one_bit_of_a_large_file_is_noticed(folder: Path) -> None:
    """`inspect` reads no weights, and sees nothing."""
    path = folder / "vae" / WEIGHTS
    flip(path, path.stat().st_size // 2)
    assert aoquant.inspect(folder).is_sound
    found = verify(folder)
    assert [(file.path, file.status) for file in found.bad_files] == [(f"vae/{WEIGHTS}", "changed")]
    with pytest.raises(CheckpointError, match=rf"'vae/{WEIGHTS}' was changed .* \(1 of 6 files are bad\)"):
        aoquant.verify(folder)


@pytest.mark.parametrize(
    ("spoil", "path", "status"),
    [
        (lambda out: (out / "vae" / WEIGHTS).unlink(), f"vae/{WEIGHTS}", "missing"),
        (lambda out: (out / "README.md").unlink(), "README.md", "missing"),
        (lambda out: (out / "model_index.json").write_text("{} "), "model_index.json", "resized"),
        (lambda out: (out / "vae" / "config.json").write_text(" " * 9), "vae/config.json", "resized"),
        (lambda out: (out / "extra.bin").touch(), "extra.bin", "unlisted"),
        (lambda out: (out / "vae" / ".hidden").write_text("x"), "vae/.hidden", "unlisted"),
        (lambda out: (out / "link").symlink_to(out), "link", "unlisted"),
    ],
    ids=["missing", "card missing", "longer", "other config", "extra", "hidden", "link"],
)
def test_what_differs_is_named(spoil: Callable[[Path], Any], path: str, status: str, folder: Path) -> None:
    spoil(folder)
    found = verify(folder)
    assert [(file.path, file.status) for file in found.bad_files] == [(path, status)]
    assert not found.is_sound
    with pytest.raises(CheckpointError, match=path) as raised:
        found.require_sound()
    assert raised.value.message.count("\n") == 0 and raised.value.hint


def test_an_edited_card_is_a_note(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("# mine")
    code, out, err = run(["verify", str(folder)], capsys)
    assert code == 0 and "as aoquant.json says" in out
    assert err == "note: README.md was edited, which is what it is there for\n"
    assert run(["verify", str(folder), "-q"], capsys)[2] == ""


def test_what_git_and_the_hub_put_there_is_none_of_its_business(folder: Path) -> None:
    for name in (".gitattributes", ".git/config", ".cache/huggingface/download/x.metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert verify(folder).is_sound


def test_what_inspect_finds_counts_too(tmp_path: Path) -> None:
    """A manifest that vouches for a damaged file does not make it sound."""
    folder = checkpoint(tmp_path / "out", "transformer")
    weights = folder / "transformer" / WEIGHTS
    forge.write_safetensors(weights.with_suffix(".safetensors"), {"a.weight": ("BF16", (8, 8))})
    weights.unlink()
    found = verify(write_texts(folder, "transformer"))
    assert not found.bad_files and not found.is_sound
    with pytest.raises(CheckpointError, match="transformer: "):
        found.require_sound()


def test_a_file_that_would_run_code_is_refused_as_such(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out", "transformer")
    TorchFile(state={"evil": Called(Named("os", "system"), ("true",))}).write(folder / "transformer" / WEIGHTS)
    with pytest.raises(UnsafeError, match="run code"):
        verify(folder)


def test_progress_counts_every_byte_once(folder: Path) -> None:
    events: list[tuple[str, int, int]] = []
    found = verify(folder, on_progress=lambda *event: events.append(event))
    done = [event[1] for event in events]
    assert done == sorted(done) and done[-1] == found.num_bytes == events[0][2]
    assert {event[0] for event in events} == {f"verifying {file.path}" for file in found.files}


def test_nothing_is_written(folder: Path) -> None:
    before = contents(folder)
    verify(folder)
    assert contents(folder) == before


def edited(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content.update(changes)


MANIFESTS: list[Callable[[dict[str, Any]], Any]] = [
    edited(components={}),
    edited(components=[]),
    edited(files={}),
    edited(source=None),
    edited(versions=[1]),
    edited(format='bin", evil("'),
    lambda content: content.pop("files"),
    lambda content: content["files"][0].update(path="../outside"),
    lambda content: content["files"][0].update(path="/etc/passwd"),
    lambda content: content["files"][0].update(path="aoquant.json"),
    lambda content: content["files"][0].update(bytes="12"),
    lambda content: content["files"][0].update(bytes=True),
    lambda content: content["files"][0].update(sha256="0" * 63),
    lambda content: content["files"].append(content["files"][0]),
    lambda content: content["files"].append("vae/config.json"),
    lambda content: content["source"].update(model=7),
    lambda content: content["components"]["vae"].update(quantized=-1),
    lambda content: content["components"]["vae"].update({"class": "A; import os"}),
    lambda content: content["components"].update({"x\nimport os": content["components"]["vae"]}),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_a_manifest_that_aoquant_did_not_write_is_refused(number: int, folder: Path) -> None:
    content = json.loads((folder / "aoquant.json").read_text())
    MANIFESTS[number](content)
    (folder / "aoquant.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not as aoquant writes it"):
        verify(folder)


def test_a_manifest_reads_back_as_it_was(folder: Path) -> None:
    text = (folder / "aoquant.json").read_text()
    manifest: Manifest = parse_manifest(json.loads(text))
    assert manifest.text() == text
