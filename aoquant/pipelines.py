"""A whole pipeline around a checkpoint's quantized components, and what it draws.

The other components come from the checkpoint's own folder, or from the source that its manifest names, at the recorded
commit. Nothing quantized is ever cast.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect as signatures
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from aoquant import loading, output
from aoquant.checkpoint.layout import MODEL_INDEX
from aoquant.checkpoint.pickles import read_pickle_file
from aoquant.engine import devices, libraries
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UnsafeError, UsageError, is_out_of_memory
from aoquant.inspection import inspect
from aoquant.report import Report
from aoquant.source import Source, open_source

SCHEMA = "aoquant.generate/1"

Offload = Literal["none", "model", "group", "sequential"]
"""How much of a pipeline is on the accelerator at a time: all, one component, one block, one layer."""

OnProgress = Callable[[str, int, int], None]

_IMAGES = (".png", ".jpg", ".jpeg", ".webp")
_VIDEOS = (".gif", ".webp", ".mp4")
_DENOISERS = ("transformer", "transformer_2", "unet", "prior")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline:
    """A pipeline that can be called. device: where it computes."""

    pipeline: Any
    folder: Path
    device: torch.device
    offload: Offload
    is_compiled: bool
    seconds: float

    @property
    def is_video(self) -> bool:
        return "num_frames" in self.parameters

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What a call of the pipeline takes."""
        return signatures.signature(self.pipeline.__call__).parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one call drew. frames: PIL images, one for a picture. step_seconds: each denoising step's."""

    frames: list[Any]
    is_video: bool
    seed: int
    seconds: float
    step_seconds: tuple[float, ...]
    peak_bytes: int

    def to_json(self, loaded: LoadedPipeline, output: Path) -> dict[str, Any]:
        """The result as JSON values, `aoquant.generate/1`."""
        return {
            "schema": SCHEMA,
            "output": output.as_posix(),
            "kind": "video" if self.is_video else "image",
            "pipeline": type(loaded.pipeline).__name__,
            "width": self.frames[0].width,
            "height": self.frames[0].height,
            "frames": len(self.frames),
            "seed": self.seed,
            "device": str(loaded.device),
            "offload": loaded.offload,
            "compiled": loaded.is_compiled,
            "load_seconds": round(loaded.seconds, 3),
            "seconds": round(self.seconds, 3),
            "steps": len(self.step_seconds),
            "seconds_per_step": self.seconds_per_step,
            "peak_memory_bytes": self.peak_bytes,
        }

    @property
    def seconds_per_step(self) -> float | None:
        """The median; without the first step, which warms up or compiles, where there are others."""
        steps = self.step_seconds[1:] or self.step_seconds
        return statistics.median(steps) if steps else None


def load(
    folder: str | Path,
    *,
    device: str = "cpu",
    offload: str = "none",
    compile: bool = False,
    source: str | Path | None = None,
    offline: bool = False,
    trust_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> LoadedPipeline:
    """Load a checkpoint's quantized components onto `device`, and the rest of their pipeline around them.

    source: where the other components are (a local pipeline folder or `org/name[@revision]`), if they are not in the
    folder and not where the manifest says. compile: the denoiser's repeated blocks, or all of it where diffusers knows
    of none. trust_pickle: as in `loading.load_component`. Raises UsageError, SourceError, CheckpointError, UnsafeError
    or ResourceError.
    """
    libraries.load("diffusers")  # what that takes is no part of the loading
    start = time.perf_counter()
    place = devices.choose(device)
    mode = check_options(offload, place, compile=compile)
    report = inspect(folder)
    names = loading.component_names(folder)
    rest = find_source(report, Path(folder), source, offline=offline)
    if rest.model_index is None:
        raise UsageError(f"{rest.model} is a single component, not a pipeline", hint="name a pipeline with --source")
    roles = {name: name or role_of(report, rest.model_index) for name in names}
    _check_roles(report, roles, rest)
    others = [path for path, _ in rest.other_files(quantized=tuple(roles.values())).values()]
    modules: dict[str, nn.Module] = {}
    with rest.arriving(others, on_progress=on_progress) as wait:
        for name, module in _quantized(report, place, mode, trust_pickle=trust_pickle):
            modules[roles[name]] = module
        for path in others:
            wait(path)
            if path.suffix == ".bin":
                _refuse_unsafe(path, trust_pickle=trust_pickle)
    dtype = loading.dtype_of(next(component for component in report.components if component.name == names[0]))
    pipeline = _assemble(rest, modules, dtype)
    with _fitting(pipeline, place, mode):
        put(pipeline, place, mode)
    if compile:
        _compile(pipeline, is_offloaded=mode != "none")
    return LoadedPipeline(
        pipeline=pipeline,
        folder=Path(folder),
        device=place,
        offload=mode,
        is_compiled=compile,
        seconds=time.perf_counter() - start,
    )


def generate(
    loaded: LoadedPipeline,
    prompt: str,
    *,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
) -> Generated:
    """Draw one picture or video. What is left out is the pipeline's own default.

    The seed is that of a generator on the CPU, so that it means the same noise on every device. Raises UsageError for
    what the pipeline does not take; ResourceError if it does not fit the device.
    """
    pipeline = loaded.pipeline
    asked = {
        "num_inference_steps": steps, "guidance_scale": guidance, "height": height, "width": width,
        "num_frames": num_frames,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if guidance is not None and not math.isfinite(guidance):
        raise UsageError(f"--guidance {guidance} is no finite number", hint="usual values lie between 1 and 10")
    if not 0 <= seed < 2**64:
        raise UsageError(f"--seed {seed} is not from 0 to 2^64 - 1", hint="choose another one")
    takes = loaded.parameters
    for name, option in _OPTIONS.items():
        if name in given and name not in takes:
            raise UsageError(f"{type(pipeline).__name__} takes no {option}", hint="leave it out")
    if "output_type" in takes:
        given["output_type"] = "pil"  # some videos come as arrays else
    ends: list[float] = []
    if "callback_on_step_end" in takes:
        given["callback_on_step_end"] = _clock(loaded.device, ends)
    _reset_peak(loaded.device)
    start = time.perf_counter()
    with _fitting(pipeline, loaded.device, loaded.offload), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile's, about its cache and its own parts
        try:
            result = pipeline(prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed), **given)
        except ValueError as error:  # diffusers checks sizes and counts so
            raise UsageError(
                f"{type(pipeline).__name__}: {' '.join(str(error).split())[:200]}", hint="change that option"
            ) from error
        except (RuntimeError, AttributeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"{type(pipeline).__name__} does not draw: {' '.join(str(error).split())[:200]}",
                hint="its components may be of different models, or --height and --width too small",
            ) from error
    seconds = time.perf_counter() - start
    drawn = result.frames[0] if hasattr(result, "frames") else result.images
    return Generated(
        frames=_as_images(drawn),
        is_video=loaded.is_video,
        seed=seed,
        seconds=seconds,
        step_seconds=tuple(end - begin for begin, end in zip([start, *ends], ends, strict=False)),
        peak_bytes=peak_bytes(loaded.device),
    )


_OPTIONS = {
    "num_inference_steps": "--steps", "guidance_scale": "--guidance", "height": "--height", "width": "--width",
    "num_frames": "--num-frames",
}  # fmt: skip


def check_target(target: Path, *, is_video: bool | None = None, overwrite: bool = False) -> None:
    """Raise UsageError if a picture or video cannot be written to `target`, as far as its name tells."""
    suffixes = sorted({*_IMAGES, *_VIDEOS}) if is_video is None else _VIDEOS if is_video else _IMAGES
    if target.suffix.lower() not in suffixes:
        what = "a file" if is_video is None else "a video" if is_video else "a picture"
        raise UsageError(f"{target} is no name for {what}", hint=f"end it in {', '.join(suffixes)}")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"{target} cannot be written: no such folder", hint="make the folder, or choose another one")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists", hint="choose another --output, or replace it with --overwrite")
    if target.suffix.lower() == ".mp4":
        _imageio()
    output.check_file(target, hint="choose another place for it")


def save(generated: Generated, target: Path, *, fps: int = 16) -> None:
    """Write the picture or the video; an existing file is replaced when the new one is whole."""
    first, *others = generated.frames
    with output.replacing(target) as beside:
        if target.suffix.lower() == ".mp4":
            _save_mp4(generated.frames, beside, fps)
        elif generated.is_video:
            first.save(beside, save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
        else:
            first.save(beside)


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use: the accelerator's own count since the call began, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "xpu":
        return torch.xpu.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if os.uname().sysname == "Darwin" else usage * 1024


def _reset_peak(device: torch.device) -> None:
    devices.synchronize(device)  # which sets it up
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).reset_peak_memory_stats(device)


def _clock(device: torch.device, ends: list[float]) -> Callable[..., dict[str, Any]]:
    def on_step_end(_pipeline: Any, _step: int, _timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        devices.synchronize(device)
        ends.append(time.perf_counter())
        return kwargs

    return on_step_end


def check_options(name: str, place: torch.device, *, compile: bool) -> Offload:
    """The way to offload called `name`. Raises UsageError if there is none, or not on `place` or compiled."""
    if name not in get_args(Offload):
        raise UsageError(f"'{name}' is no way to offload", hint=f"--offload is {', '.join(get_args(Offload))}")
    if name != "none" and place.type == "cpu":
        raise UsageError(
            f"--offload {name} moves weights between an accelerator and the CPU, and the device is the CPU",
            hint="leave it out, or name an accelerator with --device",
        )
    if compile and name in ("group", "sequential"):
        raise UsageError(
            f"--compile and --offload {name} exclude each other: what moves blocks cannot be compiled",
            hint="leave one of them out, or take --offload model",
        )
    return cast("Offload", name)


def find_source(
    report: Report, folder: Path, source: str | Path | None, *, offline: bool, components: Collection[str] | None = None
) -> Source:
    """The model that the quantized components of `folder` belong to.

    components: which of its own to open, unquantized; None for a pipeline's others, which `folder` itself may hold.
    Raises UsageError if it is not said where that is.
    """
    if source is not None:
        return open_source(str(source), components=components or (), offline=offline)
    variant = report.source.get("variant")
    if components is None and (folder / MODEL_INDEX).is_file():
        return open_source(str(folder), components=(), variant=variant)
    if repo_id := report.source.get("repo_id"):
        revision = report.source.get("revision")
        return open_source(repo_id, components=components or (), revision=revision, variant=variant, offline=offline)
    origin = report.source.get("model")
    lacks, what = ("no whole pipeline", "pipeline") if components is None else ("nothing unquantized", "model")
    raise UsageError(
        f"{folder} holds {lacks}, and does not say where that is",
        hint=f"name the {what}{f' {origin}' if origin else ''} with --source, a folder or org/name",
    )


def _quantized(
    report: Report, place: torch.device, offload: Offload, *, trust_pickle: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each component in the checkpoint."""
    each = loading.load_each(report.path, device=str(place), trust_pickle=trust_pickle, offloaded=offload != "none")
    try:
        for loaded in each:
            yield loaded.report.name, loaded.module
    except ResourceError as error:
        sizes = [component.weight_bytes for component in report.components if component.num_quantized]
        raise refusal(sizes, devices.available_bytes(place), place, offload) from error


def _check_roles(report: Report, roles: Mapping[str, str], rest: Source) -> None:
    """Raise UsageError unless the pipeline has each component: diffusers drops those that it does not know."""
    for component in report.components:
        if component.name not in roles:
            continue
        role = roles[component.name]
        entry = (rest.model_index or {}).get(role)
        found = entry[-1] if isinstance(entry, list) and entry else None
        if found == component.class_name:
            continue
        has = f"its {role} is a {found}" if found else f"it has no {role}"
        raise UsageError(
            f"{component.title}, a {component.class_name}, is no part of {rest.model}: {has}",
            hint="name the pipeline that it was made from with --source",
        )


def _refuse_unsafe(path: Path, *, trust_pickle: bool) -> None:
    """Raise UnsafeError if unpickling a file of the pipeline's other components would run code.

    diffusers and transformers would not let it, in words that advise to.
    """
    named = read_pickle_file(path).suspicious
    if named:
        more = ", which --trust-pickle does not change: it is for quantized components" if trust_pickle else ""
        raise UnsafeError(
            f"{path.parent.name}/{path.name}: unpickling it would run code: {', '.join(named[:3])}{more}",
            hint="take the pipeline from a source that you trust, or in safetensors",
        )


def role_of(report: Report, index: Mapping[str, Any]) -> str:
    """The component of a pipeline that a flat checkpoint folder can be: the only one of its class."""
    (component,) = report.components
    roles = [name for name, value in index.items() if isinstance(value, list) and value[-1] == component.class_name]
    if len(roles) != 1:
        found = f"{len(roles)} components" if roles else "no component"
        raise UsageError(
            f"the pipeline has {found} of class {component.class_name}",
            hint="quantize the pipeline, not the component alone, so that the folder says which it is",
        )
    return roles[0]


def _assemble(rest: Source, modules: Mapping[str, nn.Module], dtype: torch.dtype) -> Any:
    diffusers = libraries.load("diffusers")
    options: dict[str, Any] = {"torch_dtype": dtype, "local_files_only": True}
    if rest.variant is not None:
        options["variant"] = rest.variant
    with libraries.quiet():
        # Not DiffusionPipeline: see Origin.pipeline_class.
        pipeline_class: Any = getattr(diffusers, rest.pipeline_class or "", diffusers.DiffusionPipeline)
        try:
            pipeline = pipeline_class.from_pretrained(str(rest.folder), **modules, **options)
        except Exception as error:
            raise CheckpointError(
                f"the pipeline of {rest.model} does not load: {' '.join(str(error).split())[:200]}",
                hint="its other components may be incomplete, or of other versions",
            ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def put(pipeline: Any, place: torch.device, offload: Offload) -> None:
    """Have `pipeline` compute on `place`, with as much of it there at a time as `offload` says.

    Raises UsageError for a pipeline that cannot be offloaded so.
    """
    try:
        _put(pipeline, place, offload)
    except ValueError as error:
        raise UsageError(
            f"{type(pipeline).__name__} cannot be offloaded so: {' '.join(str(error).split())[:200]}",
            hint="choose another --offload, or none",
        ) from error


def _put(pipeline: Any, place: torch.device, offload: Offload) -> None:
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=place)
    elif offload != "none":
        # Not accelerate's sequential offloading, which takes torchao's tensors apart; leaf by leaf, this does the same.
        # No streams: they want pinned memory, and not every class of tensors can be in it.
        level = "leaf_level" if offload == "sequential" else "block_level"
        pipeline.enable_group_offload(onload_device=place, offload_type=level, num_blocks_per_group=1)
    elif place.type != "cpu":
        pipeline.to(place)


def _compile(pipeline: Any, *, is_offloaded: bool) -> None:
    for name in _DENOISERS:
        module = getattr(pipeline, name, None)
        if isinstance(module, nn.Module):
            compile_module(module, is_offloaded=is_offloaded)


def compile_module(module: nn.Module, *, is_offloaded: bool = False) -> None:
    """torch.compile `module` in place: its repeated blocks, or all of it where diffusers knows of none.

    In one graph, but for a whole module that is offloaded: what moves it is in the way.
    """
    if getattr(module, "_repeated_blocks", None):
        # nn.Module's stub takes diffusers' own method for a tensor.
        module.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
    else:
        module.compile(fullgraph=not is_offloaded)


@contextlib.contextmanager
def _fitting(pipeline: Any, place: torch.device, offload: Offload) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        sizes = [loading.storage_bytes([*part.parameters(), *part.buffers()]) for part in modules]
        raise refusal(sizes, devices.available_bytes(place), place, offload) from error


def refusal(sizes: Sequence[int], available: int | None, place: torch.device, offload: Offload) -> ResourceError:
    """The error for a pipeline whose components take `sizes` bytes, where `available` bytes were not enough.

    Its hint is the least offloading, beyond the present one, with which the weights fit.
    """
    has = f", and there are {available:,} for them and what they compute" if available is not None else ""
    needed = {"none": sum(sizes), "model": max(sizes, default=0), "group": 0, "sequential": 0}
    stronger = list(needed)[list(needed).index(offload) + 1 :] if place.type != "cpu" else []
    fitting = [name for name in stronger if available is None or needed[name] < available]
    hint = f"--offload {fitting[0]} keeps {_KEPT[fitting[0]]} there at a time; " if fitting else ""
    return ResourceError(
        f"the pipeline does not fit {place}: its weights take {sum(sizes):,} bytes{has}",
        hint=f"{hint}a smaller --height and --width take less",
    )


_KEPT = {"model": "one component", "group": "one block", "sequential": "one layer"}


def _as_images(drawn: Any) -> list[Any]:
    from PIL import Image

    if isinstance(drawn, list) and all(isinstance(frame, Image.Image) for frame in drawn):
        return drawn
    raise AoquantError(f"the pipeline drew {type(drawn).__name__}, no pictures: this kind is not supported yet")


def _save_mp4(frames: list[Any], target: Path, fps: int) -> None:
    _imageio()
    from diffusers.utils import export_to_video

    with libraries.quiet():
        export_to_video(frames, str(target), fps=fps)


def _imageio() -> None:
    try:
        for name in ("imageio", "imageio_ffmpeg"):
            importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            "writing .mp4 needs the imageio and imageio-ffmpeg packages",
            hint="pip install imageio imageio-ffmpeg; or end --output in .gif or .webp",
        ) from error
