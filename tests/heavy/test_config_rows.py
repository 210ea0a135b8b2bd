"""That torchao has what each row of the config table names."""

from __future__ import annotations

import importlib

import pytest
import torch

from aoquant.configs import ALIASES, CONFIGS, ConfigRow, parse_config
from aoquant.engine.quantize import kernel_for, stock_config
from tests.heavy import stock

ROWS = pytest.mark.parametrize("row", CONFIGS.values(), ids=lambda row: row.name)
CHOICES = {
    f"{row.name}:{option.name}={choice}"
    for row in CONFIGS.values()
    for option in row.options
    for choice in option.choices
}
TEXTS = sorted({*CONFIGS, *ALIASES.values(), *CHOICES})


@ROWS
def test_the_class_that_a_row_names_is_there(row: ConfigRow) -> None:
    for path in filter(None, (row.torchao, row.unpacked)):
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)


@pytest.mark.parametrize("text", TEXTS)
def test_every_choice_builds_a_config_of_its_rows_class(text: str) -> None:
    config = parse_config(text)
    built = stock_config(config)
    assert type(built).__name__ == config.torchao.rpartition(".")[2]
    assert type(kernel_for(config, torch.bfloat16).stock) is type(built)


@pytest.mark.parametrize("text", stock.CONFIGS)
def test_a_config_is_the_one_that_a_program_would_build_by_hand(text: str) -> None:
    assert stock_config(parse_config(text)) == stock.stock_config(text)
