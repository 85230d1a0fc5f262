"""Tensors that are spread over ranks: `DTensor`, torch's ShardedTensor, and `FlatShard` for flattened tensors.

Reads the whole tensor's shape, how it is spread, and which local memory holds which box of it. Knows no states, trees or stores, and
does not communicate. It never imports torch.distributed, which torch may lack: the creator of such a tensor has imported it. Tensors
that torch's metadata may describe wrongly are refused.
"""

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NoReturn

import torch

from tensorstore_ck.common.units import listed
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Placement, Shard, boxes, intervals, local_shape
from tensorstore_ck.format.tree import PARAMETER, REQUIRES_GRAD
from tensorstore_ck.state.boxes import held_boxes
from tensorstore_ck.state.plain_memory import PLAIN, require_plain
from tensorstore_ck.state.rank_shares import LocalPiece, RankShare, flags_of, narrowed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@short_errors
@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A run of a flattened tensor's elements: FSDP1's flat parameters, ZeRO's partitions.

    `local` holds elements [start, start + local.numel()) of the tensor of shape `shape`, row-major.

    Raises:
        InvalidOptionError: `local` is not a plain contiguous tensor, or does not lie within the whole.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        local = self.local
        if type(local) not in PLAIN:
            raise InvalidOptionError(f"FlatShard: local is a {type(local).__name__}; pass a plain torch.Tensor", object_id="local")
        if local.layout is not torch.strided or not local.is_contiguous():
            raise InvalidOptionError("FlatShard: local is not contiguous; pass local.contiguous()", object_id="local")
        try:
            shape = tuple(operator.index(extent) for extent in self.shape)
            start = operator.index(self.start)
        except TypeError as exc:
            raise InvalidOptionError(f"FlatShard: shape and start must be whole numbers: {exc}", object_id="shape") from exc
        if min(shape, default=0) < 0:
            raise InvalidOptionError(f"FlatShard: shape {shape} has a negative extent; pass the whole tensor's shape", object_id="shape")
        if start < 0 or start + local.numel() > prod(shape):
            raise InvalidOptionError(
                f"FlatShard: elements [{start}, {start + local.numel()}) do not lie within the {prod(shape)} of a tensor of shape {shape};"
                " start counts elements from the whole tensor's beginning",
                object_id="start",
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "start", start)


def group_ranks(group: "ProcessGroup | None") -> dict[int, int]:
    """Global rank -> rank in `group` (None: the default group), for all members."""
    return {rank: position for position, rank in enumerate(torch.distributed.get_process_group_ranks(group))}


class SpreadDescriber:
    """Describes tensors in terms of one group's ranks. Caches meshes: a model has few of them, but many tensors."""

    def __init__(self, ranks: Mapping[int, int], rank: int) -> None:
        """`ranks`: global rank -> rank in the group, from `group_ranks`; `rank`: this process's rank in the group."""
        self._ranks = ranks
        self._rank = rank
        self._meshes: dict[DeviceMesh, Mesh] = {}

    def describe(self, tensor: object, path: str = "") -> RankShare | None:
        """This rank's share of `tensor`, at `path` of the state; None if it is not a DTensor or ShardedTensor.

        Raises:
            UnsupportedValueError: the elements that it holds cannot be determined; the message has the reason and advice.
        """
        if type(tensor) in PLAIN or not isinstance(tensor, torch.Tensor):
            return None
        if is_dtensor(tensor):
            return self._dtensor(tensor, path)  # type: ignore[arg-type]
        if _is(tensor, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
            return _sharded_tensor(tensor, path)  # type: ignore[arg-type]
        return None

    def _dtensor(self, tensor: "DTensor", path: str) -> RankShare:
        shape = tuple(tensor.shape)
        mesh, placements, coordinate = self.placement_of(tensor, path)
        local = local_of(tensor)
        require_plain(local, path, "the local tensor of a DTensor")
        pieces: list[LocalPiece] = []
        if coordinate is not None:
            self.require_local(tensor, local, path)
            held = boxes(shape, mesh.shape, placements, coordinate)
            pieces = [LocalPiece(box, narrowed(local, offsets, box.sizes)) for box, offsets in held]
        return RankShare(shape=shape, dtype=tensor.dtype, pieces=tuple(pieces), flags=flags_of(tensor), mesh=mesh, placements=placements)

    def placement_of(self, tensor: "DTensor", path: str) -> tuple[Mesh, tuple[Placement, ...], tuple[int, ...] | None]:
        """A DTensor's mesh, its placements, and this rank's coordinate in the mesh (None: not in it)."""
        mesh = self._mesh(tensor.device_mesh, path)
        # Not device_mesh.get_coordinate(): torch reuses equal meshes, also those of an earlier group where this process had another rank.
        return mesh, _placements(tensor, mesh, path), mesh.coordinate(self._rank)

    def require_local(self, tensor: "DTensor", local: torch.Tensor, path: str) -> None:
        """Checks that the local tensor has the shape and dtype that the placements give. Raises `UnsupportedValueError` if it has not."""
        shape = tuple(tensor.shape)
        mesh, placements, coordinate = self.placement_of(tensor, path)
        assert coordinate is not None
        expected = local_shape(intervals(shape, mesh.shape, placements, coordinate))
        if tuple(local.shape) != expected or local.dtype != tensor.dtype:
            refuse(
                path,
                f"is a DTensor of shape {shape} and {tensor.dtype} placed as {tensor.placements} on a mesh of shape {mesh.shape},"
                f" which gives this rank {expected}, but its local tensor has shape {tuple(local.shape)} and {local.dtype}",
                "make its sharded dims divisible by the mesh, or pass shape= and stride= to DTensor.from_local",
            )

    def _mesh(self, device_mesh: "DeviceMesh", path: str) -> Mesh:
        mesh = self._meshes.get(device_mesh)
        if mesh is None:
            globally = device_mesh.mesh.flatten().tolist()
            outside = [rank for rank in globally if rank not in self._ranks]
            if outside:
                refuse(
                    path,
                    f"is a DTensor on a mesh with global ranks {listed(outside)}, which are not in the group that saves or restores it",
                    "pass a group= that has all ranks of the mesh",
                )
            mesh = Mesh(tuple(device_mesh.mesh.shape), tuple(self._ranks[rank] for rank in globally))
            self._meshes[device_mesh] = mesh
        return mesh


def _placements(tensor: "DTensor", mesh: Mesh, path: str) -> tuple[Placement, ...]:
    from torch.distributed.tensor import placement_types  # noqa: PLC0415 - there is a DTensor, so it is loaded

    placements: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, placement_types.Partial):
            refuse(
                path,
                f"is a DTensor with the placement {placement!r}: its value is yet to be reduced over ranks",
                "redistribute it first, e.g. tensor.redistribute(placements=[Replicate()])",
            )
        # By exact type: a subclass may split in another way.
        if type(placement) is placement_types.Replicate:
            placements.append(None)
        elif type(placement) is placement_types.Shard:
            placements.append(Shard(placement.dim % tensor.ndim))
        elif type(placement) is placement_types._StridedShard:
            placements.append(Shard(placement.dim % tensor.ndim, int(placement.split_factor)))
        else:
            refuse(path, f"is a DTensor with the placement {placement!r}, which is unknown", "redistribute it to Shard or Replicate first")
    _check_order(tensor, mesh, placements, path)
    return tuple(placements)


def _check_order(tensor: "DTensor", mesh: Mesh, placements: list[Placement], path: str) -> None:
    """Refuses a DTensor that may not have been split in the order of its mesh dims, as its placements say."""
    order = getattr(tensor._spec, "shard_order", None)  # torch 2.10 and newer
    if order is not None and any(tuple(shards.mesh_dims) != tuple(sorted(shards.mesh_dims)) for shards in order):
        refuse(path, f"is a DTensor with the shard order {order}, not the mesh's own", "redistribute it without a shard order first")
    for number, placement in enumerate(placements):
        if placement is None or placement.split_factor == 1 or tensor.shape[placement.dim] % placement.split_factor == 0:
            continue
        # FSDP2 over TP and EP has _StridedShard(split_factor=tp * ep), but splits by one and then by the other. If that is uneven, this
        # rank may hold other elements than the placements say, and the local size does not always show it. (With TP alone, either the
        # elements are the same, or the local size of some rank differs.)
        later = zip(placements[number + 1 :], mesh.shape[number + 1 :], strict=True)
        if sum(other is not None and other.dim == placement.dim and size > 1 for other, size in later) > 1:
            refuse(
                path,
                f"is a DTensor of shape {tuple(tensor.shape)} placed as {tensor.placements}, where {placement.split_factor} pieces of dim"
                f" {placement.dim} cannot be equal: torch does not record which elements each rank holds",
                f"make dim {placement.dim} divisible by {placement.split_factor}",
            )


def local_of(tensor: "DTensor") -> torch.Tensor:
    """The local tensor, detached if it is plain, after any collective that still fills it."""
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor has it
    local = local if wait is None else wait()
    return local.detach() if type(local) in PLAIN else local  # a subclass may make copies of its inner tensors to detach itself


def _sharded_tensor(tensor: "ShardedTensor", path: str) -> RankShare:
    metadata = tensor.metadata()  # the tensor's own attributes are deprecated
    shape, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
    pieces = []
    for shard in tensor.local_shards():
        box = BoxBounds(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        local = shard.tensor.detach()
        require_plain(local, path, "a local shard of a ShardedTensor")
        if not box.lies_within(shape) or tuple(local.shape) != box.sizes or local.dtype != dtype:
            refuse(
                path,
                f"is a ShardedTensor of shape {shape} and {dtype} whose metadata has a local shard of sizes {box.sizes} at"
                f" {box.offsets}, but the shard has shape {tuple(local.shape)} and {local.dtype}",
                "rebuild it from its local shards",
            )
        if 0 not in box.sizes:
            pieces.append(LocalPiece(box, local))
    flags = REQUIRES_GRAD if metadata.tensor_properties.requires_grad else 0
    flags |= PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
    return RankShare(shape, dtype, tuple(pieces), flags)


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
        return RankShare(value.shape, local.dtype, pieces, flags_of(value.local), is_flat=True)
    return held_boxes(value, path) or (describer.describe(value, path) if describer is not None else None)


def is_dtensor(tensor: object) -> bool:
    """Whether it is a `DTensor`."""
    return isinstance(tensor, torch.Tensor) and _is(tensor, "torch.distributed.tensor", "DTensor")


def _is(tensor: torch.Tensor, module: str, name: str) -> bool:
    """Whether it is an instance of a class; False if the class's module is not imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(tensor, cls)


def refuse(path: str, what: str, advice: str) -> NoReturn:
    """Raises an `UnsupportedValueError`."""
    raise UnsupportedValueError(f"{path or 'the state'} {what}; {advice}", object_id=path)
