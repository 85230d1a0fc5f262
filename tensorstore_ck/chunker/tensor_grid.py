"""Cuts a region of a tensor at a grid in *global* coordinates.

Ranks, jobs or layouts that hold the same rows in the same way cut them at the same positions, so their blocks are deduplicated.
Each function returns the block lengths of one region in bytes, in row-major order; every block is one contiguous run of the
region. No state, no I/O. Source: FORMAT.md, "The grid".
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
"""Block lengths in bytes, in memory order."""


def cut_box(offset: Sequence[int], size: Sequence[int], item_bytes: int, target_bytes: int) -> Lengths:
    """Cuts the box [offset, offset + size) of a global tensor; offsets and sizes are elements along each dim.

    A block spans R rows along dim 0: R is the largest power of two of rows that fits in `target_bytes`, and cuts lie at global
    multiples of R. A row longer than `target_bytes` is cut along the next dim by the same rule. The first and last blocks are
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
