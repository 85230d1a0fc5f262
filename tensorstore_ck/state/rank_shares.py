"""What one rank has of a tensor that is spread over ranks, as bytes to store, or as memory to fill."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from tensorstore_ck.engine.interfaces import ByteSource, WantedBox
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Placement
from tensorstore_ck.state.boxes import held_boxes
from tensorstore_ck.state.byte_sources import CopySource, MemorySource, target_of
from tensorstore_ck.state.plain_memory import require_plain, require_reachable
from tensorstore_ck.state.sharded_tensors import FlatShard, LocalPiece, SpreadDescriber, group_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankShare(NamedTuple):
    """A rank's share of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    mesh: Mesh | None
    """None: the ranks know no more than their own pieces."""
    placements: tuple[Placement, ...]
    is_flat: bool
    """The boxes of the pieces are intervals of the flattened tensor."""
    pieces: tuple[LocalPiece, ...]
    requires_grad: bool
    is_parameter: bool
    by_blocks: bool = False
    """It may be stored in another shape: what counts is the order of its elements."""

    def source(self) -> ByteSource:
        """The pieces, one after another."""
        return concatenate_sources([piece.tensor for piece in self.pieces])

    def wanted(self, tensor: int, stored: torch.dtype) -> list[WantedBox]:
        """What fills the pieces with the stored tensor of that number and dtype."""
        if not self.is_flat:
            return [WantedBox(tensor, box, target_of(local, stored)) for box, local in self.pieces]
        found = []
        for (offsets, sizes), local in self.pieces:
            at = 0
            for box in row_boxes(self.shape, offsets[0], offsets[0] + sizes[0]):
                count = prod(box[1])
                found.append(WantedBox(tensor, BoxBounds(*box), target_of(local[at : at + count], stored)))
                at += count
        return found

    def fill(self, whole: torch.Tensor) -> None:
        """Copies what the pieces have of a whole tensor that was read."""
        with torch.no_grad():
            for (offsets, sizes), local in self.pieces:
                found = whole.flatten() if self.is_flat else whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    found = found.narrow(dim, offset, size)
                local.copy_(found)


def describer_of(group: "ProcessGroup") -> SpreadDescriber:
    """Describes tensors in terms of the ranks of a group."""
    return SpreadDescriber(group_ranks(group), group.rank())


def share_of(describer: SpreadDescriber | None, value: object, path: str) -> RankShare | None:
    """The share that is a `FlatShard`, `BoxBounds`, `Boxes`, `CheckpointableTensor` or one already; with `describer`, a `DTensor` or such.

    Raises:
        UnsupportedValueError: what it holds cannot be told.
    """
    if isinstance(value, RankShare):
        return value
    if isinstance(value, FlatShard):
        require_plain(value.local, path, "the local tensor of a FlatShard")
        local = value.local.detach().view(-1)
        pieces = (LocalPiece(BoxBounds((value.start,), (local.numel(),)), local),) if local.numel() else ()
        is_parameter = isinstance(value.local, torch.nn.Parameter)
        return RankShare(value.shape, local.dtype, None, (), True, pieces, value.local.requires_grad, is_parameter)
    held = held_boxes(value, path)
    if held is not None:
        return RankShare(held.shape, held.dtype, None, (), False, held.pieces, held.requires_grad, held.is_parameter)
    found = describer.describe(value, path) if describer is not None else None
    if found is None:
        return None
    assert isinstance(value, torch.Tensor)
    is_parameter = isinstance(value, torch.nn.Parameter)
    return RankShare(found.shape, found.dtype, found.mesh, found.placements, False, found.pieces, value.requires_grad, is_parameter)


def source_of(tensor: torch.Tensor) -> ByteSource:
    """The bytes of a tensor.

    Raises:
        UnsupportedValueError: it is not a plain strided one.
    """
    require_reachable(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return MemorySource(tensor.data_ptr(), tensor.untyped_storage(), tensor.nbytes)
    return CopySource(tensor)


def concatenate_sources(tensors: Sequence[torch.Tensor]) -> ByteSource:
    """The bytes of several tensors, one after another."""
    sources = [source_of(tensor) for tensor in tensors]
    return sources[0] if len(sources) == 1 else ChainedSource(sources)


class ChainedSource:
    """`ByteSource` over several, one after another."""

    def __init__(self, sources: Sequence[ByteSource]) -> None:
        self.sources = sources
        self.size_bytes = sum(source.size_bytes for source in sources)

    def read(self, start: int, stop: int) -> memoryview:
        """What one of them gives, where it lies in one, as a block does; else a copy."""
        found: list[memoryview] = []
        for source in self.sources:
            if max(start, 0) < min(stop, source.size_bytes):
                found.append(source.read(max(start, 0), min(stop, source.size_bytes)))
            start, stop = start - source.size_bytes, stop - source.size_bytes
        return found[0] if len(found) == 1 else memoryview(b"".join(found))
