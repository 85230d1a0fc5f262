"""Boxes of a tensor on this rank, with their memory: `Box`, `Boxes` for several boxes of one tensor, torch's `CheckpointableTensor`."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format import sharding
from tensorstore_ck.state.plain_memory import PLAIN
from tensorstore_ck.state.rank_shares import LocalPiece, RankShare, flags_of

CHECKPOINTABLE_MARK: Final = "global_shape"
"""An attribute that hardly any other tensor has: a cheap first test for each of tens of thousands of tensors."""
_PROTOCOL: Final = (CHECKPOINTABLE_MARK, "global_offsets", "local_offsets", "local_sizes")


@short_errors
@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """One box of a tensor that is spread over ranks in any way, such as Megatron's ``ShardedTensor`` describes.

    `local` holds the elements of its own shape at `offsets` of the tensor of shape `global_shape`; it may have any strides. A rank
    without elements of the tensor passes an empty box, such as ``local[:0]``; a rank with several boxes passes `Boxes`.

    Raises:
        InvalidOptionError: `local` is not a plain dense tensor, or does not lie within the whole tensor.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Along each dim, in elements."""

    def __post_init__(self) -> None:
        local = self.local
        if type(local) not in PLAIN:
            raise InvalidOptionError(f"Box: local is a {type(local).__name__}; pass a plain torch.Tensor", object_id="local")
        if local.layout is not torch.strided or local.is_nested or local.is_meta:
            what = "a meta tensor, which has no data" if local.is_meta else f"no dense tensor ({local.layout})"
            raise InvalidOptionError(f"Box: local is {what}; pass a dense tensor that has its memory", object_id="local")
        try:
            shape, offsets = _numbers(self.global_shape), _numbers(self.offsets)
        except TypeError as exc:
            raise InvalidOptionError(f"Box: global_shape and offsets must be whole numbers: {exc}", object_id="global_shape") from exc
        if not len(shape) == len(offsets) == local.ndim:
            raise InvalidOptionError(
                f"Box: local has {local.ndim} dims, global_shape {len(shape)}, offsets {len(offsets)}: they must be equal; give local"
                " the dims of size 1 that it lacks, e.g. local.unsqueeze(0)",
                object_id="global_shape",
            )
        if not sharding.BoxBounds(offsets, tuple(local.shape)).lies_within(shape):
            raise InvalidOptionError(
                f"Box: a box of shape {tuple(local.shape)} at {offsets} does not lie within a tensor of shape {shape};"
                " offsets count elements from the whole tensor's beginning",
                object_id="offsets",
            )
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "offsets", offsets)


@short_errors
@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Several boxes of one tensor on one rank. (A list of `Box` means several tensors.)

    Raises:
        InvalidOptionError: there are no boxes, or they are not of one tensor.
    """

    boxes: Sequence[Box]

    def __post_init__(self) -> None:
        boxes = tuple(self.boxes)
        if not boxes or any(type(box) is not Box for box in boxes):
            what = "there are none" if not boxes else f"one is a {next(type(box).__name__ for box in boxes if type(box) is not Box)}"
            raise InvalidOptionError(f"Boxes: {what}; pass one Box or more (an empty one where a rank has nothing)", object_id="boxes")
        kinds = {(box.global_shape, box.local.dtype, box.local.requires_grad, type(box.local)) for box in boxes}
        if len(kinds) > 1:
            one, other = sorted(
                f"global shape {shape}, {dtype}, requires_grad={grad}, {kind.__name__}" for shape, dtype, grad, kind in kinds
            )[:2]
            raise InvalidOptionError(f"Boxes: they are not of one tensor: one has {one}, another {other}", object_id="boxes")
        object.__setattr__(self, "boxes", boxes)


def is_checkpointable(value: object) -> bool:
    """Whether it is a plain tensor with torch 2.15's ``CheckpointableTensor`` protocol, which names its boxes of a larger tensor."""
    return (
        hasattr(value, CHECKPOINTABLE_MARK)
        and isinstance(value, torch.Tensor)
        and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # else it may have no memory of its own
        and all(hasattr(value, name) for name in _PROTOCOL)
    )


def held_boxes(value: Any, path: str = "") -> RankShare | None:
    """The boxes of a `Box`, `Boxes` or `CheckpointableTensor`; None for anything else.

    Raises:
        UnsupportedValueError: the boxes of a `CheckpointableTensor` are impossible; the message has its `path`.
    """
    if is_checkpointable(value):
        return _held_of_checkpointable(value, path)
    if not isinstance(value, Box | Boxes):
        return None
    boxes = value.boxes if isinstance(value, Boxes) else (value,)
    first = boxes[0].local
    pieces = _pieces((box.local.detach(), box.offsets) for box in boxes)
    return RankShare(boxes[0].global_shape, first.dtype, pieces, flags_of(first))


def _held_of_checkpointable(tensor: Any, path: str) -> RankShare:
    local = tensor.detach().as_subclass(torch.Tensor)
    try:
        shape = _numbers(tensor.global_shape)
        pieces = []
        for at, start, size in zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True):
            starts, sizes = _numbers(start), _numbers(size)
            if not sharding.BoxBounds(starts, sizes).lies_within(tuple(local.shape)):
                raise ValueError(f"sizes {sizes} at {starts} do not lie within the local tensor of shape {tuple(local.shape)}")
            box = Box(local[tuple(slice(begin, begin + count) for begin, count in zip(starts, sizes, strict=True))], shape, _numbers(at))
            pieces.append((box.local, box.offsets))
    except (TypeError, ValueError, InvalidOptionError) as exc:
        raise UnsupportedValueError(
            f"{path or 'the state'} is a tensor that names boxes which it cannot hold (torch's CheckpointableTensor): {exc}; correct its"
            f" {', '.join(_PROTOCOL[:-1])} or {_PROTOCOL[-1]}, or delete them if it is an ordinary tensor",
            object_id=path,
        ) from exc
    return RankShare(shape, local.dtype, _pieces(pieces), flags_of(tensor))


def _pieces(held: Iterable[tuple[torch.Tensor, tuple[int, ...]]]) -> tuple[LocalPiece, ...]:
    return tuple(LocalPiece(sharding.BoxBounds(offsets, tuple(local.shape)), local) for local, offsets in held if 0 not in local.shape)


def coverage_error(shape: tuple[int, ...], boxes: Sequence[sharding.BoxBounds]) -> str:
    """Why boxes, none of them empty, do not cover each element of a tensor once; empty if they do."""
    if not all(box.lies_within(shape) for box in boxes):
        return "a piece lies outside"
    missing = prod(shape) - sum(prod(box.sizes) for box in boxes)
    if missing > 0:
        return f"{missing} elements are missing"
    return "" if not missing and sharding.tiles(shape, boxes) else "pieces overlap"


def _numbers(several: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, several))
