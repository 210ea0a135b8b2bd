"""All or nothing, and in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import aoquant
from aoquant.engine.run import write
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UsageError
from tests.light import processes

Folder = Callable[..., Path]
Make = Callable[..., Any]
INT8 = {"transformer": "int8wo"}
FORMATS = pytest.mark.parametrize("file_format", ["bin", "safetensors"])
TARGETS = pytest.mark.parametrize("target", ["fresh", "over"])


def tree(folder: Path) -> dict[str, str]:
    """Every path below `folder`, hidden ones too, and the hash of each file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def place(made: Make, tmp_path: Path) -> Callable[[str], Path]:
    """`place("fresh")` → an output that is not there, alone in its folder; `place("over")` → one that is."""

    def get(target: str) -> Path:
        output = tmp_path / "place" / "out"
        output.parent.mkdir()
        if target == "over":
            shutil.copytree(made("flux", "fp8wo", max_shard_size=50_000).plan.output, output)
        return output

    return get


@contextlib.contextmanager
def untouched(output: Path) -> Iterator[None]:
    """Fail unless the folder around `output` is afterwards as it was, byte for byte, with nothing more in it."""
    before = tree(output.parent)
    yield
    assert tree(output.parent) == before


class StopError(Exception):
    pass


def stop(when: str, error: BaseException) -> Callable[[str, int, int], None]:
    """A progress callback that raises `error`: at the "first" call, in the "middle", or at the "last" file."""

    def on_progress(stage: str, done: int, total: int) -> None:
        if when == "first" or (when == "middle" and done > total / 2) or (when == "last" and stage == "aoquant.json"):
            raise error

    return on_progress


@FORMATS
@TARGETS
@pytest.mark.parametrize("when", ["first", "middle", "last"])
@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_exception_leaves_nothing_behind(
    error: type[BaseException], when: str, target: str, file_format: str, place: Folder, tiny_folder: Folder
) -> None:
    output = place(target)
    options: dict[str, Any] = {"format": file_format, "overwrite": True, "on_progress": stop(when, error())}
    with untouched(output), pytest.raises(error):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, **options)


def test_a_run_after_an_interrupted_one_succeeds(place: Folder, tiny_folder: Folder, made: Make) -> None:
    output = place("fresh")
    with pytest.raises(KeyboardInterrupt):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, on_progress=stop("middle", KeyboardInterrupt()))
    aoquant.quantize(tiny_folder("flux"), INT8, output=output)
    assert tree(output) == tree(made("flux", "int8wo").plan.output)


def test_parents_that_were_made_go_again(tiny_folder: Folder, tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "out"
    with untouched(tmp_path / "a"), pytest.raises(StopError):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, on_progress=stop("middle", StopError()))
    assert not (tmp_path / "a").exists()
    aoquant.quantize(tiny_folder("flux"), INT8, output=output)
    assert aoquant.inspect(output).is_sound


@TARGETS
@pytest.mark.parametrize("source_format", ["bin", "safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_source_that_is_damaged_after_it_was_planned(
    damage: str, source_format: str, target: str, place: Folder, tiny_folder: Folder, tmp_path: Path
) -> None:
    output = place(target)
    source = shutil.copytree(tiny_folder("flux", format=source_format), tmp_path / "source")
    planned = aoquant.plan(source, INT8, output=output)
    (file,) = source.glob(f"*.{source_format}")
    if damage == "truncated":
        os.truncate(file, file.stat().st_size * 2 // 3)
    else:
        file.unlink()
    words = f"{file.name} ends [0-9]+ bytes early" if damage == "truncated" else f"{file.name} cannot be read"
    with untouched(output), pytest.raises(CheckpointError, match=words):
        write(planned, device=torch.device("cpu"), overwrite=True)


@TARGETS
def test_weights_that_are_not_finite_are_met_in_the_middle(
    target: str, place: Folder, tiny_folder: Folder, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    output = place(target)
    source = shutil.copytree(tiny_folder("flux"), tmp_path / "source")
    (file,) = source.glob("*.safetensors")
    state = load_file(file)
    state["x_embedder.weight"][3, 3] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    with untouched(output), pytest.raises(CheckpointError, match=r"x_embedder\.weight holds NaN"):
        aoquant.quantize(source, INT8, output=output, overwrite=True)


# --- a full disk ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: the write fails as on a full disk (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@FORMATS
@TARGETS
def test_a_file_that_may_not_grow(target: str, file_format: str, place: Folder, tiny_folder: Folder) -> None:
    output = place(target)
    words = "the disk of .* is full"
    with untouched(output), pytest.raises(ResourceError, match=words) as caught, file_size_limit(100_000):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, format=file_format, overwrite=True)
    assert "nothing was left behind" in caught.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@FORMATS
@TARGETS
def test_a_disk_that_fills_up_on_the_way(
    target: str, file_format: str, small_disk: Path, made: Make, tiny_folder: Folder
) -> None:
    output = small_disk / "out"
    if target == "over":
        shutil.copytree(made("flux", "int8wo").plan.output, output)
    filler = small_disk / "filler"

    def fill(stage: str, done: int, total: int) -> None:
        if not filler.exists():
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    before = tree(small_disk)
    with pytest.raises(ResourceError, match=r"the disk of .* is full"):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, format=file_format, overwrite=True, on_progress=fill)
    filler.unlink()
    assert tree(small_disk) == before


def test_a_disk_that_is_too_small_is_known_before_the_first_byte(small_disk: Path, tiny_folder: Folder) -> None:
    (small_disk / "filler").write_bytes(bytes(1_900_000))
    told: list[str] = []
    with untouched(small_disk / "out"), pytest.raises(ResourceError, match=r"[\d,]+ bytes are needed for .*/out"):
        aoquant.quantize(
            tiny_folder("flux"), INT8, output=small_disk / "out", on_progress=lambda stage, *_: told.append(stage)
        )
    assert not told


def test_a_plan_says_that_the_disk_is_too_small(small_disk: Path, tiny_folder: Folder) -> None:
    (small_disk / "full").write_bytes(bytes(1_900_000))
    planned = aoquant.plan(tiny_folder("flux"), INT8, output=small_disk / "out")
    assert any("are free on its disk" in warning for warning in planned.warnings)


def test_torchs_own_objects_name_dtype_and_device(place: Folder, tiny_folder: Folder) -> None:
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    result = aoquant.quantize(tiny_folder("flux"), INT8, output=place("fresh"), **options)
    assert (result.plan.dtype, result.device) == ("float32", "cpu")


def test_a_plan_that_needs_more_than_the_disk_has(place: Folder, tiny_folder: Folder) -> None:
    output = place("fresh")
    planned = aoquant.plan(tiny_folder("flux"), INT8, output=output)
    huge = dataclasses.replace(planned.files[0], num_bytes=1 << 60)
    with untouched(output), pytest.raises(ResourceError, match="bytes are needed"):
        write(dataclasses.replace(planned, files=(*planned.files, huge)), device=torch.device("cpu"))


# --- what is in the way ---------------------------------------------------------------------------------------------


@FORMATS
def test_overwrite_leaves_no_file_of_the_old_checkpoint(
    file_format: str, place: Folder, made: Make, tiny_folder: Folder
) -> None:
    output = place("over")
    (output / "transformer").mkdir()
    assert len(list(output.glob("*.bin"))) > 2
    aoquant.quantize(tiny_folder("flux"), INT8, output=output, format=file_format, overwrite=True)
    assert tree(output) == tree(made("flux", "int8wo", format=file_format).plan.output)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["foreign folder", "file", "link", "checkpoint"])
def test_what_is_in_the_way_stays(
    kind: str, overwrite: bool, place: Folder, tiny_folder: Folder, made: Make, tmp_path: Path
) -> None:
    if kind == "checkpoint" and overwrite:
        return  # the one case that may be replaced
    output = place("fresh")
    if kind == "foreign folder":
        output.mkdir()
        (output / "thesis.tex").write_text("years of work")
    elif kind == "file":
        output.write_text("years of work")
    elif kind == "link":
        output.symlink_to(shutil.copytree(made("flux", "int8wo").plan.output, tmp_path / "elsewhere"))
    else:
        shutil.copytree(made("flux", "int8wo").plan.output, output)
    with untouched(output), pytest.raises(UsageError):
        aoquant.quantize(tiny_folder("flux"), INT8, output=output, overwrite=overwrite)


def test_an_empty_folder_is_replaced_when_asked(place: Folder, tiny_folder: Folder) -> None:
    output = place("fresh")
    output.mkdir()
    aoquant.quantize(tiny_folder("flux"), INT8, output=output, overwrite=True)
    assert aoquant.inspect(output).is_sound


@pytest.mark.parametrize("inside", ["", "out", "a/b"])
def test_the_source_is_never_the_output_nor_changed(inside: str, tiny_folder: Folder, tmp_path: Path) -> None:
    """A folder in the source is a fine place, though; the source's own files stay as they were."""
    source = shutil.copytree(tiny_folder("flux"), tmp_path / "source")
    before = tree(source)
    if inside:
        aoquant.quantize(source, INT8, output=source / inside, overwrite=True)
    else:
        with pytest.raises(UsageError):
            aoquant.quantize(source, INT8, output=source, overwrite=True)
    after = tree(source)
    assert {path: after[path] for path in before} == before


def test_the_default_output_is_named_after_model_and_config(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder("flux"), tmp_path / "FLUX.tiny")
    monkeypatch.chdir(tmp_path)
    result = aoquant.quantize("FLUX.tiny", {"transformer": "uint4wo:group_size=16"})
    assert result.plan.output == Path("FLUX.tiny-uint4wo-group_size16")
    assert {path.name for path in tmp_path.iterdir()} == {"FLUX.tiny", "FLUX.tiny-uint4wo-group_size16"}
    assert aoquant.inspect("FLUX.tiny-uint4wo-group_size16").is_sound


# --- results --------------------------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("config_text", ["int8wo", "fp8dq"])
def test_progress_goes_up_to_the_whole(config_text: str, file_format: str, tiny_folder: Folder, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    result = aoquant.quantize(
        tiny_folder("flux"),
        {"transformer": config_text},
        output=tmp_path / "out",
        format=file_format,
        on_progress=lambda *call: told.append(call),
    )
    done = [call[1] for call in told]
    assert done == sorted(done)
    assert {call[2] for call in told} == {result.plan.output_bytes}
    framing = result.plan.output_bytes - done[-1]  # headers and checksums, which are nobody's data
    assert 0 <= framing < 100_000
    assert f"FluxTransformer2DModel → {config_text}" in {call[0] for call in told}


def test_the_result_lists_every_file(tiny_folder: Folder, tmp_path: Path) -> None:
    result = aoquant.quantize(tiny_folder("flux"), INT8, output=tmp_path / "out", device="cpu")
    listed = {str(file.path): (file.num_bytes, file.sha256) for file in result.files}
    hashes = tree(tmp_path / "out")
    assert listed == {path: ((tmp_path / "out" / path).stat().st_size, digest) for path, digest in hashes.items()}
    document = result.to_json(snippet="…")
    assert json.loads(json.dumps(document)) == document
    assert (document["schema"], document["device"], document["on_cpu"]) == ("aoquant.quantize/1", "cpu", [])


def test_nothing_says_where_the_source_was(tiny_folder: Folder, tmp_path: Path) -> None:
    """No path of this machine is in the output."""
    aoquant.quantize(tiny_folder("t5"), {"text_encoder": "int8wo"}, output=tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        content = path.read_bytes()
        assert str(tmp_path).encode() not in content and str(tiny_folder("t5")).encode() not in content, path.name


def test_torchs_threads_are_as_before(tiny_folder: Folder, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        aoquant.quantize(tiny_folder("flux"), INT8, output=tmp_path / "out")
        assert torch.get_num_threads() == 2
        with pytest.raises(AoquantError):
            aoquant.quantize(tiny_folder("flux"), INT8, output=tmp_path / "out")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- memory ---------------------------------------------------------------------------------------------------------

_MEASURE = """
import json, shutil, struct, sys
from pathlib import Path
import accelerate, diffusers, torch
import aoquant

def source(folder, layers):
    # A Flux of wide layers, 31 MB in bfloat16 for each single block, never in memory as a whole.
    folder.mkdir()
    config = {
        "patch_size": 1, "in_channels": 64, "num_layers": 0, "num_single_layers": layers, "attention_head_dim": 128,
        "num_attention_heads": 8, "joint_attention_dim": 64, "pooled_projection_dim": 64, "guidance_embeds": False,
        "axes_dims_rope": (32, 48, 48),
    }
    with accelerate.init_empty_weights():
        model = diffusers.FluxTransformer2DModel(**config)
    model.save_config(str(folder))
    header, end = {}, 0
    for name, value in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [end, end + 2 * value.numel()]}
        end += 2 * value.numel()
    text = json.dumps(header).encode()
    values = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0)).bfloat16()
    run = values.view(torch.uint8).numpy().tobytes()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, len(run)):
            file.write(run[: end - start])
    return end

def peak_bytes():
    # Not ru_maxrss, which a child takes over from the process that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

here = Path(sys.argv[1])
sizes = {"small": source(here / "small", 2), "large": source(here / "large", 8)}
peaks = {}
for config, file_format in (
    ("int8wo", "bin"), ("int8wo", "safetensors"), ("fp8dq", "bin"), ("int4wo", "bin"), ("uint7wo", "bin"),
    ("fp6wo", "safetensors"),
):
    for size in sizes:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
        aoquant.quantize(here / size, {"transformer": config}, output=here / "out", format=file_format, device="cpu")
        peaks[f"{config} {file_format} {size}"] = peak_bytes()
        shutil.rmtree(here / "out")
print(json.dumps({"sizes": sizes, "peaks": peaks}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """Of 60 MB of weights and of 240 MB, in both formats, and where a whole weight is looked at before it is made."""
    run = processes.run(["-c", _MEASURE, str(tmp_path)])
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert 55e6 < found["sizes"]["small"] < 75e6 and found["sizes"]["large"] > 240e6
    peaks = found["peaks"]
    growth = {
        name: peaks[f"{name} large"] - peak for key, peak in peaks.items() if (name := key[:-6]) + " small" == key
    }
    assert len(growth) == 6
    assert max(growth.values()) < 25e6, peaks
