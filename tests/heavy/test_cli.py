"""The commands that need torch: wrong input, and what goes to which stream."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import make_tiny_flux
import pytest
import torch
from safetensors.torch import load_file, save_file

from aoquant import console
from tests.heavy import tiny
from tests.light import bad_input
from tests.light.bad_input import Make, bad, contents, run, write

ROOT = Path(__file__).parents[2]
D = "diffusion_pytorch_model"
W = f"pipe/transformer/{D}.safetensors"
INDEX = f"sharded/{D}.safetensors.index.json"
DONE_INDEX = f"done/transformer/{D}.bin.index.json"
Q = "quantize pipe --transformer int8wo"
FLAT = "--transformer int8wo"
SKIP_ALL_BUT_X_EMBEDDER = [
    "--skip=transformer_blocks", "--skip=single_transformer_blocks", "--skip=time_text_embed",
    "--skip=context_embedder", "--skip=norm_out", "--skip=proj_out",
]  # fmt: skip


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[..., Path]) -> Path:
    """One folder with everything that the commands are pointed at. Not to be changed: `work` is a copy.

    pipe: a pipeline of Flux and T5; done, safe: made from it, as sharded `.bin` and as safetensors; sharded, binary,
    variant: Flux alone; narrow: one with a Linear of two inputs.
    """
    world = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny_folder("flux"), world / "pipe" / "transformer")
    shutil.copytree(tiny_folder("t5"), world / "pipe" / "text_encoder_2")
    parts = {
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
    }
    write(world, {"pipe/model_index.json": {"_class_name": "FluxPipeline", **parts}})
    shutil.copytree(tiny_folder("flux", shards=3), world / "sharded")
    shutil.copytree(tiny_folder("flux", format="bin"), world / "binary")
    shutil.copytree(tiny_folder("flux", variant="fp16"), world / "variant")
    narrow = diffusers.FluxTransformer2DModel(**{**tiny.MODELS["flux"].config, "in_channels": 2})
    tiny.fill(narrow)
    narrow.to(torch.bfloat16).save_pretrained(str(world / "narrow"))
    from aoquant import quantize

    components = {"transformer": "int8wo", "text_encoder_2": "fp8wo"}
    quantize(world / "pipe", components, output=world / "done", max_shard_size="100kB")
    quantize(world / "pipe", components, output=world / "safe", format="safetensors")
    return world


@pytest.fixture
def work(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `world`, as the working directory."""
    folder = tmp_path / "work"
    shutil.copytree(world, folder)
    monkeypatch.chdir(folder)
    return folder


# --- ways to spoil it -------------------------------------------------------------------------------------------------


def having(path: str, content: Any) -> Make:
    return lambda work: write(work, {path: content})


def without(*paths: str) -> Make:
    def make(work: Path) -> None:
        for path in paths:
            for found in sorted(work.glob(path)):
                found.unlink()

    return make


def edited(path: str, change: Callable[[Any], Any]) -> Make:
    """A JSON file after `change`, which changes it in place or gives a new one."""

    def make(work: Path) -> None:
        content = json.loads((work / path).read_text())
        write(work, {path: change(content) or content})

    return make


def updated(path: str, **values: Any) -> Make:
    return edited(path, lambda content: content.update(values))


def cut(path: str, num_bytes: int) -> Make:
    """A file without its last bytes."""

    def make(work: Path) -> None:
        data = (work / path).read_bytes()
        (work / path).write_bytes(data[:-num_bytes])

    return make


def only(path: str, num_bytes: int) -> Make:
    """A file's first bytes."""

    def make(work: Path) -> None:
        (work / path).write_bytes((work / path).read_bytes()[:num_bytes])

    return make


def header(change: Callable[[dict[str, Any]], Any]) -> Make:
    """The transformer's safetensors file with its header changed and its data as it was."""

    def make(work: Path) -> None:
        data = (work / W).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        (work / W).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return make


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Make:
    """The transformer's tensors after `change`."""

    def make(work: Path) -> None:
        state = load_file(work / W)
        change(state)
        save_file(state, work / W, metadata={"format": "pt"})

    return make


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def evil(path: str) -> Make:
    """A `.bin` whose state dict runs a command when it is unpickled."""

    def make(work: Path) -> None:
        state = torch.load(work / path, weights_only=False)
        torch.save({**state, "evil": Evil()}, work / path, pickle_module=pickle)

    return make


def legacy(work: Path) -> None:
    path = work / "binary" / f"{D}.bin"
    state = torch.load(path)
    torch.save(state, path, _use_new_zipfile_serialization=False)


def enormous(work: Path) -> None:
    """A T5 whose embedding alone takes twice the free disk, in a sparse file."""
    vocabulary = shutil.disk_usage(work).free // 64  # two bytes for each of 64 columns
    path = work / "pipe" / "text_encoder_2" / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    content = json.loads(data[8 : 8 + length])
    offset = 0
    for name, described in content.items():
        if name == "__metadata__":
            continue
        shape = described["shape"] = [vocabulary, 64] if name == "shared.weight" else described["shape"]
        end = offset + 2 * torch.Size(shape).numel()
        described["data_offsets"] = [offset, end]
        offset = end
    text = json.dumps(content).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + offset)
        except OSError:
            pytest.skip("this file system takes no file of this size")
    updated("pipe/text_encoder_2/config.json", vocab_size=vocabulary)(work)


def quantized_by(method: str) -> Make:
    return updated("pipe/transformer/config.json", quantization_config={"quant_method": method})


def hostile_index(name: str) -> Make:
    return edited(INDEX, lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], name)))


def first(content: dict[str, Any]) -> str:
    return next(key for key in content if key != "__metadata__")


SOURCES = [
    # config.json.
    bad("config.json missing", Q, 4, "transformer/config.json", make=without("pipe/transformer/config.json")),
    bad("config.json cut off", Q, 4, "config.json", "JSON", make=having("pipe/transformer/config.json", '{"a": ')),
    bad("config.json a list", Q, 4, "config.json", "array", make=having("pipe/transformer/config.json", [1])),
    bad("config.json too deep", Q, 4, "too deep", make=having("pipe/transformer/config.json", "[" * 200_000)),
    bad("config.json empty", Q, 4, "config.json", "empty", make=having("pipe/transformer/config.json", b"")),
    bad("config.json names no class", "quantize sharded --transformer int8wo", 4, "names no class",
        make=having("sharded/config.json", {})),
    bad("two classes", Q, 4, "FluxTransformer2DModel", "WanTransformer3DModel",
        make=updated("pipe/transformer/config.json", _class_name="WanTransformer3DModel")),
    bad("unknown class", f"quantize sharded {FLAT}", 4, "no model class FluxTransformer9DModel",
        make=updated("sharded/config.json", _class_name="FluxTransformer9DModel")),
    bad("class that is no model", f"quantize sharded {FLAT}", 4, "no model class FluxPipeline",
        make=updated("sharded/config.json", _class_name="FluxPipeline")),
    bad("class that is a module", f"quantize sharded {FLAT}", 4, "no model class utils",
        make=updated("sharded/config.json", _class_name="utils")),
    bad("unknown transformers class", "quantize pipe --text-encoder-2 int8wo", 4, "no model class T6EncoderModel",
        make=updated("pipe/model_index.json", text_encoder_2=["transformers", "T6EncoderModel"])),
    bad("unknown library", Q, 4, "neither diffusers nor transformers",
        make=updated("pipe/model_index.json", transformer=["os", "system"])),
    bad("config.json of a larger model", Q, 4, "are missing",
        make=updated("pipe/transformer/config.json", num_layers=4)),
    bad("config.json of another width", Q, 4, "has shape",
        make=updated("pipe/transformer/config.json", in_channels=32)),
    bad("config.json with an absurd number", Q, 4, "cannot be built",
        make=updated("pipe/transformer/config.json", num_attention_heads=-1)),
    bad("config.json with text for a number", Q, 4, "cannot be built",
        make=updated("pipe/transformer/config.json", num_layers="many")),
    # Already quantized.
    *(bad(f"already quantized by {method}", Q, 4, "already quantized", method, make=quantized_by(method))
      for method in ("torchao", "bitsandbytes", "gguf", "quanto")),
    bad("our own output as source", "quantize done/transformer --transformer int8wo", 4, "already quantized"),
    bad("quantized without a word in config.json", "quantize done/transformer --transformer int8wo", 4,
        "already quantized", "Int8Tensor",
        make=edited("done/transformer/config.json", lambda config: config.pop("quantization_config") and config)),
    bad("integers for weights", Q, 4, "already quantized", "int8",
        make=tensors(lambda state: state.update({"proj_out.weight": state["proj_out.weight"].to(torch.int8)}))),
    # Weight files.
    bad("no weights", Q, 4, "no weight file", make=without(W)),
    bad("variant that is not there", f"{Q} --variant fp16", 4, "'fp16'", "--variant"),
    bad("other variant than there is", f"quantize variant {FLAT} --variant bf16", 4, "'bf16'", "fp16"),
    bad("only a variant", f"quantize variant {FLAT}", 4, "--variant fp16"),
    bad("shard missing", f"quantize sharded {FLAT}", 4, "1 of the", "00002-of-", make=without("sharded/*-00002-of-*")),
    bad("index missing", f"quantize sharded {FLAT}", 4, "without an index", make=without(INDEX)),
    bad("index cut off", f"quantize sharded {FLAT}", 4, "index.json", "JSON", make=cut(INDEX, 40)),
    bad("index without a map", f"quantize sharded {FLAT}", 4, "weight_map", make=having(INDEX, {"metadata": {}})),
    *(bad(f"index that names {number}", f"quantize sharded {FLAT}", 4, "not the name of", make=hostile_index(name))
      for number, name in {
          "its parent": f"../pipe/transformer/{D}.safetensors", "the root": "/etc/passwd.safetensors",
          "another kind": "config.json", "another system's folder": "..\\x.safetensors",
      }.items()),
    bad("index that names what is not there", f"quantize sharded {FLAT}", 4, "'ghost'",
        make=edited(INDEX, lambda index: index["weight_map"].update(ghost=min(index["weight_map"].values())))),
    bad("index that leaves something out", f"quantize sharded {FLAT}", 4, "but not in",
        make=edited(INDEX, lambda index: index["weight_map"].pop("proj_out.weight") and index)),
    bad("safetensors truncated", Q, 4, "truncated", make=cut(W, 100)),
    bad("safetensors truncated in its header", Q, 4, "truncated",
        make=only(W, 500)),
    bad("safetensors header beyond bounds", Q, 4, "header",
        make=having(W, (2**40).to_bytes(8, "little") + b"{" + b" " * 99)),
    bad("safetensors with a dtype of its own", Q, 4, "'BF17'",
        make=header(lambda content: content[first(content)].update(dtype="BF17"))),
    bad("safetensors with overlapping tensors", Q, 4, "damaged",
        make=header(lambda content: content[first(content)].update(data_offsets=[2, 4]))),
    bad("safetensors that lacks a tensor", Q, 4, "1 of", "proj_out.bias",
        make=tensors(lambda state: state.pop("proj_out.bias"))),
    bad("safetensors an LFS pointer", Q, 4, "git lfs pull",
        make=having(W, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    bad("safetensors a web page", Q, 4, "web page", make=having(W, b"<!DOCTYPE html>\n<html><body>Sign in")),
    bad("safetensors empty", Q, 4, "empty", make=having(W, b"")),
    bad("safetensors something else", Q, 4, "not a safetensors file", make=having(W, b"GGUF" + bytes(100))),
    bad(".bin truncated", f"quantize binary {FLAT}", 4, f"{D}.bin", make=cut(f"binary/{D}.bin", 1000)),
    bad(".bin something else", f"quantize binary {FLAT}", 4, f"{D}.bin", make=having(f"binary/{D}.bin", b"PK\3\4 no")),
    bad(".bin that runs code", f"quantize binary {FLAT}", 5, "system", "would run code", make=evil(f"binary/{D}.bin")),
    bad(".bin from before torch 1.6", f"quantize binary {FLAT}", 4, f"{D}.bin", make=legacy),
    bad("not a number among the weights", Q, 4, "NaN", "proj_out.weight",
        make=tensors(lambda state: state["proj_out.weight"][0].fill_(float("nan")))),
    bad("infinite among the weights", "quantize pipe --transformer uint4wo", 4, "infinite",
        make=tensors(lambda state: state["transformer_blocks.0.ff.net.2.weight"][0].fill_(float("inf")))),
]  # fmt: skip

REQUESTS = [
    bad("device that is not there", f"{Q} --device cuda:7", 2, "cuda:7", "cpu"),
    bad("kind of device that is not there", f"{Q} --device mps", 2, "mps", "cpu"),
    bad("rows of float8 from float16", "quantize pipe --transformer fp8dqrow --dtype float16", 2, "--dtype bfloat16"),
    bad("group size that fits nothing", "quantize pipe --text-encoder-2 int4wo:group_size=256", 2, "none of its",
        "256"),
    bad("no Linear to quantize", [*Q.split(), "--skip", "*"], 2, "none of its", "--skip *"),
    bad("skip that matches nothing", f"{Q} --skip proj_outt", 2, "--skip proj_outt", "did you mean proj_out"),
    bad("skip of a part of a name", f"{Q} --skip proj", 2, "--skip proj", "no Linear"),
    bad("one skip of two that matches nothing", f"{Q} --skip proj_out --skip nothing", 2, "--skip nothing"),
    bad("skip in another component", f"{Q} --skip vae:proj_out", 2, "vae", "not being quantized", "transformer"),
    bad("skip in the wrong component", f"{Q} --text-encoder-2 fp8wo --skip text_encoder_2:proj_out", 2,
        "text_encoder_2:proj_out", "no Linear"),
    bad("empty skip", [*Q.split(), "--skip", ""], 2, "names no module"),
    bad("skip without a pattern", f"{Q} --skip transformer:", 2, "names no module"),
    bad("nothing would be smaller", ["quantize", "narrow", *FLAT.split(), *SKIP_ALL_BUT_X_EMBEDDER], 7,
        "not make it smaller"),
    bad("more than the disk holds", "quantize pipe --text-encoder-2 int8wo", 6, "bytes are needed", "another disk",
        make=enormous),
    bad("one bad component of two", f"{Q} --text-encoder-2 int4wo:group_size=256", 2, "text_encoder_2"),
]  # fmt: skip

LOADS = [
    bad("tile_packed without CUDA", "quantize pipe --transformer int4wo:layout=tile_packed --device cpu", 2,
        "packed by CUDA", "aoquant.load"),
    bad("plan of tile_packed without CUDA", "plan pipe --vae int4wo:layout=tile_packed --device cpu", 2, "CUDA"),
    bad("upgrade nothing", "upgrade gone", 3, "gone", "does not exist"),
    bad("upgrade a file", f"upgrade safe/transformer/{D}.safetensors", 4, "is a file"),
    bad("upgrade what is not old", "upgrade done", 2, "nothing to upgrade", "aoquant load"),
    bad("upgrade what is not quantized", "upgrade pipe", 2, "nothing to upgrade"),
    bad("upgrade what runs code", "upgrade done", 5, "system", make=evil("done/text_encoder_2/pytorch_model.bin")),
    bad("load what runs code", "load done", 5, "system", "--trust-pickle",
        make=evil("done/text_encoder_2/pytorch_model.bin")),
    bad("load nothing", "load gone", 3, "gone", "does not exist"),
    bad("load a file", f"load safe/transformer/{D}.safetensors", 4, "is a file"),
    bad("load what is not quantized", "load pipe", 4, "no quantized component", "aoquant quantize"),
    bad("load onto a device that is not there", "load safe --device cuda:7", 2, "cuda:7", "cpu"),
    bad("load onto no device", "load safe --device gpu", 2, "gpu"),
    bad("load onto a device without a number", "load safe --device cuda:x", 2, "cuda:x"),
    bad("load with a shard missing", "load done", 4, "missing", make=without("done/transformer/*-00002-of-*")),
    bad("load with the index missing", "load done", 4, "missing", make=without(DONE_INDEX)),
    bad("load with the index broken", "load done", 4, "index.json", make=having(DONE_INDEX, "{")),
    bad("load with config.json missing", "load safe", 4, "config.json", make=without("safe/transformer/config.json")),
    bad("load with config.json broken", "load safe", 4, "config.json",
        make=having("safe/transformer/config.json", "{")),
    bad("load safetensors without the block in config.json", "load safe/transformer", 4, "quantization_config",
        make=edited("safe/transformer/config.json", lambda config: config.pop("quantization_config") and config)),
    bad("load safetensors truncated", "load safe/transformer", 4, "truncated",
        make=cut(f"safe/transformer/{D}.safetensors", 9)),
    bad("load safetensors changed in size", "load safe", 4, f"{D}.safetensors",
        make=cut(f"safe/transformer/{D}.safetensors", 9)),
    bad("load of an unknown class", "load safe/transformer", 4, "no model class FluxTransformer9DModel",
        make=updated("safe/transformer/config.json", _class_name="FluxTransformer9DModel")),
    bad("load of a class of no library", "load safe/transformer", 4, "which library",
        make=edited("safe/transformer/config.json", lambda config: {
            "quantization_config": config["quantization_config"]})),
    bad("load with the config of another method", "load safe/transformer", 4, "Float8WeightOnlyConfig",
        make=edited("safe/transformer/config.json", lambda config: config["quantization_config"]["quant_type"][
            "default"].update(_type="Float8WeightOnlyConfig"))),
    bad("load of a torchao config that does not exist", "load safe/transformer", 4, "Int9WeightOnlyConfig",
        "installed: torchao", "quantize",
        make=edited("safe/transformer/config.json", lambda config: config["quantization_config"]["quant_type"][
            "default"].update(_type="Int9WeightOnlyConfig"))),
    bad("load with a tensor of the wrong shape", "load safe/transformer", 4,
        make=updated("safe/transformer/config.json", in_channels=32)),
    bad("load of a larger model than is there", "load safe/transformer", 4,
        make=updated("safe/transformer/config.json", num_layers=3)),
]  # fmt: skip


@bad_input.table([*SOURCES, *REQUESTS, *LOADS])
def test_wrong_input(
    row: bad_input.Bad, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_input.check(row, work, monkeypatch, capsys)


@pytest.mark.parametrize(
    "name",
    ["config.json missing", "unknown class", "already quantized by bitsandbytes", "no weights", "shard missing",
     "index that names its parent", "safetensors truncated", ".bin that runs code"],
)  # fmt: skip
def test_plan_refuses_as_quantize_does(
    name: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = (row for row in SOURCES if row.name == name)
    plan = bad(name, ("plan", *row.argv[1:]), row.code, *row.words, make=row.make)
    bad_input.check(plan, work, monkeypatch, capsys)


@pytest.mark.parametrize("argv", ["load done/transformer", "load done", "inspect done"])
def test_no_code_runs_from_a_bin(argv: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does another fault of the same file, its size, decide the exit code."""
    shard = sorted((work / "done" / "transformer").glob("*.bin"))[0]
    evil(shard.relative_to(work).as_posix())(work)
    code, out, err = run(argv.split(), capsys)
    assert (code, bool(out)) == (5, argv.startswith("inspect"))
    assert "system" in err and "run code" in err
    assert not (work / "ran").exists()


def test_a_linear_of_one_input_does_not_stand_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchao 0.18 itself fails on such a weight, with a RuntimeError: it stays as it is, and the plan says why."""
    model = diffusers.FluxTransformer2DModel(**{**tiny.MODELS["flux"].config, "in_channels": 1})
    tiny.fill(model)
    model.to(torch.bfloat16).save_pretrained(str(tmp_path / "model"))
    code, out, err = run(["plan", str(tmp_path / "model"), "--transformer", "int8wo", "--json"], capsys)
    assert code == 0, err
    (component,) = json.loads(out)["components"]
    fates = {tensor["name"]: (tensor["fate"], tensor["reason"]) for tensor in component["tensors"]}
    fate, reason = fates["x_embedder.weight"]
    assert fate == "keep" and reason
    assert fates["transformer_blocks.0.attn.to_q.weight"] == ("quantize", "")


# --- what goes where --------------------------------------------------------------------------------------------------

BOTH = ("pipe", "--transformer", "int8wo", "--text-encoder-2", "fp8wo")


@pytest.mark.parametrize(
    ("argv", "schema"),
    [
        (["quantize", *BOTH, "-o", "out"], "aoquant.quantize/1"),
        (["quantize", *BOTH, "-o", "out", "--format", "safetensors", "--full"], "aoquant.quantize/1"),
        (["plan", *BOTH], "aoquant.plan/1"),
        (["load", "done"], "aoquant.load/1"),
        (["inspect", "done"], "aoquant.inspect/1"),
        (["configs"], "aoquant.configs/1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_json_is_all_of_stdout(argv: list[str], schema: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*argv, "--json"], capsys)
    assert code == 0, err
    assert json.loads(out)["schema"] == schema


@pytest.mark.parametrize(
    "argv",
    [["quantize", *BOTH, "-o", "out"], ["plan", *BOTH], ["load", "done"], ["inspect", "done"]],
    ids=lambda argv: argv[0],
)
@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["", "json"])
def test_quiet_leaves_stderr_empty(
    argv: list[str], json_too: list[str], work: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0.0)  # else so short a job says nothing on the way anyhow
    code, out, err = run([*argv, "-q", *json_too], capsys)
    assert (code, err) == (0, "")
    assert out


def test_progress_is_lines_on_stderr_where_there_is_no_terminal(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_LINE_EVERY_S", 0.0)
    code, out, err = run(["quantize", *BOTH, "-o", "out", "--json"], capsys)
    assert (code, json.loads(out)["schema"]) == (0, "aoquant.quantize/1")
    lines = err.splitlines()
    assert any(line.startswith("transformer → int8wo: ") for line in lines)
    assert any(line.startswith("text_encoder_2 → fp8wo: ") for line in lines)
    assert lines[-1].startswith("aoquant.json: ")
    percents = [int(line.partition(" % (")[0].rpartition(" ")[2]) for line in lines]
    assert percents == sorted(percents) and percents[-1] <= 100
    assert "\r" not in err and "\x1b" not in err


def test_notes_go_to_stderr_and_into_the_document(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["quantize", "pipe", "--transformer", "int8dq", "--json"], capsys)
    assert code == 0
    (warning,) = json.loads(out)["warnings"]
    assert "torch.compile" in warning
    assert err == f"note: {warning}\n"


def test_the_document_of_quantize_tells_what_is_on_the_disk(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(["plan", *BOTH, "-o", "out", "--json"], capsys)
    planned = json.loads(out)
    assert not (work / "out").exists()
    _, out, _ = run(["quantize", *BOTH, "-o", "out", "--json"], capsys)
    document = json.loads(out)
    found = {path: size for path, (_, size, _) in contents(work / "out").items() if (work / "out" / path).is_file()}
    assert {file["path"]: file["bytes"] for file in document["files"]} == found
    assert {file["path"]: file["bytes"] for file in planned["files"]} == found
    assert document["output_bytes"] == planned["output_bytes"] == sum(found.values())
    for file in document["files"]:
        assert hashlib.sha256((work / "out" / file["path"]).read_bytes()).hexdigest() == file["sha256"]


@pytest.fixture(scope="session")
def whole_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The complete Flux pipeline that `make demo` begins with."""
    folder = tmp_path_factory.mktemp("whole") / "tiny-flux"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_tiny_flux.py", str(folder)])
        make_tiny_flux.main()
    return folder


def executed_snippet(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """The snippet that a `quantize` prints, and the names that it defines."""
    _, out, _ = run([*argv, "--json"], capsys)
    snippet: str = json.loads(out)["snippet"]
    namespace: dict[str, Any] = {}
    exec(snippet, namespace)
    return snippet, namespace


@pytest.mark.parametrize("full", [[], ["--full"]], ids=["", "full"])
@pytest.mark.parametrize("format_", ["bin", "safetensors"])
def test_the_snippet_that_is_printed_loads_the_result(
    format_: str,
    full: list[str],
    whole_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["quantize", str(whole_pipeline), *BOTH[1:], "-o", "out", "--format", format_, *full]
    snippet, namespace = executed_snippet(argv, capsys)
    assert type(namespace["transformer"].proj_out.weight.data).__name__ == "Int8Tensor"
    assert type(namespace["text_encoder_2"]).__name__ == "T5EncoderModel"
    assert namespace["pipeline"].transformer is namespace["transformer"]
    assert namespace["pipeline"].vae.dtype == torch.bfloat16
    _, out, _ = run([*argv, "--overwrite"], capsys)
    assert out.endswith(snippet)


@pytest.mark.parametrize("config", ["int4wo:group_size=32", "uint4wo:group_size=32", "fp6wo"])
def test_the_snippet_of_small_weights_computes_here(
    config: str,
    whole_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["quantize", str(whole_pipeline / "transformer"), "--transformer", config, "-o", "o"]
    _, namespace = executed_snippet(argv, capsys)
    model = namespace["model"]
    inputs = torch.zeros(2, model.config.joint_attention_dim, dtype=torch.bfloat16)
    assert model.context_embedder(inputs).isfinite().all()
    assert "aoquant" in (tmp_path / "o" / "README.md").read_text()


@pytest.mark.parametrize("argv", [["quantize", *BOTH, "-o", "out"], ["load", "done"]], ids=lambda argv: argv[0])
def test_a_process_of_its_own_says_nothing_but_the_document(argv: list[str], work: Path) -> None:
    """What the libraries print when they are first imported, on either stream, is held back."""
    done = subprocess.run(
        [sys.executable, "-m", "aoquant", *argv, "--json", "--quiet"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["schema"] == f"aoquant.{argv[0]}/1"
