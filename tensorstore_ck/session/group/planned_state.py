"""One rank's side of a planned save: its state in the form of the plan. Knows no torch."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, FrozenTensor, ListedSources
from tensorstore_ck.format.layout import ExplicitRegions, Layout
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Container, Leaf, Tree, parse
from tensorstore_ck.session.group.save_plan import KEEPS, SOLE, PlanMemory, PlannedTensor, SavePlan


class StoredRegions(NamedTuple):
    """The pieces that this rank stores of a tensor whose regions it reports."""

    source: ByteSource
    boxes: tuple[BoxBounds, ...]


def planned(
    captured: CapturedState, known: PlanMemory, rank: int, values: Sequence[Any] = (), blobs: Sequence[bytes] = ()
) -> CapturedState:
    """The part of its state that `rank` saves. `values`, `blobs`: those of the merged state, on the rank that stores them."""
    layout = known.plan.layout
    if layout is None and not known.plan.sets:
        return captured
    kept = {reported.tensor: without_copies(captured, reported) for reported in reported_by(captured, known, rank)}
    if layout is None:
        sources = [kept[number].source if number in kept else source for number, source in enumerate(captured.sources)]
        explicit = [ExplicitRegions(tensor, stored.boxes) for tensor, stored in sorted(kept.items())]
        return captured._replace(sources=ListedSources(sources), explicit=explicit)
    united: list[ByteSource] = [NOTHING] * len(layout.tensors)
    frozen: dict[int, FrozenTensor] = {}
    for place in known.places:
        united[place.tensor] = source_at(captured, layout, place)
        if not place.is_view and place.mine.index in captured.frozen:
            frozen[place.tensor] = captured.frozen[place.mine.index]
    explicit = []
    for tensor, spread in enumerate(layout.spreads):
        if isinstance(spread, str):
            own = kept.get(tensor, StoredRegions(NOTHING, ()))
            united[tensor] = own.source
            explicit.append(ExplicitRegions(tensor, own.boxes))
    return CapturedState(
        layout=layout,
        values=values,
        blobs=blobs,
        sources=ListedSources(united),
        explicit=explicit,
        frozen=frozen,
        device_blocks=captured.device_blocks,
        own=captured.own,
        derived=known.derived,
    )


class ReportedTensor(NamedTuple):
    """A tensor whose regions this rank reports."""

    tensor: int
    """Its number in the plan's layout."""
    mine: int
    """Its number in this rank's layout."""
    boxes: tuple[BoxBounds, ...]
    entries: Sequence[int]
    """The plan's entry for each region: see `SavePlan.sets`."""


def reported_by(captured: CapturedState, known: PlanMemory, rank: int) -> list[ReportedTensor]:
    """The tensors whose regions a rank reports, in the order of the plan's layout."""
    boxes = {regions.tensor: regions.boxes for regions in captured.explicit}
    if known.plan.layout is None:
        pairs = [(tensor, tensor) for tensor in sorted(boxes)]
    else:
        pairs = sorted({(place.tensor, place.mine.index) for place in known.places if not place.is_view and place.mine.index in boxes})
    entries = known.plan.regions_of(rank)
    tensors, at = [], 0
    for tensor, mine in pairs:
        count = len(boxes[mine])
        tensors.append(ReportedTensor(tensor, mine, boxes[mine], [SOLE] * count if entries is None else entries[at : at + count]))
        at += count
    return tensors


def without_copies(captured: CapturedState, reported: ReportedTensor) -> StoredRegions:
    """The regions that no other rank stores."""
    source, boxes = captured.sources[reported.mine], reported.boxes
    own = [entry == SOLE or bool(entry & KEEPS) for entry in reported.entries]
    if all(own):
        return StoredRegions(source, boxes)
    pieces, start = list[tuple[ByteSource, int, int]](), 0
    for box, is_own in zip(boxes, own, strict=True):
        size_bytes = prod(box.sizes) * captured.layout.tensors[reported.mine].item_bytes
        if is_own:
            pieces.append((source, start, size_bytes))
        start += size_bytes
    return StoredRegions(SourcePieces(pieces), tuple(box for box, is_own in zip(boxes, own, strict=True) if is_own))


def source_at(captured: CapturedState, layout: Layout, place: PlannedTensor) -> ByteSource:
    """The bytes that this rank has of a tensor of the common layout."""
    source = captured.sources[place.mine.index]
    return _View(source, layout.tensors[place.tensor].item_bytes, place.mine.node) if place.is_view else source


def places_of(captured: CapturedState, plan: SavePlan) -> list[PlannedTensor]:
    """The positions of this rank's tensors in the common layout."""
    assert plan.layout is not None
    own = parse(captured.layout, len(captured.values), "the layout of this rank")
    pairs = _pairs(own, parse(plan.layout, plan.holes, "the layout of all ranks"))
    return [PlannedTensor(ours.index, mine, mine.kind == "view" and ours.kind == "tensor") for mine, ours in pairs if mine.kind != "value"]


def _pairs(own: Tree, ours: Tree) -> Iterator[tuple[Leaf, Leaf]]:
    """The leaves of this rank's tree, with their counterparts in the common tree, which contains all of them."""
    pending: list[tuple[Tree, Tree]] = [(own, ours)]
    while pending:
        mine, other = pending.pop()
        if isinstance(mine, Leaf) or isinstance(other, Leaf):
            assert isinstance(mine, Leaf)
            assert isinstance(other, Leaf)
            yield mine, other
            continue
        children = {_key(other, at): child for at, child in enumerate(other.children)}
        pending += [(child, children[_key(mine, at)]) for at, child in enumerate(mine.children)]
        if mine.attributes is not None and other.attributes is not None:
            pending.append((mine.attributes, other.attributes))


def _key(branch: Container, at: int) -> str:
    return repr(branch.keys[at]) if branch.keys else str(at)


class SourcePieces:
    """`ByteSource` of some pieces of other sources."""

    def __init__(self, pieces: Sequence[tuple[ByteSource, int, int]]) -> None:
        """`pieces`: for each piece its source, its start there, and its size in bytes."""
        self._pieces = pieces
        self.size_bytes = sum(size for _, _, size in pieces)

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of one piece; a block never spans two."""
        for source, first, size in self._pieces:
            if start < size:
                return source.read(first + start, first + stop)
            start, stop = start - size, stop - size
        return memoryview(b"")


NOTHING: Final = SourcePieces(())


class _View:
    """`ByteSource` of a view into a tensor's memory that is stored as its own tensor, since ranks share the memory in different ways."""

    def __init__(self, base: ByteSource, item_bytes: int, node: Any) -> None:
        self._base = base
        self._shape, self._strides, self._offset = node[3], [step * item_bytes for step in node[4]], node[5]
        self._item_bytes = item_bytes
        self.size_bytes = prod(self._shape) * item_bytes
        self._data: memoryview | None = None

    def read(self, start: int, stop: int) -> memoryview:
        if self._data is None:
            memory = np.frombuffer(self._base.read(0, self._base.size_bytes), np.uint8)
            shape, strides = (*self._shape, self._item_bytes), (*self._strides, 1)
            view = np.lib.stride_tricks.as_strided(memory[self._offset :], shape, strides, writeable=False)
            self._data = memoryview(np.ascontiguousarray(view).tobytes())
        return self._data[start:stop]
