"""What a table does on a terminal that is too narrow for it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aoquant.tables import _Shrinking

TABLE = _Shrinking(
    columns=("component", "class", "config", ">to"),
    rows=[("text_encoder_2", "SomeVeryLongEncoderModel", "fp8wo", "1.57 MB")],
    optional=("class", ">to"),
)


def shown(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(TABLE)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "headings"),
    [(200, ["component", "class", "config", "to"]), (50, ["component", "config", "to"]), (32, ["component", "config"])],
)
def test_columns_that_do_not_fit_are_left_out(width: int, headings: list[str]) -> None:
    lines = [line.split() for line in shown(width).splitlines() if line.strip()]
    assert lines[0] == headings
    assert lines[2][0] == "text_encoder_2"
