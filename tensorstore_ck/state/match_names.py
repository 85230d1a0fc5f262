"""What a restore looks up: stored names by prefix, leaves and containers, what a target holds."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.layout import TensorSpec
from tensorstore_ck.format.tree import Container, Leaf, Tree
from tensorstore_ck.format.values import MAX_NESTING
from tensorstore_ck.state.allocate import CONVERTIBLE, LeafForm, contiguous_strides
from tensorstore_ck.state.boxes import Box, Boxes
from tensorstore_ck.state.sharded_tensors import FlatShard


class NamesByPrefix:
    """Names by prefix."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def names(self, prefix: str) -> list[str]:
        """The names that begin with `prefix`."""
        first = bisect_left(self._names, prefix)
        last = first
        while last < len(self._names) and self._names[last].startswith(prefix):
            last += 1
        return self._names[first:last]


def roots_of(path: str, stored: Mapping[str, str]) -> set[str | None]:
    """The containers below which all that a target has below `path` is stored; None among them: it is stored in another way.

    `stored`: name in the target -> path in the snapshot.
    """
    roots: set[str | None] = set()
    for name, place in stored.items():
        tail = name[len(path) - 1 :]
        roots.add(place[: -len(tail)] if place.endswith(tail) else "" if place == tail[1:] else None)
    return roots


def value_conflict(leaf: Leaf, content: SnapshotContent) -> str | None:
    """Why the snapshot cannot tell a value."""
    try:
        if leaf.kind == "value":
            content.values[leaf.index]
    except MismatchError as exc:
        return str(exc)
    return None


def own_leaves(tree: Tree) -> Iterable[Leaf]:
    """Leaves, without those of OrderedDicts' attributes, which follow their dict."""
    if isinstance(tree, Leaf):
        if tree.index >= 0:
            yield tree
        return
    for child in tree.children:
        yield from own_leaves(child)


def containers(tree: Tree) -> Iterable[Container]:
    """Every container, depth-first."""
    if isinstance(tree, Container):
        yield tree
        for child in tree.children:
            yield from containers(child)


def has_tensors(target: Any, depth: int) -> bool:
    """Whether a target has tensors or arrays."""
    if isinstance(target, torch.Tensor | np.ndarray | FlatShard | Box | Boxes):
        return True
    if depth > MAX_NESTING:
        return False
    if isinstance(target, dict):
        return any(has_tensors(child, depth + 1) for child in target.values())
    return isinstance(target, list | tuple) and any(has_tensors(child, depth + 1) for child in target)


def dtype_text(dtype: Any) -> str:
    """A dtype, for people."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else f"numpy {dtype.str}"


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of it share a place."""
    return any(extent > 1 and step == 0 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_whole(form: LeafForm, base: TensorSpec) -> bool:
    """Whether a view is all of its base as that is, as tied weights are."""
    return (dtype_text(form.dtype), *form[1:]) == (base.dtype, base.shape, contiguous_strides(base.shape), 0)


def describe_mismatch(shape: tuple[int, ...], dtype: Any, form: LeafForm, converted: torch.dtype | None) -> str | None:
    """Why a stored tensor of that form is another one than that of a target, or None. `converted`: the dtype to convert to."""
    if form.shape != shape:
        return f"shape {list(shape)} here, {list(form.shape)} in the snapshot"
    converts = converted is not None and dtype == converted and form.dtype in CONVERTIBLE
    return None if form.dtype == dtype or converts else f"{dtype_text(dtype)} here, {dtype_text(form.dtype)} in the snapshot"


def describe_target_mismatch(target: Any, form: LeafForm, converted: torch.dtype | None) -> str | None:
    """Why a stored tensor of that form does not fit the tensor or array `target`, or None."""
    problem = describe_mismatch(tuple(target.shape), target.dtype, form, converted)
    if problem is not None:
        return problem
    if isinstance(target, np.ndarray):
        return None if target.flags.writeable else "the array here is read-only"
    dims = zip(target.shape, target.stride(), form.strides, strict=True)
    if any(extent > 1 and own == 0 and step != 0 for extent, own, step in dims):
        return "the tensor here is expanded: its elements share memory, but not in the snapshot"
    return None
