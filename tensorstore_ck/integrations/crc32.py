"""The CRC-32 of bytes that were summed in pieces."""

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320


def combined(first: int, second: int, size: int) -> int:
    """The CRC-32 of bytes of sum `first` followed by `size` bytes of sum `second`."""
    return _product(_power(size), first) ^ second if first else second


@lru_cache(64)
def _power(size: int) -> int:
    """The polynomial of `size` zero bytes: x to the power of 8 x `size`, modulo the CRC's."""
    power, square, exponent = 1 << 31, 1 << 30, 8 * size
    while exponent:
        if exponent & 1:
            power = _product(square, power)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(one: int, other: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's; the highest bit is the lowest power."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product
