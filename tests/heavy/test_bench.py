"""`aoquant bench`: each case in a process of its own, as a table, JSON and a plot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import aoquant
from aoquant import benchmarking
from aoquant.cli import main
from aoquant.errors import UsageError
from tests.heavy import tiny, tiny_pipelines
from tests.light import schemas


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Flux pipeline, and its quantized transformer."""
    root = tmp_path_factory.mktemp("bench")
    source = tiny_pipelines.save("flux", root / "flux")
    aoquant.quantize(source, {"transformer": "int8wo"}, output=root / "out")
    return source, root / "out"


def a_case(folder: Path, *, source: Path, name: str = "", height: int = 32) -> dict[str, Any]:
    """The original's, in this process."""
    return {
        "folder": str(folder), "name": name, "device": "cpu", "offline": False, "trust_pickle": False,
        "source": str(source), "steps": 1, "height": height, "width": 32, "num_frames": None, "original": True,
        "compile": False,
    }  # fmt: skip


def test_figures_and_plot(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = made
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    size = ["--height", "64", "--width", "32", "--steps", "3"]
    argv = ["bench", str(folder), "--source", str(source), "--device", "cpu", *size, "--plot", str(tmp_path / "b.png")]
    assert main([*argv, "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = schemas.validated(out, "bench")
    (component,) = document["components"]
    assert (component["name"], component["class"], component["config"]) == (
        "transformer",
        "FluxTransformer2DModel",
        "int8wo",
    )
    assert component["inputs"]["hidden_states"] == "1×8×16 bfloat16"
    original, quantized = component["cases"]
    assert (original["model"], quantized["model"]) == ("original", "quantized")
    for case in (original, quantized):
        assert case["seconds_per_step"] > 0 and case["load_seconds"] > 0 and case["peak_memory_bytes"] > 1e8
    assert quantized["weight_bytes"] < 0.8 * original["weight_bytes"]
    assert min(Image.open(tmp_path / "b.png").size) > 200


def test_the_working_directory_is_no_place_for_modules(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be the checkpoint's own."""
    source, folder = made
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    for name in ("triton", "tabulate", "json"):
        Path(f"{name}.py").write_text("open('ran', 'w')\n")
    argv = ["bench", str(folder), "--source", str(source), "--device", "cpu", "--height", "32", "--width", "32"]
    assert main([*argv, "--steps", "1", "-q"]) == 0
    assert capsys.readouterr().err == "" and not Path("ran").exists()


def test_what_goes_wrong_in_a_case_is_said_as_elsewhere(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["bench", str(made[1]), "-q"]) == 2
    assert "error: " in (err := capsys.readouterr().err) and "--source" in err and len(err.splitlines()) == 2


def test_an_original_of_another_class(made: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made[0], other)
    shutil.rmtree(other / "transformer")
    tiny.save("sd3", other / "transformer")
    index = json.loads((other / "model_index.json").read_text())
    index["transformer"][1] = "SD3Transformer2DModel"
    (other / "model_index.json").write_text(json.dumps(index))
    case = a_case(made[1], name="transformer", source=other)
    with pytest.raises(UsageError, match=r"is of SD3Transformer2DModel, and the checkpoint of FluxTransformer2DModel"):
        benchmarking.measure(case)


def test_a_component_that_is_not_there(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(made[1]), "--component", "vae", "-q"]) == 2
    assert "no quantized component vae" in (err := capsys.readouterr().err) and "transformer" in err


@pytest.mark.parametrize("from_pipeline", [False, True])
def test_a_checkpoint_of_one_component(made: tuple[Path, Path], tmp_path: Path, from_pipeline: bool) -> None:
    """What it was in a pipeline is found by its class."""
    source, _ = made
    aoquant.quantize(source / "transformer", {"transformer": "int8wo"}, output=tmp_path / "flat")
    case = a_case(tmp_path / "flat", source=source if from_pipeline else source / "transformer")
    original, quantized = (benchmarking.measure({**case, "original": original}) for original in (True, False))
    assert original["inputs"] == quantized["inputs"]
    assert quantized["weight_bytes"] < original["weight_bytes"]


def test_a_size_that_a_component_does_not_take(tmp_path: Path) -> None:
    source = tiny.save("sd3", tmp_path / "sd3")  # which has positions for 8 × 8 patches
    aoquant.quantize(source, {"transformer": "int8wo"}, output=tmp_path / "flat")
    case = a_case(tmp_path / "flat", source=source, height=512)
    with pytest.raises(UsageError, match="takes no inputs for 32 × 512 pixels"):
        benchmarking.measure(case)
