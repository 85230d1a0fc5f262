"""A sharded state dict of Megatron as this rank's side of a state of the store, and `StoredState`, an opened snapshot by Megatron's keys.

`megatron_layout` says how it is laid out. Replicas (``replica_id`` other than 0) are not stored; each rank reads what it needs, and nothing
else.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import CheckpointingException, ShardedObject, ShardedTensor, is_main_replica

from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Container, Leaf, Tree, parse
from tensorstore_ck.format.values import decode
from tensorstore_ck.integrations.megatron.version import keeps_common_state_as_object
from tensorstore_ck.integrations.megatron_layout import COMMON, COMMON_OBJECT, is_object_key
from tensorstore_ck.state import Box, Boxes
from tensorstore_ck.state.allocate import TensorAllocator, form_of
from tensorstore_ck.state.byte_sources import target_of
from tensorstore_ck.state.rebuild_tree import build, require_buildable
from tensorstore_ck.state.registered_types import decode_torch

_CPU: Final = torch.device("cpu")


class NotAsStoredError(MismatchError, CheckpointingException):  # type: ignore[misc]
    """The state to load does not fit the snapshot."""


class StoredState:
    """The content of one snapshot."""

    def __init__(self, content: SnapshotContent, name: str) -> None:
        """`name`: what was opened, for messages."""
        self._content = content
        self._name = name
        tree = parse(content.layout, len(content.values))
        self._children: dict[str, Tree] = {}
        if isinstance(tree, Container) and tree.node[0] == "d":
            keys = (key if type(key) is str else str(decode(key, decode_other=decode_torch)) for key in tree.keys)
            self._children = dict(zip(keys, tree.children, strict=True))
        if COMMON not in self._children:
            raise NotAsStoredError(f"{name} was not saved by tsck.megatron: it has no {COMMON!r}", object_id=name)

    def common(self) -> Any:
        """A new copy of the common state."""
        return self._values([COMMON])[COMMON]

    def tensors(self) -> dict[str, ShardedTensor]:
        """Key -> the whole tensor, without data."""
        tensors = {}
        for key, leaf in self._children.items():
            if isinstance(leaf, Leaf) and leaf.kind == "tensor" and not is_object_key(key):
                form = form_of(self._content.layout, leaf)
                empty = torch.empty(form.shape, dtype=form.dtype, device="meta")  # type: ignore[arg-type]
                tensors[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
        return tensors

    def objects(self) -> dict[str, ShardedObject]:
        """Unique key -> the object, without data."""
        common = [COMMON_OBJECT] if keeps_common_state_as_object() else []
        return {key: ShardedObject.empty_from_unique_key(key) for key in (*self._children, *common) if is_object_key(key)}

    def load_objects(self, wanted: Sequence[ShardedObject]) -> None:
        """Gives each object its stored data. Raises `NotAsStoredError` if one of them is not stored."""
        keys = {item.unique_key: item.unique_key for item in wanted}
        if COMMON_OBJECT in keys and COMMON_OBJECT not in self._children:
            keys[COMMON_OBJECT] = COMMON
        for key in keys.values():
            if key not in self._children:
                raise NotAsStoredError(f"{self._name} has no object {key!r}", object_id=key)
        values = self._values(dict.fromkeys(keys.values()))
        for item in wanted:
            item.data = values[keys[item.unique_key]]

    def load_tensors(self, wanted: Iterable[ShardedTensor]) -> None:
        """Fills the data of each tensor with its box of the stored tensor; where that does not reach, with zeros.

        Raises:
            NotAsStoredError: a tensor is not stored, or has another shape than the stored one and may not have.
        """
        boxes = []
        for tensor in wanted:
            leaf = self._leaf(tensor)
            stored = form_of(self._content.layout, leaf)
            if tensor.data is None:
                tensor.init_data(_CPU)
            target = with_prepended_axes(tensor)
            if stored.shape != tuple(tensor.global_shape):
                target.zero_()
            starts = tuple(tensor.global_offset)
            sizes = tuple(max(0, min(size, whole - at)) for size, whole, at in zip(target.shape, stored.shape, starts, strict=True))
            if 0 not in sizes:
                assert isinstance(stored.dtype, torch.dtype)
                inner = target[tuple(slice(size) for size in sizes)]
                boxes.append(WantedBox(leaf.index, BoxBounds(starts, sizes), target_of(inner, stored.dtype)))
        self._content.read_boxes(boxes)

    def _leaf(self, wanted: ShardedTensor) -> Leaf:
        leaf = self._children.get(wanted.key)
        if not isinstance(leaf, Leaf) or leaf.kind != "tensor":
            raise NotAsStoredError(f"{self._name} has no tensor {wanted.key!r}", object_id=wanted.key)
        stored, here = form_of(self._content.layout, leaf).shape, tuple(wanted.global_shape)
        if stored != here and not (wanted.allow_shape_mismatch and len(stored) == len(here)):
            raise NotAsStoredError(
                f"{wanted.key}: its global shape is {list(here)} here, and {list(stored)} in {self._name}", object_id=wanted.key
            )
        return leaf

    def _values(self, keys: Iterable[str]) -> Mapping[str, Any]:
        trees = {key: self._children[key] for key in keys}
        wanted = [leaf for tree in trees.values() for leaf in require_buildable(tree, self._content).items()]
        fresh = TensorAllocator(self._content.layout, wanted, _CPU)
        self._content.read(fresh.targets)
        return {key: build(tree, self._content, fresh.get) for key, tree in trees.items()}


def state_of(sharded_state_dict: Any) -> dict[str, Any]:
    """The state that this rank stores of a sharded state dict, not copied. Raises `UnsupportedValueError` if one key means two things."""
    boxes: dict[str, list[Box]] = {}
    state: dict[str, Any] = {}
    for item in nested_values(sharded_state_dict):
        if not is_main_replica(item.replica_id):
            continue
        if isinstance(item, ShardedTensor):
            if item.key == COMMON or is_object_key(item.key):
                raise UnsupportedValueError(f"a ShardedTensor may not have the key {item.key!r}: rename it", object_id=item.key)
            boxes.setdefault(item.key, []).append(Box(with_prepended_axes(item), item.global_shape, item.global_offset))
        elif isinstance(item, ShardedObject):
            if item.unique_key in state:
                raise UnsupportedValueError(f"this rank has two main replicas of the ShardedObject {item.unique_key!r}", object_id=item.key)
            state[item.unique_key] = item.data
        else:
            raise UnsupportedValueError(f"a {type(item).__qualname__} in a sharded state dict cannot be stored", object_id=str(item)[:200])
    return state | {key: held[0] if len(held) == 1 else Boxes(held) for key, held in boxes.items()}


def with_prepended_axes(tensor: ShardedTensor) -> Any:
    """The local data with as many dims as the whole tensor has: the same memory."""
    return tensor.data.detach()[(None,) * tensor.prepend_axis_num]
