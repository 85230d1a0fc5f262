"""Tensors of which each rank holds boxes, several of most: as `tsck.Box`, and in one buffer as torch's ``CheckpointableTensor``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import tensorstore_ck as tsck

Ints = tuple[int, ...]


class _ToldToOlderTorch(torch.Tensor):
    """Gives DCP of torch before 2.15, in the protocol that it knows, what a newer one reads from the four attributes."""

    global_shape: Ints
    global_offsets: tuple[Ints, ...]
    local_offsets: tuple[Ints, ...]
    local_sizes: tuple[Ints, ...]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self), torch.Size(self.global_shape)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets, at), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))
            for at, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        places = zip(self.global_offsets, self.local_sizes, strict=True)
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in places]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return boxes_of(self)[self.global_offsets.index(tuple(index.offset or ()))]

    def size(self, dim: int | None = None) -> Any:
        """DCP compares it with the saved tensor's."""
        return torch.Size(self.global_shape) if dim is None else self.global_shape[dim]


def checkpointable(
    local: torch.Tensor, shape: Ints, global_offsets: Sequence[Ints], local_offsets: Sequence[Ints], sizes: Sequence[Ints]
) -> Any:
    """As torch 2.15 has it: a plain tensor, with attributes."""
    tensor: Any = local if hasattr(dcp, "CheckpointableTensor") else local.as_subclass(_ToldToOlderTorch)
    tensor.global_shape, tensor.global_offsets = shape, tuple(global_offsets)
    tensor.local_offsets, tensor.local_sizes = tuple(local_offsets), tuple(sizes)
    return tensor


def boxes_of(tensor: Any) -> list[torch.Tensor]:
    """The memory of each box of a ``CheckpointableTensor``."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    places = zip(tensor.local_offsets, tensor.local_sizes, strict=True)
    return [plain[tuple(slice(at, at + size) for at, size in zip(*place, strict=True))] for place in places]


def dealt(full: torch.Tensor, rank: int, ranks: int) -> list[tuple[Ints, torch.Tensor]]:
    """What a rank gets of a tensor that is cut along its first and last dim and dealt out: offsets, and a copy."""
    if not full.numel():
        return [((0,) * full.ndim, full.clone())]
    ends = [[0, extent] for extent in full.shape]
    ends[-1] = [0, full.shape[-1] // 3, full.shape[-1]]
    ends[0] = [full.shape[0] * at // ranks for at in range(ranks + 1)]
    found = []
    for number, cell in enumerate(product(*map(pairwise, ends))):
        own = full[tuple(slice(*bounds) for bounds in cell)]
        if (number + number // ranks) % ranks == rank and own.numel():
            found.append((tuple(start for start, _ in cell), own.t().contiguous().t() if own.ndim == 2 else own.clone()))
    return found


@dataclass(frozen=True)
class Boxed:
    """Boxes of any strides; `in_one_buffer`: with gaps between them."""

    in_one_buffer: bool = False

    def share(self, full: torch.Tensor, rank: int, ranks: int) -> Any:
        """Of a tensor without dims all have the same, as of any that is not spread."""
        if not full.ndim:
            return full.clone()
        own, shape = dealt(full, rank, ranks), tuple(full.shape)
        if not self.in_one_buffer:
            boxes = [tsck.Box(local, shape, offsets) for offsets, local in own]
            return tsck.Boxes(boxes) if len(boxes) > 1 else boxes[0] if boxes else tsck.Box(full[:0].clone(), shape, (0,) * full.ndim)
        sizes = [tuple(local.shape) for _, local in own]
        starts = [(1 + sum(size[0] + 1 for size in sizes[:at]), *(1,) * (full.ndim - 1)) for at in range(len(own))]
        room = [1 + sum(size[0] + 1 for size in sizes), *(2 + max([size[dim] for size in sizes], default=0) for dim in range(1, full.ndim))]
        tensor = checkpointable(torch.zeros(room, dtype=full.dtype), shape, [offsets for offsets, _ in own], starts, sizes)
        for place, (_, local) in zip(boxes_of(tensor), own, strict=True):
            place.copy_(local)
        return tensor
