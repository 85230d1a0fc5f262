"""DCP's plans in terms of a store: which rank writes which part, and a rank's items as a captured state."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES, ExplicitRegions, decode_layout
from tensorstore_ck.format.sharding import BoxBounds, whole_box
from tensorstore_ck.integrations.dcp.byte_items import resolve_item
from tensorstore_ck.integrations.dcp.flat_layout import FlatLayout, build_flat_layout, items_of_metadata, items_of_plans
from tensorstore_ck.state.allocate import dtype_of
from tensorstore_ck.state.boxes import held_boxes
from tensorstore_ck.state.byte_sources import BytesSource
from tensorstore_ck.state.capture import device_blocks, require_dense
from tensorstore_ck.state.rank_shares import concatenate_sources
from tensorstore_ck.state.wrapper_subclasses import is_traceable


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
        """For the part writer: all parts have a common layout."""
        return PartAuthor(self.part, self.parts, tuple(range(self.parts)), b"")


class Tiny(NamedTuple):
    """The bytes of a whole tensor small enough to be stored inside the coordinator's part."""

    number: int
    data: bytes


def assign_roles(plans: Sequence[SavePlan], coordinator: int) -> list[SavePlan]:
    """The coordinator's global plan, with a `Role` for each rank that writes. Raises `UnsupportedValueError` for what cannot be stored."""
    if not any(plan.usable for plan in plans):
        return list(plans)  # DCP reuses the plans of its last save, with their roles
    plans = _completed(plans)
    writers = [coordinator, *(rank for rank, plan in enumerate(plans) if plan.items and rank != coordinator)]
    tensors = [item.tensor_data for plan in plans for item in plan.items if item.tensor_data is not None]
    is_cut = any(data.chunk.sizes != data.size for data in tensors)
    flat = build_flat_layout(*items_of_plans(plans), in_boxes=len(writers) > 1 or is_cut)
    layout = flat.layout.encoded
    assigned = list(plans)
    for part, rank in enumerate(writers):
        numbers = tuple(flat.tensors.get(item.index.fqn, -1) for item in plans[rank].items)
        assigned[rank] = replace(plans[rank], storage_data=Role(part, len(writers), layout, numbers))
    return assigned


def flat_layout_of(metadata: Metadata, parts: int) -> FlatLayout:
    """The layout of `assign_roles`, rebuilt from DCP's metadata."""
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    is_cut = any(box.sizes != entry.size for entry in tensors for box in entry.chunks)
    return build_flat_layout(*items_of_metadata(metadata), in_boxes=parts > 1 or is_cut)


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
    every = ListedSources(sources)
    captured = CapturedState(layout=layout, values=(), blobs=(), sources=every, explicit=held, device_blocks=device_blocks(), derived={})
    return captured, results


def with_tiny(captured: CapturedState, tiny: Iterable[Tiny]) -> CapturedState:
    """The coordinator's state, with the tiny tensors of the other ranks."""
    sources, explicit = list(captured.sources), list(captured.explicit)
    for number, data in tiny:
        shape = captured.layout.tensors[number].shape
        sources[number] = BytesSource(data)
        explicit[number] = ExplicitRegions(number, (whole_box(shape),) if data else ())
    return captured._replace(sources=ListedSources(sources), explicit=explicit)


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
