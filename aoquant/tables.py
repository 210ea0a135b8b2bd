"""Results → what a person sees: rich tables and lines, no printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from aoquant.checkpoint.files import quoted
from aoquant.configs import ALIASES, CONFIGS
from aoquant.console import size
from aoquant.models import MODELS

if TYPE_CHECKING:
    from aoquant.engine.job import Plan
    from aoquant.engine.plan import ComponentPlan
    from aoquant.engine.run import Result
    from aoquant.joining import Joined
    from aoquant.loading import LoadReport
    from aoquant.report import ComponentReport, Report
    from aoquant.upgrading import Upgraded
    from aoquant.verification import Verification


def configs_table() -> RenderableType:
    """Every config name: what it means, what it stores, where it runs. All can be made on any machine."""
    table = _table("config", ">bits", "weights", "options (default first)", "runs")
    for row in CONFIGS.values():
        options = [f"{option.name}={'|'.join(map(option.spelled, option.values))}" for option in row.options]
        table.add_row(f"[bold]{row.name}[/]", str(row.bits), row.meaning, ", ".join(options), row.runs_on)
    older = _table("config", "older spellings, accepted too")
    for row in CONFIGS.values():
        names = [
            alias for alias, target in ALIASES.items() if target.partition(":")[0] == row.name and ":" not in alias
        ]
        older.add_row(row.name, ", ".join(names))
    return Group(table, older, Text("Every config can be made on any machine, with or without a GPU."))


def models_table() -> RenderableType:
    """Every name that stands for a repository: whose, what it is, its components; then what else they are called."""
    table = _table("name", "what it is", "components")
    table.columns[0].no_wrap = True
    others = _table("name", "also called")
    for row in MODELS.values():
        owner = row.repo_id.partition("/")[0]
        table.add_row(f"[bold]{row.name}[/]\n  of {owner}", row.meaning, "\n".join(row.components))
        if row.also:
            others.add_row(row.name, ", ".join(row.also))
    return Group(table, others, Text("Any case will do, and name@revision. Any other repository is written org/name."))


def plan_tables(plan: Plan, *, every_tensor: bool) -> RenderableType:
    """What would be done: a row for each component, why weights are kept, and the size of everything."""
    total = f"{len(plan.files)} files, {size(plan.output_bytes)} ({plan.output_bytes:,} bytes)"
    return Group(
        *(_fates(component) for component in plan.components if every_tensor),
        _component_plans(plan),
        *_kept_lines(plan),
        Text(f"output  {plan.output}: {total}"),
        Text(f"memory  about {size(plan.working_bytes)} of tensor data at a time"),
        *([Text(f"download {size(plan.download_bytes)}")] if plan.source.cache is not None else []),
    )


def result_tables(result: Result, *, every_tensor: bool) -> RenderableType:
    """What was done."""
    plan = result.plan
    lines = [Text(f"{plan.output}: {len(result.files)} files, {size(plan.output_bytes)}, {result.seconds:.1f} s\n")]
    if result.on_cpu:
        lines.append(Text(f"{len(result.on_cpu)} tensors did not fit the accelerator and were made on the CPU\n"))
    fates = [_fates(component) for component in plan.components if every_tensor]
    return Group(*fates, _component_plans(plan), *_kept_lines(plan), *lines)


def generated_line(document: Mapping[str, Any]) -> RenderableType:
    """What was drawn, where, and what it took."""
    size_text = f"{document['width']} × {document['height']}"
    if document["kind"] == "video":
        size_text += f", {document['frames']} frames"
    step = document["seconds_per_step"]
    pace = f", {step:.3g} s a step" if step is not None else ""
    work = f"{document['steps']} steps on {document['device']} in {document['seconds']:.1f} s{pace}"
    memory = f"{size(document['peak_memory_bytes'])} at most"
    return Text(f"{document['output']}: {size_text}, seed {document['seed']}; {work}; {memory}")


def _fates(component: ComponentPlan) -> Table:
    """Every tensor of a component: what becomes of it, and why."""
    table = _table("tensor", "fate", "becomes", "shape", ">bytes", "because")
    for tensor in component.tensors:
        kind = str(tensor.dtype).removeprefix("torch.") if tensor.kind == "Tensor" else tensor.kind
        table.add_row(
            escape(tensor.name), tensor.fate, kind, escape(str(list(tensor.shape))), f"{tensor.num_bytes:,}",
            escape(tensor.reason),
        )  # fmt: skip
    for name in component.ignored:
        table.add_row(escape(name), "leave out", "", "", "", f"not part of {component.source.class_name}")
    for name, original in component.tied.items():
        table.add_row(escape(name), "leave out", "", "", "", escape(f"tied to {original}"))
    return table


def _component_plans(plan: Plan) -> RenderableType:
    columns = ("component", "class", "config", ">quantized", ">kept", ">other", ">from", ">to", ">smaller", "read")
    rows = []
    for component in plan.components:
        shrink = component.source_bytes / component.tensor_bytes if component.tensor_bytes else 0.0
        rows.append((
            _cell(component.source.name or "(root)"),
            _cell(component.source.class_name),
            str(component.config),
            str(component.num_quantized),
            str(sum(component.kept.values())),
            str(component.num_other),
            size(component.source_bytes),
            size(component.tensor_bytes),
            f"{shrink:.2f}×",
            "whole" if component.component.whole_reason else "streamed",
        ))  # fmt: skip
    return _Shrinking(columns=columns, rows=rows, optional=("read", "class", ">other", ">from"))


def _kept_lines(plan: Plan) -> list[RenderableType]:
    """Each reason for which Linear weights stay as they are, with its number and up to three names."""
    table = _table(">kept", "because", "such as")
    for component in plan.components:
        names: dict[str, list[str]] = {}
        for tensor in component.tensors:
            if tensor.fate == "keep":
                names.setdefault(tensor.reason, []).append(tensor.name.rpartition(".")[0])
        for reason, found in names.items():
            more = "" if len(found) <= 3 else f" and {len(found) - 3} more"
            table.add_row(str(len(found)), escape(reason), escape(", ".join(found[:3])) + more)
    return [table] if table.row_count else []


def report_tables(report: Report, *, layers: bool) -> RenderableType:
    """What `inspect` found: a table for each component, versions, files and problems."""
    shown: list[RenderableType] = []
    for component in report.components:
        without = "no config, quantized tensors" if component.num_quantized else "not quantized"
        config = component.config_name or component.config or without
        title = " · ".join(filter(None, (component.name, component.class_name, config)))
        shown += [_line(title, style="bold"), _component_report(component), *_report_lines(component)]
        if layers:
            shown.append(_layers(component))
        shown.append(Text())
    if report.source:
        shown.append(_line("source   " + _joined(report.source)))
    if report.versions:
        shown.append(_line("made by  " + _joined(report.versions)))
    shown += [_problem(problem.severity, problem.text) for problem in report.problems]
    return Group(*shown)


def _component_report(component: ComponentReport) -> Table:
    table = _table("tensors", "dtype", ">count", ">parameters", ">bytes", ">bits each")
    for tally in component.tallies:
        bits = 8 * tally.num_bytes / tally.num_parameters if tally.num_parameters else 0.0
        table.add_row(
            _cell(tally.kind), tally.dtype, str(tally.count), f"{tally.num_parameters:,}", size(tally.num_bytes),
            f"{bits:.2f}",
        )  # fmt: skip
    table.add_section()
    total = sum(tally.count for tally in component.tallies)
    table.add_row(
        "all", "", str(total), f"{component.num_parameters:,}", size(component.weight_bytes),
        f"{component.bits_per_weight:.2f}",
    )  # fmt: skip
    return table


def _report_lines(component: ComponentReport) -> list[RenderableType]:
    statuses = Counter(file.status for file in component.files)
    files = ", ".join(f"{count} {status}" for status, count in statuses.items()) or "none"
    lines: list[RenderableType] = [
        Text(f"files    {component.format or 'no weights'}: {files}, {size(component.file_bytes)}")
    ]
    if component.num_quantized:
        lines.append(Text(f"weights  {component.quantized_bits_per_weight:.2f} bits each where quantized"))
    if component.needs:
        lines.append(Text(f"loads    after `import {component.needs}`"))
    if any(tally.kind == "Int4Tensor" for tally in component.tallies):
        lines.append(Text("loads    with `aoquant.load`, as what its device computes with"))
    if component.config_name and component.config:
        lines.append(_line("config   " + component.config))
    if component.versions:
        lines.append(_line("versions " + _joined(component.versions)))
    lines += [_problem(problem.severity, problem.text) for problem in component.problems]
    return lines


def _layers(component: ComponentReport) -> RenderableType:
    rows: list[tuple[str, ...]] = [("tensor", "class", "shape", "dtype", "bytes", "parts")]
    for entry in component.entries.values():
        parts = ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in entry.parts.items() if name)
        cells = (entry.name, entry.kind, str(list(entry.shape)), entry.dtype, f"{entry.num_bytes:,}", parts)
        rows.append(tuple(_safe(cell) for cell in cells))
    return _Columns(rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Rows of text, the first a heading, in columns; too long lines go on in the next one.

    For thousands of rows: rich's own table takes 0.6 ms for each (rich 15), this 0.02 ms.
    """

    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(map(cell_len, column)) for column in zip(*self.rows, strict=True)]
        for number, row in enumerate(self.rows):
            style = None if number else Style(bold=True)
            padded = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
            for piece in chop_cells("  ".join(padded).rstrip(), options.max_width):
                yield Segment(piece, style)
                yield Segment.line()


def loaded_tables(loaded: Sequence[LoadReport]) -> RenderableType:
    """A row for each component that was loaded."""
    columns = ("component", "class", "weights", "dtype", "device", ">memory", ">seconds", "expect")
    rows = []
    for component in loaded:
        weights = ", ".join(f"{count} {kind}" for kind, count in sorted(component.weights.items()))
        rows.append((
            _cell(component.name or "(root)"), _cell(component.class_name), weights, component.dtype, component.device,
            size(component.num_bytes), f"{component.seconds:.2f}", component.speed,
        ))  # fmt: skip
    return _Shrinking(columns=columns, rows=rows, optional=("class", "dtype"))


def upgraded_table(upgraded: Upgraded) -> RenderableType:
    """A row for each component that was written anew, and where."""
    table = _table("component", "class", "config", ">upgraded")
    for name, class_name, config, count in upgraded.components:
        table.add_row(_cell(name or "(root)"), _cell(class_name), config, str(count))
    return Group(table, Text(f"{upgraded.output}: every value is as it was"))


def bench_table(document: Mapping[str, Any]) -> RenderableType:
    """A row for each case of each component, and what they were given."""
    table = _table("component", "model", "compiled", ">s to load", ">s a step", ">weights", ">peak memory")
    inputs = []
    for component in document["components"]:
        name = component["name"] or component["class"]
        for case in component["cases"]:
            table.add_row(
                _cell(name), "original" if case["model"] == "original" else _cell(component["config"]),
                "yes" if case["compiled"] else "no", f"{case['load_seconds']:.2f}", f"{case['seconds_per_step']:.3g}",
                size(case["weight_bytes"]), size(case["peak_memory_bytes"]),
            )  # fmt: skip
        inputs.append(Text(f"{name}: " + ", ".join(f"{key} {shape}" for key, shape in component["inputs"].items())))
    rounds = "one round" if document["rounds"] == 1 else f"medians of {document['rounds']} rounds"
    steps = f"{document['steps']} steps" if document["steps"] > 1 else "one step"
    return Group(table, *inputs, Text(f"{steps} on {document['device']} after one to warm up; {rounds}"))


def environment_tables(report: Mapping[str, Any]) -> RenderableType:
    """Versions, devices, and for each config what each device makes and runs."""
    versions = {"aoquant": report["aoquant"], "python": report["python"], **report["versions"]}
    lines = [Text(", ".join(f"{name} {version}" for name, version in versions.items())), Text(report["platform"])]
    for device in report["devices"]:
        memory = f", {size(device['memory_bytes'])}" if device["memory_bytes"] else ""
        lines.append(Text(f"{device['device']}: {device['kind']}{memory}"))
    table = _table("config", "device", "makes", "runs", "expect")
    for row in report["configs"]:
        for device, verdict in row["on"].items():
            makes, runs = (escape(verdict[key]) or "yes" for key in ("cannot_make", "cannot_run"))
            table.add_row(f"[bold]{row['config']}[/]", device, makes, runs, verdict["speed"])
    return Group(*lines, table)


def verification_lines(found: Verification) -> RenderableType:
    """Each file that is not as it was written, each problem, and a line on the whole."""
    lines = [_problem("error", file.text) for file in found.bad_files]
    lines += [_problem(problem.severity, problem.text) for problem in found.problems]
    if found.is_sound:
        lines.append(Text(f"{found.path}: {len(found.files)} files, {size(found.num_bytes)}, as aoquant.json says"))
    return Group(*lines)


def joined_tables(joined: Joined) -> RenderableType:
    """A row for each component, and the size of the whole."""
    columns = ("component", "class", "config", ">quantized", ">kept", ">other", ">size")
    rows = []
    for record in joined.manifest.components:
        num_bytes = sum(file.num_bytes for file in joined.manifest.files_of(record))
        rows.append((
            _cell(record.name), _cell(record.class_name), _cell(record.config), str(record.num_quantized),
            str(sum(record.kept.values())), str(record.num_other), size(num_bytes),
        ))  # fmt: skip
    linked = f", {len(joined.linked)} of them links" if joined.linked else ""
    total = f"{len(joined.manifest.files) + 1} files{linked}, {size(joined.num_bytes)}"
    return Group(
        _Shrinking(columns=columns, rows=rows, optional=("class", ">other")), Text(f"{joined.output}: {total}\n")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shrinking:
    """A table that goes without its `optional` columns, one after the other, where the terminal is too narrow."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    optional: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self.optional) + 1):
            shown = [number for number, name in enumerate(self.columns) if name not in self.optional[:count]]
            table = _table(*(self.columns[number] for number in shown))
            for row in self.rows:
                table.add_row(*(row[number] for number in shown))
            wide = options.update(max_width=10_000)
            if Measurement.get(console, wide, table).maximum <= options.max_width:
                break
        yield table


def _problem(severity: str, text: str) -> Text:
    return _line(f"{severity}: {text}", style="bold red" if severity == "error" else "yellow")


def _safe(text: str) -> str:
    """Text out of a file, without the control characters that a terminal would obey."""
    return quoted(text, quote=False, limit=1000)


def _line(text: str, style: str = "") -> Text:
    return Text(_safe(text), style=style)


def _cell(text: str) -> str:
    """`_safe` for a table's cell, which reads markup."""
    return escape(_safe(text))


def _joined(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _table(*columns: str) -> Table:
    """A plain table; `>` before a heading aligns its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table
