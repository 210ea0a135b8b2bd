"""A checkpoint against the pipeline that it was made from: load time, time per step, peak memory.

Each case runs in a process of its own, so that its memory is its own. `python -m aoquant.benchmarking CASE FILE` is
such a process: CASE is JSON, and so is what it writes into FILE.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import aoquant.errors
from aoquant.errors import AoquantError, UsageError

SCHEMA = "aoquant.bench/1"
PROMPT = "a lighthouse at dusk, waves on the rocks"

OnCase = Callable[[str], None]
"""Called with what is being measured."""


class Settings(TypedDict, total=False):
    """What every case has in common: the arguments of `pipelines.load` and `pipelines.generate`."""

    device: str
    offload: str
    source: str | None
    offline: bool
    steps: int | None
    height: int | None
    width: int | None
    num_frames: int | None


def bench(
    folder: str, settings: Settings, *, compiled: bool = False, rounds: int = 1, on_case: OnCase | None = None
) -> dict[str, Any]:
    """Measure the original and the quantized pipeline, also compiled if asked, in turns. As JSON, `aoquant.bench/1`.

    The figures of a case are medians of its rounds. Raises what `pipelines.load` and `pipelines.generate` raise.
    """
    cases = [
        (original, is_compiled)
        for is_compiled in ((False, True) if compiled else (False,))
        for original in (True, False)
    ]
    found: dict[tuple[bool, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            if on_case is not None:
                on_case(f"{_title(*case)}, round {number + 1} of {rounds}")
            found[case].append(_run(folder, settings, original=case[0], is_compiled=case[1]))
    return {
        "schema": SCHEMA,
        "folder": Path(folder).as_posix(),
        "rounds": rounds,
        "cases": [
            {"model": "original" if case[0] else "quantized", "compiled": case[1], **_median(found[case])}
            for case in cases
        ],
    }


def plot(document: Mapping[str, Any], target: Path) -> None:
    """Draw the cases as bars, into a file of any kind that matplotlib writes. Raises UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs the matplotlib package", hint="pip install matplotlib") from error
    cases = document["cases"]
    labels = [_title(case["model"] == "original", case["compiled"]) for case in cases]
    colors = ["#8a8f98" if case["model"] == "original" else "#2a78c2" for case in cases]
    panels = (("seconds_per_step", "seconds a step", 1.0), ("peak_memory_bytes", "peak memory, GB", 1e9),
              ("load_seconds", "seconds to load", 1.0))  # fmt: skip
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(cases)), layout="constrained")
    for axes, (key, title, unit) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        bars = axes.barh(labels, [(case[key] or 0) / unit for case in cases], color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    first = cases[0]
    figure.suptitle(f"{Path(document['folder']).name} on {first['device']}, {first['pipeline']}", fontsize=11)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{target} cannot be written: {error}", hint="choose another --plot, such as bench.png"
        ) from error


def _title(original: bool, is_compiled: bool) -> str:
    return ("original" if original else "quantized") + (", compiled" if is_compiled else "")


def _run(folder: str, settings: Settings, *, original: bool, is_compiled: bool) -> dict[str, Any]:
    case = json.dumps({**settings, "folder": folder, "original": original, "compile": is_compiled})
    with tempfile.TemporaryDirectory() as scratch:
        answered = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "aoquant.benchmarking", case, str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (this very program)
        answer: dict[str, Any] | None = json.loads(answered.read_text()) if answered.is_file() else None
    if answer is None:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise AoquantError(f"{_title(original, is_compiled)}: its process ended with {done.returncode}: {last}")
    if "error" in answer:
        raise getattr(aoquant.errors, answer["error"])(answer["message"], hint=answer["hint"])
    return answer


def _median(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each measured figure the median; of the others what the first round says."""
    result = dict(rounds[0])
    for key in ("load_seconds", "seconds_per_step", "peak_memory_bytes"):
        values = [found[key] for found in rounds if found[key] is not None]
        result[key] = statistics.median_low(values) if values else None
    return result


def _measure(case: dict[str, Any]) -> dict[str, Any]:
    from aoquant import pipelines

    drawing = {key: case.pop(key, None) for key in ("steps", "height", "width", "num_frames")}
    loaded = pipelines.load(case.pop("folder"), **case)
    generated = pipelines.generate(loaded, PROMPT, **drawing)
    found = generated.to_json(loaded, Path())
    kept = ("pipeline", "device", "offload", "width", "height", "frames", "steps", "load_seconds", "seconds_per_step",
            "peak_memory_bytes")  # fmt: skip
    return {key: found[key] for key in kept}


def _main() -> None:
    try:
        answer = _measure(json.loads(sys.argv[1]))
    except AoquantError as error:
        answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    _main()
