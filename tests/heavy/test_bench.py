"""`aoquant bench`: each case in a process of its own, as a table, JSON and a plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import aoquant
from aoquant.cli import main
from tests.heavy import tiny_pipelines
from tests.light import schemas


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny Flux pipeline, and its quantized transformer."""
    root = tmp_path_factory.mktemp("bench")
    source = tiny_pipelines.save("flux", root / "flux")
    aoquant.quantize(source, {"transformer": "int8wo"}, output=root / "out")
    return source, root / "out"


def test_figures_and_plot(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = made
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    size = ["--height", "16", "--width", "16", "--steps", "3"]
    argv = ["bench", str(folder), "--source", str(source), "--device", "cpu", *size, "--plot", str(tmp_path / "b.png")]
    assert main([*argv, "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = schemas.validated(out, "bench")
    assert [(case["model"], case["compiled"]) for case in document["cases"]] == [
        ("original", False),
        ("quantized", False),
    ]
    for case in document["cases"]:
        assert (case["pipeline"], case["width"], case["steps"]) == ("FluxPipeline", 16, 3)
        assert case["seconds_per_step"] > 0 and case["load_seconds"] > 0 and case["peak_memory_bytes"] > 1e8
    assert min(Image.open(tmp_path / "b.png").size) > 200


def test_what_goes_wrong_in_a_case_is_said_as_elsewhere(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["bench", str(made[1]), "-q"]) == 2
    assert "error: " in (err := capsys.readouterr().err) and "--source" in err and len(err.splitlines()) == 2
