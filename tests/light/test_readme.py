"""README's tables and commands are true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aoquant import errors
from aoquant.cli import app
from aoquant.configs import CONFIGS, ConfigRow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def config_line(row: ConfigRow) -> str:
    options = []
    for option in row.options:
        default, *others = map(option.spelled, option.values)
        options.append(f"`{option.name}={default}` (or {', '.join(others)})")
    return f"| `{row.name}` | {row.bits} | {row.meaning} | {', '.join(options)} | {row.runs_on} |"


def test_the_config_table_is_the_config_table() -> None:
    written = README.partition("<!-- configs:")[2].partition("<!-- /configs -->")[0].splitlines()[3:]
    assert [line for line in written if line] == [config_line(row) for row in CONFIGS.values()]


def test_every_exit_code_is_listed() -> None:
    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    listed = set(map(int, re.findall(r"^\| (\d+) \|", README, re.MULTILINE)))
    assert listed == codes | {0, 130}


def commands() -> list[str]:
    blocks = re.findall(r"```(?:bash|console)\n(.*?)```", README, re.DOTALL)
    lines = [line.removeprefix("$ ").partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("aoquant ")]


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str) -> None:
    import typer

    words = shlex.split(command)[1:]
    root = typer.main.get_command(app)
    with root.make_context("aoquant", list(words), resilient_parsing=False) as context:
        name, sub, rest = root.resolve_command(context, words)  # type: ignore[attr-defined]
        assert sub is not None
        sub.make_context(name, list(rest), parent=context)


def test_every_option_of_quantize_is_described() -> None:
    import typer

    quantize = typer.main.get_command(app).commands["quantize"]  # type: ignore[attr-defined]
    missing = [
        option
        for parameter in quantize.params
        if not any(option in README for option in [*parameter.opts, *parameter.secondary_opts])
        for option in parameter.opts
        if option.startswith("--")
    ]
    assert missing == []
