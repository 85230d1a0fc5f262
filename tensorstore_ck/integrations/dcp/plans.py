"""DCP's plans, flat names and byte items in the terms of a store.

Pure. The coordinator builds it from the plans before the writes and from DCP's metadata after them; both must be equal.
"""

import io
import pickle
import re
import threading
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES, ExplicitRegions, Layout, Node, TensorSpec, decode_layout
from tensorstore_ck.format.sharding import BoxBounds, whole_box
from tensorstore_ck.format.tree import REQUIRES_GRAD, ROOT, LeafNames
from tensorstore_ck.format.values import MAX_NESTING, encode, key_text
from tensorstore_ck.state.allocate import dtype_of
from tensorstore_ck.state.boxes import held_boxes
from tensorstore_ck.state.byte_sources import BytesSource
from tensorstore_ck.state.capture import device_blocks, require_dense
from tensorstore_ck.state.opaque_item import OpaqueItem, capture_value
from tensorstore_ck.state.rank_shares import concatenate_sources
from tensorstore_ck.state.registered_types import DTYPE_NAMES, FACTORIES
from tensorstore_ck.state.wrapper_subclasses import is_traceable

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
            items[item.index.fqn] = None if data is None else _tensor_item(data.size, data.properties)
    return items, dict(ChainMap(*(_paths(plan.planner_data) for plan in plans)))  # as DCP's planner does for its metadata


def items_of_metadata(metadata: Metadata) -> tuple[dict[str, TensorItem | None], dict[str, Path]]:
    """The same, from DCP's metadata."""
    items = {
        fqn: _tensor_item(entry.size, entry.properties) if isinstance(entry, TensorStorageMetadata) else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    return items, _paths(metadata.planner_data)


def _paths(planner_data: object) -> dict[str, Path]:
    """The paths of names that a flattening planner has recorded; other planners record none, or something else."""
    paths = planner_data if isinstance(planner_data, dict) else {}
    return {fqn: path for fqn, path in paths.items() if isinstance(path, tuple) and path}


def _tensor_item(size: Sequence[int], properties: Any) -> TensorItem:
    return TensorItem(tuple(size), properties.dtype, properties.requires_grad)


def build_flat_layout(items: Items, paths: Mapping[str, Path], *, in_boxes: bool) -> FlatLayout:
    """The layout of a state with these items. `in_boxes`: each rank's part says which boxes of the tensors it has.

    Raises:
        UnsupportedValueError: a tensor's dtype has no stored form.
    """
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


_SAFE_GLOBALS: Final = [
    frozenset,
    defaultdict,
    *FACTORIES.values(),
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type) and issubclass(kind, np.dtype)),
]
"""Types that must be registered with torch to be accepted with ``weights_only=True``."""
_loading: Final = threading.Lock()
"""torch's list of safe globals is one per process."""
_ZIPPING: Final = ("resolve_data", "transform_object")
"""The methods of torch's planner that zip an object."""


def resolve_item(planner: SavePlanner, item: WriteItem) -> OpaqueItem:
    """Captures a byte item of a plan. Raises `UnsupportedValueError` if it holds something that cannot be stored."""
    own_classes = takewhile(lambda cls: cls is not DefaultSavePlanner, type(planner).__mro__)
    if isinstance(planner, DefaultSavePlanner) and not any(name in vars(cls) for cls in own_classes for name in _ZIPPING):
        return capture_value(planner.lookup_object(item.index), item.index.fqn)  # zipping and unzipping takes three times as long
    resolved = planner.resolve_data(item)
    assert not isinstance(resolved, torch.Tensor)
    return decode_item(resolved, item.index.fqn)


def decode_item(data: io.BytesIO | bytes, fqn: str) -> OpaqueItem:
    """Captures a byte item. Raises `UnsupportedValueError` if it holds more than plain values, containers, tensors and arrays."""
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    stream.seek(0)
    try:
        with _loading, torch.serialization.safe_globals(_SAFE_GLOBALS):
            value = torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as exc:
        named = re.search(r"GLOBAL (\S+)", str(exc))
        what = f"a {named[1]}" if named else "something that torch does not load with weights_only=True"
        raise UnsupportedValueError(
            f"cannot store {fqn}: it holds {what}, which only its own code can create; store its state_dict() or plain values instead",
            object_id=fqn,
        ) from exc
    return capture_value(value, fqn)


def torch_zip(value: object) -> bytes:
    """A value in the form that DCP's planners take."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Role(NamedTuple):
    """A rank's task in a save. Part of its plan, and of DCP's cached copy of it."""

    part: int
    """The number of the part that it writes; the coordinator's is 0."""
    parts: int
    layout: bytes
    """Sealed."""
    numbers: tuple[int, ...]
    """The tensor number of each item in the plan; -1 for a byte item."""

    @property
    def author(self) -> PartAuthor:
        """Whose part it is: all parts have a common layout."""
        return PartAuthor(self.part, self.parts, tuple(range(self.parts)), b"")


class Tiny(NamedTuple):
    """The bytes of a whole tensor small enough to be stored inside the coordinator's part."""

    number: int
    data: bytes


def assign_roles(plans: Sequence[SavePlan], coordinator: int) -> list[SavePlan]:
    """The coordinator's global plan, with a `Role` for itself and for every rank that writes something.

    Raises:
        UnsupportedValueError: a tensor cannot be stored.
    """
    if not any(plan.usable for plan in plans):
        return list(plans)  # DCP reuses the plans of its last save, with their roles
    plans = _completed(plans)
    writers = [coordinator, *(rank for rank, plan in enumerate(plans) if plan.items and rank != coordinator)]
    boxes = [item.tensor_data.chunk for plan in plans for item in plan.items if item.tensor_data is not None]
    sizes = [item.tensor_data.size for plan in plans for item in plan.items if item.tensor_data is not None]
    flat = build_flat_layout(*items_of_plans(plans), in_boxes=len(writers) > 1 or _are_cut(boxes, sizes))
    layout = flat.layout.encode()
    assigned = list(plans)
    for part, rank in enumerate(writers):
        numbers = tuple(flat.tensors.get(item.index.fqn, -1) for item in plans[rank].items)
        assigned[rank] = replace(plans[rank], storage_data=Role(part, len(writers), layout, numbers))
    return assigned


def flat_layout_of(metadata: Metadata, parts: int) -> FlatLayout:
    """The layout of `assign_roles`, rebuilt from DCP's metadata."""
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    boxes = [box for entry in tensors for box in entry.chunks]
    sizes = [entry.size for entry in tensors for _ in entry.chunks]
    return build_flat_layout(*items_of_metadata(metadata), in_boxes=parts > 1 or _are_cut(boxes, sizes))


def _are_cut(boxes: Sequence[ChunkStorageMetadata], sizes: Sequence[torch.Size]) -> bool:
    return any(box.sizes != size for box, size in zip(boxes, sizes, strict=True))


def _completed(plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
    """The plans, completed from DCP's cache for ranks whose plan did not change. Raises `InvalidOptionError` if the cache lacks them."""
    if all(plan.usable for plan in plans):
        return plans
    for cached in SavePlanner._cached_global_plan.values():
        if len(cached) == len(plans) and all(mine is theirs for mine, theirs in zip(plans, cached, strict=True) if mine.usable):
            return cached
    raise InvalidOptionError(
        "the plans of some ranks changed, and those of the others are not in DCP's cache: use a planner with enable_plan_caching=False",
        object_id="planner",
    )


def resolve_items(plan: SavePlan, planner: SavePlanner, role: Role) -> tuple[CapturedState, list[WriteResult]]:
    """A rank's items, without copies except the planner's own; and results for DCP, which carry byte items and tiny tensors.

    Raises:
        UnsupportedValueError: an item cannot be stored; the message names it.
    """
    layout = decode_layout(role.layout, "the layout in DCP's plan")
    pieces: dict[int, list[tuple[BoxBounds, torch.Tensor]]] = {}
    results = []
    for item, number in zip(plan.items, role.numbers, strict=True):
        if item.type == WriteItemType.BYTE_IO:
            subtree = resolve_item(planner, item)
            results.append(WriteResult(item.index, sum(map(len, subtree.blobs)), subtree))
            continue
        spec = layout.tensors[number]
        assert item.tensor_data is not None
        box = BoxBounds(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        tensor = _tensor(planner.resolve_data(item), item, box)
        if tensor.dtype != dtype_of(spec.dtype, spec.item_bytes):
            raise UnsupportedValueError(
                f"cannot store {spec.name}: the planner planned {spec.dtype} and gave {tensor.dtype}", object_id=spec.name
            )
        tiny = None
        if role.part and box.sizes == spec.shape and spec.size_bytes <= INLINE_TENSOR_BYTES:
            tiny = Tiny(number, bytes(concatenate_sources([tensor]).read(0, spec.size_bytes)))
        elif 0 not in box.sizes:
            pieces.setdefault(number, []).append((box, tensor))
        results.append(WriteResult(item.index, tensor.nbytes, tiny))
    sources = [concatenate_sources([tensor for _, tensor in pieces.get(number, ())]) for number in range(len(layout.tensors))]
    explicit = [ExplicitRegions(number, tuple(box for box, _ in pieces.get(number, ()))) for number in range(len(layout.tensors))]
    held = explicit if layout.spreads else ()
    captured = CapturedState(layout=layout, values=(), blobs=(), sources=sources, explicit=held, device_blocks=device_blocks(), derived={})
    return captured, results


def with_tiny(captured: CapturedState, tiny: Iterable[Tiny]) -> CapturedState:
    """The coordinator's state, with the tiny tensors of the other ranks."""
    sources, explicit = list(captured.sources), list(captured.explicit)
    for number, data in tiny:
        shape = captured.layout.tensors[number].shape
        sources[number] = BytesSource(data)
        explicit[number] = ExplicitRegions(number, (whole_box(shape),) if data else ())
    return captured._replace(sources=sources, explicit=explicit)


def _tensor(resolved: Any, item: WriteItem, box: BoxBounds) -> torch.Tensor:
    if isinstance(resolved, torch.Tensor) and is_traceable(type(resolved)):
        kind = type(resolved)
        raise UnsupportedValueError(
            f"cannot store {item.index.fqn}: it is a {kind.__module__}.{kind.__qualname__}, and DCP's plan cannot hold its inner "
            "tensors; Store.put_snapshot with group= stores it",
            object_id=item.index.fqn,
        )
    require_dense(resolved, item.index.fqn)
    held = held_boxes(resolved, item.index.fqn)
    if held is not None and box not in [piece.box for piece in held.pieces]:
        raise UnsupportedValueError(
            f"cannot store {item.index.fqn}: it holds boxes of a tensor of shape {list(held.shape)} (torch's CheckpointableTensor), but "
            f"the planner of torch {torch.__version__} planned it as a whole one: use torch 2.15 or newer, or Store.put_snapshot(group=)",
            object_id=item.index.fqn,
        )
    tensor: torch.Tensor = resolved.detach()
    if tuple(tensor.shape) != box.sizes:
        raise UnsupportedValueError(
            f"cannot store {item.index.fqn}: the planner planned a box of {list(box.sizes)} and gave a tensor of {list(tensor.shape)}",
            object_id=item.index.fqn,
        )
    return tensor
