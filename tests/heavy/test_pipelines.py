"""Whole pipelines of the real classes: quantized by the command, assembled with `--full`, loaded and run by stock.

What they draw is what stock draws with components that it quantized itself, to the bit.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import aoquant
from aoquant.cli import main
from tests.heavy import stock, tiny_pipelines
from tests.heavy.tiny_pipelines import PIPELINES
from tests.light import processes

FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])
ALL = pytest.mark.parametrize("name", PIPELINES)
LOADED_WHOLE: Mapping[str, tuple[str, ...]] = {}
"""Pipeline → the components whose tensors do not map one to one. None of these has any."""

Saved = Callable[[str], Path]
Quantized = Callable[[str, str], Path]


def arguments(name: str) -> list[str]:
    """`--text-encoder int8wo …` for the configs of a row."""
    return [text for pair in PIPELINES[name].configs.items() for text in (f"--{pair[0].replace('_', '-')}", pair[1])]


def document(argv: list[str]) -> dict[str, Any]:
    """The JSON document that a command which succeeds prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*argv, "--json"]) == 0
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def stock_pipeline(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(folder), dtype=torch.bfloat16)


def with_parts(name: str, folder: Path, parts: Mapping[str, Any]) -> Any:
    """The pipeline in `folder` with these parts in place of its own. DiffusionPipeline would drop those of Wan."""
    cls = getattr(diffusers, PIPELINES[name].class_name)
    return cls.from_pretrained(str(folder), dtype=torch.bfloat16, **parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(name)` → that pipeline's folder, as published. Do not write there."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tiny_pipelines.save(name, tmp_path_factory.mktemp("pipelines") / name)
        return folders[name]

    return get


@pytest.fixture(scope="module")
def quantized(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(name, format)` → what `quantize --full` makes of it. Do not write there."""
    folders: dict[tuple[str, str], Path] = {}

    def get(name: str, file_format: str) -> Path:
        key = name, file_format
        if key not in folders:
            out = tmp_path_factory.mktemp("out") / name
            result = document(
                ["quantize", str(saved(name)), *arguments(name), "--full", "-o", str(out), "--format", file_format]
            )
            assert {part["name"] for part in result["components"]} == PIPELINES[name].configs.keys()
            folders[key] = out
        return folders[key]

    return get


@pytest.fixture(scope="module")
def by_stock(saved: Saved) -> Callable[[str], tuple[dict[str, dict[str, torch.Tensor]], torch.Tensor]]:
    """`by_stock(name)` → the state of each component as stock quantizes it on loading, and what they draw."""
    made: dict[str, tuple[dict[str, dict[str, torch.Tensor]], torch.Tensor]] = {}

    def get(name: str) -> tuple[dict[str, dict[str, torch.Tensor]], torch.Tensor]:
        if name not in made:
            index = json.loads((saved(name) / "model_index.json").read_text())
            parts = {
                part: stock.quantize(saved(name) / part, index[part][0], index[part][1], config)
                for part, config in PIPELINES[name].configs.items()
            }
            drawn = tiny_pipelines.run(with_parts(name, saved(name), parts), name)
            made[name] = {part: dict(model.state_dict()) for part, model in parts.items()}, drawn
        return made[name]

    return get


@ALL
def test_the_plan_says_which_components_stream(name: str, saved: Saved, tmp_path: Path) -> None:
    plan = document(["plan", str(saved(name)), *arguments(name), "--full", "-o", str(tmp_path / "out")])
    whole = {part["name"]: part["whole_reason"] for part in plan["components"] if not part["streamed"]}
    assert tuple(whole) == LOADED_WHOLE.get(name, ())
    assert all(whole.values())
    assert {part["name"]: part["config"] for part in plan["components"]} == PIPELINES[name].configs
    assert all(part["quantized"] > 0 for part in plan["components"])
    assert plan["warnings"] == []


@FORMATS
@ALL
def test_stock_loads_it_in_one_line_and_draws_what_stock_quantized_draws(
    name: str, file_format: str, quantized: Quantized, by_stock: Callable[[str], Any]
) -> None:
    states, expected = by_stock(name)
    pipeline = stock_pipeline(quantized(name, file_format))
    ran = set()
    for part, state in states.items():
        model = getattr(pipeline, part)
        stock.assert_same_state(model.state_dict(), state)
        model.register_forward_hook(lambda *_, part=part: ran.add(part))
    drawn = tiny_pipelines.run(pipeline, name)
    assert ran == states.keys()
    assert drawn.isfinite().all()
    assert drawn.float().std() > 0.01
    assert torch.equal(drawn, expected)


@FORMATS
@ALL
def test_the_other_parts_are_copies_and_all_is_sound(
    name: str, file_format: str, saved: Saved, quantized: Quantized
) -> None:
    source, out = saved(name), quantized(name, file_format)
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    others = [path for path in files if path.parts[0] not in PIPELINES[name].configs]
    assert {Path("model_index.json"), Path("vae/config.json")} < set(others)
    for path in others:
        assert (out / path).read_bytes() == (source / path).read_bytes(), path
    report = document(["inspect", str(out)])
    assert report["problems"] == []
    assert {part["name"] for part in report["components"] if part["config"]} == set(PIPELINES[name].configs)


@pytest.mark.parametrize(("one", "other"), [("transformer", "transformer_2"), ("transformer_2", "transformer")])
def test_quantizing_one_of_wans_two_transformers_warns_and_runs(
    one: str, other: str, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["quantize", str(saved("wan2.2")), "--component", f"{one}=int8wo", "--full", "-o", str(tmp_path / "out")]
    assert main(argv) == 0
    assert f"wan2.2 also has {other}, which stays unquantized" in capsys.readouterr().err
    pipeline = stock_pipeline(tmp_path / "out")
    assert type(getattr(pipeline, one).blocks[0].attn1.to_q.weight.data).__name__ == "Int8Tensor"
    assert type(getattr(pipeline, other).blocks[0].attn1.to_q.weight.data) is torch.Tensor
    assert tiny_pipelines.run(pipeline, "wan2.2").isfinite().all()


@FORMATS
@pytest.mark.parametrize("name", ["flux_controlnet", "sdxl_controlnet"])
def test_a_controlnet_alone(name: str, file_format: str, saved: Saved, tmp_path: Path) -> None:
    """As most are published: a folder of its own, beside no pipeline."""
    source, out = saved(name) / "controlnet", tmp_path / "out"
    document(["quantize", str(source), "--controlnet", "int8wo", "-o", str(out), "--format", file_format])
    library, class_name = json.loads((saved(name) / "model_index.json").read_text())["controlnet"]
    expected = stock.quantize(source, library, class_name, "int8wo")
    loaded = aoquant.load(out)
    stock.assert_same_state(loaded.state_dict(), expected.state_dict())
    drawn = [
        tiny_pipelines.run(with_parts(name, saved(name), {"controlnet": controlnet}), name)
        for controlnet in (loaded, expected, stock.load(source, library, class_name))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@ALL
def test_the_lines_of_the_card_put_every_part_into_the_pipeline(
    name: str, quantized: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that the pipeline's class could do without, which DiffusionPipeline would drop."""
    card = (quantized(name, "bin") / "README.md").read_text()
    lines = card.partition("```python\n")[2].partition("```")[0]
    namespace: dict[str, Any] = {}
    monkeypatch.chdir(quantized(name, "bin").parent)
    exec(lines, namespace)
    assert type(namespace["pipeline"]).__name__ == PIPELINES[name].class_name
    for part in PIPELINES[name].configs:
        assert getattr(namespace["pipeline"], part) is namespace[part]


@pytest.mark.parametrize("name", ["flux", "wan2.2", "qwen_image"])
def test_shards_of_bin_load_by_the_printed_lines(name: str, saved: Saved, tmp_path: Path) -> None:
    """diffusers finds shards of `.bin` only if told not to look for safetensors, which the other parts then are."""
    argv = ["quantize", str(saved(name)), *arguments(name), "--full", "-o", str(tmp_path / "out")]
    result = document([*argv, "--max-shard-size", "50kB"])
    split = [part for part in PIPELINES[name].configs if part.startswith("transformer")]
    assert [warning.partition(" takes ")[0] for warning in result["warnings"]] == split
    with pytest.raises(OSError, match=r"no file named diffusion_pytorch_model\.bin"):
        stock_pipeline(tmp_path / "out")
    namespace: dict[str, Any] = {}
    exec(result["snippet"], namespace)
    assert tiny_pipelines.run(namespace["pipeline"], name).isfinite().all()
    safe = document([*argv, "--max-shard-size", "50kB", "--format", "safetensors", "--overwrite"])
    assert safe["warnings"] == []
    assert tiny_pipelines.run(stock_pipeline(tmp_path / "out"), name).isfinite().all()


def test_as_typed_in_a_shell(saved: Saved, tmp_path: Path) -> None:
    """The command in one process, the printed lines in another."""
    argv = ["-m", "aoquant", "quantize", str(saved("flux")), *arguments("flux"), "--full", "-o", "out"]
    done = processes.run([*argv, "--json", "--quiet"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    draw = "\nimages = pipeline('a lighthouse', num_inference_steps=2, height=32, width=32, output_type='pt').images"
    check = "\nassert images.shape == (1, 3, 32, 32) and images.isfinite().all()"
    script = json.loads(done.stdout)["snippet"] + draw + check
    ran = processes.run(["-c", script], cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
