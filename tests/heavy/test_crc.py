"""The combined CRC is the CRC of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from aoquant.engine.crc import crc32_combine


@given(st.binary(max_size=2000), st.binary(max_size=2000))
def test_two_runs_combine_to_the_whole(first: bytes, second: bytes) -> None:
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_long_second_run() -> None:
    first, second = b"abc", bytes(5_000_000)
    assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
