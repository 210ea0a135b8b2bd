"""CRC-32 of two runs of bytes from that of each, so that a thread can take it of what it has in its cache.

A CRC is a remainder modulo a polynomial over GF(2); appending n zero bytes multiplies it by x^(8n). The method is
that of zlib's crc32_combine (zlib 1.2.12), which Python's zlib module does not offer. Bits are reflected: the highest
bit of an int is the coefficient of x^0.
"""

from __future__ import annotations

import functools

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of a + b, from that of a, that of b, and the length of b."""
    return _multiply(_shift(second_bytes), first) ^ second


@functools.lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """x^(8·num_bytes) modulo the polynomial, by repeated squaring."""
    power, result = _ONE >> 8, _ONE  # x^8, x^0
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        num_bytes >>= 1
    return result


def _multiply(left: int, right: int) -> int:
    """left · right modulo the polynomial."""
    product, bit = 0, _ONE
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product
