"""The examples that `make demo` does not run."""

from __future__ import annotations

import forward_errors
import pytest


def test_forward_errors_shrink_with_finer_weights(capsys: pytest.CaptureFixture[str]) -> None:
    forward_errors.main(["--configs", "int8wo", "uint2wo"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| config | bits per weight | Flux | T5 |", "| --- | --- | --- | --- |"]
    fine, coarse = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    assert (fine[0], coarse[0]) == ("`int8wo`", "`uint2wo`")
    for column in (2, 3):
        assert 0 < float(fine[column]) < 0.1 < float(coarse[column]) < 2
    assert 8 < float(fine[1]) < 8.5
