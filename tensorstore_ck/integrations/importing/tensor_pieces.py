"""A tensor that lies in several pieces of several files, told to `state.capture` as a rank would tell its share of it.

It is never put together: each piece stays where it is, and the store gets the boxes, cut into the same blocks as when the ranks that
hold these pieces put them.
"""

from collections.abc import Sequence
from typing import Final

import torch

from tensorstore_ck.format.sharding import whole_box
from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.state.boxes import Box, Boxes, coverage_error
from tensorstore_ck.state.sharded_tensors import LocalPiece

MAX_PIECES: Final = 1 << 16
"""Of one tensor: each is compared with the others."""


def assembled(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[LocalPiece]) -> torch.Tensor | Boxes:
    """The tensor that the pieces are, which must be all of it, and nothing twice.

    Raises:
        MalformedError: they are not.
    """
    held = sorted((piece for piece in pieces if 0 not in piece.box.sizes), key=lambda piece: piece.box)
    problem = f"there are {len(held)} pieces" if len(held) > MAX_PIECES else coverage_error(shape, [piece.box for piece in held])
    if problem:
        raise MalformedError(f"{problem} of the tensor {printable(name)!r}, of shape {list(shape)[:8]}")
    if len(held) == 1 and held[0].box == whole_box(shape):
        return held[0].tensor
    if not held:
        return torch.empty(shape, dtype=dtype)
    return Boxes([Box(piece.tensor, shape, piece.box.offsets) for piece in held])
