"""Tests of the old stack are collected in it and nowhere else: `make test-legacy`."""

from __future__ import annotations

from importlib import metadata

if not metadata.version("torchao").startswith("0.15."):
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.heavy.conftest import *  # noqa: F403  (its fixtures, and the environment that they need)
