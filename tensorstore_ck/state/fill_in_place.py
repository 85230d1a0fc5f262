"""Fills existing tensors with stored bytes: in place if possible, and reading each byte once.

Targets that share memory as the stored tensors do are filled together. Other targets of one stored tensor are copied from the target
that was filled, or from one temporary tensor at a time.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import ByteTarget, SnapshotContent
from tensorstore_ck.format.tree import Leaf
from tensorstore_ck.state.aliasing import Extent, MemoryAreas, find_alias_candidates, group_overlapping
from tensorstore_ck.state.allocate import LeafForm, TensorAllocator, view_of
from tensorstore_ck.state.byte_sources import MemoryTarget, bits_of, target_of
from tensorstore_ck.state.memory_extents import area_of, extent_of
from tensorstore_ck.state.rank_shares import RankShare

COMPARED_BYTES: Final = 64 << 20
"""Bytes compared at a time, before anything is filled."""


class FillTask(NamedTuple):
    """A tensor or array to fill, and the stored leaf to fill it with."""

    target: Any
    leaf: Leaf
    form: LeafForm
    name: str


class ShareTask(NamedTuple):
    """A rank's share that is to be filled."""

    name: str
    tensor: int
    """The number of the stored tensor."""
    stored: torch.dtype
    share: RankShare


def find_conflicts(fills: list[FillTask]) -> dict[str, str]:
    """Targets that share memory although they are stored separately: name -> the name of the target that is filled instead."""
    conflicts: dict[str, str] = {}
    by_device: defaultdict[object, list[tuple[int, int, int]]] = defaultdict(list)
    extents: dict[int, Extent] = {}
    areas = MemoryAreas()
    for fill in fills:
        areas.append(area_of(fill.target))
    for number in find_alias_candidates(areas):
        extent = extents[number] = extent_of(fills[number].target)
        by_device[extent.device].append((extent.start, extent.stop, number))
    for intervals in by_device.values():
        for run in group_overlapping(intervals):
            solid = sorted(number for number in run if _is_solid(extents[number]))
            for number in solid[1:]:
                if _origin(fills[number], extents[number]) != _origin(fills[solid[0]], extents[solid[0]]):
                    conflicts[fills[number].name] = fills[solid[0]].name
    return conflicts


def is_same_tensor(content: SnapshotContent, fill: FillTask, other: FillTask) -> bool:
    """Whether two targets are one tensor and their stored bytes are equal: tied tensors, which FSDP2 had untied when they were saved."""
    if fill.leaf.kind != "tensor" or other.leaf.kind != "tensor" or fill.form != other.form:
        return False
    a, b = extent_of(fill.target), extent_of(other.target)
    if (a.address, fill.target.dtype, _strides(fill.target)) != (b.address, other.target.dtype, _strides(other.target)):
        return False
    one, two = fill.leaf.index, other.leaf.index
    size_bytes = content.layout.tensors[one].size_bytes
    return all(
        content.read_range(one, start, min(start + COMPARED_BYTES, size_bytes))
        == content.read_range(two, start, min(start + COMPARED_BYTES, size_bytes))
        for start in range(0, size_bytes, COMPARED_BYTES)
    )


def _is_solid(extent: Extent) -> bool:
    """Without gaps, so that overlapping intervals mean shared elements."""
    return not extent.repeats and extent.size_bytes == extent.stop - extent.start


def _origin(fill: FillTask, extent: Extent) -> tuple[object, ...]:
    """A key that is equal for targets whose relative positions are those of the stored leaves."""
    form = fill.form
    if _strides(fill.target) == _normal(form.strides, form.shape):
        return fill.leaf.index, extent.address - form.offset_bytes // form.dtype.itemsize * fill.target.itemsize
    return fill.leaf.index, extent.address, _strides(fill.target), form


def read_in_place(content: SnapshotContent, fills: list[FillTask]) -> None:
    """Reads the stored bytes into all targets."""
    by_tensor: defaultdict[int, list[FillTask]] = defaultdict(list)
    for fill in fills:
        if fill.target.nbytes:
            by_tensor[fill.leaf.index].append(fill)
    direct: dict[int, ByteTarget] = {}
    written: list[Any] = []
    copies: list[tuple[FillTask, list[FillTask]]] = []
    indirect: list[list[FillTask]] = []
    for number, members in by_tensor.items():
        chosen = _choose(members)
        if chosen is None:
            indirect.append(members)
            continue
        first, direct[number], rest = chosen
        written.append(first.target)
        if rest:
            copies.append((first, rest))
    content.read(direct)
    for first, rest in copies:
        for fill in rest:
            _copy(view_of(first.target, fill.form), fill.target)
    for members in indirect:
        temporary = TensorAllocator(content.layout, [(fill.leaf, None) for fill in members], torch.device("cpu"))
        content.read(temporary.targets)
        for fill in members:
            _copy(temporary.get(fill.leaf), fill.target)
    torch.autograd.graph.increment_version([target for target in written if isinstance(target, torch.Tensor)])


def _choose(members: list[FillTask]) -> tuple[FillTask, ByteTarget, list[FillTask]] | None:
    """The task that receives the bytes of a stored tensor, and those to copy from it afterwards; None if none can receive them."""
    if len(members) == 1 and members[0].leaf.kind == "tensor":  # nearly always
        return members[0], _target(members[0]), []
    targets = [(fill, _target(fill)) for fill in members if fill.leaf.kind == "tensor"]
    plain = [(fill, target) for fill, target in targets if isinstance(target, MemoryTarget)]
    for first, target in (plain or targets)[:1]:
        rest = [fill for fill in members if fill is not first and not is_alias(first, fill)]
        if not rest or (plain and all(_can_be_viewed(first, fill) for fill in rest)):
            return first, target, rest
    return None


def _can_be_viewed(first: FillTask, other: FillTask) -> bool:
    """Whether torch can address `other` inside `first`, which may begin at any byte of its storage."""
    if not isinstance(first.target, torch.Tensor) or not isinstance(other.form.dtype, torch.dtype):
        return True
    start = first.target.storage_offset() * first.target.itemsize + other.form.offset_bytes
    return start % other.form.dtype.itemsize == 0


def _target(fill: FillTask) -> ByteTarget:
    dtype = fill.form.dtype
    return target_of(fill.target, dtype if isinstance(dtype, torch.dtype) else None)


def is_alias(first: FillTask, other: FillTask) -> bool:
    """Whether filling `first` also fills `other`, because their relative position is that of the stored leaves."""
    a, b = extent_of(first.target), extent_of(other.target)
    if a.device != b.device or b.address != a.address + other.form.offset_bytes:
        return False
    if other.leaf.kind == "tensor":
        return bool(first.target.dtype == other.target.dtype) and _strides(first.target) == _strides(other.target)
    strides = _normal(other.form.strides, other.form.shape)
    is_base = a.is_whole and first.form.dtype == first.target.dtype
    return is_base and bool(other.form.dtype == other.target.dtype) and strides == _strides(other.target)


def _strides(target: Any) -> tuple[int, ...]:
    """The strides in elements; 0 for dims of one element."""
    steps = target.stride() if isinstance(target, torch.Tensor) else [step // target.itemsize for step in target.strides]
    return _normal(steps, target.shape)


def _normal(strides: Iterable[int], shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(step if extent > 1 else 0 for step, extent in zip(strides, shape, strict=True))


def _copy(source: Any, target: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
        return
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())  # elements that repeat are written once
    source, target = source[once], target.detach()[once]
    if source.dtype == target.dtype and not (target.is_conj() or target.is_neg()):
        source, target = bits_of(source), bits_of(target)
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)
