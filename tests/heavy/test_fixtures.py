"""Checkpoints that stock diffusers wrote with torchao 0.15, in classes that today's lacks: explained, no traceback.

tests/legacy/make_fixtures.py wrote them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aoquant.cli import main

FIXTURES = Path(__file__).parents[1] / "fixtures" / "torchao-0.15"


@pytest.mark.parametrize(
    ("name", "code", "words", "hint"),
    [
        ("int8wo", 4, "does not read Int8WeightOnlyConfig version 1", "it was made with diffusers 0.42.1"),
        ("uint4wo", 4, "does not read UIntXWeightOnlyConfig version 1", "it was made with diffusers 0.42.1"),
        # It names a function of torchao, for its activations: a reference, but to code.
        ("int8dq", 5, "_int8_symm_per_token_reduced_range_quant", "--trust-pickle"),
    ],
)
def test_an_old_checkpoint_is_explained(
    name: str, code: int, words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", str(FIXTURES / name)]) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2 and words in lines[0] and hint in lines[1]


@pytest.mark.parametrize(
    ("name", "kind", "count"), [("int8wo", "AffineQuantizedTensor", 28), ("uint4wo", "AffineQuantizedTensor", 28)]
)
def test_an_old_checkpoint_is_described(name: str, kind: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURES / name)]) == 0
    assert f"{kind}" in (out := capsys.readouterr().out) and f" {count} " in out
