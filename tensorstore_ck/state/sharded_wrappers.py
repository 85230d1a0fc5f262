"""DTensors over wrapper subclasses: the spread of each inner tensor follows from the outer tensor, by a rule of the class.

An inner tensor has one element per outer element, per box of them, or per block of the flattened whole, or is equal on all ranks. The store
has the inner tensors of the whole tensor, so another layout, or one process, restores the same. Blocks that do not align with the ranks'
shares can be restored on the same layout only.
"""

from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from tensorstore_ck.format.sharding import BoxBounds, Mesh, Placement, Run, Shard, boxes, intervals, local_shape
from tensorstore_ck.format.tree import REQUIRES_GRAD
from tensorstore_ck.state.plain_memory import require_plain
from tensorstore_ck.state.rank_shares import LocalPiece, RankShare, flags_of, narrowed
from tensorstore_ck.state.registered_types import registered_class
from tensorstore_ck.state.sharded_tensors import SpreadDescriber, is_dtensor, local_of, refuse
from tensorstore_ck.state.torchao_types import RegisteredType
from tensorstore_ck.state.wrapper_subclasses import FLAT, OUTER_KEY, describe_outer, tensor_parts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WHOLE: Final = {"OptimState8bit": ("qmap",), "OptimState4bit": ("qmap",)}
"""Class -> inner tensors that are equal on all ranks."""
_BOXED: Final = {"Int8Tensor": ("scale", "zero_point"), "Float8Tensor": ("scale",), "IntxUnpackedToInt8Tensor": ("scale", "zero_point")}
"""Class -> inner tensors that have an element for each box of ``block_size`` elements."""


class _OuterTensor(NamedTuple):
    """The whole tensor, and this rank's part of it."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    coordinate: tuple[int, ...]
    path: str

    def is_sharded(self, dim: int) -> bool:
        """Whether the ranks hold different parts along `dim`."""
        return any(
            placement is not None and placement.dim == dim and extent > 1
            for extent, placement in zip(self.mesh.shape, self.placements, strict=True)
        )


class UnwrappedShards(NamedTuple):
    """A DTensor over a wrapper subclass, taken apart."""

    registered: RegisteredType
    state: dict[str, Any]
    """The result of `wrapper_subclasses.flattened` for the whole tensor, with a `RankShare` for each inner tensor."""


def unwrap_shards(describer: SpreadDescriber, tensor: object, path: str) -> UnwrappedShards | None:
    """The state of a DTensor whose local tensor is a registered wrapper subclass; None for anything else.

    Raises:
        UnsupportedValueError: the spread of its inner tensors cannot be determined.
    """
    if not is_dtensor(tensor):
        return None
    dtensor: DTensor = tensor  # type: ignore[assignment]
    local: Any = local_of(dtensor)
    registered = registered_class(type(local))
    if registered is None or not registered.wraps:
        return None
    mesh, placements, coordinate = describer.placement_of(dtensor, path)
    if coordinate is None:
        refuse(path, "is a DTensor on a mesh that does not have this rank", "leave it out here")
    describer.require_local(dtensor, local, path)
    outer = _OuterTensor(tuple(dtensor.shape), local=tuple(local.shape), mesh=mesh, placements=placements, coordinate=coordinate, path=path)
    inner, context = tensor_parts(local)
    name = registered.cls.__name__
    state: dict[str, Any] = {}
    bound = False
    for key, part in inner.items():
        require_plain(part, f"{path}.{key}", "an inner tensor of a DTensor's local tensor")
        if key in _WHOLE.get(name, ()):
            state[key] = _share(outer, part, tuple(part.shape), (None,) * len(placements))
        elif key in FLAT.get(name, ()):
            blocks = _blocks(outer, part, key)
            bound = bound or blocks is None
            state[key] = blocks or _in_rank_order(outer, part, key)
        elif key in _BOXED.get(name, ()):
            state[key] = _boxed(outer, part, context["block_size"], key)
        elif tuple(part.shape) == outer.local:
            state[key] = _share(outer, part, outer.shape, placements)
        elif not any(placements):
            state[key] = _share(outer, part, tuple(part.shape), placements)
        else:
            refuse(
                path,
                f"is a DTensor of {registered.cls.__qualname__}s placed as {dtensor.placements}, and how its inner tensor {key!r} of shape"
                f" {tuple(part.shape)} is spread cannot be determined",
                "redistribute it to Replicate first",
            )
    form = describe_outer(dtensor, _global_context(name, context, outer))
    if bound:
        form["bound"] = {
            "mesh": list(mesh.shape),
            "placements": [None if placement is None else list(placement) for placement in placements],
        }
    return UnwrappedShards(registered, state | {OUTER_KEY: form})


def _global_context(name: str, context: Any, outer: _OuterTensor) -> Any:
    """The context that the whole tensor would have."""
    if name == "OptimState4bit":
        return [context[0], torch.Size(outer.shape), *context[2:]]
    if name in _BOXED:
        sizes = [_box_extent(outer, dim, extent) for dim, extent in enumerate(context["block_size"])]
        return context | {"block_size": type(context["block_size"])(sizes)}
    return context


def _box_extent(outer: _OuterTensor, dim: int, extent: int) -> int:
    """The extent of a box of the whole tensor: a box of more than one element that spans this rank's extent spans the whole dim."""
    spans = extent > 1 and extent == outer.local[dim]
    return outer.shape[dim] if spans else extent


def _boxed(outer: _OuterTensor, part: torch.Tensor, block_size: Any, key: str) -> RankShare:
    """The share of an inner tensor with one element per box; along dims that one box spans, it is equal on all ranks."""
    if part.numel() == 1 and part.dim() != len(outer.local):
        return _share(outer, part, tuple(part.shape), (None,) * len(outer.placements))
    extents = [_box_extent(outer, dim, extent) for dim, extent in enumerate(block_size)]
    if part.dim() != len(extents):
        refuse(outer.path, f"is a DTensor with an inner tensor {key!r} of shape {tuple(part.shape)}", "redistribute it to Replicate first")
    shape = tuple(-(-size // extent) for size, extent in zip(outer.shape, extents, strict=True))
    spanned = {dim for dim, extent in enumerate(extents) if extent == outer.shape[dim] and extent > 1}
    placements = tuple(None if placement is None or placement.dim in spanned else placement for placement in outer.placements)
    whole = {dim: extent for dim, extent in enumerate(extents) if dim not in spanned and outer.is_sharded(dim)}
    if not all(
        _follows((outer.shape, shape), dim=dim, length=extent, mesh_shape=outer.mesh.shape, placements=outer.placements)
        for dim, extent in whole.items()
    ):
        refuse(
            outer.path,
            f"is a DTensor in boxes of {list(block_size)} elements, placed as {list(outer.placements)} on a mesh of shape"
            f" {outer.mesh.shape}: a box spans several ranks",
            "shard it along another dim",
        )
    return _share(outer, part, shape, placements)


def _blocks(outer: _OuterTensor, part: torch.Tensor, key: str) -> RankShare | None:
    """The share of an inner tensor with one element per block of the flattened whole, in the whole's shape with as few of the last dims
    merged as possible; None if blocks do not align with the ranks' shares.
    """
    if not part.numel() or prod(outer.local) % part.numel() or part.dim() != 1:
        refuse(outer.path, f"is a DTensor whose inner tensor {key!r} has no element for each block", "redistribute it to Replicate first")
    length = prod(outer.local) // part.numel()
    for dim in range(max(1, len(outer.shape))):
        merged = prod(outer.shape[dim:])
        if merged % length or any(outer.is_sharded(later) for later in range(dim + 1, len(outer.shape))):
            continue
        shape = (*outer.shape[:dim], merged // length)
        if _follows((outer.shape, shape), dim=dim, length=length, mesh_shape=outer.mesh.shape, placements=outer.placements):
            placements = tuple(
                placement if placement is not None and placement.dim < len(shape) else None for placement in outer.placements
            )
            local = local_shape(intervals(shape, outer.mesh.shape, placements, outer.coordinate))
            return _share(outer, part.view(local), shape, placements, by_blocks=True)
    return None


def _in_rank_order(outer: _OuterTensor, part: torch.Tensor, key: str) -> RankShare:
    """The share of an inner tensor that concatenates those of all ranks; only for restores with the same placements."""
    counts = {
        prod(local_shape(intervals(outer.shape, outer.mesh.shape, outer.placements, coordinate)))
        for coordinate in product(*map(range, outer.mesh.shape))
    }
    if len(counts) > 1:
        refuse(
            outer.path,
            f"is a DTensor of shape {outer.shape} placed as {list(outer.placements)} on a mesh of shape {outer.mesh.shape}, and the"
            f" blocks of its inner tensor {key!r} do not align with the ranks' shares, which are unequal",
            "shard it along its first dim, or evenly",
        )
    shards = [extent for extent, placement in zip(outer.mesh.shape, outer.placements, strict=True) if placement is not None]
    return _share(outer, part, (part.numel() * prod(shards),), tuple(placement and Shard(0) for placement in outer.placements))


@lru_cache(4096)
def _follows(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dim: int, length: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> bool:
    """Whether on all ranks the inner tensor's runs along `dim` match the whole's: one inner element per `length` elements."""
    shape, inner = shapes
    row = prod(shape[dim + 1 :]) if len(inner) == dim + 1 else 1
    inner_placements = tuple(placement if placement is not None and placement.dim < len(inner) else None for placement in placements)
    for coordinate in product(*map(range, mesh_shape)):
        if any(
            position and (placement is None or placement.dim != dim) for position, placement in zip(coordinate, placements, strict=True)
        ):
            continue  # this mesh dim does not shard `dim`
        outer_runs = intervals(shape, mesh_shape, placements, coordinate)[dim] if shape else []
        inner_runs = intervals(inner, mesh_shape, inner_placements, coordinate)[dim]
        if not shape:
            return True
        scaled: list[Run] = [(start * row, count * row) for start, count in outer_runs]
        if scaled != [(start * length, count * length) for start, count in inner_runs]:
            return False
    return True


def _share(
    outer: _OuterTensor, part: torch.Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...], *, by_blocks: bool = False
) -> RankShare:
    """The share of an inner tensor of the global shape `shape`, checked against the placements."""
    expected = local_shape(intervals(shape, outer.mesh.shape, placements, outer.coordinate))
    if tuple(part.shape) != expected:
        refuse(
            outer.path,
            f"is a DTensor with an inner tensor of shape {tuple(part.shape)} where its placements give this rank {expected}",
            "redistribute it to Replicate first",
        )
    held = boxes(shape, outer.mesh.shape, placements, outer.coordinate)
    pieces = tuple(LocalPiece(box, narrowed(part.detach(), offsets, box.sizes)) for box, offsets in held)
    return RankShare(
        shape=shape,
        dtype=part.dtype,
        pieces=pieces,
        flags=flags_of(part) & REQUIRES_GRAD,
        mesh=outer.mesh,
        placements=placements,
        by_blocks=by_blocks,
    )


def regrouped(share: RankShare, shape: tuple[int, ...]) -> RankShare:
    """The same share of a tensor that is stored in another shape: as intervals of the flattened tensor."""
    pieces = []
    for (offsets, sizes), tensor in share.pieces:
        dim = max((at for at, size in enumerate(sizes) if size != share.shape[at]), default=0)
        row = prod(share.shape[dim + 1 :])
        for index in product(*map(range, sizes[:dim])):
            start = 0
            for at, extent in enumerate(share.shape[: dim + 1]):
                start = start * extent + offsets[at] + (index[at] if at < dim else 0)
            run = tensor[index].reshape(-1)
            pieces.append(LocalPiece(BoxBounds((start * row,), (run.numel(),)), run))
    return share._replace(shape=shape, mesh=None, placements=(), is_flat=True, pieces=tuple(pieces))
