"""The command as people type it: a bare name, a Hub on loopback, and afterwards the cache alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_tiny_flux
import pytest

from tests.heavy import stock
from tests.light import processes
from tests.light.hub_server import HubServer

REPO = "black-forest-labs/FLUX.1-dev"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Flux pipeline, to be served as the real one's repository."""
    folder = tmp_path_factory.mktemp("published") / "FLUX.1-dev"
    make_tiny_flux.tiny_flux(0).save_pretrained(folder)
    return folder


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def aoquant(*argv: str, work: Path, endpoint: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One command in a process of its own, with the Hub at `endpoint` and its cache in `work`; and its JSON."""
    environment = {
        "HF_HUB_OFFLINE": "0", "HF_HOME": str(work / "home"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    done = processes.run(["-m", "aoquant", *argv, "--json"], cwd=work, env=environment)
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stdout)


def test_a_bare_name_is_quantized_from_the_hub_and_then_from_the_cache(
    hub: HubServer, published: Path, tmp_path: Path
) -> None:
    commit = hub.publish(REPO, published)
    argv = ("quantize", "FLUX.1-dev", "--transformer", "int8wo")
    done, first = aoquant(*argv, work=tmp_path, endpoint=hub.url)
    assert first["output"] == "FLUX.1-dev-int8wo"
    assert (first["source"]["repo_id"], first["source"]["revision"]) == (REPO, commit)
    assert done.stderr.count(f"note: FLUX.1-dev is {REPO}\n") == 1
    weights = {path for path in hub.downloaded(REPO) if path.endswith((".safetensors", ".bin"))}
    assert weights == {f"transformer/{path.name}" for path in (published / "transformer").glob("*.safetensors")}

    made = tmp_path / "FLUX.1-dev-int8wo"
    manifest = (made / "aoquant.json").read_text()
    assert json.loads(manifest)["source"]["repo_id"] == REPO
    loaded = stock.load(made / "transformer", "diffusers", "FluxTransformer2DModel")
    expected = stock.quantize(published / "transformer", "diffusers", "FluxTransformer2DModel", "int8wo")
    stock.assert_same_state(loaded.state_dict(), expected.state_dict())

    hub.forget()
    _, second = aoquant(*argv, "--offline", "-o", "again", work=tmp_path, endpoint=hub.url)
    assert hub.requests == []
    assert second["source"] == first["source"]
    assert hashes(second) == hashes(first)


def hashes(result: dict[str, Any]) -> dict[str, str]:
    """Of the component's files; the others name the folder that they lie in."""
    found = {file["path"]: file["sha256"] for file in result["files"] if "/" in file["path"]}
    assert found
    return found
