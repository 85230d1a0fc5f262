"""Takes a state apart: containers become a tree, tensors become sources of bytes, everything else becomes values.

Nothing is copied or read here. A value that cannot be stored is refused with its path, never dropped and never pickled. Leaves are
numbered and named depth-first, as in `tree.parse`. At the end, addresses decide which leaves share memory.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format import hash_probes, sharding
from tensorstore_ck.format.layout import MAX_ITEM_BYTES, ExplicitRegions, Layout, Node, Sharding, SharedStorage, Spread, TensorSpec
from tensorstore_ck.format.sharding import Mesh
from tensorstore_ck.format.tree import ATTRIBUTES, SHORT_PATH, LeafNames
from tensorstore_ck.format.values import MAX_NESTING, PLAIN_TYPES, encode, key_text, move_to_blobs, numpy_dtype_name, pack_numbers
from tensorstore_ck.state.aliasing import AliasPlan, AreaOffset, find_alias_candidates, plan_aliases
from tensorstore_ck.state.boxes import Box, Boxes, coverage_error, is_checkpointable
from tensorstore_ck.state.byte_sources import Array, source_of
from tensorstore_ck.state.device.device_blocks import DeviceBlocks
from tensorstore_ck.state.device.waited_copies import follow_all
from tensorstore_ck.state.memory_extents import area_of, extent_of
from tensorstore_ck.state.memory_order import order_of
from tensorstore_ck.state.plain_memory import PLAIN, is_plain, require_plain
from tensorstore_ck.state.rank_shares import RankShare, flags_of
from tensorstore_ck.state.registered_types import DTYPE_NAMES, FACTORIES, NamedState, encode_torch, namedtuple_name, registered_class
from tensorstore_ck.state.sharded_tensors import FlatShard, SpreadDescriber, share_of
from tensorstore_ck.state.sharded_wrappers import UnwrappedShards, unwrap_shards
from tensorstore_ck.state.sourced_tensor import SourcedTensor
from tensorstore_ck.state.stored_tensors import NumberOf, StoredTensors, without_views
from tensorstore_ck.state.tensor_table import TensorTable
from tensorstore_ck.state.unsupported_types import advice_for

_SHARES: Final = frozenset({Box, Boxes, RankShare})
_INLINE: Final = frozenset({type(None), bool, float})
_CONTAINERS: Final = frozenset({dict, list, tuple, OrderedDict, Counter, defaultdict})
_FACTORY_NAMES: Final = {factory: name for name, factory in FACTORIES.items()}

Refuse = Callable[[UnsupportedValueError], None]


def capture(state: object, describer: SpreadDescriber | None = None) -> CapturedState:
    """Takes `state` apart, or this rank's part of it. Its tensors must neither move nor change until the result has been stored.

    `describer` describes how tensors are spread over the ranks of the group.

    Raises:
        UnsupportedValueError: a value cannot be stored; the message has its path and advice.
    """
    return CaptureWalk(describer=describer).capture(state)


class CaptureWalk:
    """One walk over a state. With `refuse`, it continues after values that cannot be stored."""

    def __init__(self, refuse: Refuse | None = None, describer: SpreadDescriber | None = None) -> None:
        self._describer = describer
        self._spreads: dict[int, Spread] = {}
        self._meshes: dict[Mesh, int] = {}
        self._explicit: dict[int, tuple[sharding.BoxBounds, ...]] = {}
        self._unwrapped: dict[int, tuple[torch.Tensor, UnwrappedShards | None]] = {}
        self._values: list[Any] = []
        self._blobs: list[bytes] = []
        self._names = LeafNames()
        self._refuse = refuse
        self._top: list[Node] = [None]
        self._table = TensorTable()
        self._tensor_nodes: list[tuple[list[Any], range]] = []
        """Where the nodes of tensors are, to be replaced if some turn out to be views."""

    def capture(self, state: object) -> CapturedState:
        """Walks the whole state, and decides which of its tensors share memory."""
        self._visit(state, "", self._top, 0, 0)
        table = self._table
        every, storages = range(len(table.objects)), list[SharedStorage]()
        stored = StoredTensors(every, every, *table.columns())
        if candidates := find_alias_candidates(table.areas):
            aliases = plan_aliases({leaf: extent_of(table.objects[leaf]) for leaf in candidates})
            if aliases.views:
                stored = without_views(stored, table, aliases, self._names)
            storages = self._shared_storages(aliases, stored.number_of)
            if aliases.views:
                self._renumber(aliases, stored.number_of)
        spreads = [self._spreads.get(leaf) for leaf in stored.leaves] if self._spreads else ()
        explicit = [ExplicitRegions(stored.number_of[leaf], boxes) for leaf, boxes in self._explicit.items()] if self._explicit else ()
        if table.areas.devices:
            follow_all(table.areas.devices.values())
        layout = Layout(stored.specs, self._top[0], storages, list(self._meshes), spreads)
        return CapturedState(layout, self._values, self._blobs, stored.sources, explicit, device_blocks=device_blocks())

    def _shared_storages(self, aliases: AliasPlan, number_of: NumberOf) -> list[SharedStorage]:
        """The storages that several tensors share, or that begin before their only tensor."""
        storages = []
        for storage in aliases.storages:
            for base, _ in storage.offsets:
                self._check_addressable(base)
            tensors, offsets = zip(*sorted((number_of[base], offset) for base, offset in storage.offsets), strict=True)
            storages.append(SharedStorage(storage.size_bytes, tensors, offsets))
        return storages

    def _renumber(self, aliases: AliasPlan, number_of: NumberOf) -> None:
        """Puts the node of a view, or of a tensor with its final number, in place of each node that the walk made of a leaf."""
        for nodes, positions in self._tensor_nodes:
            for position in positions:
                node = nodes[position]
                leaf = node if type(node) is int else node[1]
                view = aliases.views.get(leaf)
                nodes[position] = self._view_node(leaf, view, number_of[view.base]) if view else self._node(leaf, number_of[leaf])

    def _node(self, leaf: int, number: int) -> Node:
        flags = self._table.flags.get(leaf)
        return ["t", number, flags] if flags else number

    def _view_node(self, leaf: int, view: AreaOffset, base: int) -> Node:
        """`base`: the number of the tensor that it views."""
        self._check_addressable(leaf)
        kind, viewed = self._table.kind_of(leaf), self._table.objects[leaf]
        strides = viewed.stride() if isinstance(viewed, torch.Tensor) else tuple(step // viewed.itemsize for step in viewed.strides)
        flags = self._table.flags.get(leaf, 0)
        return ["w", base, kind.dtype, list(kind.shape), list(strides), view.offset_bytes, flags]

    def _check_addressable(self, leaf: int) -> None:
        """Checks that strides can describe a leaf that shares memory."""
        if leaf < 0:
            return
        shared = self._table.objects[leaf]
        if isinstance(shared, torch.Tensor):
            is_addressable = not (shared.is_conj() or shared.is_neg() or shared.data_ptr() % shared.itemsize)
        else:
            is_addressable = not any(step % shared.itemsize for step in shared.strides)
        if not is_addressable:
            what = "it shares memory with another tensor in a way that strides cannot describe"
            self._fail(self._table.names[leaf], what, "store a copy of it (.clone() or .copy())")

    # --- containers ---------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, path: str, nodes: list[Any], position: int, depth: int) -> None:
        """Puts the node of `value` into ``nodes[position]``. `path` ends with a dot, or is empty."""
        kind = type(value)
        if kind in PLAIN and not is_checkpointable(value):
            self._visit_tensor(value, path, nodes, position)
        elif kind in _INLINE or (kind is int and -(1 << 63) <= value < 1 << 63):  # as `encode` would return it
            self._names.at(path)
            self._values.append(value)
        elif kind in PLAIN_TYPES:
            self._visit_value(value, path)
        elif kind in _CONTAINERS:
            if kind in (list, tuple) and (array := pack_numbers(value)) is not None:
                self._names.at(path)
                self._values.append(move_to_blobs(array, path[:-1], self._blobs))
            else:
                self._visit_container(value, path, nodes, position, depth)
        elif kind is np.ndarray or kind is np.memmap:
            self._visit_array(value, path, nodes, position)
        elif kind in _SHARES or is_checkpointable(value) or (self._describer is not None and kind is FlatShard):
            self._visit_spread(value, path, nodes, position)
        elif kind is SourcedTensor:
            self._visit_sourced(value, path, nodes, position)
        elif isinstance(value, torch.Tensor):
            self._visit_subclass(value, path, nodes, position, depth)
        elif (registered := registered_class(kind)) is not None:
            self._visit_registered(registered.name, registered.to_state(value), path, nodes, (position, depth))
        elif kind is NamedState:
            self._visit_registered(value.name, value.state, path, nodes, (position, depth))
        elif isinstance(value, tuple) and kind is not torch.Size and isinstance(getattr(kind, "_fields", None), tuple):
            self._visit_container(value, path, nodes, position, depth)
        elif (advice := advice_for(value)) is not None:
            self._fail(path[:-1], *advice)
        else:
            self._visit_value(value, path)

    def _visit_subclass(self, value: torch.Tensor, path: str, nodes: list[Any], position: int, depth: int) -> None:
        registered = registered_class(type(value))
        if registered is not None:
            self._visit_registered(registered.name, registered.to_state(value), path, nodes, (position, depth))
        elif self._describer is None:
            what, advice = advice_for(value) or ("it is not a plain tensor", "store a plain one")
            self._fail(path[:-1], what, advice)
        else:
            try:
                if id(value) not in self._unwrapped:  # the inner tensors of one object are one object each
                    self._unwrapped[id(value)] = value, unwrap_shards(self._describer, value, path[:-1])
            except UnsupportedValueError as exc:
                self._refused(exc)
            else:
                if (apart := self._unwrapped[id(value)][1]) is None:
                    self._visit_spread(value, path, nodes, position)
                else:
                    self._visit_registered(apart.registered.name, apart.state, path, nodes, (position, depth))

    def _visit_registered(self, name: str, state: object, path: str, nodes: list[Any], at: tuple[int, int]) -> None:
        """`at`: position among the nodes, and depth."""
        if at[1] >= MAX_NESTING:
            self._fail_too_deep(path)
            return
        node = nodes[at[0]] = ["r", name, None]
        self._visit(state, path, node, 2, at[1] + 1)

    def _visit_value(self, value: object, path: str) -> None:
        name = self._names.at(path)
        try:
            self._values.append(move_to_blobs(encode(value, name, encode_torch), name, self._blobs))
        except UnsupportedValueError as exc:
            self._refused(exc)

    def _visit_container(self, value: Any, path: str, nodes: list[Any], position: int, depth: int) -> None:
        if depth >= MAX_NESTING:
            self._fail_too_deep(path)
            return
        path = path if len(path) <= SHORT_PATH else self._names.reserve(path, len(value))
        kind, items = type(value), value
        children: list[Any] = [None] * len(value)
        if kind is list or kind is tuple:
            nodes[position] = ["l" if kind is list else "u", children]
            paths = [f"{path}{number}" for number in range(len(value))]
        elif isinstance(value, tuple):
            if (name := namedtuple_name(kind)) is None:
                what = f"the namedtuple {kind.__qualname__} could not be found again by its module and name"
                self._fail(path[:-1], what, "define it at the top level of a module, or use tsck.register_type")
                return
            paths = [path + key for key in kind._fields]
            nodes[position] = ["n", name, list(kind._fields), children]
        else:
            items, (keys, paths) = value.values(), self._keys(value, path)
            nodes[position] = ["d", keys, children] if kind is dict else self._dict_node(value, path, keys, children)
        items, child = [*items], 0
        while child < len(items):
            if type(items[child]) in PLAIN:
                child = self._visit_run(items, paths, children, child)
            if child < len(items):
                self._visit(items[child], f"{paths[child]}.", children, child, depth + 1)
            child += 1
        if kind is OrderedDict and (attributes := vars(value)):
            if set(attributes) != {"_metadata"}:
                self._fail(path[:-1], f"its OrderedDict has attributes {sorted(attributes)}", "move them into the dict")
                return
            self._visit(attributes["_metadata"], f"{path}{ATTRIBUTES}.", nodes[position], 3, depth + 1)

    def _dict_node(self, value: Any, path: str, keys: list[Any], children: list[Any]) -> list[Any]:
        kind = type(value)
        if kind is OrderedDict:
            return ["o", keys, children, False]
        if kind is not defaultdict:
            return ["c", keys, children]
        factory = value.default_factory
        if factory is not None and _FACTORY_NAMES.get(factory) is None:
            advice = f"convert it with dict(...); a factory can be {', '.join(sorted(FACTORIES))}, or None"
            self._fail(path[:-1], f"its defaultdict makes values with {factory!r}, which has no stored form", advice)
            return ["d", keys, children]
        return ["f", None if factory is None else _FACTORY_NAMES[factory], keys, children]

    def _keys(self, value: dict[Any, Any], path: str) -> tuple[list[Any], list[str]]:
        """The encoded keys of a dict at `path`, and the paths of its items."""
        plain, kinds = list(value), set(map(type, value))
        if kinds == {str} and "".join(plain).isascii():
            return plain, list(map(path.__add__, plain)) if path else plain  # as `encode` would return them
        if len(value) ** 2 > hash_probes.FREE_PROBES and (fault := hash_probes.fault_of(plain, is_set=False)):
            self._fail(path[:-1], fault, "use other keys, such as text")
        if kinds == {int} and min(value) >= -(1 << 63) and max(value) < 1 << 63:
            return plain, list(map(path.__add__, map(str, value)))
        keys = [self._key(key, path) for key in value]
        return keys, [path + key_text(key) for key in keys]

    def _key(self, key: object, path: str) -> Any:
        try:
            return encode(key, f"{path}{key!r:.80} (a dict key)", encode_torch)
        except UnsupportedValueError as exc:
            self._refused(exc)
            return None

    def _fail_too_deep(self, path: str) -> None:
        shown = path[:-1] if len(path) < 100 else f"{path[:60]}...{path[-30:-1]}"
        self._fail(shown, f"it is nested deeper than {MAX_NESTING} levels", "flatten it; does something contain itself?")

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _visit_run(self, items: list[Any], paths: Sequence[str], nodes: list[Any], start: int) -> int:
        """Adds consecutive ordinary tensors at once; returns where they end."""
        table, first = self._table, len(self._table.objects)
        stop = table.add_run(items, start)
        table.names += self._names.names(paths[start:stop])
        numbers = range(first, len(table.objects))
        nodes[start:stop] = map(self._node, numbers, numbers) if table.flags else numbers
        self._tensor_nodes.append((nodes, range(start, stop)))
        return stop

    def _visit_tensor(self, tensor: torch.Tensor, path: str, nodes: list[Any], position: int) -> None:
        name = self._names.at(path)
        number = self._table.number_of.get(id(tensor))
        if number is None:
            try:
                spec = TensorSpec(name, require_dense(tensor, name), tensor.itemsize, tuple(tensor.shape), order_of(tensor))
                number = self._table.add(tensor, spec, source_of(tensor), area_of(tensor), flags_of(tensor))
            except UnsupportedValueError as exc:
                self._refused(exc)
                return
            except (RuntimeError, NotImplementedError) as exc:
                self._fail(name, f"torch cannot reach its memory ({exc})", "store a plain tensor with the same values")
                return
        self._set_node(number, nodes, position)

    def _set_node(self, number: int, nodes: list[Any], position: int) -> None:
        nodes[position] = self._node(number, number)
        self._tensor_nodes.append((nodes, range(position, position + 1)))

    def _visit_spread(self, value: Any, path: str, nodes: list[Any], position: int) -> None:
        name = self._names.at(path)
        number = self._table.number_of.get(id(value))
        if number is None:
            try:
                share = share_of(self._describer, value, name)
                if share is None or share.dtype not in DTYPE_NAMES:
                    dtype = value.dtype if share is None else share.dtype
                    what, advice = advice_for(value) or (f"its dtype {dtype} has no stored form", "convert it")
                    raise UnsupportedValueError(f"cannot store {name}: {what}; {advice}", object_id=name)
                for piece in share.pieces:
                    require_dense(piece.tensor, name)
                boxes = tuple(piece.box for piece in share.pieces)
                if self._describer is None and (fault := coverage_error(share.shape, boxes)):
                    what = f"its boxes do not cover a tensor of shape {list(share.shape)} ({fault}), and there are no other ranks"
                    raise UnsupportedValueError(f"cannot store {name}: {what}; pass group=, so that all ranks save theirs", object_id=name)
            except UnsupportedValueError as exc:
                self._refused(exc)
                return
            spec = TensorSpec(name, DTYPE_NAMES[share.dtype], share.dtype.itemsize, share.shape, share.order)
            number = self._table.add(value, spec, share.source(), None, share.flags)
            if share.mesh is not None:
                self._spreads[number] = Sharding(self._meshes.setdefault(share.mesh, len(self._meshes)), share.placements)
            else:
                self._spreads[number] = "flat" if share.is_flat else "boxes"
                self._explicit[number] = boxes
        self._set_node(number, nodes, position)

    def _visit_sourced(self, value: Any, path: str, nodes: list[Any], position: int) -> None:
        name = self._names.at(path)
        number = self._table.number_of.get(id(value))
        if number is None:
            spec = TensorSpec(name, DTYPE_NAMES[value.dtype], value.dtype.itemsize, value.shape)
            number = self._table.add(value, spec, value.source, None)
        self._set_node(number, nodes, position)

    def _visit_array(self, array: Array, path: str, nodes: list[Any], position: int) -> None:
        name = self._names.at(path)
        number = self._table.number_of.get(id(array))
        if number is None:
            dtype = numpy_dtype_name(array.dtype)
            if dtype is None or not 0 < array.itemsize <= MAX_ITEM_BYTES:
                advice = "split it into plain arrays, or convert it with .tolist()"
                self._fail(name, f"its numpy dtype {array.dtype} has no stored form", advice)
                return
            spec = TensorSpec(name, f"np:{dtype}", array.itemsize, array.shape, order_of(array))
            number = self._table.add(array, spec, source_of(array), area_of(array))
        self._set_node(number, nodes, position)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _fail(self, path: str, what: str, advice: str) -> None:
        self._refused(UnsupportedValueError(f"cannot store {path or 'the state'}: {what}; {advice}", object_id=path))

    def _refused(self, error: UnsupportedValueError) -> None:
        if self._refuse is None:
            raise error
        self._refuse(error)


def device_blocks() -> DeviceBlocks | None:
    """None as long as this process has no device."""
    return DeviceBlocks() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def require_dense(tensor: torch.Tensor, name: str) -> str:
    """The stored name of a tensor's dtype.

    Raises:
        UnsupportedValueError: it is not a dense tensor with its memory.
    """
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or not is_plain(tensor) or tensor.is_meta:
        what, advice = advice_for(tensor) or ("it is not a dense tensor", "convert it to one")
        raise UnsupportedValueError(f"cannot store {name}: {what}; {advice}", object_id=name)
    require_plain(tensor, name, "it")
    return dtype
