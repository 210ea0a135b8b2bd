"""`aoquant generate` and `load_pipeline`: what they draw is what stock draws with the same quantized components."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageSequence

import aoquant
from aoquant import loading, pipelines
from aoquant.cli import main
from aoquant.errors import UsageError
from tests.heavy import tiny_pipelines
from tests.light import processes, schemas

CASES = {
    "flux": ("transformer", "int8wo"),
    "sdxl": ("unet", "uint4wo"),
    "wan2.2": ("transformer", "int8wo"),
}

Made = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`made(name)` → a pipeline's folder, and what quantize makes of its denoiser alone. Do not write there."""
    folders: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in folders:
            root = tmp_path_factory.mktemp("generate")
            source = tiny_pipelines.save(name, root / name)
            component, config = CASES[name]
            aoquant.quantize(source, {component: config}, output=root / "out")
            folders[name] = source, root / "out"
        return folders[name]

    return get


def stock_frames(name: str, source: Path, folder: Path, seed: int) -> list[Any]:
    """What the stock pipeline draws with the quantized component as its own loader gives it."""
    component, _ = CASES[name]
    row = tiny_pipelines.PIPELINES[name]
    index = json.loads((source / "model_index.json").read_text())
    model_class = getattr(diffusers, index[component][1])
    part = model_class.from_pretrained(
        str(folder), subfolder=component, torch_dtype=torch.bfloat16, use_safetensors=False
    )
    pipeline_class = getattr(diffusers, row.class_name)
    pipeline = pipeline_class.from_pretrained(str(source), torch_dtype=torch.bfloat16, **{component: part})
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 16, "width": 16, **({"num_frames": 5} if name == "wan2.2" else {})}
    generator = torch.Generator().manual_seed(seed)
    result = pipeline(
        prompt=tiny_pipelines.PROMPT, num_inference_steps=2, generator=generator, output_type="pil", **size
    )
    return list(result.frames[0] if hasattr(result, "frames") else result.images)


def arguments(name: str, source: Path, folder: Path, target: Path, *, seed: int) -> list[str]:
    video = ["--num-frames", "5"] if name == "wan2.2" else []
    return [
        "generate", str(folder), tiny_pipelines.PROMPT, "-o", str(target), "--source", str(source), "--steps", "2",
        "--height", "16", "--width", "16", "--seed", str(seed), "--device", "cpu", "--json", *video,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_the_picture_is_stocks_bit_by_bit(
    made: Made, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = made(name)
    pictures = []
    for seed in (3, 4):
        target = tmp_path / f"{seed}.png"
        assert main(arguments(name, source, folder, target, seed=seed)) == 0
        report = schemas.validated(capsys.readouterr().out, "generate")
        assert (report["kind"], report["width"], report["height"], report["frames"]) == ("image", 16, 16, 1)
        assert (report["seed"], report["steps"], report["device"]) == (seed, 2, "cpu")
        assert report["seconds_per_step"] > 0 and report["peak_memory_bytes"] > 1e8
        pictures.append(np.asarray(Image.open(target)))
        (expected,) = stock_frames(name, source, folder, seed)
        assert np.array_equal(pictures[-1], np.asarray(expected))
    assert not np.array_equal(pictures[0], pictures[1])


def test_the_video_is_stocks_bit_by_bit(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = made("wan2.2")
    assert main(arguments("wan2.2", source, folder, tmp_path / "video.webp", seed=3)) == 0
    report = schemas.validated(capsys.readouterr().out, "generate")
    assert (report["kind"], report["frames"]) == ("video", 5)
    assert sum(1 for _ in ImageSequence.Iterator(Image.open(tmp_path / "video.webp"))) > 1
    loaded = pipelines.load(folder, source=source)
    drawn = pipelines.generate(loaded, tiny_pipelines.PROMPT, seed=3, steps=2, height=16, width=16, num_frames=5)
    expected = stock_frames("wan2.2", source, folder, 3)
    assert len(drawn.frames) == len(expected) == 5
    for frame, other in zip(drawn.frames, expected, strict=True):
        assert np.array_equal(np.asarray(frame), np.asarray(other))


def test_a_whole_folder_needs_no_source(made: Made, tmp_path: Path) -> None:
    source, _ = made("flux")
    aoquant.quantize(source, {"transformer": "int8wo"}, output=tmp_path / "whole", full=True)
    pipeline = aoquant.load_pipeline(tmp_path / "whole")
    assert type(pipeline).__name__ == "FluxPipeline"
    assert type(pipeline.transformer.x_embedder.weight.data).__name__ == "Int8Tensor"


def test_a_flat_folder_takes_the_only_place_of_its_class(made: Made, tmp_path: Path) -> None:
    source, _ = made("flux")
    aoquant.quantize(source / "transformer", {"transformer": "int8wo"}, output=tmp_path / "flat")
    pipeline = aoquant.load_pipeline(tmp_path / "flat", source=source)
    assert type(pipeline.transformer.x_embedder.weight.data).__name__ == "Int8Tensor"
    source, _ = made("wan2.2")
    aoquant.quantize(source / "transformer", {"transformer": "int8wo"}, output=tmp_path / "expert")
    with pytest.raises(UsageError, match="2 components of class WanTransformer3DModel"):
        aoquant.load_pipeline(tmp_path / "expert", source=source)


class Touch:
    """Pickled as a call that would leave a trace."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        pytest.param(["--num-frames", "3"], 2, "takes no --num-frames", id="frames of a picture"),
        pytest.param(["--source", ""], 3, "", id="no source"),
        pytest.param(["--source", "nowhere/../x"], 3, "no such folder", id="missing source"),
        pytest.param(["--offload", "model"], 2, "the device is the CPU", id="offload to the CPU"),
        pytest.param(["--offload", "half"], 2, "no way to offload", id="unknown offload"),
        pytest.param(["--device", "cuda:9"], 2, "no device cuda:9", id="unknown device"),
        pytest.param(["-o", "picture.txt"], 2, "no name for a file", id="suffix"),
        pytest.param(["-o", "video.gif"], 2, "no name for a picture", id="suffix of a video"),
        pytest.param(["-o", "nowhere/picture.png"], 2, "no such folder", id="folder"),
        pytest.param(["-o", "there.png"], 2, "exists", id="exists"),
        pytest.param(["--height", "0"], 2, "height", id="no height"),
        pytest.param(["--height", "1", "--width", "1"], 4, "FluxPipeline does not draw", id="too small"),
        pytest.param(["--guidance", "nan"], 2, "no finite number", id="guidance"),
        pytest.param(["--seed", "18446744073709551616"], 2, "2^64", id="seed"),
        pytest.param(["-o", "/proc/x.png"], 2, "cannot be written", id="a place for no files"),
        pytest.param(["-o", "video.mp4"], 2, "imageio", id="no imageio"),
        pytest.param(["--source", "sdxl"], 2, "is no part of sdxl: it has no transformer", id="another pipeline"),
        pytest.param(["--source", "sd3"], 2, "its transformer is a SD3Transformer2DModel", id="another class"),
        pytest.param(
            ["--source", "evil"], 5, "text_encoder_2/pytorch_model.bin: unpickling it would run", id="unsafe rest"
        ),
        pytest.param(["--source", "evil", "--trust-pickle"], 5, "does not change", id="unsafe rest, trusted"),
    ],
)
def test_bad_input(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    changes: list[str], code: int, words: str,
) -> None:  # fmt: skip
    source, folder = made("flux")
    monkeypatch.chdir(tmp_path)
    Path("there.png").write_text("mine")
    others = {"sdxl", "sd3", "evil"} & set(changes)
    for name in others:
        if name == "evil":
            shutil.copytree(source, "evil")
            shutil.rmtree("evil/text_encoder_2")
            encoder = transformers.T5EncoderModel.from_pretrained(source / "text_encoder_2")
            encoder.config.save_pretrained("evil/text_encoder_2")
            torch.save({**encoder.state_dict(), "x": Touch()}, "evil/text_encoder_2/pytorch_model.bin")
        else:
            tiny_pipelines.save(name, tmp_path / name)
    assert main([*arguments("flux", source, folder, Path("picture.png"), seed=0), *changes]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err
    lines = err.splitlines()
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: ") and len(lines) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"there.png", *others} and Path(
        "there.png"
    ).read_text() == "mine"


def test_a_quiet_process_says_nothing_but_the_document(made: Made, tmp_path: Path) -> None:
    source, folder = made("flux")
    argv = arguments("flux", source, folder, tmp_path / "x.png", seed=0)
    argv[argv.index("--height") + 1] = "17"  # diffusers warns that it will round
    done = processes.run(["-m", "aoquant", *argv, "-q"])
    assert (done.returncode, done.stderr) == (0, "")
    assert schemas.validated(done.stdout, "generate")["height"] == 16


def test_the_rest_of_a_local_pipeline_has_to_be_named(
    made: Made, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, folder = made("flux")
    assert main(["generate", str(folder), "a fox", "-o", str(tmp_path / "x.png")]) == 2
    assert "name the pipeline flux with --source" in capsys.readouterr().err


def test_an_existing_picture_is_replaced_only_on_request(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = made("flux")
    target = tmp_path / "picture.png"
    shutil.copy(Path(__file__), target)
    assert main([*arguments("flux", source, folder, target, seed=1), "--overwrite"]) == 0
    assert Image.open(target).size == (16, 16)
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("sizes", "available", "offload", "advice"),
    [
        pytest.param([6_000, 3_000], 8_000, "none", "--offload model keeps one component", id="a component fits"),
        pytest.param([6_000, 3_000], 10_000, "none", "--offload model keeps one component", id="the weights fit"),
        pytest.param([9_000, 3_000], 8_000, "none", "--offload group keeps one block", id="a component does not fit"),
        pytest.param([6_000, 3_000], 8_000, "model", "--offload group keeps one block", id="a component is too much"),
        pytest.param([6_000, 3_000], 8_000, "group", "--offload sequential keeps one layer", id="a block is too much"),
        pytest.param([6_000, 3_000], 8_000, "sequential", "a smaller --height", id="a layer is too much"),
    ],
)
def test_what_would_fit_is_said(sizes: list[int], available: int, offload: pipelines.Offload, advice: str) -> None:
    error = pipelines.refusal(sizes, available, CUDA, offload)
    assert error.exit_code == 6 and error.hint.startswith(advice)
    words = f"its weights take {sum(sizes):,} bytes, and there are {available:,} for them and what they compute"
    assert error.message == f"the pipeline does not fit cuda:0: {words}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_offloaded_draws_the_same(made: Made, name: str) -> None:
    """From a CPU to itself: the hooks of accelerate and diffusers move every class of tensors there is."""
    source, folder = made(name)
    drawn = []
    for offload in get_args(pipelines.Offload):
        loaded = pipelines.load(folder, source=source)
        pipelines.put(loaded.pipeline, torch.device("cpu"), offload)
        size = {"height": 16, "width": 16, **({"num_frames": 5} if name == "wan2.2" else {})}
        frames = pipelines.generate(loaded, tiny_pipelines.PROMPT, seed=3, steps=2, **size).frames
        drawn.append(np.stack([np.asarray(frame) for frame in frames]))
    assert all(np.array_equal(frames, drawn[0]) for frames in drawn)


def test_what_cannot_be_compiled_is_said() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        pipelines.check_options("group", torch.device("cuda"), compile=True)
    assert pipelines.check_options("model", torch.device("cuda"), compile=True) == "model"


def test_int4_is_offloaded_in_the_class_that_computes(made: Made, tmp_path: Path) -> None:
    source, _ = made("flux")
    aoquant.quantize(source, {"transformer": "int4wo:group_size=32"}, output=tmp_path / "out")
    here, offloaded = (
        next(loading.load_each(tmp_path / "out", offloaded=offloaded)).module.state_dict()
        for offloaded in (False, True)
    )
    for name, value in here.items():
        assert type(offloaded[name].data) is type(value.data) and offloaded[name].device.type == "cpu"
    assert {type(value).__name__ for value in here.values()} > {"Int4OpaqueTensor"}


def test_a_pickle_is_trusted_on_request(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = made("flux")
    odd = shutil.copytree(folder, tmp_path / "odd")
    (odd / "aoquant.json").unlink()
    (file,) = (odd / "transformer").glob("*.bin")
    torch.save({**torch.load(file, weights_only=True), "zz": argparse.Namespace(step=1)}, file)
    argv = arguments("flux", source, odd, tmp_path / "x.png", seed=3)
    assert main(argv) == 5
    assert "argparse.Namespace" in (err := capsys.readouterr().err) and "--trust-pickle" in err
    assert not (tmp_path / "x.png").exists()
    assert main([*argv, "--trust-pickle"]) == 0
    (expected,) = stock_frames("flux", source, folder, 3)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "x.png")), np.asarray(expected))
