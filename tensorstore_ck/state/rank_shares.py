"""One rank's share of a tensor that is spread over ranks, as bytes to store or as memory to fill."""

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
from tensorstore_ck.state.sharded_tensors import FlatShard, LocalPiece, SpreadDescriber, group_ranks, narrowed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankShare(NamedTuple):
    """A rank's share of one tensor."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""
    dtype: torch.dtype
    mesh: Mesh | None
    """None: each rank knows only its own pieces."""
    placements: tuple[Placement, ...]
    is_flat: bool
    """The boxes of the pieces are intervals of the flattened tensor."""
    pieces: tuple[LocalPiece, ...]
    requires_grad: bool
    is_parameter: bool
    by_blocks: bool = False
    """It may be stored in another shape with the same order of elements."""

    def source(self) -> ByteSource:
        """The bytes of the pieces, concatenated."""
        return concatenate_sources([piece.tensor for piece in self.pieces])

    def wanted(self, tensor: int, stored: torch.dtype) -> list[WantedBox]:
        """The boxes to read into the pieces, of the stored tensor with that number and dtype."""
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
        """Fills the pieces from a whole tensor that was read."""
        with torch.no_grad():
            for (offsets, sizes), local in self.pieces:
                local.copy_(narrowed(whole.flatten() if self.is_flat else whole, offsets, sizes))


def describer_of(group: "ProcessGroup") -> SpreadDescriber:
    """A describer in terms of a group's ranks."""
    return SpreadDescriber(group_ranks(group), group.rank())


def share_of(describer: SpreadDescriber | None, value: object, path: str) -> RankShare | None:
    """The share in a `FlatShard`, `Box`, `Boxes`, `CheckpointableTensor` or `RankShare`; with `describer` also in a `DTensor` or such.

    Raises:
        UnsupportedValueError: the elements that it holds cannot be determined.
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
        UnsupportedValueError: it is not a plain strided tensor.
    """
    require_reachable(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return MemorySource(tensor.data_ptr(), tensor.untyped_storage(), tensor.nbytes)
    return CopySource(tensor)


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
        """The bytes of one source, if they lie in one, as those of a block do; else a copy."""
        found: list[memoryview] = []
        for source in self.sources:
            if max(start, 0) < min(stop, source.size_bytes):
                found.append(source.read(max(start, 0), min(stop, source.size_bytes)))
            start, stop = start - source.size_bytes, stop - source.size_bytes
        return found[0] if len(found) == 1 else memoryview(b"".join(found))
