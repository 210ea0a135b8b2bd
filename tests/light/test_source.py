"""MODEL → folders and files: local ones in this process, those of a Hub on loopback in child processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoquant.errors import AoquantError, CheckpointError, SourceError, UsageError
from aoquant.source import Source, open_component, open_source
from tests.light import processes
from tests.light.hub_server import HubServer

REPO = "acme/tiny-flux"
TOKEN = "hf_SecretSecretSecretSecret"

# Reads keyword arguments of open_source, fetches what it describes, prints the result or the error as JSON. `_free`:
# bytes that the disk has. `_open`: the components to fetch. `_whole`: the others' files too. `_plan`: fetch nothing.
DRIVER = """
import json, shutil, sys, time
from pathlib import Path
from aoquant import hub
from aoquant.checkpoint.weights import read_weights
from aoquant.errors import AoquantError
from aoquant.output import check_disk
from aoquant.source import open_component, open_source
arguments = json.loads(sys.argv[1])
free, then, whole, plan, model = (arguments.pop(key, None) for key in ("_free", "_open", "_whole", "_plan", "model"))
if free is not None:
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: usage._replace(free=free)
progress = []
try:
    source = open_source(model, **arguments)
    names = then if then is not None else arguments["components"]
    opened = [open_component(source, name) for name in names]
    contents = [read_weights(part.weights, opener=source.opener) for part in opened]
    needed = [file for part in opened for file in part.weights.files]
    if whole:
        needed += [path for path, _ in source.other_files(quantized=names).values()]
    download_bytes = source.bytes_to_download(needed)
    if source.snapshot is not None:
        check_disk(Path("out"), 0, cache=hub.cache_folder(), download_bytes=download_bytes)
    if not plan:
        with source.arriving(needed, on_progress=lambda *event: progress.append(event)) as wait:
            for path in needed:
                wait(path)
except AoquantError as error:
    fields = {"error": type(error).__name__, "code": error.exit_code}
    print(json.dumps({**fields, "message": error.message, "hint": error.hint}))
    sys.exit()
print(json.dumps({
    "kind": source.kind, "model": source.model, "repo_id": source.repo_id, "revision": source.revision,
    "folder": str(source.folder), "components": source.components, "card": source.card, "progress": progress,
    "download_bytes": download_bytes, "tensors": [sorted(found.entries) for found in contents],
    "opened": {part.name: {"class": part.class_name, "library": part.library,
                           "files": [str(file) for file in part.weights.files]} for part in opened},
}))
"""


def safetensors_bytes(**tensors: list[float]) -> bytes:
    """A valid .safetensors file of float32 vectors."""
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    """Write `files` (path → bytes, or a value to be JSON) below `folder`."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def pipeline_files() -> dict[str, Any]:
    """A pipeline: a sharded transformer, weights in several formats and variants, parts without weights."""
    shards = {f"diffusion_pytorch_model-0000{i}-of-00002.safetensors": f"block.{i}.weight" for i in (1, 2)}
    index = {"metadata": {"total_size": 32}, "weight_map": {tensor: name for name, tensor in shards.items()}}
    return {
        "model_index.json": {
            "_class_name": "FluxPipeline",
            "_diffusers_version": "0.42.1",
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "transformer": ["diffusers", "FluxTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "image_encoder": [None, None],
            "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
            "requires_safety_checker": True,
        },
        "README.md": b"# tiny",
        "LICENSE.md": b"free",
        ".gitattributes": b"*.bin filter=lfs\n",
        "tiny-flux.safetensors": safetensors_bytes(all=[0.0] * 1000),
        "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler"},
        "tokenizer/vocab.json": {"a": 0},
        "tokenizer/merges.txt": b"#version: 0.2\n",
        "transformer/config.json": {"_class_name": "FluxTransformer2DModel", "num_layers": 1},
        "transformer/diffusion_pytorch_model.safetensors.index.json": index,
        **{f"transformer/{name}": safetensors_bytes(**{key: [1.0] * 4}) for name, key in shards.items()},
        "transformer/diffusion_pytorch_model.bin": b"\x80\x02 not chosen",
        "transformer/diffusion_pytorch_model.fp16.safetensors": safetensors_bytes(half=[2.0]),
        "text_encoder/config.json": {"architectures": ["CLIPTextModel"]},
        "text_encoder/model.safetensors": safetensors_bytes(weight=[3.0]),
        "text_encoder/pytorch_model.bin": b"\x80\x02 not chosen",
        "text_encoder/flax_model.msgpack": b"not chosen",
        "vae/config.json": {"_class_name": "AutoencoderKL"},
        "vae/diffusion_pytorch_model.safetensors": safetensors_bytes(weight=[4.0]),
        "vae/diffusion_pytorch_model.fp16.safetensors": safetensors_bytes(weight=[4.5]),
        "safety_checker/config.json": {"architectures": ["StableDiffusionSafetyChecker"]},
        "safety_checker/model.safetensors": safetensors_bytes(weight=[5.0]),
    }


TRANSFORMER_FILES = {
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
}

OTHER_FILES = {
    "model_index.json",
    "LICENSE.md",
    "scheduler/scheduler_config.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
    "safety_checker/config.json",
    "safety_checker/model.safetensors",
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return write_files(tmp_path / "tiny-flux", pipeline_files())


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def opened_names(source: Source, name: str) -> list[str]:
    return [path.name for path in open_component(source, name).weights.files]


# Local folders.


def test_a_local_pipeline_lists_the_components_that_hold_weights(pipeline: Path) -> None:
    source = open_source(str(pipeline), components=["transformer"])
    assert source.kind == "pipeline"
    assert source.components == ("text_encoder", "transformer", "vae", "safety_checker")
    assert (source.model, source.repo_id, source.revision) == ("tiny-flux", None, None)
    assert source.folder == pipeline


def test_a_component_has_its_class_from_the_pipeline_and_its_weights(pipeline: Path) -> None:
    source = open_source(str(pipeline), components=["transformer", "text_encoder"])
    transformer = open_component(source, "transformer")
    assert (transformer.library, transformer.class_name) == ("diffusers", "FluxTransformer2DModel")
    assert transformer.config["num_layers"] == 1
    assert [path.name for path in transformer.weights.files] == [
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model-00002-of-00002.safetensors",
    ]
    encoder = open_component(source, "text_encoder")
    assert encoder.name == "text_encoder"
    assert (encoder.library, encoder.class_name) == ("transformers", "CLIPTextModel")


def test_a_variant_chooses_the_weights(pipeline: Path) -> None:
    source = open_source(str(pipeline), components=["transformer"], variant="fp16")
    assert opened_names(source, "transformer") == ["diffusion_pytorch_model.fp16.safetensors"]


def test_the_other_files_of_a_pipeline_are_all_but_the_quantized_and_the_duplicates(pipeline: Path) -> None:
    source = open_source(str(pipeline), components=["transformer"])
    files = source.other_files(quantized=["transformer"])
    assert {str(path) for path in files} == OTHER_FILES
    assert all(found == (pipeline / path, (pipeline / path).stat().st_size) for path, found in files.items())


def test_the_other_files_take_the_variant_where_there_is_one(pipeline: Path) -> None:
    source = open_source(str(pipeline), components=["transformer"], variant="fp16")
    weights = {str(path) for path in source.other_files(quantized=["transformer"]) if path.suffix != ".json"}
    assert "vae/diffusion_pytorch_model.fp16.safetensors" in weights
    assert "vae/diffusion_pytorch_model.safetensors" not in weights
    assert "text_encoder/model.safetensors" in weights


@pytest.mark.parametrize("missing", ["tokenizer", "vae"])
def test_a_part_that_is_missing_is_no_whole_pipeline(pipeline: Path, missing: str) -> None:
    shutil.rmtree(pipeline / missing)
    source = open_source(str(pipeline), components=["transformer"])
    with pytest.raises(CheckpointError, match=f"has no {missing}"):
        source.other_files(quantized=["transformer"])


def test_a_single_component_has_no_other_files(pipeline: Path) -> None:
    source = open_source(str(pipeline / "text_encoder"), components=["text_encoder"])
    assert source.other_files(quantized=["text_encoder"]) == {}


@pytest.mark.parametrize(
    ("folder", "library", "class_name"),
    [
        ("transformer", "diffusers", "FluxTransformer2DModel"),
        ("text_encoder", "transformers", "CLIPTextModel"),
    ],
)
@pytest.mark.parametrize("name", ["prior", "own"])
def test_a_component_folder_is_a_source_under_any_name(
    pipeline: Path, name: str, folder: str, library: str, class_name: str
) -> None:
    name = name.replace("own", folder)
    source = open_source(str(pipeline / folder), components=[name])
    component = open_component(source, name)
    assert (source.kind, source.model, source.components) == ("component", folder, (name,))
    assert (component.name, component.library, component.class_name) == ("", library, class_name)
    assert component.folder == pipeline / folder


@pytest.mark.parametrize(
    ("folder", "name"),
    [("transformer", "text_encoder_2"), ("transformer", "image_encoder"), ("text_encoder", "unet"),
     ("text_encoder", "transformer_2"), ("text_encoder", "vae")],
)  # fmt: skip
def test_a_component_folder_is_not_called_what_it_cannot_be(pipeline: Path, folder: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"not a {name}"):
        open_component(open_source(str(pipeline / folder), components=[name]), name)


def test_a_relative_folder_is_called_by_its_own_name(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline)
    assert open_source(".", components=[]).model == "tiny-flux"
    assert open_source("../tiny-flux/", components=[]).model == "tiny-flux"


def test_a_folder_named_like_a_repository_goes_before_it(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pipeline.parents[1])
    assert open_source(f"{pipeline.parent.name}/tiny-flux", components=[]).repo_id is None


def test_a_local_folder_needs_no_huggingface_hub(pipeline: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None\n" + DRIVER
    result = run(code, model=str(pipeline), components=["transformer"])
    assert result["kind"] == "pipeline"


def _drop(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def _put(path: str, content: object) -> Callable[[Path], object]:
    return lambda folder: write_files(folder, {path: content})


def _config(path: str, **changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / path, **changes)


def _nothing(folder: Path) -> None:
    pass


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("damage", "asked", "error", "words"),
    [
        pytest.param(_nothing, ["transformr"], UsageError, "transformr", id="unknown"),
        pytest.param(_nothing, ["image_encoder"], UsageError, "image_encoder", id="absent"),
        pytest.param(_nothing, ["tokenizer"], UsageError, "tokenizer", id="tokenizer"),
        pytest.param(_nothing, ["scheduler"], UsageError, "scheduler", id="scheduler"),
        pytest.param(_nothing, ["safety_checker"], CheckpointError, "stable_diffusion", id="own module"),
        pytest.param(
            _config("transformer/config.json", quantization_config=BITSANDBYTES),
            ["transformer"], CheckpointError, "already quantized", id="bitsandbytes",
        ),
        pytest.param(
            _config("text_encoder/config.json", quantization_config={"quant_method": "fp8"}),
            ["text_encoder"], CheckpointError, "method fp8", id="fp8",
        ),
        pytest.param(
            _config("transformer/config.json", quantization_config={"quant_type": "int8wo"}),
            ["transformer"], CheckpointError, "method unknown", id="old torchao",
        ),
        pytest.param(
            _config("text_encoder/config.json", quantization_config="int8"),
            ["text_encoder"], CheckpointError, "already quantized", id="odd block",
        ),
        pytest.param(
            _config("transformer/config.json", _class_name="SD3Transformer2DModel"),
            ["transformer"], CheckpointError, "SD3Transformer2DModel", id="contradiction",
        ),
        pytest.param(
            _drop("transformer/config.json"), ["transformer"], CheckpointError, "transformer/config.json",
            id="no config",
        ),
        pytest.param(
            _put("transformer/config.json", b"{"), ["transformer"], CheckpointError, "JSON", id="broken",
        ), pytest.param(_put("model_index.json", b"[]"), ["transformer"], CheckpointError, "model_index",
        id="no object"), pytest.param(
            _put("model_index.json", {"../vae": ["diffusers", "AutoencoderKL"]}),
            ["../vae"], CheckpointError, "../vae", id="climbing name",
        ),
        pytest.param(
            _drop("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"),
            ["transformer"], CheckpointError, "00002-of-00002", id="missing shard",
        ),
    ],
)  # fmt: skip
def test_a_bad_pipeline_is_refused(
    pipeline: Path, damage: Callable[[Path], object], asked: list[str], error: type[AoquantError], words: str
) -> None:
    damage(pipeline)
    with pytest.raises(error, match=words) as caught:
        open_component(open_source(str(pipeline), components=asked), asked[0])
    assert_fit_to_print(caught.value.message, caught.value.hint)


def test_the_nearest_component_is_suggested(pipeline: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_source(str(pipeline), components=["transformer_2"])
    assert caught.value.hint.startswith("did you mean transformer? it has text_encoder, transformer, vae")


def test_a_component_whose_folder_is_missing_is_damage_and_not_a_wrong_name(pipeline: Path) -> None:
    for path in (pipeline / "vae").iterdir():
        path.unlink()
    (pipeline / "vae").rmdir()
    source = open_source(str(pipeline), components=["vae"])
    with pytest.raises(CheckpointError, match=r"no vae/config\.json"):
        open_component(source, "vae")


def test_two_names_for_a_single_component_are_refused(pipeline: Path) -> None:
    with pytest.raises(UsageError, match="single component"):
        open_source(str(pipeline / "vae"), components=["vae", "unet"])


def test_a_component_without_a_class_is_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "nameless", {"config.json": {"hidden_size": 4}})
    source = open_source(str(folder), components=["transformer"])
    with pytest.raises(CheckpointError, match="names no class"):
        open_component(source, "transformer")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model_index\.json nor config\.json"):
        open_source(str(tmp_path), components=["transformer"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("~nobody-by-this-name/x", "no such folder"),
        ("a/b/c", "no such folder"),
        ("models/", "no such folder"),
        ("C:\\models\\flux", "no such folder"),
        ("", "no such folder"),
        ("x" * 5000 + "/y/z", "no such folder"),
        ("a\n\x1b[31mb/c/d", "no such folder"),
        ("https://huggingface.co/acme/tiny-flux", "an address"),
        ("my-flux", "stands for one repository"),
        ("x" * 5000, "stands for one repository"),
        ("a\n\x1b[31mb", "stands for one repository"),
        ("acme/tiny-flux@", "no revision"),
    ],
)
def test_what_cannot_be_a_model_never_reaches_the_hub(model: str, words: str) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        open_source(model, components=["transformer"])
    assert_fit_to_print(caught.value.message, caught.value.hint)


def test_a_bare_name_is_answered_with_the_form_to_write() -> None:
    with pytest.raises(SourceError) as caught:
        open_source("my-flux", components=["transformer"])
    assert "org/my-flux" in caught.value.hint


def test_a_weight_file_is_not_a_model(pipeline: Path) -> None:
    with pytest.raises(SourceError, match="is a file"):
        open_source(str(pipeline / "tiny-flux.safetensors"), components=["transformer"])


def test_contradicting_revisions_are_refused() -> None:
    with pytest.raises(UsageError, match="two revisions"):
        open_source("acme/tiny-flux@v1", components=["transformer"], revision="v2")


def test_a_revision_of_a_local_folder_is_refused(pipeline: Path) -> None:
    with pytest.raises(UsageError, match="no revision 'v1'"):
        open_source(str(pipeline), components=["transformer"], revision="v1")


# The Hub.


def run(code: str = DRIVER, *, env: dict[str, str] | None = None, **arguments: object) -> dict[str, Any]:
    """Run open_source in a process of its own, since huggingface_hub reads its environment on import."""
    asked = json.dumps({"model": REPO, "components": ["transformer"], **arguments})
    done = processes.run(["-c", code, asked], env=env)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    result["stderr"] = done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return result


def refusal(**arguments: Any) -> dict[str, Any]:
    """Run open_source, which must refuse, and give its error."""
    result = run(**arguments)
    assert "error" in result, result
    assert_fit_to_print(result["message"], result["hint"])
    return result


def assert_fit_to_print(message: str, hint: str) -> None:
    assert message and message.isprintable() and len(message) < 400
    assert hint and hint.isprintable()


def downloads(result: dict[str, Any]) -> set[str]:
    """The files of the commit that lie in the cache, whole."""
    folder = Path(result["folder"])
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_the_files_of_the_components_asked_for_are_downloaded(hub: HubServer, pipeline: Path) -> None:
    commit = hub.publish(REPO, pipeline)
    result = run()
    assert hub.downloaded(REPO) == {"model_index.json", "README.md", *TRANSFORMER_FILES}
    assert (result["model"], result["repo_id"], result["revision"]) == (REPO, REPO, commit)
    assert [Path(path).read_bytes() for path in result["opened"]["transformer"]["files"]] == [
        (pipeline / "transformer" / f"diffusion_pytorch_model-0000{i}-of-00002.safetensors").read_bytes()
        for i in (1, 2)
    ]


def test_a_plan_reads_headers_by_ranges_and_no_weights(hub: HubServer, tmp_path: Path) -> None:
    values = [0.0] * 1_000_000
    weights = safetensors_bytes(a=values, b=values)
    write_files(tmp_path, {"config.json": b'{"_class_name": "FluxTransformer2DModel"}',
                           "diffusion_pytorch_model.safetensors": weights})  # fmt: skip
    hub.publish(REPO, tmp_path)
    planned = run(_plan=True)
    assert (planned["tensors"], planned["download_bytes"]) == ([["a", "b"]], len(weights))
    assert sum(hub.sent_bytes.values()) < len(weights) / 100
    assert downloads(planned) == {"config.json"}


def test_a_mirror_need_not_list_sizes(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    sized = run(_plan=True)
    hub.repos[REPO].unsized = True
    assert run(_plan=True)["download_bytes"] == sized["download_bytes"] > 0


def test_an_endpoint_without_ranges_sends_whole_files_into_the_cache(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    described = run(_plan=True)["tensors"]
    hub.repos[REPO].no_ranges = True
    hub.forget()
    assert run(_plan=True)["tensors"] == described
    hub.forget()
    run()
    assert not [path for path in hub.downloaded(REPO) if path.endswith(".safetensors")]


def test_nothing_is_downloaded_twice(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    run()
    hub.forget()
    run()
    assert hub.downloaded(REPO) == set()


def test_a_variant_downloads_its_own_weights(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    run(variant="fp16")
    assert hub.downloaded(REPO) == {
        "model_index.json",
        "README.md",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.fp16.safetensors",
    }


def test_bin_weights_are_downloaded_where_there_are_no_others(hub: HubServer, pipeline: Path) -> None:
    (pipeline / "text_encoder" / "model.safetensors").unlink()
    hub.publish(REPO, pipeline)
    run(components=["text_encoder"])
    assert hub.downloaded(REPO) == {
        "model_index.json",
        "README.md",
        "text_encoder/config.json",
        "text_encoder/pytorch_model.bin",
    }


def test_a_whole_pipeline_comes_with_one_format_of_each_weight(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    folder = Path(run(_whole=True)["folder"])
    assert hub.downloaded(REPO) == OTHER_FILES | TRANSFORMER_FILES | {"README.md"}
    fetched = open_source(str(folder), components=["transformer"]).other_files(quantized=["transformer"])
    assert {str(path) for path in fetched} == OTHER_FILES


def test_a_whole_pipeline_takes_a_variant_where_there_is_one(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    run(_whole=True, variant="fp16")
    weights = {path for path in hub.downloaded(REPO) if path.endswith(("safetensors", "bin"))}
    assert weights == {
        "transformer/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.safetensors",
        "safety_checker/model.safetensors",
    }


LICENSED = """---
license: other
license_name: tiny-non-commercial
license_link: LICENSE.md
pipeline_tag: text-to-image
base_model: acme/tiny
tags: [flux]
---
# tiny
"""
CARRIED = {"license": "other", "license_name": "tiny-non-commercial", "pipeline_tag": "text-to-image"}


def test_the_license_of_a_local_card_is_carried(pipeline: Path) -> None:
    (pipeline / "README.md").write_text(LICENSED)
    assert open_source(str(pipeline), components=["vae"]).card == {**CARRIED, "license_link": "LICENSE.md"}


def test_the_license_of_a_card_on_the_hub_is_carried_and_its_link_holds_anywhere(
    hub: HubServer, pipeline: Path
) -> None:
    (pipeline / "README.md").write_text(LICENSED)
    commit = hub.publish(REPO, pipeline)
    linked = {**CARRIED, "license_link": f"https://huggingface.co/{REPO}/blob/{commit}/LICENSE.md"}
    assert run()["card"] == linked
    hub.forget()
    assert run(offline=True)["card"] == linked
    assert hub.requests == []


@pytest.mark.parametrize(
    "card",
    [b"", b"# no front matter", b"---\n: : [\n---\n", b"---\n- a list\n---\n", b"---\nlicense: mit", b"\xff\xfe---",
     b"---\nlicense: [mit]\npipeline_tag: 7\nlicense_name: \"a\\nb\"\n---\n",
     b"---\n!!python/object/apply:os.abort []\n---\n",
     b"---\n" + b"#" * 2_000_000 + b"\nlicense: mit\n---\n"],
)  # fmt: skip
def test_a_card_that_says_nothing_usable_is_no_error(card: bytes, pipeline: Path) -> None:
    (pipeline / "README.md").write_bytes(card)
    assert open_source(str(pipeline), components=["vae"]).card == {}


def test_a_repository_may_be_a_single_component(hub: HubServer, pipeline: Path) -> None:
    write_files(pipeline / "transformer", {"README.md": b"# one"})
    hub.publish(REPO, pipeline / "transformer")
    result = run()
    assert (result["kind"], result["components"]) == ("component", ["transformer"])
    assert result["opened"][""]["class"] == "FluxTransformer2DModel"
    own = {path.removeprefix("transformer/") for path in TRANSFORMER_FILES}
    assert hub.downloaded(REPO) == own | {"README.md"}


@pytest.mark.parametrize("as_option", [True, False])
def test_a_revision_is_an_exact_commit_from_then_on(hub: HubServer, pipeline: Path, as_option: bool) -> None:
    tagged = hub.publish(REPO, pipeline, revision="refs/pr/1")
    edit_json(pipeline / "transformer" / "config.json", num_layers=2)
    latest = hub.publish(REPO, pipeline)
    first = run(revision="refs/pr/1") if as_option else run(model=f"{REPO}@refs/pr/1")
    assert first["revision"] == tagged
    assert run()["revision"] == latest
    assert run(model=f"{REPO}@{tagged}")["revision"] == tagged
    resolved = {path.split("/")[4] for _, path in hub.requests if "/resolve/" in path}
    assert resolved <= {tagged, latest, "main", "refs%2Fpr%2F1"}


def test_every_large_file_is_asked_for_by_commit(hub: HubServer, pipeline: Path) -> None:
    commit = hub.publish(REPO, pipeline)
    run()
    large = [path for _, path in hub.requests if path.endswith(".safetensors")]
    assert large and all(f"/resolve/{commit}/" in path for path in large)


def test_progress_counts_to_the_total(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    progress = run()["progress"]
    stages, done, totals = zip(*progress, strict=True)
    shards = [path for path in TRANSFORMER_FILES if path.endswith("safetensors")]
    assert set(stages) == {f"downloading {REPO}"}
    assert set(totals) == {sum((pipeline / path).stat().st_size for path in shards)}
    assert list(done) == sorted(done) and done[-1] == totals[-1]


def test_no_bar_is_drawn(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    assert "it/s" not in (stderr := run()["stderr"]) and "%|" not in stderr


def test_offline_takes_what_an_earlier_run_left(hub: HubServer, pipeline: Path) -> None:
    commit = hub.publish(REPO, pipeline)
    online = run()
    hub.forget()
    offline = run(offline=True)
    same = {"progress": None, "download_bytes": 0}
    assert {**offline, **same} == {**online, **same} and online["download_bytes"] and not offline["download_bytes"]
    assert run(env={"HF_HUB_OFFLINE": "1"})["revision"] == commit
    assert hub.requests == []


def test_offline_a_whole_pipeline_comes_from_the_cache_too(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    run(_whole=True)
    assert run(_whole=True, offline=True, _open=["vae"])["opened"]["vae"]["class"] == "AutoencoderKL"


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        pytest.param(None, {}, "is not in the Hub's cache", id="nothing"),
        pytest.param({"components": ["vae"]}, {}, "lacks transformer/config.json", id="other component"),
        pytest.param({}, {"revision": "v9"}, "'v9' is not in the Hub's cache", id="other revision"),
        pytest.param({}, {"_whole": True}, "lacks scheduler/", id="not whole"),
    ],
)
def test_offline_says_what_is_not_cached(
    hub: HubServer, pipeline: Path, first: dict[str, Any] | None, then: dict[str, Any], words: str
) -> None:
    hub.publish(REPO, pipeline)
    if first is not None:
        run(**first)
    error = refusal(offline=True, **then)
    assert error["code"] == 3
    assert words in error["message"]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("*00002-of-*", "00002-of-00002"), ("*diffusion*", "the weights of transformer")],
)
def test_offline_a_missing_weight_file_is_named(hub: HubServer, pipeline: Path, pattern: str, words: str) -> None:
    hub.publish(REPO, pipeline)
    folder = Path(run()["folder"]) / "transformer"
    for path in folder.glob(pattern):
        path.unlink()
    error = refusal(offline=True)
    assert (error["code"], words in error["message"]) == (3, True)


def _gate(hub: HubServer) -> None:
    hub.repos[REPO].gated = True


def _hide(hub: HubServer) -> None:
    hub.repos[REPO].private = True


def _disable(hub: HubServer) -> None:
    hub.repos[REPO].disabled = True


def _reject(hub: HubServer) -> None:
    hub.rejected_tokens.add(TOKEN)


def _fail_api(status: int) -> Callable[[HubServer], None]:
    return lambda hub: setattr(hub.repos[REPO], "api_status", status)


def _fail_files(status: int) -> Callable[[HubServer], None]:
    return lambda hub: setattr(hub.repos[REPO], "file_status", status)


@pytest.mark.parametrize(
    ("trouble", "token", "arguments", "message", "hint"),
    [
        (_nothing, None, {"model": "acme/other"}, "no repository acme/other", "HF_TOKEN"),
        (_nothing, TOKEN, {"model": "acme/other"}, "or it is private", "account"),
        (_hide, None, {}, "or it is private", "HF_TOKEN"),
        (_gate, None, {}, "is gated, and there is no Hub token", "hf auth login"),
        (_gate, TOKEN, {}, "gated, and the account", "accept its licence"),
        (_reject, TOKEN, {}, "does not accept your Hub token", "HF_TOKEN"),
        (_fail_api(403), TOKEN, {}, "does not permit", "settings/tokens"),
        (_disable, None, {}, "has been disabled", ""),
        (_nothing, None, {"revision": "v9"}, "no revision 'v9'", "tree/main"),
        (_nothing, None, {"model": f"{REPO}@v9"}, "no revision 'v9'", "tree/main"),
        (_fail_api(429), None, {}, "HTTP 429", "HF_TOKEN"),
        (_fail_api(503), None, {}, "HTTP 503", "later"),
        (_fail_files(500), None, {}, "HTTP 500", "later"),
        (_fail_api(418), None, {}, "HTTP 418", ""),
        (_nothing, None, {"model": "acme/tiny--flux"}, "cannot be a repository", "letters"),
        (_nothing, None, {"model": "ac me/tiny flux"}, "cannot be a repository", "letters"),
    ],
)
def test_each_trouble_with_the_hub_has_its_own_message(
    hub: HubServer,
    pipeline: Path,
    trouble: Callable[[Any], None],
    token: str | None,
    arguments: dict[str, Any],
    message: str,
    hint: str,
) -> None:
    hub.publish(REPO, pipeline)
    trouble(hub)
    error = refusal(env={"HF_TOKEN": token} if token else {}, **arguments)
    assert (error["error"], error["code"]) == ("SourceError", 3)
    assert message in error["message"]
    assert hint in error["hint"]


def test_the_page_of_a_gated_repository_is_on_the_endpoint_in_use(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    _gate(hub)
    assert f"{hub.url}/{REPO}" in refusal()["hint"]


def test_a_gated_repository_opens_for_an_accepted_token(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    _gate(hub)
    hub.repos[REPO].accepted_tokens.add(TOKEN)
    assert run(env={"HF_TOKEN": TOKEN})["repo_id"] == REPO


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://someone:secret-word@127.0.0.1:9"])
def test_an_endpoint_that_cannot_be_reached_is_named_without_its_password(endpoint: str) -> None:
    error = refusal(env={"HF_ENDPOINT": endpoint})
    assert (error["code"], error["message"]) == (3, "http://127.0.0.1:9 cannot be reached")
    assert "--offline" in error["hint"]
    assert "secret-word" not in error["message"] + error["hint"]


def test_an_endpoint_that_is_no_hub_is_named(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    hub.repos[REPO].not_a_hub = True
    error = refusal()
    assert (error["code"], "does not answer as a Hub" in error["message"]) == (3, True)


@pytest.mark.parametrize(
    ("damage", "asked", "code", "words"),
    [
        pytest.param(_nothing, ["transformr"], 2, "transformr", id="unknown component"),
        pytest.param(_nothing, ["safety_checker"], 4, "stable_diffusion", id="own module"),
        pytest.param(_config("transformer/config.json", quantization_config=BITSANDBYTES),
                     ["transformer"], 4, "bitsandbytes", id="quantized"),
        pytest.param(_drop("transformer/config.json"), ["transformer"], 4, "lacks transformer/config.json",
                     id="no config"),
        pytest.param(_drop("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"),
                     ["transformer"], 4, "00002-of-00002", id="no shard"),
        pytest.param(_drop("vae/diffusion_pytorch_model.safetensors"), ["vae"], 4, "vae of acme/tiny-flux",
                     id="only a variant"),
    ],
)  # fmt: skip
def test_an_unfit_repository_is_refused_before_its_weights_are_downloaded(
    hub: HubServer, pipeline: Path, damage: Callable[[Path], object], asked: list[str], code: int, words: str
) -> None:
    damage(pipeline)
    hub.publish(REPO, pipeline)
    error = refusal(components=asked)
    assert (error["code"], words in error["message"]) == (code, True), error
    assert not [path for path in hub.downloaded(REPO) if path.endswith((".safetensors", ".bin"))]


def test_a_repository_that_holds_no_model_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.publish(REPO, write_files(tmp_path, {"README.md": b"# nothing"}))
    error = refusal()
    assert (error["code"], "neither model_index.json nor config.json" in error["message"]) == (4, True)


def test_a_download_that_does_not_fit_the_disk_is_not_begun(hub: HubServer, pipeline: Path, isolated: Path) -> None:
    hub.publish(REPO, pipeline)
    error = refusal(_free=100)
    assert (error["error"], error["code"]) == ("ResourceError", 6)
    assert "100 are free" in error["message"]
    assert not list(isolated.rglob("*.safetensors"))


def test_contents_that_another_commit_left_in_the_cache_need_no_room(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    run()
    edit_json(pipeline / "vae" / "config.json", changed=True)
    latest = hub.publish(REPO, pipeline)
    hub.forget()
    assert run(_free=0)["revision"] == latest
    assert not [path for path in hub.downloaded(REPO) if path.endswith(".safetensors")]


def test_a_connection_that_breaks_within_a_file_is_taken_up_again(hub: HubServer, pipeline: Path) -> None:
    hub.publish(REPO, pipeline)
    hub.repos[REPO].cut_after = 50
    result = run(components=["vae"])
    if "error" in result:  # huggingface_hub before 1.0 leaves this to the next run
        assert result["code"] == 3
        result = run(components=["vae"])
    (file,) = result["opened"]["vae"]["files"]
    original = (pipeline / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert Path(file).read_bytes() == original
    assert hub.sent_bytes[f"{REPO}/vae/diffusion_pytorch_model.safetensors"] > len(original)


def test_an_interrupted_download_leaves_nothing_that_passes_for_whole(
    hub: HubServer, pipeline: Path, isolated: Path
) -> None:
    hub.publish(REPO, pipeline)
    repo = hub.repos[REPO]
    repo.stall_after = 50
    with processes.start(["-c", DRIVER, json.dumps({"model": REPO, "components": ["vae"]})]) as child:
        assert repo.stalled.wait(timeout=30)
        for _ in range(30):  # a library may swallow one that meets it in the wrong place
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.finish(timeout=2)
                break
        done = child.finish(timeout=30)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    assert not list(isolated.rglob("*diffusion_pytorch_model.safetensors"))
    offline = refusal(components=["vae"], offline=True)
    assert (offline["code"], "weights of vae" in offline["message"]) == (3, True)
    repo.stall_after = None
    repo.release.set()
    (file,) = run(components=["vae"])["opened"]["vae"]["files"]
    assert Path(file).read_bytes() == (pipeline / "vae" / "diffusion_pytorch_model.safetensors").read_bytes()


def test_a_cache_that_is_a_file_is_named(hub: HubServer, pipeline: Path, tmp_path: Path) -> None:
    hub.publish(REPO, pipeline)
    (tmp_path / "home").write_text("")
    error = refusal(env={"HF_HOME": str(tmp_path / "home")})
    assert (error["code"], "cache cannot be used" in error["message"]) == (3, True)
