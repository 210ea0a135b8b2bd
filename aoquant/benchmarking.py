"""A checkpoint's components against those they were made from: load time, time per step, peak memory.

Each case runs in a process of its own, so that its memory is its own: `main`, whose arguments are the case as JSON, and
the file that it writes its answer into, as JSON too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import aoquant.errors
from aoquant import output
from aoquant.errors import AoquantError, ResourceError, UsageError, is_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from aoquant.engine.inputs import Size
    from aoquant.report import Report

SCHEMA = "aoquant.bench/1"
PLOTS = (".png", ".svg", ".pdf")

OnCase = Callable[[str], None]
"""Called with what is being measured."""


class Settings(TypedDict):
    """What every case has in common. height, width, num_frames: None for what the component is usually used for."""

    device: str
    source: str | None
    offline: bool
    trust_pickle: bool
    steps: int
    height: int | None
    width: int | None
    num_frames: int | None


def bench(
    folder: str,
    settings: Settings,
    *,
    components: Sequence[str] = (),
    compiled: bool = False,
    rounds: int = 1,
    on_case: OnCase | None = None,
) -> dict[str, Any]:
    """Measure each component, original and quantized, also compiled if asked, in turns. As JSON, `aoquant.bench/1`.

    components: those to measure; all if empty. The figures of a case are medians of its rounds. Raises what
    `loading.load_component` and `source.open_source` raise; UsageError for a class that there are no inputs for.
    """
    from aoquant.inspection import inspect

    report = inspect(folder)
    found = _components(report, folder, components)
    cases = [
        (original, is_compiled)
        for is_compiled in ((False, True) if compiled else (False,))
        for original in (True, False)
    ]
    measured: dict[tuple[str, bool, bool], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name in found:
            for original, is_compiled in cases:
                if on_case is not None:
                    title = f"{name}, " if name else ""
                    on_case(f"{title}{case_title(original, is_compiled)}, round {number + 1} of {rounds}")
                answer = _run(folder, name, settings, original=original, is_compiled=is_compiled)
                measured.setdefault((name, original, is_compiled), []).append(answer)
    return {
        "schema": SCHEMA,
        "folder": Path(folder).as_posix(),
        "device": next(iter(measured.values()))[0]["device"],
        "steps": settings["steps"],
        "rounds": rounds,
        "components": [
            {
                "name": name,
                "class": class_name,
                "config": config,
                "inputs": measured[name, True, False][0]["inputs"],
                "cases": [
                    {"model": "original" if original else "quantized", "compiled": is_compiled}
                    | _medians(measured[name, original, is_compiled])
                    for original, is_compiled in cases
                ],
            }
            for name, (class_name, config) in found.items()
        ],
    }


def case_title(original: bool, is_compiled: bool) -> str:
    return ("original" if original else "quantized") + (", compiled" if is_compiled else "")


def check_plot(target: Path) -> None:
    """Raise UsageError where `plot` could not draw: without matplotlib, or into a file that cannot be written."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError("--plot needs the matplotlib package", hint="pip install matplotlib") from error
    if target.suffix.lower() not in PLOTS:
        raise UsageError(f"{target} is no name for a plot", hint=f"end it in {', '.join(PLOTS)}")
    if target.is_dir():
        raise UsageError(f"{target} cannot be written: {os.strerror(errno.EISDIR)}", hint="choose another --plot")
    output.check_file(target, hint="choose another --plot")


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw the cases as bars. Raises UsageError as `check_plot`; ResourceError for a full disk."""
    check_plot(target)
    from matplotlib.figure import Figure

    cases = [(component, case) for component in document["components"] for case in component["cases"]]
    several = len(document["components"]) > 1
    labels = [
        (f"{component['name']}: " if several else "") + case_title(case["model"] == "original", case["compiled"])
        for component, case in cases
    ]
    colors = ["#8a8f98" if case["model"] == "original" else "#2a78c2" for _, case in cases]
    panels = (("seconds_per_step", "seconds a step", 1.0), ("peak_memory_bytes", "peak memory, GB", 1e9),
              ("load_seconds", "seconds to load", 1.0))  # fmt: skip
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(cases)), layout="constrained")
    for axes, (key, title, unit) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        bars = axes.barh(labels, [case[key] / unit for _, case in cases], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # all three share it
    figure.suptitle(f"{Path(document['folder']).name} on {document['device']}", fontsize=11)
    with output.replacing(target) as beside:
        figure.savefig(beside, dpi=150)


def _components(report: Report, folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Name → (class, config) of each component to measure."""
    from aoquant import loading

    every = loading.component_names(folder)
    for name in names:
        if name not in every:
            has = ", ".join(filter(None, every)) or "one without a name: leave --component out"
            raise UsageError(f"{folder} has no quantized component {name}", hint=f"it has {has}")
    return {
        component.name: (component.class_name, component.config_name or component.config)
        for component in report.components
        if component.name in (names or every)
    }


_START = """
import sys
sys.path[:] = [path for path in sys.path if path]
from aoquant.benchmarking import main
main()
"""


def _run(folder: str, name: str, settings: Settings, *, original: bool, is_compiled: bool) -> dict[str, Any]:
    case = json.dumps({**settings, "folder": folder, "name": name, "original": original, "compile": is_compiled})
    with tempfile.TemporaryDirectory() as scratch:
        answered = Path(scratch) / "answer.json"
        # Not -m, which looks for modules in the working directory first: it may be the checkpoint's.
        command = [sys.executable, "-c", _START, case, str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (this very program)
        answer: dict[str, Any] | None = json.loads(answered.read_text()) if answered.is_file() else None
    if answer is None and done.returncode == -9:
        raise ResourceError(
            f"{case_title(original, is_compiled)}: its process was killed, as where memory runs out",
            hint="free memory, or run it on a larger machine",
        )
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise AoquantError(f"{case_title(original, is_compiled)}: its process ended with {done.returncode}: {last}")
    if "error" in answer:
        raise getattr(aoquant.errors, answer["error"])(answer["message"], hint=answer["hint"])
    return answer


_FIGURES = ("load_seconds", "seconds_per_step", "weight_bytes", "peak_memory_bytes")


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median_low(found[key] for found in rounds) for key in _FIGURES}


# --- the process of a case ------------------------------------------------------------------------------------------


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """What one case's process finds out. case: `Settings`, and folder, name, original, compile."""
    import torch

    from aoquant import loading, pipelines
    from aoquant.engine import devices, libraries
    from aoquant.engine.inputs import synthetic_inputs, usual_size
    from aoquant.inspection import inspect

    place = devices.choose(case["device"])
    devices.synchronize(place)  # setting it up is no part of loading
    report = inspect(case["folder"])
    component = next(found for found in report.components if found.name == case["name"])
    dtype = loading.dtype_of(component)
    if case["original"]:
        module, load_seconds = _original(report, component.class_name, case, place, dtype)
    else:
        loaded = loading.load_component(
            case["folder"], case["name"], device=str(place), trust_pickle=case["trust_pickle"]
        )
        module, load_seconds = loaded.module, loaded.report.seconds
    asked = {key: case[key] for key in ("height", "width", "num_frames") if case[key] is not None}
    size = dataclasses.replace(usual_size(module), **asked)
    inputs = synthetic_inputs(module, size, device=place, dtype=dtype)
    if case["compile"]:
        pipelines.compile_module(module)
    seconds = []
    with torch.no_grad(), libraries.quiet(), warnings.catch_warnings(), _explained(case, component.class_name, size):
        warnings.simplefilter("ignore")  # torch.compile's
        for _ in range(case["steps"] + 1):
            start = time.perf_counter()
            module(**inputs)
            devices.synchronize(place)
            seconds.append(time.perf_counter() - start)
    return {
        "device": str(place),
        "inputs": {name: text for name, value in inputs.items() if (text := _shape(value))},
        "load_seconds": round(load_seconds, 3),
        "seconds_per_step": statistics.median(seconds[1:]),  # the first warms up, or compiles
        "weight_bytes": loading.storage_bytes([*module.parameters(), *module.buffers()]),
        "peak_memory_bytes": pipelines.peak_bytes(place),
    }


@contextlib.contextmanager
def _explained(case: Mapping[str, Any], class_name: str, size: Size) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ResourceError(
                f"{class_name} does not fit {case['device']} with what it computes",
                hint="a smaller --height and --width take less",
            ) from error
        reason = " ".join(str(error).split())[:200]
        if case["original"] and not case["compile"]:
            raise UsageError(
                f"{class_name} takes no inputs for {size.width} × {size.height} pixels: {reason}",
                hint="choose another --height and --width, such as multiples of 64",
            ) from error
        title = case_title(case["original"], case["compile"])
        raise AoquantError(
            f"{class_name}, {title}, does not compute on {case['device']}: {reason}",
            hint="`aoquant env` shows what this machine runs",
        ) from error


def _original(
    report: Report, class_name: str, case: Mapping[str, Any], place: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, float]:
    """The component that a quantized one was made from, as its library loads it, and how long that took."""
    from aoquant import pipelines
    from aoquant.engine import libraries
    from aoquant.source import open_component

    folder, name = Path(case["folder"]), case["name"]

    def opened(components: Sequence[str]) -> Any:
        return pipelines.find_source(report, folder, case["source"], offline=case["offline"], components=components)

    source = opened([name] if name else [])
    if not name and source.model_index is not None:  # a pipeline, of which the checkpoint's only component was one
        name = pipelines.role_of(report, source.model_index)
        source = opened([name])
    component = open_component(source, name)
    if component.class_name != class_name:
        raise UsageError(
            f"{name or 'the model'} of {source.model} is of {component.class_name}, and the checkpoint of {class_name}",
            hint="name what it was made from with --source",
        )
    with source.arriving(component.weights.files) as wait:
        for file in component.weights.files:
            wait(file)
    model_class: Any = libraries.find_class(component.library, component.class_name)
    options: dict[str, Any] = {
        "torch_dtype" if component.library == "diffusers" else "dtype": dtype,
        "local_files_only": True,
        "variant": source.variant,
    }
    if place.type != "cpu":
        options["device_map"] = {"": place}
    with libraries.quiet():
        start = time.perf_counter()
        module: nn.Module = model_class.from_pretrained(str(component.folder), **options)
        return module.eval(), time.perf_counter() - start


def _shape(value: Any) -> str:
    """`1×4096×64 bfloat16`; empty for what is no tensor."""
    if isinstance(value, list | tuple) and value:
        return _shape(value[0])
    if not hasattr(value, "dtype"):
        return ""
    return "×".join(map(str, value.shape)) + " " + str(value.dtype).removeprefix("torch.")


def main() -> None:
    try:
        answer = measure(json.loads(sys.argv[1]))
    except AoquantError as error:
        answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    except Exception as error:
        known = ("ResourceError", "it does not fit") if is_out_of_memory(error) else ("AoquantError", "it fails")
        answer = {"error": known[0], "message": f"{known[1]}: {' '.join(str(error).split())[:200]}", "hint": ""}
    Path(sys.argv[2]).write_text(json.dumps(answer))
