"""Real models from a Hub on loopback: what is transferred, what is linked, and what an interrupt leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import make_tiny_flux
import pytest
import torch

import aoquant as library
from tests.light import processes
from tests.light.hub_server import HubServer

REPO = "acme/tiny-flux"
SHARD = "transformer/diffusion_pytorch_model-{:05d}-of-00003.safetensors"

QUANTIZE = ("-m", "aoquant", "quantize", REPO, "--transformer", "int8wo", "-o", "out")

# Quantizes the transformer of the repository, and prints each stage that reports progress, once.
DRIVER = f"""
import aoquant, sys
seen = set()
def on_progress(stage, done, total):
    if stage not in seen and done:
        seen.add(stage)
        print(stage, flush=True)
aoquant.quantize("{REPO}", {{"transformer": "int8wo"}}, output="out", on_progress=on_progress)
"""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Flux pipeline whose transformer lies in three shards."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-flux"
    make_tiny_flux.tiny_flux(seed=0).save_pretrained(str(folder))
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(str(folder), subfolder="transformer")
    for path in (folder / "transformer").iterdir():
        path.unlink()
    transformer.to(torch.bfloat16).save_pretrained(str(folder / "transformer"), max_shard_size="14MB")
    assert (folder / SHARD.format(3)).is_file()
    return folder


@pytest.fixture
def hub(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serves the pipeline to processes started from the folder `tmp_path`, which have a fresh cache there."""
    with HubServer() as server:
        server.publish(REPO, pipeline)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.chdir(tmp_path)
        yield server


def aoquant(*arguments: str) -> dict[str, Any]:
    done = processes.run(["-m", "aoquant", *arguments, "--json"])
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def weights_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_plan_transfers_headers_and_no_weights(hub: HubServer, pipeline: Path) -> None:
    planned = aoquant("plan", REPO, "--transformer", "int8wo", "--text-encoder-2", "int8wo", "-o", "out")
    size = weights_of(pipeline / "transformer") + weights_of(pipeline / "text_encoder_2")
    assert planned["download_bytes"] == size
    sent = sum(count for path, count in hub.sent_bytes.items() if path.endswith(".safetensors"))
    assert 0 < sent < size / 100
    result = aoquant("quantize", REPO, "--transformer", "int8wo", "--text-encoder-2", "int8wo", "-o", "out")
    assert (result["output_bytes"], result["components"]) == (
        planned["output_bytes"],
        [{key: value for key, value in part.items() if key != "tensors"} for part in planned["components"]],
    )
    local = library.quantize(pipeline, {"transformer": "int8wo", "text_encoder_2": "int8wo"}, output="local")
    weights = {str(file.path): file.sha256 for file in local.files if file.path.suffix == ".bin"}
    assert len(weights) == 2 and weights.items() <= {file["path"]: file["sha256"] for file in result["files"]}.items()


def test_other_components_are_links_to_the_cache(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    result = aoquant("quantize", REPO, "--transformer", "int8wo", "--full", "-o", "out")
    blobs = {path.stat().st_ino for path in (tmp_path / "hf").rglob("blobs/*")}
    linked = {
        path.relative_to("out").as_posix()
        for path in Path("out").rglob("*")
        if path.is_file() and path.stat().st_ino in blobs
    }
    assert linked == {
        file["path"] for file in result["files"] if file["path"].endswith(".safetensors") and file["bytes"] >= 1_000_000
    }
    assert "text_encoder_2/model.safetensors" in linked
    for path in linked:
        assert (pipeline / path).read_bytes() == (Path("out") / path).read_bytes()
    before = {path: path.read_bytes() for path in (tmp_path / "hf").rglob("blobs/*")}
    aoquant("quantize", REPO, "--transformer", "fp8wo", "--full", "-o", "out", "--overwrite")
    assert {path: path.read_bytes() for path in before} == before


def test_work_begins_before_the_last_file_has_arrived(hub: HubServer) -> None:
    repo = hub.repos[REPO]
    repo.stall_after, repo.stall_at = 0, SHARD.format(3)
    with processes.start(["-c", DRIVER]) as child:
        deadline = time.monotonic() + 60
        while "\ntransformer →" not in child.output()[0]:
            assert child.returncode is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert repo.stalled.wait(timeout=30) and not repo.release.is_set()
        repo.release.set()
        done = child.finish()
    assert done.returncode == 0, done.stderr
    stages = done.stdout.splitlines()
    assert f"downloading {REPO}" in stages and "transformer → int8wo" in stages
    assert Path("out/aoquant.json").is_file()


def test_an_interrupt_during_the_download_ends_at_once(hub: HubServer, tmp_path: Path) -> None:
    repo = hub.repos[REPO]
    repo.stall_after = 1000
    with processes.start(QUANTIZE) as child:
        assert repo.stalled.wait(timeout=60)
        time.sleep(0.5)
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        done = child.finish(timeout=30)
        assert time.monotonic() - started < 8  # the client itself would wait 10 s for the network
    assert (done.returncode, done.stdout) == (130, "")
    assert "error: interrupted" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_download_that_fails_midway_leaves_nothing(hub: HubServer, tmp_path: Path) -> None:
    repo = hub.repos[REPO]
    repo.fail_at = SHARD.format(2)
    done = processes.run(QUANTIZE)
    assert (done.returncode, done.stdout) == (3, "")
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and "HTTP 404" in error and hint == "hint: run it again"
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    assert os.environ["HF_ENDPOINT"] == hub.url
