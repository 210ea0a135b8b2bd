"""The table of names, and what a name stands for: a folder, a row, or the only such repository in the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aoquant.models import MODELS, ModelRow, find_model, models_json
from tests.light import processes
from tests.light.hub_server import HubServer
from tests.light.test_source import pipeline_files, write_files

ROWS = pytest.mark.parametrize("row", MODELS.values(), ids=lambda row: row.name)
SPELLINGS = [(spelling, row) for row in MODELS.values() for spelling in row.spellings]
FLUX = "black-forest-labs/FLUX.1-dev"

# Opens argv[1] (a model) with the keyword arguments in argv[2], and prints what it is or the error as JSON.
DRIVER = """
import json, sys
from aoquant.errors import AoquantError
from aoquant.source import open_source
try:
    source = open_source(sys.argv[1], components=[], **json.loads(sys.argv[2]))
except AoquantError as error:
    print(json.dumps({"code": error.exit_code, "message": error.message, "hint": error.hint}))
else:
    print(json.dumps({"repo_id": source.repo_id, "model": source.model, "alias": source.alias,
                      "revision": source.revision}))
"""


def opened(model: str, *, work: Path, **options: Any) -> dict[str, Any]:
    """In a process of its own, since huggingface_hub reads its environment on import."""
    done = processes.run(["-c", DRIVER, model, json.dumps(options)], cwd=work)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return write_files(tmp_path / "published", pipeline_files())


# --- the table --------------------------------------------------------------------------------------------------------


@ROWS
def test_a_row_is_well_formed(row: ModelRow) -> None:
    assert re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", row.repo_id)
    assert re.fullmatch(r"\w+Pipeline", row.pipeline)
    assert row.components and all(name.isidentifier() for name in row.components)
    assert all(class_name.isidentifier() for class_name in row.components.values())
    assert row.meaning and row.meaning == row.meaning.strip() and not row.meaning.endswith(".")


@pytest.mark.parametrize(("spelling", "row"), SPELLINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_spelling_stands_for_its_row_in_any_case(spelling: str, row: ModelRow) -> None:
    assert find_model(spelling) is find_model(spelling.upper()) is find_model(spelling.lower()) is row
    assert re.fullmatch(r"[A-Za-z0-9][\w.-]*", spelling)


def test_no_spelling_and_no_repository_is_there_twice() -> None:
    folded = [spelling.casefold() for spelling, _ in SPELLINGS]
    assert len(set(folded)) == len(folded)
    assert len({row.repo_id.casefold() for row in MODELS.values()}) == len(MODELS)


def test_what_is_not_in_the_table_is_none() -> None:
    assert find_model("FLUX.9-dev") is find_model("") is find_model(FLUX) is None


def test_the_table_as_json_has_every_row_and_all_of_it() -> None:
    document = json.loads(json.dumps(models_json()))
    assert document["schema"] == "aoquant.models/1"
    assert [row["repo_id"] for row in document["models"]] == [row.repo_id for row in MODELS.values()]
    assert document["models"][0] == {
        "name": "FLUX.1-dev",
        "aliases": ["flux-dev"],
        "repo_id": FLUX,
        "pipeline": "FluxPipeline",
        "components": {
            "text_encoder": "CLIPTextModel",
            "text_encoder_2": "T5EncoderModel",
            "transformer": "FluxTransformer2DModel",
        },
        "meaning": "text to image",
    }


# --- what a name stands for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FLUX.1-dev", "flux.1-DEV", "flux-dev", "FLUX.1-dev@main"])
def test_a_name_of_the_table_is_its_repository(name: str, hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    commit = hub.publish(FLUX, pipeline)
    bare = name.partition("@")[0]
    assert opened(name, work=tmp_path) == {"repo_id": FLUX, "model": FLUX, "alias": bare, "revision": commit}
    hub.forget()
    assert opened(name, work=tmp_path, offline=True)["revision"] == commit
    assert hub.requests == []


def test_a_revision_goes_with_a_name(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    first = hub.publish(FLUX, pipeline, revision="refs/pr/1")
    write_files(pipeline, {"README.md": b"# later"})
    assert hub.publish(FLUX, pipeline) != first
    result = opened("FLUX.1-dev@refs/pr/1", work=tmp_path)
    assert (result["revision"], result["alias"]) == (first, "FLUX.1-dev")
    assert opened("FLUX.1-dev", work=tmp_path, revision="refs/pr/1")["revision"] == first


def test_a_folder_goes_before_a_name(tmp_path: Path) -> None:
    write_files(tmp_path / "FLUX.1-dev", pipeline_files())
    result = opened("FLUX.1-dev", work=tmp_path)
    assert result == {"repo_id": None, "model": "FLUX.1-dev", "alias": None, "revision": None}


def test_a_repository_that_is_written_out_has_no_alias(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    hub.publish("acme/FLUX.1-dev", pipeline)
    result = opened("acme/FLUX.1-dev@main", work=tmp_path)
    assert (result["repo_id"], result["alias"]) == ("acme/FLUX.1-dev", None)


def test_a_name_is_the_only_such_repository_in_the_cache(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    commit = hub.publish("acme/Tiny-Flux", pipeline)
    unknown = opened("tiny-flux", work=tmp_path)
    assert (unknown["code"], "'tiny-flux'" in unknown["message"]) == (3, True)
    assert hub.requests == []  # no search
    opened("acme/Tiny-Flux", work=tmp_path)
    for options in ({}, {"offline": True}):
        result = opened("tiny-flux", work=tmp_path, **options)
        assert (result["repo_id"], result["alias"], result["revision"]) == ("acme/Tiny-Flux", "tiny-flux", commit)


def test_the_table_goes_before_the_cache(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    hub.publish("acme/flux.1-dev", pipeline)
    hub.publish(FLUX, pipeline)
    opened("acme/flux.1-dev", work=tmp_path)
    assert opened("flux.1-dev", work=tmp_path)["repo_id"] == FLUX


def test_several_of_one_name_in_the_cache_are_listed(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    for repo_id in ("acme/tiny-flux", "other/Tiny-Flux"):
        hub.publish(repo_id, pipeline)
        opened(repo_id, work=tmp_path)
    error = opened("tiny-flux", work=tmp_path, offline=True)
    assert error["code"] == 3
    assert "acme/tiny-flux, other/Tiny-Flux" in error["message"]
    assert "acme/tiny-flux" in error["hint"]


def test_a_folder_of_the_cache_without_a_commit_is_no_repository(isolated: Path, tmp_path: Path) -> None:
    (isolated / "hub" / "models--acme--tiny-flux" / "snapshots").mkdir(parents=True)
    assert opened("tiny-flux", work=tmp_path)["code"] == 3


@pytest.mark.parametrize(
    ("name", "near"),
    [("FLUX.1-def", "FLUX.1-dev"), ("sdxll", "sdxl"), ("Qwen-Imagee", "Qwen-Image"), ("tiny-fluxx", "tiny-flux")],
)
def test_a_name_that_is_none_is_answered_with_those_that_are_close(
    name: str, near: str, hub: HubServer, pipeline: Path, tmp_path: Path
) -> None:
    hub.publish("acme/tiny-flux", pipeline)
    opened("acme/tiny-flux", work=tmp_path)
    error = opened(name, work=tmp_path)
    assert error["code"] == 3 and f"'{name}'" in error["message"]
    for other in (f"did you mean {near}", "aoquant models", f"org/{name}"):
        assert other in error["hint"]
