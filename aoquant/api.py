"""The library's verbs, with the meaning of the commands of the same names. torch is imported when it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aoquant.errors import AoquantError, GateError, UsageError
from aoquant.request import Options, Request, make_request

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from torch import nn
    from typing_extensions import Unpack

    from aoquant.engine.job import Plan
    from aoquant.engine.run import Result
    from aoquant.inspection import Report
    from aoquant.joining import Joined
    from aoquant.upgrading import Upgraded
    from aoquant.upload import Pushed
    from aoquant.verification import Verification

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
    included, nothing is left behind, but for a finished folder that could not be uploaded.
    """
    request = make_request(str(model), components, options)
    return push_result(request, run(request, on_progress=on_progress), on_progress=on_progress)


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


def load(
    folder: str | Path, *, component: str | None = None, device: str = "cpu", trust_pickle: bool = False
) -> nn.Module:
    """Load one quantized component of a checkpoint folder, as an nn.Module of its own class, onto `device`.

    component: may be left out where the folder holds one. trust_pickle: where no safe way works, unpickle a
    `.bin` without any check, which runs whatever it says. Raises UsageError, CheckpointError or UnsafeError.
    """
    from aoquant import loading

    names = loading.component_names(folder)
    if component is None and len(names) == 1:
        component = names[0]
    if component is None or component not in names:
        asked = f"no component {component}" if component is not None else f"{len(names)} components"
        raise UsageError(f"{folder} holds {asked}", hint=f"say which: {', '.join(names)}")
    loaded: loading.Loaded = loading.load_component(folder, component, device=device, trust_pickle=trust_pickle)
    return loaded.module


def load_pipeline(
    folder: str | Path,
    *,
    device: str = "cpu",
    offload: str = "none",
    compile: bool = False,
    source: str | Path | None = None,
    offline: bool = False,
    trust_pickle: bool = False,
) -> DiffusionPipeline:
    """A diffusers pipeline around the quantized components of a checkpoint folder, ready to be called.

    The other components come from the folder (`--full`), else from the repository and commit that it was made from, or
    from `source`, a pipeline folder or `org/name[@revision]`. offload: `none`, `model`, `group` or `sequential`: how
    much of it is on the accelerator at a time. compile: torch.compile the denoiser. trust_pickle: as in `load`. Raises
    UsageError, SourceError, CheckpointError, UnsafeError or ResourceError.
    """
    from aoquant import pipelines

    loaded = pipelines.load(
        folder,
        device=device,
        offload=offload,
        compile=compile,
        source=source,
        offline=offline,
        trust_pickle=trust_pickle,
    )
    pipeline: DiffusionPipeline = loaded.pipeline
    return pipeline


def upgrade(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Upgraded:
    """Write a checkpoint of torchao's earlier tensor classes anew in today's, its values bit by bit the same.

    output: default `FOLDER-upgraded`. The original model is not needed. Raises as `aoquant.upgrading.upgrade`.
    """
    from aoquant import upgrading

    return upgrading.upgrade(folder, output, overwrite=overwrite, on_progress=on_progress)


def verify(folder: str | Path, *, on_progress: OnProgress | None = None) -> Verification:
    """Check every file of a checkpoint folder against its aoquant.json, to the last byte. Imports no torch.

    Raises CheckpointError unless all is as aoquant wrote it; UnsafeError if unpickling a file would run code.
    """
    from aoquant.verification import verify as check

    found = check(folder, on_progress=on_progress)
    found.require_sound()
    return found


def join(
    output: str | Path,
    folders: Sequence[str | Path],
    *,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Joined:
    """Merge checkpoint folders of different components of one pipeline into `output`. Imports no torch.

    The result is what one `quantize` of all the components would have made. Raises as `aoquant.joining.join`.
    """
    from aoquant.joining import join as merge

    return merge(output, folders, overwrite=overwrite, on_progress=on_progress)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    on_progress: OnProgress | None = None,
) -> Pushed:
    """Verify a checkpoint folder and upload it to the repository `repo_id` of the Hub, in one commit. Imports no torch.

    Raises CheckpointError for a folder that does not verify; SourceError if the Hub does not take it; UsageError for a
    public repository that was to be private.
    """
    from aoquant.upload import push as upload

    return upload(folder, repo_id, private=private, create_pr=create_pr, on_progress=on_progress)


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

    plan = make_plan(
        source,
        request.configs,
        folder=request.output,
        format=request.format,
        dtype=request.dtype,
        skip=request.skip,
        max_shard_bytes=request.max_shard_bytes,
        full=request.full,
    )
    if request.max_bytes is not None and plan.output_bytes > request.max_bytes:
        raise _too_large(plan, request.max_bytes)
    return plan


def _too_large(plan: Plan, max_bytes: int) -> GateError:
    largest = max(plan.components, key=lambda component: component.tensor_bytes)
    title = largest.source.name or largest.source.class_name
    copied = sum(file.num_bytes for file in plan.files if file.kind == "copy")
    hint = f"a config of fewer bits: {title} takes {largest.tensor_bytes:,} bytes as {largest.config}"
    if kept := sum(largest.kept.values()):
        hint += f", of which {kept} Linear weights are kept as they are"
    if copied:
        hint += f"; without --full {copied:,} bytes fewer are written"
    return GateError(
        f"the output would have {plan.output_bytes:,} bytes, more than the {max_bytes:,} of --max-size", hint=hint
    )


def _refuse_device(request: Request) -> None:
    """Raise UsageError where a config is made on CUDA only, and the device is another one."""
    bound = [config for config in request.configs.values() if config.options.get("layout") == "tile_packed"]
    if not bound:
        return
    from aoquant.engine import devices, support

    if reason := support.cannot_make(bound[0], devices.choose(request.device)):
        raise UsageError(
            f"{bound[0]} is {reason}",
            hint=f"write {bound[0].row.name}: it is made anywhere, and aoquant.load packs it where it loads",
        )


def run(request: Request, *, on_progress: OnProgress | None = None) -> Result:
    """Plan `request` and carry the plan out, but for the upload."""
    from aoquant.output import check_place

    if request.push_to is not None:
        from aoquant import upload

        upload.check(request.push_to)
    check_place(request.output, overwrite=request.overwrite)  # before anything is fetched
    job = prepare(request)
    from aoquant.engine import devices
    from aoquant.engine.run import write

    device = devices.choose(request.device)
    return write(job, device=device, overwrite=request.overwrite, on_progress=on_progress)


def push_result(request: Request, result: Result, *, on_progress: OnProgress | None = None) -> Result:
    """Upload what `run` has written, if `request` says so. The folder stays whatever becomes of that."""
    if request.push_to is None:
        return result
    from aoquant import upload

    try:
        pushed = upload.push(request.output, request.push_to, private=request.private, on_progress=on_progress)
    except AoquantError as error:
        raise type(error)(error.message, hint=f"{error.hint}; {how_to_push(request)}") from error
    return dataclasses.replace(result, pushed=pushed)


def how_to_push(request: Request) -> str:
    """What to type when the upload of a finished output has failed."""
    command = f"aoquant push {request.output} {request.push_to}" + (" --private" if request.private else "")
    return f"{request.output} is whole: `{command}` uploads it"
