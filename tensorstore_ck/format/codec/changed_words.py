"""Finds the words in which a block differs from its base, in one pass over both, and writes them into a base.

The same pass sums up both, so that a base that was kept in memory is not hashed again. Sums are never stored: they depend on the build.
"""

import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_split import Words, add_differences, bytes_of, words_of, zigzag_differences


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
    if not compiled.HAS_KERNEL:
        words, others = words_of(raw, item_bytes), words_of(base, item_bytes)
        changed = np.flatnonzero(words != others)
        few = changed[:limit]
        values = zigzag_differences(words[few], others[few], is_float=is_float)
        gaps = np.diff(few, prepend=-1).astype("<u4")
        return Changes(len(changed), gaps=gaps, values=values, is_float=is_float, sum=_crc(raw), base_sum=_crc(base))
    gaps, values = np.empty(limit, "<u4"), np.empty(limit, f"<u{item_bytes}")
    count, raw_sum, base_sum = compiled.kernel.find_changes(raw, base, bytes_of(gaps), bytes_of(values), item_bytes, is_float)
    return Changes(count, gaps=gaps[:count], values=values[:count], is_float=is_float, sum=raw_sum, base_sum=base_sum)


def _crc(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def apply_changes(gaps: Words, values: Words, base: memoryview, *, is_float: bool) -> bool:
    """Makes `base` the block in place; False, and `base` as it was, if the gaps do not fit it."""
    if compiled.HAS_KERNEL:
        return compiled.kernel.apply_changes(bytes_of(gaps), bytes_of(values), base, values.dtype.itemsize, is_float)
    positions: npt.NDArray[Any] = np.cumsum(gaps, dtype=np.int64) - 1
    words = words_of(base, values.dtype.itemsize)
    if len(gaps) and (int(gaps.min()) == 0 or int(positions[-1]) >= len(words)):
        return False
    picked = np.empty_like(values)
    add_differences(words[positions], values, picked, is_float=is_float)
    words[positions] = picked
    return True
