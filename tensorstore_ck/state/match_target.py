"""Compares stored leaves with the target of a restore: names by prefix, containers, shapes and dtypes."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import SnapshotContent
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.layout import MAX_NAME_BYTES, TensorSpec, dense_strides
from tensorstore_ck.format.tree import Container, Leaf, LeafNames, Tree
from tensorstore_ck.format.values import MAX_NESTING, key_text
from tensorstore_ck.state.allocate import CONVERTIBLE, LeafForm
from tensorstore_ck.state.boxes import Box, Boxes
from tensorstore_ck.state.rebuild_tree import UNSELECTED
from tensorstore_ck.state.sharded_tensors import FlatShard

LONGEST_PATH: Final = MAX_NAME_BYTES // 8
"""The most characters of a path that is surely the name of its leaf."""


class NamesByPrefix:
    """Sorted names, looked up by prefix."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)

    def names(self, prefix: str) -> list[str]:
        """The names that begin with `prefix`."""
        first = bisect_left(self._names, prefix)
        last = first
        while last < len(self._names) and self._names[last].startswith(prefix):
            last += 1
        return self._names[first:last]

    def any(self, prefix: str) -> bool:
        """Whether any name begins with `prefix`."""
        first = bisect_left(self._names, prefix)
        return first < len(self._names) and self._names[first].startswith(prefix)


def leaf_name(path: str) -> str:
    """The name of the leaf at `path`, which ends with a dot, or is empty at the root."""
    return path[:-1] if is_name(path) else LeafNames().at(path)


def is_name(path: str) -> bool:
    """Whether the name of a leaf at `path` is the path itself, so that the names of all leaves below begin with it."""
    return 0 < len(path) <= LONGEST_PATH and (path.isascii() or path.isprintable())  # unpaired surrogates are not


def spelled(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """(name that the keys spell, value) of everything below the root of a tree: not unique, unlike the names of leaves."""
    for container in leaves_and_containers(tree)[1]:
        prefix = f"{container.path}." if container.path else ""
        for key, child in zip(container.keys, container.children, strict=False):
            yield leaf_name(f"{prefix}{key_text(key)}."), child


def children_by_key(tree: Tree | None) -> dict[str, Tree]:
    """The selected children of a container, or of a registered type's state, by the repr of their encoded keys.

    Paths are not unique: the keys 0 and "0" are spelled alike.
    """
    if isinstance(tree, Container) and tree.node[0] == "r":
        tree = tree.children[0]
    if not isinstance(tree, Container):
        return {}
    return {repr(key): child for key, child in zip(tree.keys, tree.children, strict=False) if child is not UNSELECTED}


def container_paths(path: str, stored: Mapping[str, str]) -> set[str | None]:
    """The stored containers that hold what the target has below `path`; with None if some of it has another relative path.

    `stored`: name in the target -> path in the snapshot.
    """
    paths: set[str | None] = set()
    for name, stored_path in stored.items():
        tail = name[len(path) :]
        paths.add("" if stored_path == tail else stored_path[: -len(tail) - 1] if stored_path.endswith(f".{tail}") else None)
    return paths


def value_conflict(leaf: Leaf, content: SnapshotContent) -> str | None:
    """The message if ranks saved different values of a leaf, else None."""
    try:
        if leaf.kind == "value":
            content.values[leaf.index]
    except MismatchError as exc:
        return str(exc)
    return None


def leaves_and_containers(tree: Tree) -> tuple[list[Leaf], list[Container]]:
    """All selected leaves and all containers, depth-first; without OrderedDicts' attributes, which are restored with their dict."""
    leaves: list[Leaf] = []
    containers: list[Container] = []
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, Container):
            containers.append(item)
            pending.extend(reversed(item.children))
        elif item is not UNSELECTED:
            leaves.append(item)
    return leaves, containers


def has_tensors(target: Any, depth: int) -> bool:
    """Whether a target contains tensors or arrays."""
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
    """Whether some of its elements share memory by a stride of 0."""
    return any(extent > 1 and step == 0 for extent, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_whole(form: LeafForm, base: TensorSpec) -> bool:
    """Whether a view is identical to its base, as tied weights are."""
    return (dtype_text(form.dtype), *form[1:]) == (base.dtype, base.shape, dense_strides(base.shape), 0)


def describe_mismatch(shape: tuple[int, ...], dtype: Any, form: LeafForm, converted: torch.dtype | None) -> str | None:
    """Why a stored tensor's form does not fit a target's shape and dtype, or None. `converted`: the dtype to convert to."""
    if form.shape != shape:
        return f"shape {list(shape)} here, {list(form.shape)} in the snapshot"
    converts = converted is not None and dtype == converted and form.dtype in CONVERTIBLE
    return None if form.dtype == dtype or converts else f"{dtype_text(dtype)} here, {dtype_text(form.dtype)} in the snapshot"


def describe_target_mismatch(target: Any, form: LeafForm, converted: torch.dtype | None) -> str | None:
    """Why a stored tensor's form does not fit the tensor or array `target`, or None."""
    problem = describe_mismatch(tuple(target.shape), target.dtype, form, converted)
    if problem is not None:
        return problem
    if isinstance(target, np.ndarray):
        return None if target.flags.writeable else "the array here is read-only"
    dims = zip(target.shape, target.stride(), form.strides, strict=True)
    if not target.is_contiguous() and any(extent > 1 and own == 0 and step != 0 for extent, own, step in dims):
        return "the tensor here is expanded: its elements share memory, but not in the snapshot"
    return None
