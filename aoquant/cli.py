"""The commands. `main` is the one place where exceptions become lines and exit codes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from aoquant import __version__
from aoquant.console import Console, ReaderGone, accept_any_text, open_streams, silence_stdout
from aoquant.errors import AoquantError, CheckpointError, ResourceError, UsageError, is_out_of_memory
from aoquant.output import finished, forget, is_staging
from aoquant.request import Options, Request, make_request

INTERRUPTED = 130

# Objects made between two collections. At Python's 700 torch and diffusers are walked again and again while they are
# imported and used: `aoquant plan` of a 5.1 GB component took 5.3 s instead of 4.8 s (2 cores, medians of three). What
# garbage one command makes is not worth that.
_COLLECT_EVERY = 100_000

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn a diffusers pipeline into a torchao-quantized checkpoint, without holding the model in memory.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda[:N], xpu[:N] or mps.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that aoquant wrote.")]
Private = Annotated[bool, typer.Option("--private", help="Make the repository a private one.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use the Hub's cache only.")]
Offload = Annotated[str, typer.Option(help="none, model, group or sequential.")]
Trust = Annotated[
    bool,
    typer.Option("--trust-pickle", help="Where no safe way works, run what a .bin says: only if you trust its maker."),
]
Rest = Annotated[
    str | None,
    typer.Option("--source", metavar="MODEL", help="The pipeline whose other components to use.", show_default=False),
]
Folder = Annotated[str, typer.Argument(help="A checkpoint folder.", show_default=False)]
Model = Annotated[
    str,
    typer.Argument(
        help="A local pipeline or component folder, a name of `aoquant models`, or org/name[@revision].",
        show_default=False,
    ),
]


def _component(name: str) -> Any:
    return typer.Option(f"--{name}", metavar="CONFIG", help=f"Config for {name.replace('-', '_')}.", show_default=False)


def _add_model_command(name: str, summary: str, act: Callable[[Request, Console, bool], None]) -> None:
    """Register a command that takes a model, its components' configs, and all that may be said about them."""

    @app.command(name, help=summary)
    def command(
        model: Model,
        transformer: Annotated[str | None, _component("transformer")] = None,
        transformer_2: Annotated[str | None, _component("transformer-2")] = None,
        unet: Annotated[str | None, _component("unet")] = None,
        text_encoder: Annotated[str | None, _component("text-encoder")] = None,
        text_encoder_2: Annotated[str | None, _component("text-encoder-2")] = None,
        text_encoder_3: Annotated[str | None, _component("text-encoder-3")] = None,
        image_encoder: Annotated[str | None, _component("image-encoder")] = None,
        controlnet: Annotated[str | None, _component("controlnet")] = None,
        vae: Annotated[str | None, _component("vae")] = None,
        component: Annotated[
            list[str] | None, typer.Option(metavar="NAME=CONFIG", help="Config for any other component. Repeatable.")
        ] = None,
        output: Annotated[
            str | None, typer.Option("--output", "-o", help="Folder to write. [default: ./<model name>-<configs>]")
        ] = None,
        format: Annotated[str, typer.Option(help="bin or safetensors.")] = "bin",
        max_shard_size: Annotated[str, typer.Option(help="Most bytes of tensors in one file.")] = "10GB",
        device: Device = "auto",
        dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
        skip: Annotated[
            list[str] | None,
            typer.Option(metavar="[COMPONENT:]PATTERN", help="Modules to leave unquantized. Repeatable."),
        ] = None,
        full: Annotated[bool, typer.Option("--full", help="Write the pipeline's other components too.")] = False,
        revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
        variant: Annotated[str | None, typer.Option(help="Variant of the weights, such as fp16.")] = None,
        offline: Offline = False,
        overwrite: Overwrite = False,
        max_size: Annotated[
            str | None, typer.Option(metavar="SIZE", help="Refuse an output of more bytes, such as 7GB: exit code 7.")
        ] = None,
        push_to: Annotated[
            str | None, typer.Option(metavar="REPO_ID", help="Upload the finished folder to this repository.")
        ] = None,
        private: Private = False,
        json: Json = False,
        quiet: Quiet = False,
        verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every tensor and its fate.")] = False,
    ) -> None:
        console = Console(as_json=json, quiet=quiet)
        named = {
            "transformer": transformer, "transformer_2": transformer_2, "unet": unet, "text_encoder": text_encoder,
            "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3, "image_encoder": image_encoder,
            "controlnet": controlnet, "vae": vae,
        }  # fmt: skip
        options: Options = {
            "output": output, "format": format, "max_shard_size": max_shard_size, "device": device, "dtype": dtype,
            "skip": skip or (), "full": full, "revision": revision, "variant": variant, "offline": offline,
            "overwrite": overwrite, "max_size": max_size, "push_to": push_to, "private": private,
        }  # fmt: skip
        act(make_request(model, _components(named, component or []), options), console, verbose)


def _components(named: dict[str, str | None], others: Sequence[str]) -> dict[str, str]:
    components = {name: config for name, config in named.items() if config is not None}
    for item in others:
        name, equals, config = item.partition("=")
        name = name.strip().replace("-", "_")
        if not (name and equals and config):
            raise UsageError(
                f"--component {item} is not NAME=CONFIG", hint="write for example --component prior=int8wo"
            )
        if name in components:
            raise UsageError(f"component {name} is given twice", hint="give each component one config")
        components[name] = config
    return components


def _quantize(request: Request, console: Console, verbose: bool) -> None:
    from aoquant import api
    from aoquant.tables import result_tables

    with console.progress() as on_progress:
        result = api.run(request, on_progress=on_progress)
        try:
            result = api.push_result(request, result, on_progress=on_progress)
        except _Interrupted:
            raise _Interrupted(api.how_to_push(request)) from None
    for warning in result.plan.warnings:
        console.note(warning)
    lines = result.plan.snippet(folder=str(request.output), model=request.model)
    console.result(result.to_json(snippet=lines), lambda: result_tables(result, every_tensor=verbose))
    console.code(lines.rstrip())
    if result.pushed is not None:
        console.code(f"\n{result.pushed.pull_request or result.pushed.url}")


def _plan(request: Request, console: Console, verbose: bool) -> None:
    from aoquant import api
    from aoquant.tables import plan_tables

    plan = api.prepare(request)
    for warning in plan.warnings:
        console.note(warning)
    console.result(plan.to_json(), lambda: plan_tables(plan, every_tensor=verbose))


_add_model_command("quantize", "Quantize components of a pipeline into a new folder.", _quantize)
_add_model_command("plan", "Show what quantize would do: every tensor's fate, the exact output. Writes nothing.", _plan)


@app.command(
    help="Show what a checkpoint folder or weight file holds, and what is wrong with it. Runs no code from it."
)
def inspect(
    path: Annotated[str, typer.Argument(help="A folder, or a .safetensors or .bin file.", show_default=False)],
    layers: Annotated[bool, typer.Option("--layers", help="List every tensor.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant.inspection import inspect as read
    from aoquant.tables import report_tables

    console = Console(as_json=json, quiet=quiet)
    report = read(path)
    console.result(report.to_json(layers=layers), lambda: report_tables(report, layers=layers))
    report.refuse_unsafe()
    if not report.is_sound:
        raise CheckpointError(f"{path} is not sound", hint="the report says what is wrong; fetch or make it again")


@app.command(help="Load every quantized component as a program would, and report. The exit code says whether it works.")
def load(
    folder: Folder,
    device: Device = "cpu",
    trust_pickle: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant import loading
    from aoquant.tables import loaded_tables

    console = Console(as_json=json, quiet=quiet)
    reports = list(
        map(attrgetter("report"), loading.load_each(folder, device=device, trust_pickle=trust_pickle))
    )  # one component in memory at a time: no name here keeps it
    for report in reports:
        if report.unpickled == "trusted":
            console.note(f"{report.name or report.class_name}: its .bin was unpickled without any check, as asked")
    document = {"schema": loading.SCHEMA, "components": [report.to_json() for report in reports]}
    console.result(document, lambda: loaded_tables(reports))


@app.command(help="Draw a picture or video with a checkpoint: its components, and the rest of their pipeline.")
def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Argument(help="What to draw.", show_default=False)],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File to write. [default: ./<folder name>.png or .gif]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same noise on every device.")] = 0,
    height: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video.")] = None,
    fps: Annotated[int, typer.Option(min=1, help="Frames a second of a video.")] = 16,
    device: Device = "auto",
    offload: Offload = "none",
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the transformer or UNet.")] = False,
    source: Rest = None,
    offline: Offline = False,
    trust_pickle: Trust = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant import pipelines
    from aoquant.tables import generated_line

    console = Console(as_json=json, quiet=quiet)
    if output is not None:
        pipelines.check_target(Path(output), overwrite=overwrite)
    with console.progress() as on_progress:
        loaded = pipelines.load(
            folder, device=device, offload=offload, compile=compile, source=source, offline=offline,
            trust_pickle=trust_pickle, on_progress=on_progress,
        )  # fmt: skip
    target = Path(output or f"{Path(folder).resolve().name}.{'gif' if loaded.is_video else 'png'}")
    pipelines.check_target(target, is_video=loaded.is_video, overwrite=overwrite)
    loaded.pipeline.set_progress_bar_config(disable=not console.is_live)
    with console.library_talk():
        generated = pipelines.generate(
            loaded, prompt, seed=seed, steps=steps, guidance=guidance, height=height, width=width, num_frames=num_frames
        )
    pipelines.save(generated, target, fps=fps)
    drawn = generated.frames[0]
    if (height or drawn.height, width or drawn.width) != (drawn.height, drawn.width):
        console.note(
            f"drawn at {drawn.width} × {drawn.height}, the nearest size that {type(loaded.pipeline).__name__} takes"
        )
    if num_frames is not None and num_frames != len(generated.frames):
        console.note(f"drawn as {len(generated.frames)} frames, the nearest number that it takes")
    document = generated.to_json(loaded, target)
    console.result(document, lambda: generated_line(document))


@app.command(help="Check every file of a checkpoint folder against its aoquant.json, to the last byte.")
def verify(folder: Folder, json: Json = False, quiet: Quiet = False) -> None:
    from aoquant.tables import verification_lines
    from aoquant.verification import verify as check

    console = Console(as_json=json, quiet=quiet)
    with console.progress() as on_progress:
        found = check(folder, on_progress=on_progress)
    for note in found.notes:
        console.note(note)
    console.result(found.to_json(), lambda: verification_lines(found))
    found.require_sound()


@app.command(help="Write a checkpoint of earlier versions anew in today's tensor classes, with the same values.")
def upgrade(
    folder: Folder,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Folder to write. [default: FOLDER-upgraded]")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant import upgrading
    from aoquant.tables import upgraded_table

    console = Console(as_json=json, quiet=quiet)
    with console.progress() as on_progress:
        upgraded = upgrading.upgrade(folder, output, overwrite=overwrite, on_progress=on_progress)
    console.result(upgraded.to_json(), lambda: upgraded_table(upgraded))
    if upgraded.snippet:
        console.code(upgraded.snippet.rstrip())


@app.command(help="Merge folders of different components of one pipeline, such as several machines made.")
def join(
    output: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)],
    folders: Annotated[
        list[str], typer.Argument(metavar="FOLDER...", help="Two or more checkpoint folders.", show_default=False)
    ],
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant.joining import join as merge
    from aoquant.tables import joined_tables

    console = Console(as_json=json, quiet=quiet)
    with console.progress() as on_progress:
        joined = merge(output, folders, overwrite=overwrite, on_progress=on_progress)
    console.result(joined.to_json(), lambda: joined_tables(joined))
    console.code(joined.snippet.rstrip())


@app.command(help="Verify a checkpoint folder and upload it to the Hub.")
def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="org/name.", show_default=False)],
    private: Private = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant.upload import push as upload

    console = Console(as_json=json, quiet=quiet)
    with console.progress() as on_progress:
        pushed = upload(folder, repo_id, private=private, create_pr=create_pr, on_progress=on_progress)
    console.result(pushed.to_json(), lambda: pushed.pull_request or pushed.url)


@app.command(help="List the config names: meaning, bits, options, where each runs.")
def configs(json: Json = False) -> None:
    from aoquant.configs import configs_json
    from aoquant.tables import configs_table

    Console(as_json=json).result(configs_json(), configs_table)


@app.command(help="List the names that stand for repositories: what each is, and its components.")
def models(json: Json = False) -> None:
    from aoquant.models import models_json
    from aoquant.tables import models_table

    Console(as_json=json).result(models_json(), models_table)


@app.command(
    help="Measure a checkpoint's components against those they were made from: load time, time a step, peak memory."
)
def bench(
    folder: Folder,
    component: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measure this one only. Repeatable. [default: all]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Calls to measure, after one to warm up.")] = 4,
    height: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Figures are medians of so many rounds.")] = 1,
    device: Device = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Measure both compiled too.")] = False,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="MODEL", help="What the checkpoint was made from.", show_default=False),
    ] = None,
    offline: Offline = False,
    trust_pickle: Trust = False,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the figures, as .png or .svg.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    from aoquant import benchmarking
    from aoquant.tables import bench_table

    console = Console(as_json=json, quiet=quiet)
    settings: benchmarking.Settings = {
        "device": device, "source": source, "offline": offline, "trust_pickle": trust_pickle, "steps": steps,
        "height": height, "width": width, "num_frames": num_frames,
    }  # fmt: skip
    names = [name.replace("-", "_") for name in component or ()]
    if plot is not None:
        benchmarking.check_plot(Path(plot))
    document = benchmarking.bench(
        folder, settings, components=names, compiled=compile, rounds=rounds, on_case=console.note
    )
    console.result(document, lambda: bench_table(document))
    if plot is not None:
        benchmarking.plot(document, Path(plot))


@app.command(help="Show versions, devices, and what they can make and run, config by config.")
def env(json: Json = False) -> None:
    from aoquant import environment
    from aoquant.tables import environment_tables

    report = environment.report()
    Console(as_json=json).result(report, lambda: environment_tables(report))


def _print_version(asked: bool) -> None:
    if asked:
        Console().result({}, lambda: __version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code (README lists them); prints at most an error and a hint of its own."""
    forget()
    signals = _Signals()
    gc.set_threshold(_COLLECT_EVERY)
    open_streams()
    accept_any_text()
    try:
        code = app(args=list(sys.argv[1:] if argv is None else argv), prog_name="aoquant", standalone_mode=False)
        sys.stdout.flush()
    except (ReaderGone, BrokenPipeError):  # whoever read stdout has seen enough, which is no error
        silence_stdout()
        return 0
    except BaseException as error:
        if signals.received or isinstance(error, KeyboardInterrupt | typer.Abort):
            _say_interrupted(str(error) if isinstance(error, _Interrupted) else "")
            return INTERRUPTED
        if isinstance(error, AoquantError):
            return _fail(error)
        if is_out_of_memory(error):
            hint = "free memory, or run it on a larger machine; AOQUANT_DEBUG=1 shows where"
            return _fail(ResourceError("memory ran out", hint=hint), cause=error)
        if isinstance(error, OSError) and error.filename is None:  # what has a name is not stdout
            silence_stdout()
            hint = "a full disk behind a redirection, for example; what was written to a folder is whole"
            return _fail(AoquantError(f"stdout cannot be written: {error.strerror}", hint=hint))
        if isinstance(error, typer.TyperException):
            hint = "`aoquant --help` and `aoquant COMMAND --help` show how"
            return _fail(UsageError(_message(error), hint=hint))
        raise
    return code if isinstance(code, int) else 0


def _fail(error: AoquantError, *, cause: BaseException | None = None) -> int:
    if os.environ.get("AOQUANT_DEBUG"):
        import traceback

        traceback.print_exception(cause or error)
    Console().error(error)
    return error.exit_code


def _message(error: Any) -> str:
    text: str = error.format_message() if hasattr(error, "format_message") else str(error)
    return text.strip().rstrip(".") or "the command line is wrong"


class _Interrupted(BaseException):
    """Raised where a signal meets the program; not KeyboardInterrupt, which Typer turns into a wordless exit.

    Its text is what was left behind, and what to do with it.
    """


class _Signals:
    """Lets Ctrl-C, SIGTERM and SIGHUP unwind the stack once, so that whoever holds a temporary folder removes it.

    Signals that this process was told to ignore (`nohup`) stay ignored. `received` tells the truth where a library
    under interruption has turned the exception into one of its own.
    """

    def __init__(self) -> None:
        self.received = False
        usual = {signal.SIG_DFL, signal.default_int_handler}
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        self._caught = [number for number in numbers if signal.getsignal(number) in usual]
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            for number in self._caught:
                signal.signal(number, self._interrupt)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        for other in self._caught:
            signal.signal(other, signal.SIG_IGN)
        self.received = True
        if _is_importing(frame) and not is_staging():
            _say_interrupted()
            os._exit(INTERRUPTED)
        raise _Interrupted


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported.

    Then an exception would do harm: C++ in torch 2.13 aborts on it now and then, and libraries take it for a missing
    module.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _say_interrupted(left: str = "") -> None:
    whole = ", ".join(map(str, finished()))
    hint = left or (f"{whole} is whole: it was finished before" if whole else "nothing was left behind")
    Console().error(AoquantError("interrupted", hint=hint))
    sys.stderr.flush()
