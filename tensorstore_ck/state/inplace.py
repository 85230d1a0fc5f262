"""Fills tensors that are there with stored bytes: directly where that is possible, each byte read once.

Tensors of the target that share memory as they did are filled together. Others that come from one stored tensor are copied from the one
that was filled, or from one temporary tensor at a time.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

from tensorstore_ck.layout import ByteTarget, Content, Layout
from tensorstore_ck.state.capture import extent_of
from tensorstore_ck.state.fresh import Form, FreshTensors, Wanted, form_of, view_of
from tensorstore_ck.state.memory import MemoryTarget, target_of
from tensorstore_ck.state.sharing import Extent, overlapping
from tensorstore_ck.tree import Leaf


class Fill(NamedTuple):
    """A tensor or array to fill, and with what."""

    target: Any
    leaf: Leaf
    name: str


def find_conflicts(fills: list[Fill]) -> dict[str, str]:
    """Names of targets whose memory is also another's, though they are stored apart: name -> the one that is filled instead."""
    conflicts: dict[str, str] = {}
    by_device: defaultdict[object, list[tuple[int, int, int]]] = defaultdict(list)
    extents = [extent_of(fill.target) if fill.target.nbytes else None for fill in fills]
    for number, extent in enumerate(extents):
        if extent is not None:
            by_device[extent.device].append((extent.start, extent.stop, number))
    for intervals in by_device.values():
        for run in overlapping(intervals):
            solid = sorted(number for number in run if _is_solid(extents[number]))
            for number in solid[1:]:
                if _origin(fills[number], extents[number]) != _origin(fills[solid[0]], extents[solid[0]]):
                    conflicts[fills[number].name] = fills[solid[0]].name
    return conflicts


def _is_solid(extent: Extent | None) -> bool:
    """Without gaps, so that overlapping intervals mean shared elements."""
    return extent is not None and extent.size_bytes == extent.stop - extent.start


def _origin(fill: Fill, extent: Extent | None) -> tuple[int, int]:
    """The stored tensor, and where it begins if this target shares memory as it did when stored."""
    assert extent is not None
    return fill.leaf.index, extent.address - (fill.leaf.node[5] if fill.leaf.kind == "view" else 0)


def read_in_place(content: Content, fills: list[Fill]) -> None:
    """Reads what is stored into all targets."""
    by_tensor: defaultdict[int, list[Fill]] = defaultdict(list)
    for fill in fills:
        if fill.target.nbytes:
            by_tensor[fill.leaf.index].append(fill)
    direct: dict[int, ByteTarget] = {}
    copies: list[tuple[Fill, list[Fill]]] = []
    indirect: list[list[Fill]] = []
    for number, members in by_tensor.items():
        chosen = _choose(content.layout, members)
        if chosen is None:
            indirect.append(members)
            continue
        first, rest = chosen
        direct[number] = _target(content.layout, first)
        copies.append((first, rest))
    content.read(direct)
    for first, rest in copies:
        for fill in rest:
            _copy(view_of(first.target, form_of(content.layout, fill.leaf)), fill.target)
    for members in indirect:
        temporary = FreshTensors(content.layout, [Wanted(fill.leaf) for fill in members], torch.device("cpu"))
        content.read(dict(temporary.targets))
        for fill in members:
            _copy(temporary.get(fill.leaf), fill.target)
    written = [first.target for first, _ in copies if isinstance(first.target, torch.Tensor) and not first.target.is_inference()]
    torch.autograd.graph.increment_version(written)


def _choose(layout: Layout, members: list[Fill]) -> tuple[Fill, list[Fill]] | None:
    """The fill that takes the bytes of a stored tensor, and those to copy from it afterwards; None if none can take them."""
    whole = [fill for fill in members if fill.leaf.kind == "tensor"]
    plain = [fill for fill in whole if isinstance(_target(layout, fill), MemoryTarget)]
    for first in (plain or whole)[:1]:
        rest = [fill for fill in members if fill is not first and not _is_alias(layout, first, fill)]
        if plain or not rest:
            return first, rest
    return None


def _target(layout: Layout, fill: Fill) -> ByteTarget:
    dtype = form_of(layout, fill.leaf).dtype
    return target_of(fill.target, dtype if isinstance(dtype, torch.dtype) else None)


def _is_alias(layout: Layout, first: Fill, other: Fill) -> bool:
    """Whether filling `first` has filled `other`, because it lies there just as it is stored."""
    a, b, form = extent_of(first.target), extent_of(other.target), form_of(layout, other.leaf)
    if a.device != b.device or b.address != a.address + form.offset_bytes:
        return False
    if other.leaf.kind == "tensor":
        return bool(first.target.dtype == other.target.dtype) and _strides(first.target) == _strides(other.target)
    return bool(form.dtype == other.target.dtype) and a.is_whole and form.strides == _strides(other.target)


def _strides(found: Any) -> tuple[int, ...]:
    """In elements, and 0 where they do not matter."""
    steps = found.stride() if isinstance(found, torch.Tensor) else [step // found.itemsize for step in found.strides]
    return tuple(step if extent > 1 else 0 for step, extent in zip(steps, found.shape, strict=True))


def _copy(source: Any, target: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
        return
    target_of(target, source.dtype).write(0, target_bytes(source))


def target_bytes(source: torch.Tensor) -> memoryview:
    """Reserved."""
    raise NotImplementedError


_ = Form
