"""Finds the words in which a block differs from its base, in one pass over both, and writes them into a base.

The same pass sums up both, so that a base that was kept in memory is not hashed again. Sums are never stored: they depend on the build.
"""

import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_split import Words, add_differences, bytes_of, words_of, zigzag_differences

PIECE_BYTES: Final = 1 << 19
"""Bytes of a block, and of its base, that are compared at a time: they stay in a core's cache."""


class FewChanges(NamedTuple):
    """The words that differ, as they are stored: see `Changes`."""

    gaps: Words
    values: Words
    is_float: bool

    def positions(self, count: int) -> Words | None:
        """Where the words are in a block of `count` words; None if they do not fit it."""
        positions: Words = np.cumsum(self.gaps, dtype=np.int64) - 1
        is_misfit = len(positions) and (int(self.gaps.min()) == 0 or int(positions[-1]) >= count)
        return None if is_misfit else positions


class Changes(NamedTuple):
    """The words that differ."""

    changed: int
    """How many, up to the limit; above it, only that they are more than it."""
    gaps: Words
    """The distance of each from the one before, of the first from -1; u4."""
    values: Words
    """Zigzag differences."""
    is_float: bool
    sum: bytes
    """Of the block."""
    base_sum: bytes


def find_changes(raw: memoryview, base: memoryview, item_bytes: int, *, is_float: bool, limit: int) -> Changes:
    """Compares two blocks of one size; takes down at most `limit` words that differ."""
    return _compare(raw, base, item_bytes, is_float=is_float, limit=limit)


def patch_changes(
    raw: memoryview, base: memoryview, item_bytes: int, *, is_float: bool, limit: int, visit: Callable[[memoryview], object]
) -> Changes:
    """As `find_changes`, and makes `base` the block; if more than `limit` words differ, `base` is as before in the end.

    With the kernel, `visit` gets the block piece by piece, while a core has it in its cache: to hash it then takes two thirds of the time.
    If it raises, `base` is neither block.
    """
    return _compare(raw, base, item_bytes, is_float=is_float, limit=limit, visit=visit)


def _compare(
    raw: memoryview, base: memoryview, item_bytes: int, *, is_float: bool, limit: int, visit: Callable[[memoryview], object] | None = None
) -> Changes:
    if len(raw) != len(base):
        raise ValueError(f"blocks of {len(raw)} and {len(base)} bytes cannot be compared")
    gaps, values = np.empty(limit, "<u4"), np.empty(limit, f"<u{item_bytes}")
    if compiled.HAS_KERNEL:
        count, block_sum, base_sum = compiled.kernel.compare_words(
            raw, base, bytes_of(gaps), bytes_of(values), item_bytes, is_float, PIECE_BYTES, visit
        )
    else:
        words, others = words_of(raw, item_bytes), words_of(base, item_bytes)
        changed = np.flatnonzero(words != others)
        few, count, block_sum, base_sum = changed[:limit], len(changed), _crc(raw), _crc(base)
        values[: len(few)] = zigzag_differences(words[few], others[few], is_float=is_float)
        gaps[: len(few)] = np.diff(few, prepend=-1)
        if visit is not None:
            visit(raw)
            others[few] = words[few]
    if visit is not None and count > limit:
        apply_changes(gaps, _negated(values), base, is_float=is_float)
    return Changes(count, gaps=gaps[:count], values=values[:count], is_float=is_float, sum=block_sum, base_sum=base_sum)


def sum_of(block: memoryview) -> bytes:
    """The `sum` of a block."""
    return _compare(block, block, 1, is_float=False, limit=0).sum


def visit_changed(changes: FewChanges, base: memoryview, visit: Callable[[memoryview], object]) -> tuple[Words, Words, Words] | None:
    """The positions of the changed words, the words of `base` there, and those of the block; None if they do not fit.

    `visit` gets the block piece by piece, each in a copy that the next piece overwrites: it stays in the core's cache.
    """
    dtype = changes.values.dtype
    words = words_of(base, dtype.itemsize)
    positions = changes.positions(len(words))
    if positions is None:
        return None
    old, new, step = np.empty_like(changes.values), np.empty_like(changes.values), PIECE_BYTES // dtype.itemsize
    memory, begin = np.empty(min(step, len(words)), dtype), 0
    for start in range(0, len(words), step):
        piece = memory[: len(words) - start]
        piece[:] = words[start : start + step]
        end = int(np.searchsorted(positions, start + step))
        at, few = positions[begin:end] - start, slice(begin, end)
        old[few] = piece[at]
        add_differences(old[few], changes.values[few], new[few], is_float=changes.is_float)
        piece[at] = new[few]
        visit(bytes_of(piece))
        begin = end
    return positions, old, new


def _crc(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def _negated(values: Words) -> Words:
    """Zigzag differences the other way round; the least integer is its own negation."""
    negated: Words = np.where(values & 1, values + (values != np.iinfo(values.dtype).max), values - 1).astype(values.dtype)
    return negated


def apply_changes(gaps: Words, values: Words, base: memoryview, *, is_float: bool) -> bool:
    """Makes `base` the block in place; False, and `base` as it was, if the gaps do not fit it."""
    if compiled.HAS_KERNEL:
        return compiled.kernel.apply_changes(bytes_of(gaps), bytes_of(values), base, values.dtype.itemsize, is_float)
    words = words_of(base, values.dtype.itemsize)
    positions = FewChanges(gaps, values, is_float).positions(len(words))
    if positions is None:
        return False
    picked = np.empty_like(values)
    add_differences(words[positions], values, picked, is_float=is_float)
    words[positions] = picked
    return True
