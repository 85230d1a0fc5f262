"""DCP's flat names and their paths as a layout: the same tree as a save of the nested state would have.

Pure. The coordinator builds it from the plans before the writes and from DCP's metadata after them; both must be equal.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.layout import Layout, Node, TensorSpec
from tensorstore_ck.format.tree import REQUIRES_GRAD, ROOT, LeafNames
from tensorstore_ck.format.values import MAX_NESTING, encode, key_text
from tensorstore_ck.state.registered_types import DTYPE_NAMES

Path = tuple[str | int, ...]


class TensorItem(NamedTuple):
    """DCP's description of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class FlatLayout(NamedTuple):
    """A layout, and which DCP item belongs where in it."""

    layout: Layout
    tensors: dict[str, int]
    """fqn -> number of the tensor."""
    holes: list[str | None]
    """The fqn that fills each hole; None: a gap in a list."""


Items = Mapping[str, TensorItem | None]
"""fqn -> tensor; None: a byte item."""


def items_of_plans(plans: Sequence[SavePlan]) -> tuple[dict[str, TensorItem | None], dict[str, Path]]:
    """The items that all ranks together write, and the paths of their names."""
    items: dict[str, TensorItem | None] = {}
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        if item.index.fqn not in items:
            items[item.index.fqn] = None if data is None else _tensor(data.size, data.properties)
    return items, dict(ChainMap(*(_paths(plan.planner_data) for plan in plans)))  # as DCP's planner does for its metadata


def items_of_metadata(metadata: Metadata) -> tuple[dict[str, TensorItem | None], dict[str, Path]]:
    """The same, from DCP's metadata."""
    items = {
        fqn: _tensor(entry.size, entry.properties) if isinstance(entry, TensorStorageMetadata) else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return items, _paths(metadata.planner_data)


def _paths(planner_data: object) -> dict[str, Path]:
    """The paths of names that a flattening planner has recorded; other planners record none, or something else."""
    paths = planner_data if isinstance(planner_data, dict) else {}
    return {fqn: path for fqn, path in paths.items() if isinstance(path, tuple) and path}


def _tensor(size: Sequence[int], properties: Any) -> TensorItem:
    return TensorItem(tuple(size), properties.dtype, properties.requires_grad)


def build_flat_layout(items: Items, paths: Mapping[str, Path], *, in_boxes: bool) -> FlatLayout:
    """The layout of a state with these items; `in_boxes`: parts have boxes. Raises `UnsupportedValueError` for a dtype without a form."""
    ordered = dict.fromkeys([*(fqn for fqn in paths if fqn in items), *items])  # in the state's order, not by rank
    of_items = {fqn: paths.get(fqn, (fqn,)) for fqn in ordered}
    ends = set(of_items.values())
    root: dict[str | int, Any] = {}
    for fqn, path in of_items.items():
        if any(path[:length] in ends for length in range(1, len(path))):
            path = (fqn,)  # its parent is an item on another rank: use the flat name
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = fqn
    return _Builder(items).build(root, in_boxes=in_boxes)


class _Builder:
    def __init__(self, items: Items) -> None:
        self._items = items
        self._names = LeafNames()
        self._specs: list[TensorSpec] = []
        self._tensors: dict[str, int] = {}
        self._holes: list[str | None] = []

    def build(self, root: dict[str | int, Any], *, in_boxes: bool) -> FlatLayout:
        tree = self._container(root, "")
        layout = Layout(self._specs, tree, spreads=["boxes"] * len(self._specs) if in_boxes else ())
        return FlatLayout(layout, self._tensors, self._holes)

    def _container(self, children: dict[str | int, Any], path: str, depth: int = 0) -> Node:
        if depth >= MAX_NESTING:
            name = path[:60]
            raise UnsupportedValueError(
                f"cannot store {name}...: it is nested deeper than {MAX_NESTING} levels; flatten it", object_id=name
            )
        if children and all(type(key) is int for key in children):
            slots: list[Any] = [None] * (max(map(int, children)) + 1)  # DCP omits empty containers, and fills the gaps with None
            for position, child in children.items():
                slots[int(position)] = child
            return ["l", [self._node(child, f"{path}{position}.", depth) for position, child in enumerate(slots)]]
        keys = [encode(str(key), f"{path}{key!r:.80} (a dict key)") for key in children]  # with several ranks, some may be positions
        nodes = [self._node(child, f"{path}{key_text(key)}.", depth) for key, child in zip(keys, children.values(), strict=True)]
        return ["d", keys, nodes]

    def _node(self, child: Any, path: str, depth: int) -> Node:
        if isinstance(child, dict):
            return self._container(child, path, depth + 1)
        name = self._names.name(path[:-1] if path else ROOT)
        item = self._items[child] if child is not None else None
        if item is None:
            self._holes.append(child)
            return None
        dtype = DTYPE_NAMES.get(item.dtype)
        if dtype is None:
            raise UnsupportedValueError(f"cannot store {name}: its dtype {item.dtype} has no stored form; convert it", object_id=name)
        number = self._tensors[child] = len(self._specs)
        self._specs.append(TensorSpec(name, dtype, item.dtype.itemsize, item.shape))
        return ["t", number, REQUIRES_GRAD] if item.requires_grad else number
