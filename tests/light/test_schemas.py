"""What the light commands print is what the published schemas say, and the schemas say something."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.light import forge, schemas
from tests.light.bad_input import run, write
from tests.light.checkpoints import WEIGHTS, checkpoint
from tests.light.forge import Called, Named, TorchFile
from tests.light.test_inspection import DIFFUSERS, pipeline, safe_component

NAMES = sorted(path.stem for path in schemas.FOLDER.glob("*.json"))
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def flat(work: Path) -> None:
    checkpoint(work / "out", "")


def whole(work: Path) -> None:
    checkpoint(work / "out", "transformer", others={"model_index.json": b'{"_class_name": "FluxPipeline"}'})


def stock(work: Path) -> None:
    pipeline(work / "out")


def safe(work: Path) -> None:
    safe_component(work / "out")


def damaged(work: Path) -> None:
    folder = checkpoint(work / "out", "transformer", "vae")
    (folder / "transformer" / WEIGHTS).write_bytes(b"PK")
    (folder / "vae" / "config.json").write_text("{")
    (folder / "README.md").write_text("# mine")
    (folder / "extra").touch()


def evil(work: Path) -> None:
    flat(work)
    state = {"evil": Called(Named("os", "system"), ("true",)), "epoch": 3}
    TorchFile(state=state).write(work / "out" / WEIGHTS)


def old_manifest(work: Path) -> None:
    write(work, {"out/aoquant.json": {"schema": "aoquant.manifest/9"}, "out/vae/config.json": DIFFUSERS})


def file(work: Path) -> None:
    (work / "out").mkdir()
    forge.write_safetensors(work / "out" / "x.safetensors", {"a.weight": ("BF16", (8, 8))})


@pytest.mark.parametrize(
    ("make", "argv", "code"),
    [
        (flat, "inspect out", 0),
        (flat, "inspect out --layers", 0),
        (whole, "inspect out", 0),
        (stock, "inspect out --layers", 0),
        (safe, "inspect out --layers", 4),
        (damaged, "inspect out --layers", 4),
        (evil, "inspect out --layers", 5),
        (old_manifest, "inspect out", 4),
        (file, "inspect out/x.safetensors", 0),
        (flat, "verify out", 0),
        (whole, "verify out", 0),
        (damaged, "verify out", 4),
        (flat, "configs", 0),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_documents_are_as_their_schemas_say(
    make: Callable[[Path], Any], argv: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    found, out, _ = run([*argv.split(), "--json"], capsys)
    assert found == code
    schemas.validated(out, argv.split()[0])


def test_a_manifest_is_as_its_schema_says(tmp_path: Path) -> None:
    for names in (("",), ("transformer", "vae")):
        folder = checkpoint(tmp_path / f"out{len(names)}", *names)
        schemas.validated((folder / "aoquant.json").read_text(), "manifest")


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one_and_closed(name: str) -> None:
    """No object of it takes keys that it does not name, and each key is explained."""
    schema = schemas.schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    for found in objects(schema):
        assert found.get("additionalProperties") is not True
        assert "additionalProperties" in found or found["description"].startswith("of a quantized tensor")
        if "properties" in found:
            assert found["additionalProperties"] is False
    assert schema["properties"]["schema"] == {"const": f"aoquant.{name}/1"}
    assert set(schema["properties"]) == set(schema["required"])


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for value in schema.values():
            yield from objects(value)
    if isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_a_document_with_a_key_more_or_less_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat(tmp_path)
    monkeypatch.chdir(tmp_path)
    document = json.loads(run(["verify", "out", "--json"], capsys)[1])
    validator = jsonschema.Draft202012Validator(schemas.schema("verify"))
    assert validator.is_valid(document)
    for key in document:
        assert not validator.is_valid({name: value for name, value in document.items() if name != key})
    assert not validator.is_valid({**document, "more": 1})
    deeper = copy.deepcopy(document)
    deeper["files"][0]["more"] = 1
    assert not validator.is_valid(deeper)


def test_every_document_has_its_schema_and_its_line_in_the_readme() -> None:
    package = schemas.FOLDER.parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"aoquant\.([a-z]+)/1"', text)}
    assert named == set(NAMES)
    assert [name for name in NAMES if f"`aoquant.{name}/1`" not in README] == []
