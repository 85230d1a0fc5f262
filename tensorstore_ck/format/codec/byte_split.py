"""Splits words into groups of bytes and merges them again, at memory speed.

A float's sign, exponent and mantissa have different statistics. Rotated left by one bit, a word has its exponent in whole bytes at the
top, and its sign below the mantissa, among the noise. Works on pieces that stay in a core's cache; numpy releases the GIL.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PIECE_BYTES: Final = 1 << 18
PAGE_OFFSET_BYTES: Final = 1 << 11

Words = npt.NDArray[Any]
"""Unsigned integers, little-endian."""


def words_of(data: memoryview | bytes | bytearray, item_bytes: int) -> Words:
    """The words in `data`; not copied."""
    return np.frombuffer(data, f"<u{item_bytes}")


def bytes_of(words: Words) -> memoryview:
    """The bytes of words; not copied."""
    return memoryview(words.view("u1"))  # type: ignore[arg-type]


def split(words: Words, widths: Sequence[int], *, rotated: bool) -> list[Words]:
    """The groups of bytes of each word, the most significant first; `widths`, in bytes, sum up to the word's."""
    bits = 8 * words.dtype.itemsize
    groups: list[Words] = [np.empty(len(words), f"<u{width}") for width in widths]
    step = PIECE_BYTES // words.dtype.itemsize
    spare, more = _spares(min(step, len(words)), words.dtype)
    for start in range(0, len(words), step):
        piece = words[start : start + step]
        part, rest = spare[: len(piece)], more[: len(piece)]
        shift = bits
        for group, width in zip(groups, widths, strict=True):
            shift -= 8 * width
            taken: Words = part
            if not rotated:
                taken = np.right_shift(piece, shift, out=part) if shift else piece
            elif shift:
                np.right_shift(piece, shift - 1, out=part)
            else:
                np.left_shift(piece, 1, out=part)
                np.right_shift(piece, bits - 1, out=rest)
                np.bitwise_or(part, rest, out=part)
            np.copyto(group[start : start + len(piece)], taken, casting="unsafe")
    return groups


def merge(groups: Sequence[Words], into: Words, *, rotated: bool) -> None:
    """Merges groups of bytes into words. Writes each word once: `into` may be a tensor that other processes restore at the same time."""
    bits = 8 * into.dtype.itemsize
    step = PIECE_BYTES // into.dtype.itemsize
    spare, more = _spares(min(step, len(into)), into.dtype)
    for start in range(0, len(into), step):
        piece = into[start : start + step]
        merged, part = spare[: len(piece)], more[: len(piece)]
        shift = bits
        for number, group in enumerate(groups):
            shift -= 8 * group.dtype.itemsize
            here = part if number else merged
            np.copyto(here, group[start : start + len(piece)])
            low = here >> 1 if rotated and not shift else None  # rotates back
            np.left_shift(here, bits - 1 if low is not None else shift - rotated, out=here)
            if number:
                np.bitwise_or(merged, here, out=merged)
            if low is not None:
                np.bitwise_or(merged, low, out=merged)
        np.copyto(piece, merged)


def zigzag_differences(words: Words, base: Words, *, is_float: bool) -> Words:
    """Zigzag-coded differences modulo 2^bits; of floats, differences in their order as integers."""
    bits = 8 * words.dtype.itemsize
    signed = np.dtype(f"<i{words.dtype.itemsize}")
    differences = np.empty_like(words)
    for piece, other, out in _pieces(words, base, differences):
        difference = _ordered(piece, is_float=is_float) - _ordered(other, is_float=is_float)
        np.left_shift(difference, 1, out=out)
        np.bitwise_xor(out, (difference.view(signed) >> (bits - 1)).view(words.dtype), out=out)
    return differences


def add_differences(base: Words, differences: Words, into: Words, *, is_float: bool) -> None:
    """The inverse of `zigzag_differences`: writes `base` plus `differences` to `into`."""
    for other, zigzag, out in _pieces(base, differences, into):
        difference = (zigzag >> 1) ^ (0 - (zigzag & 1))
        out[:] = _ordered(_ordered(other, is_float=is_float) + difference, is_float=is_float)


def _ordered(words: Words, *, is_float: bool) -> Words:
    """Maps floats to two's complement integers of the same order; its own inverse."""
    if not is_float:
        return words
    bits = 8 * words.dtype.itemsize
    sign: Words = (words.view(f"<i{words.dtype.itemsize}") >> (bits - 1)).view(words.dtype)
    ordered: Words = words ^ (sign & words.dtype.type((1 << (bits - 1)) - 1))
    return ordered


def _pieces(*arrays: Words) -> Any:
    step = PIECE_BYTES // arrays[0].dtype.itemsize
    return (tuple(array[start : start + step] for array in arrays) for start in range(0, len(arrays[0]), step))


def _spares(count: int, dtype: np.dtype[Any]) -> tuple[Words, Words]:
    """Two arrays at different offsets in a page: at equal ones, cores take a load to depend on a store (4K aliasing)."""
    gap = PAGE_OFFSET_BYTES // dtype.itemsize
    memory = np.empty(2 * count + 2 * gap, dtype)
    return memory[gap : gap + count], memory[2 * gap + count :]
