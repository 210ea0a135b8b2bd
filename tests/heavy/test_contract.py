"""What CI relies on: join = one run, size gates, uploads behind `quantize`, documents as their schemas say."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aoquant
from tests.heavy import tiny
from tests.light import processes, schemas
from tests.light.bad_input import contents, run, write
from tests.light.hub_server import HubServer

TOKEN = "hf_SecretSecretSecretSecret"
CARD = """---
license: other
license_name: tiny-non-commercial
license_link: https://example.org/license
pipeline_tag: text-to-image
---
"""
BOTH = {"transformer": "int8wo", "text_encoder_2": "fp8wo"}
REPO = "acme/pipe-int8wo"


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[..., Path]) -> Path:
    """A pipeline of Flux and two text encoders, with a licensed model card. Not to be changed."""
    pipe = tmp_path_factory.mktemp("contract") / "pipe"
    shutil.copytree(tiny_folder("flux"), pipe / "transformer")
    shutil.copytree(tiny_folder("clip_text"), pipe / "text_encoder")
    shutil.copytree(tiny_folder("t5"), pipe / "text_encoder_2")
    index = {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", tiny.MODELS["clip_text"].class_name],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }
    write(pipe, {"model_index.json": index, "README.md": CARD})
    return pipe


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- join -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "format_"),
    [((), "bin"), ((), "safetensors"), ((0,), "bin"), ((0, 1), "bin")],
    ids=["bin", "safetensors", "one full", "both full"],
)
def test_joined_folders_are_what_one_run_makes(full: tuple[int, ...], format_: str, pipe: Path, tmp_path: Path) -> None:
    """File by file; and it verifies, is sound, and loads."""
    for number, (name, config) in enumerate(BOTH.items()):
        aoquant.quantize(pipe, {name: config}, output=tmp_path / f"part{number}", full=number in full, format=format_)
    joined = aoquant.join(tmp_path / "out", [tmp_path / "part0", tmp_path / "part1"])
    aoquant.quantize(pipe, BOTH, output=tmp_path / "single" / "out", full=bool(full), format=format_)
    single = files(tmp_path / "single" / "out")
    assert files(tmp_path / "out") == single
    assert joined.to_json()["files"] == json.loads(single["aoquant.json"])["files"]
    assert aoquant.verify(tmp_path / "out").is_sound and aoquant.inspect(tmp_path / "out").is_sound
    loaded: Any = aoquant.load(tmp_path / "out", component="transformer")
    assert type(loaded.proj_out.weight.data).__name__ == "Int8Tensor"


# --- the model card ---------------------------------------------------------------------------------------------------


def test_the_license_goes_from_the_source_into_card_and_manifest(pipe: Path, tmp_path: Path) -> None:
    result = aoquant.quantize(pipe, {"transformer": "int8wo"}, output=tmp_path / "out")
    said = {
        "license": "other", "license_name": "tiny-non-commercial", "license_link": "https://example.org/license",
        "pipeline_tag": "text-to-image",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "aoquant.json").read_text())["source"]["card"] == said
    from aoquant import hub

    front = hub.front_matter(tmp_path / "out" / "README.md")
    assert {key: front[key] for key in said} == said
    assert front["library_name"] == "diffusers" and "torchao" in front["tags"]
    sizes = sum(file.num_bytes for file in result.files if str(file.path).startswith("transformer/"))
    assert f"| int8wo | {result.plan.components[0].num_quantized} |" in (tmp_path / "out" / "README.md").read_text()
    assert f"{sizes / 1000:.2f} kB |" in (tmp_path / "out" / "README.md").read_text()


# --- size gates -------------------------------------------------------------------------------------------------------


def test_the_size_gate_is_exact(pipe: Path, tmp_path: Path) -> None:
    num_bytes = aoquant.plan(pipe, BOTH, output=tmp_path / "out").output_bytes
    with pytest.raises(aoquant.GateError) as raised:
        aoquant.quantize(pipe, BOTH, output=tmp_path / "out", max_size=num_bytes - 1)
    assert f"{num_bytes:,}" in raised.value.message and f"{num_bytes - 1:,}" in raised.value.message
    assert "transformer" in raised.value.hint and "--full" not in raised.value.hint
    assert contents(tmp_path) == {}
    aoquant.quantize(pipe, BOTH, output=tmp_path / "out", max_size=num_bytes)


def test_the_gate_tells_what_full_costs(pipe: Path, tmp_path: Path) -> None:
    with pytest.raises(aoquant.GateError) as raised:
        aoquant.plan(pipe, BOTH, output=tmp_path / "out", full=True, max_size="1kB")
    assert "without --full" in raised.value.hint


def test_the_gate_comes_before_any_weight_is_read(pipe: Path, tmp_path: Path) -> None:
    """A weight that would be refused when it is read is never met."""
    broken = shutil.copytree(pipe, tmp_path / "pipe")
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    data = weights.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights.write_bytes(data[:start] + b"\xff" * (len(data) - start))  # NaN, all of them
    with pytest.raises(aoquant.GateError):
        aoquant.quantize(broken, {"transformer": "int8wo"}, output=tmp_path / "out", max_size="1kB")
    with pytest.raises(aoquant.CheckpointError, match="NaN"):
        aoquant.quantize(broken, {"transformer": "int8wo"}, output=tmp_path / "out")


# --- quantize --push-to -----------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.writers[TOKEN] = {"acme"}
        yield server


def start(pipe: Path, work: Path, hub: HubServer, *options: str, token: str = TOKEN) -> processes.Child:
    argv = ["-m", "aoquant", "quantize", str(pipe), "--transformer", "int8wo", "-o", "out", *options]
    environment = {
        "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    return processes.start(argv, cwd=work, env=environment)


def finish(process: processes.Child, work: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; the token is in neither, nor in a file."""
    done = process.finish()
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert all(TOKEN.encode() not in content for content in files(work).values())
    return done.returncode, done.stdout, done.stderr


def quantize(pipe: Path, work: Path, hub: HubServer, *options: str, token: str = TOKEN) -> tuple[int, str, str]:
    with start(pipe, work, hub, *options, token=token) as process:
        return finish(process, work)


def test_quantize_and_upload_in_one(pipe: Path, tmp_path: Path, hub: HubServer) -> None:
    code, out, err = quantize(pipe, tmp_path, hub, "--push-to", REPO, "--private", "--json", "-q")
    assert (code, err) == (0, "")
    document = schemas.validated(out, "quantize")
    assert document["pushed"]["url"] == f"{hub.url}/{REPO}" and document["pushed"]["private"]
    there = hub.repos[REPO].commits[hub.repos[REPO].revisions["main"]]
    made = files(tmp_path / "out")
    assert there.keys() == {*made, ".gitattributes"}
    assert {name for name in made if there[name] != made[name]} == {"README.md"}
    assert f'from_pretrained("{REPO}", subfolder="transformer"' in there["README.md"].decode()


def test_the_address_is_the_last_line(pipe: Path, tmp_path: Path, hub: HubServer) -> None:
    _, out, _ = quantize(pipe, tmp_path, hub, "--push-to", REPO, "-q")
    assert out.splitlines()[-1] == f"{hub.url}/{REPO}"


def test_a_failed_upload_leaves_the_finished_folder_and_says_how_to_go_on(
    pipe: Path, tmp_path: Path, hub: HubServer
) -> None:
    hub.upload_status["commit"] = 403
    code, out, err = quantize(pipe, tmp_path, hub, "--push-to", REPO, "--json", "-q")
    assert (code, out) == (3, "")
    assert "HTTP 403" in err and f"out is whole: `aoquant push out {REPO}` uploads it" in err
    assert aoquant.verify(tmp_path / "out").is_sound


def test_an_interrupted_upload_does_so_too(pipe: Path, tmp_path: Path, hub: HubServer) -> None:
    hub.hold = "commit"
    with start(pipe, tmp_path, hub, "--push-to", REPO, "--private", "-q") as process:
        assert hub.held.wait(timeout=120)
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process, tmp_path)
    assert (code, out) == (130, "")
    assert err == f"error: interrupted\nhint: out is whole: `aoquant push out {REPO} --private` uploads it\n"
    assert aoquant.verify(tmp_path / "out").is_sound


@pytest.mark.parametrize(
    ("options", "token", "code", "words"),
    [
        (("--push-to", REPO), "", 3, "HF_TOKEN"),
        (("--push-to", "pipe-int8wo"), TOKEN, 3, "org/pipe-int8wo"),
        (("--push-to", "a b/c"), TOKEN, 3, "'a b/c'"),
        (("--private",), TOKEN, 2, "--push-to"),
    ],
    ids=["no token", "no owner", "no name", "private alone"],
)
def test_what_cannot_be_uploaded_is_not_quantized(
    options: tuple[str, ...], token: str, code: int, words: str, pipe: Path, tmp_path: Path, hub: HubServer
) -> None:
    found, out, err = quantize(pipe, tmp_path, hub, *options, token=token)
    assert (found, out) == (code, "") and words in err
    assert files(tmp_path) == {} and hub.requests == []


# --- documents --------------------------------------------------------------------------------------------------------


def argv(name: str, config: str, folder: Path, *options: str) -> list[str]:
    return [str(folder), "--component", f"{tiny.MODELS[name].component}={config}", *options]


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("flux", "int8wo", ()),
        ("flux", "int4wo:group_size=32", ("--skip", "proj_out", "--format", "safetensors")),
        ("flux", "uint4wo:group_size=32", ("--max-shard-size", "100kB")),
        ("flux", "fp6wo", ("--dtype", "float16")),
        ("sdxl_unet", "fp8dq", ()),
        ("t5", "int8dq", ()),
        ("qwen2_moe", "int8wo", ()),
    ],
    ids=["streamed", "kept", "packed, sharded", "packed floats", "unet", "tied", "whole"],
)
def test_documents_are_as_their_schemas_say(
    name: str, config: str, options: tuple[str, ...], tiny_folder: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    arguments = argv(name, config, tiny_folder(name), *options, "-o", "out", "--json", "-q")
    plan = schemas.validated(run(["plan", *arguments], capsys)[1], "plan")
    made = schemas.validated(run(["quantize", *arguments], capsys)[1], "quantize")
    assert plan["components"][0]["streamed"] is made["components"][0]["streamed"] is (name != "qwen2_moe")
    for command in ("inspect out --layers", "verify out", "load out"):
        code, out, err = run([*command.split(), "--json", "-q"], capsys)
        assert (code, err) == (0, "")
        schemas.validated(out, command.split()[0])
    schemas.validated((tmp_path / "out" / "aoquant.json").read_text(), "manifest")


def test_documents_of_a_whole_pipeline_are_as_their_schemas_say(
    pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(pipe), "--transformer", "int8wo", "--full", "-o", "out", "--json", "-q"]
    schemas.validated(run(["plan", *arguments], capsys)[1], "plan")
    schemas.validated(run(["quantize", *arguments], capsys)[1], "quantize")
    inspected = schemas.validated(run(["inspect", "out", "--json"], capsys)[1], "inspect")
    assert inspected["kind"] == "pipeline"
