"""One rank's share of a tensor that is spread over ranks, as bytes to store or as memory to fill."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from tensorstore_ck.engine.interfaces import ByteSource, WantedBox
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Placement
from tensorstore_ck.format.tree import PARAMETER, REQUIRES_GRAD
from tensorstore_ck.state.byte_sources import source_of, target_of
from tensorstore_ck.state.memory_order import order_of


class LocalPiece(NamedTuple):
    """A box of the whole tensor, and the local memory that holds it."""

    box: BoxBounds
    tensor: torch.Tensor
    """Has the box's sizes; detached, not necessarily contiguous."""


class RankShare(NamedTuple):
    """A rank's share of one tensor."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""
    dtype: torch.dtype
    pieces: tuple[LocalPiece, ...]
    """Without empty ones."""
    flags: int
    """See `flags_of`."""
    mesh: Mesh | None = None
    """None: each rank knows only its own pieces."""
    placements: tuple[Placement, ...] = ()
    is_flat: bool = False
    """The boxes of the pieces are intervals of the flattened tensor."""
    by_blocks: bool = False
    """It may be stored in another shape with the same order of elements."""

    @property
    def order(self) -> tuple[int, ...]:
        """The memory order of this rank's piece, if it holds one box."""
        return order_of(self.pieces[0].tensor) if len(self.pieces) == 1 and not self.is_flat else ()

    def source(self) -> ByteSource:
        """The bytes of the pieces, concatenated."""
        return concatenate_sources([piece.tensor for piece in self.pieces])

    def wanted(self, tensor: int, stored: torch.dtype) -> list[WantedBox]:
        """The boxes to read into the pieces, of the stored tensor with that number and dtype."""
        return [WantedBox(tensor, box, target_of(local, stored)) for box, local in self.boxes()]

    def boxes(self) -> list[LocalPiece]:
        """The pieces as boxes of the whole tensor, also where they are intervals of it."""
        if not self.is_flat:
            return [*self.pieces]
        boxes = []
        for (offsets, sizes), local in self.pieces:
            at = 0
            for box in row_boxes(self.shape, offsets[0], offsets[0] + sizes[0]):
                count = prod(box[1])
                boxes.append(LocalPiece(BoxBounds(*box), local[at : at + count].view(box[1])))
                at += count
        return boxes

    def fill(self, whole: torch.Tensor) -> None:
        """Fills the pieces from a whole tensor that was read."""
        with torch.no_grad():
            for (offsets, sizes), local in self.pieces:
                local.copy_(narrowed(whole.flatten() if self.is_flat else whole, offsets, sizes))


def flags_of(tensor: torch.Tensor) -> int:
    """The flags of a tensor: `REQUIRES_GRAD` and `PARAMETER`."""
    return (REQUIRES_GRAD if tensor.requires_grad else 0) | (PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0)


def narrowed(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """A box of `tensor`, as a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def concatenate_sources(tensors: Sequence[torch.Tensor]) -> ByteSource:
    """The concatenated bytes of several tensors."""
    sources = [source_of(tensor) for tensor in tensors]
    return sources[0] if len(sources) == 1 else ChainedSource(sources)


class ChainedSource:
    """`ByteSource` over concatenated sources."""

    def __init__(self, sources: Sequence[ByteSource]) -> None:
        self.sources = sources
        self.size_bytes = sum(source.size_bytes for source in sources)

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes without a copy if they lie in one source, as those of a block do; otherwise a copy."""
        views: list[memoryview] = []
        for source in self.sources:
            if max(start, 0) < min(stop, source.size_bytes):
                views.append(source.read(max(start, 0), min(stop, source.size_bytes)))
            start, stop = start - source.size_bytes, stop - source.size_bytes
        return views[0] if len(views) == 1 else memoryview(b"".join(views))
