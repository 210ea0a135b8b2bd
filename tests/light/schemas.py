"""The JSON Schema of each document, and a document held against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

import aoquant

FOLDER = Path(aoquant.__file__).parent / "schemas"


def schema(name: str) -> dict[str, Any]:
    """`plan` → the schema of `aoquant.plan/1`."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def validate(document: Any, name: str) -> None:
    """Hold a parsed document against the schema that it names, which has to be `name`'s."""
    assert document["schema"] == f"aoquant.{name}/1"
    errors = jsonschema.Draft202012Validator(schema(name)).iter_errors(document)
    assert [f"{error.json_path}: {error.message[:300]}" for error in errors] == []


def validated(text: str, name: str) -> Any:
    """Text that has to be exactly one document of the schema `name`."""
    document = json.loads(text)
    validate(document, name)
    return document
