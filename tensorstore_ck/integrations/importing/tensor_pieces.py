"""A tensor in several pieces of several files, passed to `state.capture` like a rank's boxes of it.

The pieces are never assembled: each stays in its file, and the store gets the boxes, cut into the same blocks as in a save by the ranks
that held these pieces.
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
    """The tensor of these pieces, which must cover it exactly once.

    Raises:
        MalformedError: they do not.
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
