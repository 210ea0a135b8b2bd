"""The library's verbs, with the meaning of the commands of the same names. torch is imported when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aoquant.errors import UsageError
from aoquant.request import Options, Request, make_request

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import nn
    from typing_extensions import Unpack

    from aoquant.engine.job import Plan
    from aoquant.engine.run import Result
    from aoquant.inspection import Report

OnProgress = Callable[[str, int, int], None]
"""Called now and then with (stage, bytes done, bytes in all)."""


def quantize(
    model: str | Path,
    components: Mapping[str, str],
    *,
    on_progress: OnProgress | None = None,
    **options: Unpack[Options],
) -> Result:
    """Quantize components of a pipeline into a new folder, one block of weights in memory at a time.

    model: a local pipeline or component folder, `org/name[@revision]` on the Hub, or a name of `aoquant models`.
    components: name → config, such as `{"transformer": "int8wo", "text_encoder_2": "int4wo:group_size=64"}`.
    options: see `Options`.

    Raises UsageError, SourceError, CheckpointError, ResourceError or GateError; whatever is raised, KeyboardInterrupt
    included, nothing is left behind.
    """
    return run(make_request(str(model), components, options), on_progress=on_progress)


def plan(model: str | Path, components: Mapping[str, str], **options: Unpack[Options]) -> Plan:
    """What `quantize` with the same arguments would do: each tensor's fate, each file to the byte. Writes nothing.

    From the Hub come configs and the headers of weight files, and no weights.
    """
    return prepare(make_request(str(model), components, options))


def inspect(path: str | Path) -> Report:
    """What a checkpoint folder or weight file holds, and what is wrong with it. Runs no code from it, imports no torch.

    Raises CheckpointError if there is nothing at `path` that can be read as a checkpoint.
    """
    from aoquant.inspection import inspect as read

    return read(path)


def load(folder: str | Path, *, component: str | None = None, device: str = "cpu") -> nn.Module:
    """Load one quantized component of a checkpoint folder, as an nn.Module of its own class, onto `device`.

    component: may be left out where the folder holds one. Raises UsageError, CheckpointError or UnsafeError.
    """
    from aoquant import loading

    names = loading.component_names(folder)
    if component is None and len(names) == 1:
        component = names[0]
    if component is None or component not in names:
        asked = f"no component {component}" if component is not None else f"{len(names)} components"
        raise UsageError(f"{folder} holds {asked}", hint=f"say which: {', '.join(names)}")
    loaded: loading.Loaded = loading.load_component(folder, component, device=device)
    return loaded.module


def load_pipeline(
    folder: str | Path,
    *,
    device: str = "cpu",
    offload: str = "none",
    compile: bool = False,
    source: str | Path | None = None,
    offline: bool = False,
) -> DiffusionPipeline:
    """A diffusers pipeline around the quantized components of a checkpoint folder, ready to be called.

    The other components come from the folder (`--full`), else from the repository and commit that it was made from, or
    from `source`, a pipeline folder or `org/name[@revision]`. offload: `none`, `model`, `sequential` or `group`: how
    much of it is on the accelerator at a time. compile: torch.compile the denoiser. Raises UsageError, SourceError,
    CheckpointError, UnsafeError or ResourceError.
    """
    from aoquant import pipelines

    loaded = pipelines.load(folder, device=device, offload=offload, compile=compile, source=source, offline=offline)
    pipeline: DiffusionPipeline = loaded.pipeline
    return pipeline


def prepare(request: Request) -> Plan:
    """Open the source of `request`, and plan it."""
    from aoquant.source import open_source

    _refuse_device(request)
    source = open_source(
        request.model,
        components=tuple(request.configs),
        revision=request.revision,
        variant=request.variant,
        offline=request.offline,
    )
    from aoquant.engine.job import make_plan

    return make_plan(
        source,
        request.configs,
        folder=request.output,
        format=request.format,
        dtype=request.dtype,
        skip=request.skip,
        max_shard_bytes=request.max_shard_bytes,
        full=request.full,
    )


def _refuse_device(request: Request) -> None:
    """Raise UsageError where a config is made on CUDA only, and the device is another one."""
    bound = [config for config in request.configs.values() if config.options.get("layout") == "tile_packed"]
    if not bound:
        return
    from aoquant.engine import devices

    device = devices.choose(request.device)
    if device.type != "cuda":
        raise UsageError(
            f"{bound[0]} is packed by CUDA, and the device is {device}",
            hint=f"write {bound[0].row.name}: it is made anywhere, and aoquant.load packs it where it loads",
        )


def run(request: Request, *, on_progress: OnProgress | None = None) -> Result:
    """Plan `request` and carry the plan out."""
    from aoquant.output import check_place

    check_place(request.output, overwrite=request.overwrite)  # before anything is fetched
    job = prepare(request)
    from aoquant.engine import devices
    from aoquant.engine.run import write

    device = devices.choose(request.device)
    return write(job, device=device, overwrite=request.overwrite, on_progress=on_progress)
