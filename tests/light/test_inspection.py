"""Reports on folders: what is there, what is wrong, in how much time, and without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoquant.errors import CheckpointError, SourceError
from aoquant.inspection import Report, inspect
from tests.light import forge
from tests.light.forge import Called, Named, TorchFile

D = "diffusion_pytorch_model"
ROOT = Path(__file__).parents[2]
INT8WO = {
    "quant_method": "torchao",
    "modules_to_not_convert": None,
    "quant_type": {
        "default": {
            "_type": "Int8WeightOnlyConfig",
            "_version": 2,
            "_data": {"granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}, "group_size": None},
        }
    },
}
DIFFUSERS = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1"}
TRANSFORMERS = {"architectures": ["T5EncoderModel"], "model_type": "t5", "transformers_version": "5.24.0"}


def component(folder: Path, config: dict[str, Any] | None = None, **quantization: Any) -> Path:
    """A transformer of one int8 weight [4, 8] and one bfloat16 bias, in a `.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**(DIFFUSERS if config is None else config), **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    file = TorchFile()
    file.state = {"a.weight": file.int8(4, 8), "a.bias": file.tensor("BFloat16Storage", (4,))}
    file.write(folder / f"{D}.bin")
    return folder


def safe_component(folder: Path, **quantization: Any) -> Path:
    """The same in safetensors."""
    component(folder, **quantization)
    (folder / f"{D}.bin").unlink()
    tensors = {"a._weight_qdata": ("I8", (4, 8)), "a._weight_scale": ("F32", (4, 1)), "a.bias": ("BF16", (4,))}
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(8), "a.bias": None})
    forge.write_safetensors(folder / f"{D}.safetensors", tensors, metadata)
    return folder


def texts(report: Report) -> list[str]:
    problems = [*report.problems, *(problem for part in report.components for problem in part.problems)]
    return [f"{problem.severity}: {problem.text}" for problem in problems]


@pytest.mark.parametrize("make", [component, safe_component])
def test_a_sound_component(make: Callable[..., Path], tmp_path: Path) -> None:
    report = inspect(make(tmp_path / "m", quantization_config=INT8WO))
    assert texts(report) == [] and report.is_sound
    (part,) = report.components
    assert (report.kind, part.name, part.class_name, part.library) == (
        "component", "", "FluxTransformer2DModel", "diffusers",
    )  # fmt: skip
    assert part.config == "torchao Int8WeightOnlyConfig(granularity=PerRow(dim=-1))"
    assert [(row.kind, row.dtype, row.count, row.num_parameters, row.num_bytes) for row in part.tallies] == [
        ("Int8Tensor", "int8", 1, 32, 48),
        ("Tensor", "bfloat16", 1, 4, 8),
    ]
    assert part.weight_bytes == 56 and part.num_parameters == 36
    assert part.bits_per_weight == pytest.approx(8 * 56 / 36)
    assert part.quantized_bits_per_weight == pytest.approx(8 * 48 / 32)
    assert part.versions == {"diffusers": "0.42.1", "torchao config": "2"}
    assert part.file_bytes == sum(file.num_bytes for file in part.files) > 56


def pipeline(folder: Path) -> Path:
    folder.mkdir()
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.42.1",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "image_encoder": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    component(folder / "transformer", quantization_config=INT8WO)
    (folder / "text_encoder").mkdir()
    (folder / "text_encoder" / "config.json").write_text(json.dumps(TRANSFORMERS))
    table = {"shared.weight": ("F32", (8, 4))}
    forge.write_safetensors(folder / "text_encoder" / "model.safetensors", table, {"format": "pt"})
    for name in ("tokenizer", "scheduler"):
        (folder / name).mkdir()
        (folder / name / f"{name}_config.json").write_text("{}")
    return folder


def test_a_pipeline(tmp_path: Path) -> None:
    report = inspect(pipeline(tmp_path / "flux"))
    assert (report.kind, report.class_name) == ("pipeline", "FluxPipeline")
    assert texts(report) == []
    assert [(part.name, part.class_name, part.library, part.format) for part in report.components] == [
        ("transformer", "FluxTransformer2DModel", "diffusers", "bin"),
        ("text_encoder", "T5EncoderModel", "transformers", "safetensors"),
    ]
    assert report.components[1].versions == {"transformers": "5.24.0"}
    assert report.components[0].files[0].path == f"transformer/{D}.bin"


def test_a_pipeline_with_a_folder_missing_and_one_too_many(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "flux")
    (folder / "text_encoder").rename(folder / "text_encoder_9")
    assert texts(inspect(folder)) == [
        "error: model_index.json names the component 'text_encoder', and its folder is missing",
        "warning: the folder 'text_encoder_9' is not in model_index.json",
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint(folder: Path) -> Path:
    """An aoquant output of one component."""
    component(folder / "transformer", quantization_config=INT8WO)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    manifest = {
        "schema": "aoquant.manifest/1",
        "aoquant": "0.1.0",
        "source": {"model": "acme/flux", "revision": None},
        "versions": {"torch": "2.13.0", "torchao": "0.18.0"},
        "components": {"transformer": {"config": "int8wo"}},
        "files": [
            {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in files
        ],
    }
    (folder / "aoquant.json").write_text(json.dumps(manifest))
    return folder


def test_an_output_folder(tmp_path: Path) -> None:
    report = inspect(str(checkpoint(tmp_path / "out")))
    assert report.kind == "checkpoint" and texts(report) == []
    assert [(part.name, part.config_name) for part in report.components] == [("transformer", "int8wo")]
    assert report.versions == {"aoquant": "0.1.0", "torch": "2.13.0", "torchao": "0.18.0"}
    assert report.source == {"model": "acme/flux"}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([{"path": "transformer/config.json", "bytes": 1}], "error: 'transformer/config.json' has .* says 1"),
        ([{"path": "gone.bin", "bytes": 1}], "error: 'gone.bin', which aoquant.json lists, is missing"),
        ([{"path": "../../etc/passwd", "bytes": 1}], "warning: aoquant.json lists '../../etc/passwd'"),
        ([{"path": "/etc/passwd", "bytes": 1}], "no path within the folder"),
        ([{"path": "a\0b", "bytes": 1}], "no path within the folder"),
        ([5, {"bytes": 3}], "lists 'None'"),
    ],
)
def test_manifests_that_disagree_with_the_files(files: list[Any], words: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    edit(folder / "aoquant.json", files=files)
    found = texts(inspect(folder))
    assert any(re.search(words, text) for text in found), found


def test_a_small_file_that_was_changed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace("Flux", "Flax"))
    text = "error: 'transformer/config.json' was changed since aoquant wrote it: its SHA-256 differs"
    assert texts(inspect(folder)) == [text]


def test_a_model_card_may_be_changed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    (folder / "README.md").write_text("# Mine")
    edit(folder / "aoquant.json", files=[{"path": "README.md", "bytes": 1, "sha256": "0"}])
    assert texts(inspect(folder)) == []


def test_manifests_of_another_make(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "out")
    edit(folder / "aoquant.json", schema="other/1", versions=5, source=[1])
    assert texts(inspect(folder)) == [
        "warning: aoquant.json is of the schema 'other/1', which this version does not know"
    ]
    (folder / "aoquant.json").write_text("{")
    assert "not valid JSON" in texts(inspect(folder))[0]


def quantization(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def by_name(**configs: Any) -> dict[str, Any]:
    named = {name: config and config["quant_type"]["default"] for name, config in configs.items()}
    return quantization("FqnToConfig", fqn_to_config=named, module_fqn_to_config=named)


_WRONG = "error: config.json says {}, yet 1 tensors are none that it makes, the first is 'a.weight', an Int8Tensor"
_NO_ACTIVATIONS = (
    "error: config.json says Int8DynamicActivationInt8WeightConfig, yet 1 tensors do not quantize activations, "
    "the first is 'a.weight'"
)
BLOCKS: dict[str, tuple[Any, str, list[str]]] = {
    "another class": (
        quantization("Float8WeightOnlyConfig"), "torchao Float8WeightOnlyConfig()",
        [_WRONG.format("Float8WeightOnlyConfig")],
    ),
    "activations": (
        quantization("Int8DynamicActivationInt8WeightConfig"), "torchao Int8DynamicActivationInt8WeightConfig()",
        [_NO_ACTIVATIONS],
    ),
    "unknown config": (
        quantization("FutureConfig"), "torchao FutureConfig()",
        ["warning: config.json names 'FutureConfig', no torchao config that is known here"],
    ),
    "by name": (
        by_name(_default=quantization("Int8WeightOnlyConfig"), proj_out=None),
        "torchao FqnToConfig(_default=Int8WeightOnlyConfig(), proj_out=None)", [],
    ),
    "by name, another class": (
        by_name(_default=quantization("Float8WeightOnlyConfig"), x=quantization("Int4WeightOnlyConfig")),
        "torchao FqnToConfig(_default=Float8WeightOnlyConfig(), x=Int4WeightOnlyConfig())",
        [_WRONG.format("Float8WeightOnlyConfig or Int4WeightOnlyConfig")],
    ),
    "skipped modules": (
        {**INT8WO, "modules_to_not_convert": ["proj_out"]},
        "torchao Int8WeightOnlyConfig(granularity=PerRow(dim=-1)), not [proj_out]", [],
    ),
    "old string": ({"quant_method": "torchao", "quant_type": "int8wo"},
                   "torchao 'int8wo' (as older diffusers wrote it)", []),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type=nf4)",
        ["error: config.json says bitsandbytes, yet tensors are torchao's"],
    ),
    "a number": (5, "5", ["error: config.json says unknown, yet tensors are torchao's"]),
    "nonsense": ({"quant_method": "torchao", "quant_type": [1]}, "torchao, in no known form", []),
    "deeper nonsense": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": 5}}},
                        "torchao FqnToConfig()", []),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKS)
def test_what_the_config_says_against_the_tensors(case: str, tmp_path: Path) -> None:
    block, text, problems = BLOCKS[case]
    report = inspect(component(tmp_path / "m", quantization_config=block))
    assert report.components[0].config == text
    assert texts(report) == problems


def test_a_config_that_says_quantized_while_no_tensor_is(tmp_path: Path) -> None:
    folder = component(tmp_path / "m", quantization_config=INT8WO)
    file = TorchFile()
    file.state["a.weight"] = file.tensor("BFloat16Storage", (4, 8))
    file.write(folder / f"{D}.bin")
    assert texts(inspect(folder)) == ["error: config.json says that the weights are quantized, and no tensor is"]


def test_quantized_tensors_without_a_config_that_says_so(tmp_path: Path) -> None:
    (text,) = texts(inspect(safe_component(tmp_path / "safe")))
    assert text.startswith("error: 1 tensors are quantized") and "meta device, without an error" in text
    (text,) = texts(inspect(component(tmp_path / "bin")))
    assert text.startswith("warning: 1 tensors are quantized")


def test_a_pickle_that_would_run_code(tmp_path: Path) -> None:
    folder = component(tmp_path / "m", quantization_config=INT8WO)
    file = TorchFile()
    file.state = {"a.weight": file.int8(4, 8), "x": Called(Named("os", "system"), ("id",))}
    file.write(folder / f"{D}.bin")
    report = inspect(folder)
    assert texts(report) == [f"error: {D}.bin would run code when unpickled: os.system"]
    assert report.components[0].suspicious == ("os.system",) and not report.is_sound


def sharded(folder: Path) -> Path:
    component(folder, TRANSFORMERS)
    (folder / f"{D}.bin").unlink()
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name, shard in zip("abc", shards, strict=True):
        forge.write_safetensors(folder / shard, {name: ("F32", (100,))}, {"format": "pt"})
    index = {"weight_map": dict(zip("abc", shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_in_bad_health(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    assert texts(inspect(folder)) == []
    (folder / "model-00001-of-00003.safetensors").unlink()
    with (folder / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.truncate(200)
    edit(folder / "model.safetensors.index.json",
         weight_map={"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors",
                     "d": "model-00003-of-00003.safetensors"})  # fmt: skip
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"old")
    (folder / "pytorch_model.bin").write_bytes(b"other")
    report = inspect(folder)
    found = "\n".join(texts(report))
    for words in (
        "error: the shard 'model-00001-of-00003.safetensors', which model.safetensors.index.json names, is missing",
        "error: model-00002-of-00003.safetensors is truncated: it has 200 bytes",
        "error: 'd' is not in model-00003-of-00003.safetensors",
        "error: 'c' is in model-00003-of-00003.safetensors but not in model.safetensors.index.json",
        "warning: 1 shards that model.safetensors.index.json does not name are left over",
        "warning: weights in several formats: read was safetensors, not 'pytorch_model.bin'",
    ):
        assert words in found, found
    assert [file.status for file in report.components[0].files] == ["missing", "unread", "truncated", "ok", "unread"]


def test_variants(tmp_path: Path) -> None:
    folder = safe_component(tmp_path / "m", quantization_config=INT8WO)
    (folder / f"{D}.safetensors").rename(folder / f"{D}.fp16.safetensors")
    (text,) = texts(inspect(folder))
    assert text == "warning: only the variant 'fp16' is here: the stock loaders need variant='fp16'"
    assert len(inspect(folder).components[0].entries) == 2
    assert texts(inspect(folder, variant="fp16")) == []
    assert "variant 'bf16'" in texts(inspect(folder, variant="bf16"))[0]
    forge.write_safetensors(folder / f"{D}.bf16.safetensors", {"x": ("F32", (1,))})
    assert "only variants" in texts(inspect(folder))[0]


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    folder = component(tmp_path / "m")
    file = TorchFile()
    table = file.tensor("FloatStorage", (8, 4))
    file.state = {"shared.weight": table, "encoder.weight": table}
    file.write(folder / f"{D}.bin")
    (part,) = inspect(folder).components
    assert part.tied == {"encoder.weight": "shared.weight"}
    assert (part.num_parameters, part.weight_bytes, part.bits_per_weight) == (32, 128, 32)


def test_missing_and_broken_configs(tmp_path: Path) -> None:
    folder = component(tmp_path / "m")
    (folder / "config.json").unlink()
    assert "there is no config.json" in texts(inspect(folder))[0]
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in texts(inspect(folder))[0]
    (folder / "config.json").write_text('{"_class_name": 5, "architectures": "x", "quantization_config": null}')
    assert inspect(folder).components[0].class_name == ""
    (folder / f"{D}.bin").unlink()
    assert "no weights" in texts(inspect(folder))[0]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_single_file(suffix: str, tmp_path: Path) -> None:
    make = component if suffix == ".bin" else safe_component
    report = inspect(make(tmp_path / "m") / f"{D}{suffix}")
    assert report.kind == "file" and texts(report) == []
    assert [entry.kind for entry in report.components[0].entries.values()] == ["Int8Tensor", "Tensor"]


def test_one_shard_of_many_is_no_problem_in_itself(tmp_path: Path) -> None:
    metadata = forge.torchao_metadata({"a.weight": forge.int8_record(8), "b": None})
    path = forge.write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"b": ("F32", (2,))}, metadata)
    assert texts(inspect(path)) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: root / "gone", "does not exist"),
        (lambda root: root / ("x" * 5000), "is no path|does not exist"),
        (lambda root: str(root) + "/a\0b", "is no path|does not exist"),
        (lambda root: root, "holds no checkpoint"),
        (lambda root: (root / "x.gguf").write_bytes(b"GGUF") and root / "x.gguf", "no weight file"),
        (lambda root: (root / "x.bin").write_bytes(b"hello") and root / "x.bin", "no zip"),
        (lambda root: (root / "x.safetensors").write_bytes(b"<html>") and root / "x.safetensors", "web page"),
        (lambda root: (root / "config.json").write_text("{}") and root / "config.json", "no weight file"),
    ],
)  # fmt: skip
def test_what_cannot_be_inspected(make: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, SourceError), match=words) as raised:
        inspect(make(tmp_path))
    assert raised.value.exit_code == (3 if "path" in words or "exist" in words else 4) and raised.value.hint


def test_json_is_stable_and_complete(tmp_path: Path) -> None:
    report = inspect(checkpoint(tmp_path / "out"))
    content = json.loads(json.dumps(report.to_json()))
    assert content["schema"] == "aoquant.inspect/1" and content["is_sound"] is True
    (part,) = content["components"]
    assert "layers" not in part and part["num_tensors"] == 2 and part["num_quantized"] == 1
    assert part["files"] == [{"path": f"transformer/{D}.bin", "num_bytes": part["file_bytes"], "status": "ok"}]
    assert json.dumps(report.to_json()) == json.dumps(inspect(tmp_path / "out").to_json())
    (part,) = report.to_json(layers=True)["components"]
    assert part["layers"][0] == {
        "name": "a.weight", "kind": "Int8Tensor", "dtype": "bfloat16", "shape": [4, 8], "num_bytes": 48,
        "file": f"{D}.bin", "attributes": {"block_size": "[1, 8]"},
        "parts": {"qdata": {"dtype": "int8", "shape": [4, 8]}, "scale": {"dtype": "float32", "shape": [4, 1]}},
    }  # fmt: skip


def test_twelve_gigabytes_take_a_moment(tmp_path: Path) -> None:
    folder = component(tmp_path / "m")
    (folder / f"{D}.bin").unlink()
    tensors = {f"blocks.{number}.weight": ("BF16", (6_000_000,)) for number in range(1000)}
    forge.write_safetensors(folder / f"{D}.safetensors", tensors, {"format": "pt"})
    times = []
    for _ in range(20):
        start = time.process_time()
        report = inspect(folder)
        times.append(time.process_time() - start)
        if min(times) < 0.1:
            break
    assert report.components[0].weight_bytes == 12_000_000_000
    assert min(times) < 0.1


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    folder = component(tmp_path / "m", quantization_config=INT8WO)
    code = (
        "import sys\n"
        "for name in ('torch', 'torchao', 'numpy', 'safetensors', 'diffusers', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from aoquant.inspection import inspect\n"
        f"assert inspect({str(folder)!r}).is_sound\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
