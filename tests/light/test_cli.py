"""The commands as far as they go without torch: wrong input, what each argument means, what light ones print."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import aoquant
from aoquant import api
from aoquant.cli import main
from aoquant.configs import CONFIGS
from aoquant.errors import AoquantError
from aoquant.models import MODELS
from aoquant.request import Request
from tests.light import bad_input, forge
from tests.light.bad_input import bad, having, run, signals_kept, write
from tests.light.checkpoints import checkpoint
from tests.light.forge import TorchFile
from tests.light.test_inspection import INT8WO, component, pipeline, safe_component

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "torchao", "numpy", "safetensors", "diffusers", "transformers", "accelerate")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
Q = "--transformer int8wo"
QUANTIZE_PIPE = f"quantize pipe {Q}"


def pipe(work: Path) -> None:
    pipeline(work / "pipe")


def one(work: Path) -> None:
    component(work / "one")


def one_made(work: Path) -> None:
    pipe(work)
    checkpoint(work / "one", "transformer")


def two_made(work: Path) -> None:
    one_made(work)
    checkpoint(work / "two", "text_encoder")
    checkpoint(work / "flat", "")


def model_index(content: Any) -> bad_input.Make:
    return having({"pipe/model_index.json": content})


def empty_folder(name: str) -> bad_input.Make:
    return lambda work: (work / name).mkdir()


def dangling(work: Path) -> None:
    pipe(work)
    (work / "out").symlink_to(work / "gone")


def beside_pipe(content: dict[str, Any]) -> bad_input.Make:
    """The pipeline, and these files in the working directory."""

    def make(work: Path) -> None:
        pipe(work)
        write(work, content)

    return make


def truncated_bin(work: Path) -> None:
    path = TorchFile(state={}).write(work / "x.bin")
    path.write_bytes(path.read_bytes()[:-10])


ROWS = [
    # The words of the command line.
    bad("no command", "", 2, "command", "aoquant --help"),
    bad("unknown command", "quantise pipe", 2, "quantise"),
    bad("unknown option", f"{QUANTIZE_PIPE} --frob", 2, "--frob"),
    bad("unknown option of configs", "configs --frob", 2, "--frob"),
    bad("unknown option of models", "models --frob", 2, "--frob"),
    bad("argument of models", "models FLUX.1-dev", 2, "FLUX.1-dev"),
    bad("option without its value", "quantize pipe --transformer", 2, "--transformer"),
    bad("value for a flag", f"{QUANTIZE_PIPE} --full=yes", 2, "--full"),
    bad("no model", "quantize", 2, "model"),
    bad("two models", f"quantize pipe pipe {Q}", 2, "pipe"),
    bad("two paths to inspect", "inspect a b", 2, "b"),
    # Configs.
    bad("unknown config", "quantize pipe --transformer int9wo", 2, "'int9wo'", "did you mean int8wo"),
    bad("misspelt alias", "quantize pipe --transformer float8_weight_onli", 2, "did you mean fp8wo"),
    bad("config like nothing", "quantize pipe --transformer q8_0", 2, "'q8_0'", "aoquant configs"),
    bad("empty config", ["quantize", "pipe", "--transformer", ""], 2, "''", "aoquant configs"),
    bad("unknown config option", "quantize pipe --transformer int4wo:groupsize=64", 2, "'groupsize'", "group_size"),
    bad("config that takes no option", "plan pipe --unet fp8dq:group_size=64", 2, "fp8dq takes no options"),
    bad("value that an option lacks", "quantize pipe --transformer int4wo:group_size=48", 2, "group_size=48", "64"),
    bad("option without =", "quantize pipe --transformer int4wo:group_size", 2, "'group_size'", "key=value"),
    bad("option given twice", "plan pipe --vae int4wo:group_size=64,group_size=32", 2, "'group_size'", "twice"),
    bad("option against its name", "plan pipe --vae fp4_e3m0wo:dtype=e1m2", 2, "says dtype twice: e3m0 and e1m2"),
    bad("colon without an option", "quantize pipe --transformer int8wo:", 2, "no option after its colon"),
    bad("uintx without bits", "quantize pipe --transformer uintx", 2, "uint1wo to uint7wo"),
    # Components.
    bad("no component", "quantize pipe", 2, "no component", "--transformer int8wo"),
    bad("component without a config", "quantize pipe --component prior", 2, "prior", "NAME=CONFIG"),
    bad("component without a name", "quantize pipe --component =int8wo", 2, "=int8wo", "NAME=CONFIG"),
    bad("component with an empty config", "quantize pipe --component prior=", 2, "prior=", "NAME=CONFIG"),
    bad("component twice", f"{QUANTIZE_PIPE} --component transformer=fp8wo", 2, "transformer", "twice"),
    bad("component twice in two spellings", "plan pipe --component a-b=fp8wo --component a_b=fp8wo", 2, "a_b", "twice"),
    bad("component that it lacks", "quantize pipe --unet int8wo", 2, "'unet'", "transformer, text_encoder", make=pipe),
    bad(
        "component misspelt", "plan pipe --component transfomer=int8wo", 2, "'transfomer'", "did you mean transformer",
        make=pipe,
    ),
    bad("component without weights", "plan pipe --component tokenizer=int8wo", 2, "'tokenizer'", "weights", make=pipe),
    bad("text encoder that is none", "plan one --text-encoder int8wo", 2, "one is a", "not a text_encoder", make=one),
    bad("two configs for one component", "quantize one --unet int8wo --vae int8wo", 2, "unet, vae", make=one),
    # Other values.
    bad("no size", f"{QUANTIZE_PIPE} --max-shard-size big", 2, "'big'", "10GB"),
    bad("size of nothing", f"{QUANTIZE_PIPE} --max-shard-size 0", 2, "0", "10GB"),
    bad("negative size", [*QUANTIZE_PIPE.split(), "--max-shard-size=-1GB"], 2, "'-1GB'", "10GB"),
    bad("size beyond numbers", f"{QUANTIZE_PIPE} --max-shard-size {'9' * 400}", 2, "is not a size"),
    bad("unknown format", f"{QUANTIZE_PIPE} --format gguf", 2, "'gguf'", "bin or safetensors"),
    bad("unknown dtype", f"{QUANTIZE_PIPE} --dtype bf16", 2, "'bf16'", "bfloat16"),
    bad("unknown device", f"{QUANTIZE_PIPE} --device gpu", 2, "'gpu'", "cuda"),
    bad("device without a number", f"{QUANTIZE_PIPE} --device cuda:", 2, "'cuda:'", "cuda:N"),
    # The model.
    bad("empty model", ["quantize", "", "--transformer", "int8wo"], 2, "no name"),
    bad("no such folder", f"quantize ./nowhere {Q}", 3, "./nowhere", "no such folder"),
    bad("no such absolute folder", f"quantize /no/such/folder {Q}", 3, "no such folder"),
    bad("path of several folders", f"quantize a/b/c {Q}", 3, "'a/b/c'", "no such folder"),
    bad("home of nobody", f"quantize ~nobody-like-that/model {Q}", 3, "no such folder"),
    bad("folder of another system", f"quantize C:\\models\\flux {Q}", 3, "no such folder"),
    bad("name with a slash at its end", f"quantize acme/ {Q}", 3, "'acme/'"),
    bad("revision of a bare folder", f"quantize pipe@main {Q}", 2, "local folder", "leave out @main", make=pipe),
    bad("output of aoquant as the model", f"quantize done {Q}", 4, "already quantized", "written by aoquant",
        make=having({"done/aoquant.json": {}})),
    bad("bare name", f"quantize my-flux {Q}", 3, "'my-flux'", "aoquant models", "org/my-flux"),
    bad("misspelt name", f"plan FLUX.1-def@v1 {Q}", 3, "'FLUX.1-def'", "did you mean FLUX.1-dev"),
    bad("name offline and not cached", f"quantize sdxl {Q} --offline", 3, "offline", "stable-diffusion-xl-base-1.0"),
    bad("no revision after @ of a name", f"quantize sdxl@ {Q}", 3, "@main"),
    bad("name with two revisions", f"quantize sdxl@v1 {Q} --revision v2", 2, "'v1'", "'v2'"),
    bad("address", f"quantize https://huggingface.co/acme/x {Q}", 3, "address", "org/name"),
    bad("no repository's name", ["quantize", "acme/na me", "--transformer", "int8wo"], 3, "'acme/na me'", "org/name"),
    bad("no revision after @", f"quantize acme/x@ {Q}", 3, "@main"),
    bad("two revisions", f"quantize acme/x@v1 {Q} --revision v2", 2, "'v1'", "'v2'"),
    bad("revision of a folder", f"{QUANTIZE_PIPE} --revision main", 2, "local folder", make=pipe),
    bad("file as model", f"quantize model.safetensors {Q}", 3, "is a file", make=having({"model.safetensors": b"x"})),
    bad("folder without a model", f"quantize empty {Q}", 4, "model_index.json", make=empty_folder("empty")),
    bad("offline and not cached", f"quantize acme/x {Q} --offline", 3, "offline", "acme/x"),
    # model_index.json.
    bad("model_index.json cut off", QUANTIZE_PIPE, 4, "model_index.json", "JSON", make=model_index('{"x": [')),
    bad("model_index.json a list", QUANTIZE_PIPE, 4, "model_index.json", "array", make=model_index([1])),
    bad("model_index.json empty", QUANTIZE_PIPE, 4, "model_index.json", "empty", make=model_index(b"")),
    bad("model_index.json too deep", QUANTIZE_PIPE, 4, "too deep", make=model_index("[" * 200_000)),
    bad("model_index.json in latin-1", QUANTIZE_PIPE, 4, "JSON", make=model_index(b'{"\xe9": 1}')),
    bad("model_index.json an LFS pointer", QUANTIZE_PIPE, 4, "git lfs pull", make=model_index(LFS)),
    bad("model_index.json a web page", QUANTIZE_PIPE, 4, "web page", make=model_index(b"<!DOCTYPE html><html>")),
    bad(
        "component outside the pipeline", "quantize pipe --component ../x=int8wo", 4, "'../x'",
        make=model_index({"../x": ["diffusers", "UNet2DModel"]}),
    ),
    # The output.
    bad("output exists", f"{QUANTIZE_PIPE} -o out", 2, "out exists", "--overwrite",
        make=beside_pipe({"out/aoquant.json": {}})),
    bad("output of someone else exists", f"{QUANTIZE_PIPE} -o out", 2, "out exists, and was not written by aoquant",
        make=beside_pipe({"out/x": ""})),
    bad("output of ours and someone else", f"{QUANTIZE_PIPE} -o out --overwrite", 2, "holds 'notes'",
        make=beside_pipe({"out/notes": "mine", "out/aoquant.json": {}})),
    bad(
        "default output exists", QUANTIZE_PIPE, 2, "pipe-int8wo exists",
        make=beside_pipe({"pipe-int8wo/x": ""}),
    ),
    bad("output is a file", f"{QUANTIZE_PIPE} -o out", 2, "out exists", make=beside_pipe({"out": ""})),
    bad("output is a file to overwrite", f"{QUANTIZE_PIPE} -o out --overwrite", 2, "not a folder",
        make=beside_pipe({"out": ""})),
    bad("output under a file", f"{QUANTIZE_PIPE} -o file/out", 2, "file/out", "directory",
        make=beside_pipe({"file": ""})),
    bad("output far under a file", f"{QUANTIZE_PIPE} -o file/a/out", 2, "file/a/out", make=beside_pipe({"file": ""})),
    bad("output with too long a name", f"{QUANTIZE_PIPE} -o {'x' * 300}", 2, "too long", make=pipe),
    bad("output where no folders are", f"{QUANTIZE_PIPE} -o /proc/out", 2, "/proc/out", make=pipe),
    bad("output a dangling link", f"{QUANTIZE_PIPE} -o out", 2, "out exists", make=dangling),
    bad("output a dangling link to overwrite", f"{QUANTIZE_PIPE} -o out --overwrite", 2, "is a link", make=dangling),
    bad("output with a null byte", [*QUANTIZE_PIPE.split(), "-o", "a\0b"], 2, "null", make=pipe),
    bad("empty output", [*QUANTIZE_PIPE.split(), "--output="], 2, "no folder's name", make=pipe),
    bad("output of someone else", f"{QUANTIZE_PIPE} -o out --overwrite", 2, "was not written by aoquant",
        make=beside_pipe({"out/notes": "mine"})),
    bad("output is the source", f"{QUANTIZE_PIPE} -o pipe", 2, "pipe exists", make=pipe),
    bad("output is the source to overwrite", f"{QUANTIZE_PIPE} -o pipe --overwrite", 2, "not written by aoquant",
        make=pipe),
    bad("output is a mount point", f"{QUANTIZE_PIPE} -o /proc --overwrite", 2, "mount point", make=pipe),
    # Sizes and uploads.
    bad("no size for a gate", f"{QUANTIZE_PIPE} --max-size small", 2, "'small'", "10GB"),
    bad("gate of nothing", f"plan pipe {Q} --max-size 0GB", 2, "0GB"),
    bad("private without an upload", f"{QUANTIZE_PIPE} --private", 2, "--push-to"),
    bad("upload to no name", [*QUANTIZE_PIPE.split(), "--push-to", "a b/c"], 3, "'a b/c'", "org/name", make=pipe),
    bad("upload to nobody's", f"{QUANTIZE_PIPE} --push-to flux", 3, "'flux'", "org/flux", make=pipe),
    bad("upload without a token", f"{QUANTIZE_PIPE} --push-to acme/flux", 3, "token", "HF_TOKEN", make=pipe),
    # verify.
    bad("verify nothing", "verify gone", 3, "'gone'", "does not exist"),
    bad("verify a file", "verify x", 3, "is a file", make=having({"x": "x"})),
    bad("verify a null byte", ["verify", "a\0b"], 3, "'a"),
    bad("verify too long a name", f"verify {'x' * 5000}", 3, "no path"),
    bad("verify what aoquant did not write", "verify pipe", 4, "no aoquant.json", make=pipe),
    bad("verify a manifest cut off", "verify out", 4, "aoquant.json", "JSON", make=having({"out/aoquant.json": "{"})),
    bad("verify a manifest of a list", "verify out", 4, "array", make=having({"out/aoquant.json": []})),
    bad("verify a manifest of nothing", "verify out", 4, "schema", make=having({"out/aoquant.json": {}})),
    bad("verify a manifest of the future", "verify out", 4, "aoquant.manifest/2", "update aoquant",
        make=having({"out/aoquant.json": {"schema": "aoquant.manifest/2"}})),
    bad("verify a manifest of its schema alone", "verify out", 4, "not as aoquant writes it",
        make=having({"out/aoquant.json": {"schema": "aoquant.manifest/1"}})),
    bad("verify a manifest with a key twice", "verify out", 4, "twice",
        make=having({"out/aoquant.json": '{"schema": "aoquant.manifest/1", "schema": 1}'})),
    # join.
    bad("join nothing", "join", 2, "OUT"),
    bad("join without folders", "join out", 2, "FOLDER"),
    bad("join one folder", "join out one", 2, "1 folder", make=one_made),
    bad("join what is not there", "join out one gone", 3, "'gone'", make=one_made),
    bad("join what aoquant did not write", "join out one pipe", 4, "pipe has no aoquant.json", make=one_made),
    bad("join a folder with itself", "join out one one", 4, "both hold transformer", make=one_made),
    bad("join onto one of them", "join one one two --overwrite", 2, "holds the source", "another", make=two_made),
    bad("join into one of them", "join one/out one two", 2, "would lie in one", make=two_made),
    bad("join onto something", "join pipe one two --overwrite", 2, "was not written by aoquant", make=two_made),
    bad("join flat folders", "join out one flat", 4, "by itself", make=two_made),
    # push.
    bad("push without a name", "push one", 2, "REPO_ID"),
    bad("push to no name", ["push", "one", "a b/c"], 3, "'a b/c'", make=one_made),
    bad("push to an address", "push one https://hub/acme/x", 3, "org/name", make=one_made),
    bad("push to nobody's", "push one flux", 3, "'flux'", "org/flux", make=one_made),
    bad("push without a token", "push one acme/flux", 3, "token", "hf auth login", make=one_made),
    # inspect.
    bad("inspect nothing", "inspect gone", 3, "gone", "does not exist"),
    bad("inspect no file", "inspect /dev/null", 3, "neither a folder nor a file"),
    bad("inspect an empty name", ["inspect", ""], 4, "checkpoint"),
    bad("inspect too long a name", f"inspect {'x' * 5000}", 3, "x"),
    bad("inspect a null byte", ["inspect", "a\0b"], 3, "path"),
    bad("inspect a text file", "inspect notes.txt", 4, "notes.txt", make=having({"notes.txt": "hello"})),
    bad("inspect a folder without models", "inspect empty", 4, "empty", make=empty_folder("empty")),
    bad("inspect a web page", "inspect x.safetensors", 4, "web page", make=having({"x.safetensors": "<html>"})),
    bad("inspect an LFS pointer", "inspect x.safetensors", 4, "git lfs pull", make=having({"x.safetensors": LFS})),
    bad("inspect an empty file", "inspect x.bin", 4, "x.bin", "empty", make=having({"x.bin": b""})),
    bad("inspect a truncated zip", "inspect x.bin", 4, "x.bin", "truncated", make=truncated_bin),
    bad(
        "inspect a header beyond bounds", "inspect x.safetensors", 4, "header",
        make=having({"x.safetensors": (2**40).to_bytes(8, "little") + b"{" + b" " * 100}),
    ),
]  # fmt: skip


@bad_input.table(ROWS)
def test_wrong_input(
    row: bad_input.Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_input.check(row, tmp_path, monkeypatch, capsys)


# --- argv → request ---------------------------------------------------------------------------------------------------

PLAIN = {
    "model": "m", "output": Path("m-int8wo"), "format": "bin", "max_shard_bytes": 10_000_000_000, "device": "auto",
    "dtype": "bfloat16", "skip": (), "full": False, "revision": None, "variant": None, "offline": False,
    "overwrite": False, "max_bytes": None, "push_to": None, "private": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        ("m --transformer int8wo", {}),
        ("acme/m --transformer int8wo", {"model": "acme/m"}),
        ("acme/m@v2 --transformer int8wo", {"model": "acme/m@v2"}),
        ("FLUX.1-dev --transformer int8wo", {"model": "FLUX.1-dev", "output": Path("FLUX.1-dev-int8wo")}),
        ("sdxl@v1 --transformer int8wo", {"model": "sdxl@v1", "output": Path("sdxl-int8wo")}),
        ("m --transformer int8_weight_only", {}),
        ("m --transformer int8wo -o out/x", {"output": Path("out/x")}),
        ("m --transformer int8wo --output out/x", {"output": Path("out/x")}),
        ("m --transformer int8wo --output=~/x", {"output": Path.home() / "x"}),
        ("m --transformer int8wo --format safetensors", {"format": "safetensors"}),
        ("m --transformer int8wo --max-shard-size 512MiB", {"max_shard_bytes": 512 * 2**20}),
        ("m --transformer int8wo --max-shard-size 1.5GB", {"max_shard_bytes": 1_500_000_000}),
        ("m --transformer int8wo --device cuda:1", {"device": "cuda:1"}),
        ("m --transformer int8wo --dtype float16", {"dtype": "float16"}),
        ("m --transformer int8wo --dtype float32", {"dtype": "float32"}),
        ("m --transformer int8wo --skip proj_out --skip *.norm", {"skip": ("proj_out", "*.norm")}),
        ("m --transformer int8wo --full --offline --overwrite", {"full": True, "offline": True, "overwrite": True}),
        ("m --transformer int8wo --max-size 7GB", {"max_bytes": 7_000_000_000}),
        ("m --transformer int8wo --push-to acme/q", {"push_to": "acme/q"}),
        ("m --transformer int8wo --push-to acme/q --private", {"push_to": "acme/q", "private": True}),
        ("m --transformer int8wo --revision v1 --variant fp16", {"revision": "v1", "variant": "fp16"}),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_arguments_become_a_request(command: str, argv: str, changed: dict[str, Any], caught: list[Request]) -> None:
    request = request_of(command, argv, caught)
    assert {name: str(config) for name, config in request.configs.items()} == {"transformer": "int8wo"}
    assert {name: getattr(request, name) for name in PLAIN} == {**PLAIN, **changed}


@pytest.mark.parametrize(
    ("argv", "configs", "output"),
    [
        *((f"--{name} fp8wo", {name.replace("-", "_"): "fp8wo"}, "m-fp8wo") for name in (
            "transformer", "transformer-2", "unet", "text-encoder", "text-encoder-2", "text-encoder-3", "image-encoder",
            "controlnet", "vae",
        )),
        ("--component prior=int8dq", {"prior": "int8dq"}, "m-int8dq"),
        ("--component text-encoder-4=int8dq", {"text_encoder_4": "int8dq"}, "m-int8dq"),
        ("--component a=fp8dq --component b=fp8dq", {"a": "fp8dq", "b": "fp8dq"}, "m-fp8dq"),
        ("--vae fp8wo --unet int8wo --component a=int8wo", {"unet": "int8wo", "vae": "fp8wo", "a": "int8wo"},
         "m-int8wo-fp8wo"),
        ("--unet int4wo:group_size=64", {"unet": "int4wo:group_size=64"}, "m-int4wo-group_size64"),
        ("--component a=int4wo:group_size=64", {"a": "int4wo:group_size=64"}, "m-int4wo-group_size64"),
        ("--unet float8wo_e5m2", {"unet": "fp8wo:dtype=e5m2"}, "m-fp8wo-dtypee5m2"),
    ],
)  # fmt: skip
def test_components_of_a_request(argv: str, configs: dict[str, str], output: str, caught: list[Request]) -> None:
    request = request_of("quantize", f"m {argv}", caught)
    assert {name: str(config) for name, config in request.configs.items()} == configs
    assert request.output == Path(output)


class SeenError(AoquantError):
    """Ends a command where its request would be carried out."""


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    requests: list[Request] = []

    def catch(request: Request, **_: object) -> None:
        requests.append(request)
        raise SeenError("seen")

    monkeypatch.setattr(api, "run", catch)
    monkeypatch.setattr(api, "prepare", catch)
    return requests


def request_of(command: str, argv: str, caught: list[Request]) -> Request:
    with signals_kept():
        assert main([command, *argv.split()]) == SeenError.exit_code
    (request,) = caught
    return request


# --- what light commands print ----------------------------------------------------------------------------------------


def test_configs_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["configs", "--json"], capsys)
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "aoquant.configs/1")
    assert [row["name"] for row in document["configs"]] == list(CONFIGS)


def test_configs_as_a_table_names_every_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["configs"], capsys)
    assert (code, err) == (0, "")
    assert [name for name in CONFIGS if name not in out] == []


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["models", "--json"], capsys)
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "aoquant.models/1")
    assert [row["name"] for row in document["models"]] == list(MODELS)


def test_models_as_a_table_names_every_repository_whole(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["models"], capsys)
    assert (code, err) == (0, "")
    words = set(out.replace(",", " ").split())
    for row in MODELS.values():
        assert {*row.spellings, row.repo_id.partition("/")[0], *row.components} <= words
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("layers", [[], ["--layers"]], ids=["", "layers"])
def test_inspect_as_json(layers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = safe_component(tmp_path / "m", quantization_config=INT8WO)
    code, out, err = run(["inspect", str(folder), "--json", *layers], capsys)
    document = json.loads(out)
    assert (code, err, document["schema"]) == (0, "", "aoquant.inspect/1")
    assert ("layers" in document["components"][0]) is bool(layers)


def test_inspect_of_a_damaged_checkpoint_prints_the_report_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = component(tmp_path / "m", quantization_config=INT8WO)
    (folder / "config.json").write_text("{")
    code, out, err = run(["inspect", str(folder), "--json"], capsys)
    assert (code, json.loads(out)["is_sound"]) == (4, False)
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_inspect_shows_text_from_files_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No markup, no colour and no control characters come from a file's own words."""
    folder = component(tmp_path / "m", {"_class_name": "[red]Flux[/red]\x1b[31m", "_diffusers_version": "0.42.1"})
    file = TorchFile()
    file.state = {"[bold]a[/].weight": file.int8(4, 8), "b\x1b[2J\r\n\x9b": file.int8(4, 8), ":smile:": file.int8(4, 8)}
    file.write(folder / "diffusion_pytorch_model.bin")
    code, out, _ = run(["inspect", str(folder), "--layers"], capsys)
    assert code == 0
    assert all(line.isprintable() for line in out.splitlines())
    for text in ("[red]Flux[/red]", "[bold]a[/].weight", "b\\x1b[2J\\r\\n\\x9b", ":smile:"):
        assert text in out


def test_every_tensor_is_listed_whole_in_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = safe_component(tmp_path / "m")
    tensors = {f"{'x' * 150}.图.{number}.weight": ("BF16", (8, 8)) for number in range(5_000)}
    forge.write_safetensors(folder / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    start = time.process_time()
    code, out, _ = run(["inspect", str(folder), "--layers"], capsys)
    assert (code, time.process_time() - start < 8) == (0, True)  # it took 12 s once, for 20,000
    joined = out.replace("\n", "")
    assert all(name in joined for name in tensors)
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["quantize", "--help"], ["inspect", "-h"]], ids=" ".join)
def test_help_goes_to_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(argv, capsys)
    assert (code, err) == (0, "")
    assert out.lstrip().startswith("Usage: aoquant")


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], capsys) == (0, f"{aoquant.__version__}\n", "")


# --- in processes of their own ----------------------------------------------------------------------------------------


@pytest.fixture
def nothing_heavy(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing heavy can be imported."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in HEAVY:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(blocked), str(ROOT)])}


@pytest.mark.parametrize(
    "argv",
    [
        "--help", "--version", "quantize --help", "configs", "configs --json", "models", "models --json",
        "inspect m", "inspect m --json", "inspect m --layers", "verify made", "verify made --json",
        "join out made other", "quantize m --transformer int9wo", "quantize ./gone --transformer int8wo",
        "quantize gone --transformer int8wo",
    ],
)  # fmt: skip
def test_light_commands_need_nothing_heavy_and_no_time(
    argv: str, nothing_heavy: dict[str, str], tmp_path: Path
) -> None:
    safe_component(tmp_path / "m", quantization_config=INT8WO)
    checkpoint(tmp_path / "made", "transformer")
    checkpoint(tmp_path / "other", "vae")
    command = [sys.executable, "-m", "aoquant", *argv.split(), *(["--overwrite"] if "join" in argv else [])]
    best_s = float("inf")
    for _ in range(15):  # a shared machine has slow moments; a heavy import would never get under the bound
        wall_s, cpu_s = time.perf_counter(), children_s()
        done = subprocess.run(command, cwd=tmp_path, env=nothing_heavy, capture_output=True, text=True, timeout=60)
        wall_s, cpu_s = time.perf_counter() - wall_s, children_s() - cpu_s
        best_s = min(best_s, wall_s, max(cpu_s, 0.01))  # on busy cores the wall clock measures the neighbours
        assert "was imported" not in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert done.returncode == (2 if "int9wo" in argv else 3 if "gone" in argv else 0), done.stderr
        assert bool(done.stdout) is (done.returncode == 0)
        if best_s < 0.5:
            break
    assert best_s < 0.5


def children_s() -> float:
    """Processor seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_heavy_command_says_so_when_torch_is_missing(nothing_heavy: dict[str, str], tmp_path: Path) -> None:
    """The blocked imports do block: a command that goes on to torch fails here."""
    safe_component(tmp_path / "m")
    command = [sys.executable, "-m", "aoquant", "load", "m"]
    done = subprocess.run(command, cwd=tmp_path, env=nothing_heavy, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "torch was imported" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "configs | true", "configs --json | true", "models | true", "inspect m --layers | head -n 1",
        "inspect m --layers --json | head -n 1",
    ],
)  # fmt: skip
def test_a_reader_that_stops_reading_is_no_error(line: str, tmp_path: Path) -> None:
    safe_component(tmp_path / "m")
    tensors = {f"blocks.{number}.weight": ("BF16", (8, 8)) for number in range(20_000)}
    forge.write_safetensors(tmp_path / "m" / "diffusion_pytorch_model.safetensors", tensors, {"format": "pt"})
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m aoquant {line}; echo ${{PIPESTATUS[0]}}"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "line", ["configs", "configs --json", "models", "models --json", "inspect m", "inspect m --layers --json", "--help"]
)
def test_a_stdout_that_is_full_is_an_error_of_one_line(line: str, tmp_path: Path) -> None:
    safe_component(tmp_path / "m")
    done = in_shell(f"{line} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert [text.partition(":")[0] for text in done.stderr.splitlines()] == ["error", "hint"], done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    done = in_shell(f"configs {closed}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def in_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`aoquant LINE` in a shell of its own."""
    return subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m aoquant {line}"], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_an_interrupt_before_anything_was_imported_is_two_lines(tmp_path: Path) -> None:
    """Ctrl-C the moment that aoquant.cli begins to be imported, before it could take care of signals."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "aoquant", "configs"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted\nhint: nothing was left behind\n"


@pytest.mark.parametrize("argv", [["configs"], ["inspect", "m", "--layers"], ["inspect", "m", "--json"]], ids=" ".join)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_of_stdout_is_no_error(argv: list[str], encoding: str, tmp_path: Path) -> None:
    component(tmp_path / "m", {"_class_name": "Flux—图", "_diffusers_version": "0.42.1"})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "aoquant", *argv]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in argv:
        assert json.loads(done.stdout.decode(encoding))["schema"] == "aoquant.inspect/1"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let such a name be")
def test_a_path_that_is_not_utf8_is_no_error(tmp_path: Path) -> None:
    component(tmp_path / os.fsdecode(b"m\xff"))
    for option in ([], ["--json"]):
        command = [sys.executable, "-m", "aoquant", "inspect", os.fsdecode(b"m\xff"), *option]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")
