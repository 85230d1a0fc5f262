"""The canonical grid: cuts of a tensor's region in *global* coordinates.

Two ranks, jobs or layouts that hold the same rows in the same way cut them in the same places, so their blocks dedup. All
functions return the lengths in bytes of the blocks of one region, in the row-major order of the region's own memory: every
block is one contiguous run of it. No state, no I/O. The rule is FORMAT.md's, "The grid".
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
"""Block lengths in bytes, in memory order."""


def cut_box(offset: Sequence[int], size: Sequence[int], item_bytes: int, target_bytes: int) -> Lengths:
    """Cuts the box [offset, offset + size) of a global tensor.

    Along dim 0 a block spans the largest power of two of rows that fits in `target_bytes`, at multiples of it in global
    coordinates; when one row is too long, each row is cut along the next dim in the same way. The first and last blocks are
    clipped to the box.
    """
    if 0 in size:
        return np.empty(0, np.int64)
    if not size:
        return np.array([item_bytes], np.int64)
    row_bytes = item_bytes
    for extent in size[1:]:
        row_bytes *= extent
    if row_bytes > target_bytes and len(size) > 1:
        return np.tile(cut_box(offset[1:], size[1:], item_bytes, target_bytes), size[0])
    rows = 1 << max(target_bytes // row_bytes, 1).bit_length() - 1
    return _multiples(offset[0], offset[0] + size[0], rows) * row_bytes


def cut_interval(start: int, stop: int, item_bytes: int, target_bytes: int) -> Lengths:
    """Cuts elements [start, stop) of a flattened tensor at multiples of `target_bytes`."""
    return _multiples(start, stop, max(target_bytes // item_bytes, 1)) * item_bytes


def _multiples(start: int, stop: int, step: int) -> Lengths:
    """Lengths of [start, stop) cut at multiples of `step`."""
    if stop <= start:
        return np.empty(0, np.int64)
    inner = np.arange(start // step + 1, -(-stop // step), dtype=np.int64) * step
    return np.diff(inner, prepend=start, append=stop)
