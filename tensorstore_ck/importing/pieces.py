"""A tensor that lies in several pieces of several files, told to `state.capture` as a rank would tell its share of it.

It is never put together: each piece stays where it is, and the store gets the boxes, cut into the same blocks as when the ranks that
hold these pieces put them.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
import torch

from tensorstore_ck.importing.faults import MalformedError, printable
from tensorstore_ck.sharding import Box, whole_box
from tensorstore_ck.state.sharded import Boxes, Piece

MAX_PIECES: Final = 1 << 16
"""Of one tensor: each is compared with the others."""


def assembled(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[Piece]) -> torch.Tensor | Boxes:
    """The tensor that the pieces are, which must be all of it, and nothing twice.

    Raises:
        MalformedError: they are not.
    """
    held = sorted((piece for piece in pieces if 0 not in piece.box.sizes), key=lambda piece: piece.box)
    problem = _problem(shape, [piece.box for piece in held])
    if problem:
        raise MalformedError(f"{problem} of the tensor {printable(name)!r}, of shape {list(shape)[:8]}")
    if len(held) == 1 and held[0].box == whole_box(shape):
        return held[0].tensor
    if not held:
        return torch.empty(shape, dtype=dtype)
    return Boxes(shape, dtype, tuple(held))


def _problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    if len(boxes) > MAX_PIECES:
        return f"there are {len(boxes)} pieces"
    for box in boxes:
        within = len(box.offsets) == len(box.sizes) == len(shape) and all(
            offset >= 0 and size > 0 and offset + size <= extent for offset, size, extent in zip(*box, shape, strict=True)
        )
        if not within:
            return "a piece lies outside"
    missing = prod(shape) - sum(prod(box.sizes) for box in boxes)
    if missing > 0:
        return f"{missing} elements are missing"
    starts = np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), len(shape))
    ends = starts + np.array([box.sizes for box in boxes], np.int64).reshape(starts.shape)
    for at in range(len(boxes)):
        if ((starts[at + 1 :] < ends[at]) & (ends[at + 1 :] > starts[at])).all(axis=1).any():
            return "pieces overlap"
    return "" if not missing else f"there are {-missing} elements too many"
