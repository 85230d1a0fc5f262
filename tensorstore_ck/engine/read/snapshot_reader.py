"""Reads one snapshot: record -> parts -> ranges of packs, every block verified before its bytes count.

No global index, and no list of what lies where: which parts hold a box of a tensor follows from the layout (see `block_assignment`),
and a part is opened only when something of it is wanted. A snapshot whose ranks had several layouts, such as the stages of a pipeline,
is read as one (see `merge_layout_parts`). The save has checked that a tensor of several layouts has the same bytes in all of them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from tensorstore_ck.common.byte_cache import ByteCache
from tensorstore_ck.common.host_memory import require_memory
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.interfaces import ByteTarget, WantedBox
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.engine.read.block_reader import BufferTarget, OpenPart, ReadBlocks, WantedBlock, deliver, read_blocks, wanted_blocks
from tensorstore_ck.engine.read.box_copy import BoxTarget
from tensorstore_ck.errors import CorruptObjectError, DamageError, MismatchError
from tensorstore_ck.format.block_assignment import decode_regions, first_ranks, ranks_with_layout, regions_of_tensor, row_boxes
from tensorstore_ck.format.layout import ExplicitRegions, Layout, decode_layout
from tensorstore_ck.format.merge_layout_parts import LayoutConflictError, MergedLayout
from tensorstore_ck.format.part import Part, decode_values, part_name
from tensorstore_ck.format.part_index import PartIndex, RegionBytes
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import ParseBudget, check_msgpack
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import expand
from tensorstore_ck.format.values import msgpack_blobs
from tensorstore_ck.log import SnapshotRow

ReadPart = Callable[[Record, int], Part]
"""See `Engine.read_part`."""
Layouts = ByteCache[Digest, bytes]
"""Encoded layouts by their ids, which are hashes of them."""


def open_snapshot(
    engine: Engine,
    info: SnapshotRow,
    read: ReadBlocks = read_blocks,
    *,
    position: float = 0.0,
    read_part: ReadPart | None = None,
    layouts: Layouts | None = None,
) -> "SnapshotReader | MergedSnapshot":
    """The snapshot, whatever layouts its ranks had. For the other parameters see `SnapshotReader`."""
    first = SnapshotReader(engine, info, 0, read, position=position, read_part=read_part, layouts=layouts)
    others = first_ranks(first.part.layout_of or b"")[1:]
    return MergedSnapshot([first, *(first.reader_of(rank) for rank in others)]) if others else first


def require_part_of_each_rank(record: Record, world_size: int, name: str) -> None:
    """Raises `CorruptObjectError` if a record lists neither a part for each rank, nor two. `name`: the part that states `world_size`."""
    if len(record.parts) not in (world_size, 2 * world_size):
        raise CorruptObjectError(f"{name} is one of {world_size}, but there are {len(record.parts)}", object_id=name)


class SnapshotReader:
    """What the ranks with one layout saved: `SnapshotContent` over an engine. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        info: SnapshotRow,
        rank: int = 0,
        read: ReadBlocks = read_blocks,
        *,
        position: float = 0.0,
        read_part: ReadPart | None = None,
        record: Record | None = None,
        budget: ParseBudget | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        """Opens the first part and its layout.

        `rank`: of the part to begin with: the first one with its layout, or the number of a rank state. `position`: where this reader is
        among all readers, from 0 to 1: ranks at the same position most likely saved what it wants. `read_part`: None: the engine does.
        `record`: the snapshot's, if it was read already. `budget`: that of another reader of the snapshot; the results of both are kept.
        `layouts`: encoded layouts that need not be read, and where this one is added.
        """
        self.info = info
        self._engine = engine
        self._read_blocks = read
        self._position = position
        self._read_part = engine.read_part if read_part is None else read_part
        self._parts: dict[int, OpenPart] = {}
        self._plans: dict[int, PartIndex] = {}
        self._explicit: dict[int, list[ExplicitRegions]] = {}
        self._boxes: dict[int, dict[int, tuple[BoxBounds, ...]]] = {}
        self.record: Record = record if record is not None else engine.read_record(info)
        self._first = rank
        first = self._open(rank)
        self.part: Part = first.part
        self.budget = ParseBudget() if budget is None else budget
        """Limits how much of the snapshot may be parsed."""
        self.budget.add_stored(self.part.stored_bytes + (self.record.stored_bytes if budget is None else 0))
        self.name = first.name
        self.world_size = self.part.world_size
        require_part_of_each_rank(self.record, self.world_size, self.name)
        self.ranks = (rank,) if self.part.layout_of is None else ranks_with_layout(self.part.layout_of, rank, self.world_size)
        """The ranks with this layout, whose parts these are."""
        nearest = sorted(self.ranks, key=lambda other: abs(other + 0.5 - position * self.world_size))
        self._nearest = [*dict.fromkeys([nearest[0], rank, *nearest])]  # this one is open already
        self._blob_first = np.concatenate(([0], np.cumsum(self.part.blobs["blocks"], dtype=np.int64)))
        self._layouts = layouts
        encoded = self.encoded_layout()
        layout = decode_layout(encoded, f"the layout of {self.name}", self.budget)
        if layouts is not None:
            layouts.put(self.part.layout_id, encoded)  # its hash was checked now
        tree, self.values, self.subtrees = expand(layout.tree, decode_values(self.part, self.name), f"the layout of {self.name}")
        self._parsed_blobs = msgpack_blobs(self.values, self.name)
        self.layout: Layout = replace(layout, tree=tree)
        self._plan(rank)

    def reader_of(self, rank: int) -> "SnapshotReader":
        """A reader of another layout of the snapshot, whose first rank is `rank`."""
        return SnapshotReader(
            self._engine,
            self.info,
            rank,
            self._read_blocks,
            position=self._position,
            read_part=self._read_part,
            record=self.record,
            budget=self.budget,
            layouts=self._layouts,
        )

    def reading_with(self, read: ReadBlocks) -> "SnapshotReader":
        """The same open snapshot, whose tensors `read` reads."""
        other = copy.copy(self)
        other._read_blocks = read
        return other

    # --- parts --------------------------------------------------------------------------------------------------------

    def _open(self, rank: int) -> OpenPart:
        if rank not in self._parts:
            try:
                part = self._read_part(self.record, rank)
                places = locate_blocks(self._engine, self._engine.log.view(), part)
            except DamageError as exc:
                raise_if_expired(self._engine.log, self.info, exc)
                raise
            self._parts[rank] = OpenPart(part, part_name(self.record.parts[rank]), places, lambda row: self.tensor_at(row, rank))
        return self._parts[rank]

    def _plan(self, rank: int) -> PartIndex:
        if rank not in self._plans:
            opened = self._open(rank)
            self._plans[rank] = self.plan_of(opened.part, opened.name, self._explicit_of(rank))
        return self._plans[rank]

    def _explicit_of(self, rank: int) -> list[ExplicitRegions]:
        if rank not in self._explicit:
            opened = self._open(rank)
            self._explicit[rank] = decode_regions(self.layout, opened.part.regions, opened.name)
        return self._explicit[rank]

    def plan_of(self, part: Part, name: str, explicit: Sequence[ExplicitRegions] | None = None) -> PartIndex:
        """Where the blocks of each tensor lie in one of the ranks' parts. `explicit`: its regions, if decoded already.

        Raises:
            CorruptObjectError: the part does not fit the layout.
        """
        if part.layout_id != self.part.layout_id or part.world_size != self.world_size or part.layout_of != self.part.layout_of:
            raise CorruptObjectError(f"{name} does not belong to the other parts of its snapshot", object_id=name)
        return PartIndex(
            layout=self.layout,
            part=part,
            layout_ranks=self.ranks,
            block_bytes=self._engine.config.block_bytes,
            name=name,
            explicit=explicit,
        )

    def stored(self, tensor: int) -> Iterator[tuple[Part, RegionBytes]]:
        """The regions of a tensor that each part has."""
        for rank in self.ranks:
            yield from ((self._open(rank).part, held) for held in self._plan(rank).of(tensor))

    def holding(self, tensor: int) -> Iterator[tuple[Part, RegionBytes]]:
        """The regions of a tensor that a read of all of it takes; opens no part that it does not need."""
        for rank, held in self._holding(tensor, self.layout.tensors[tensor].whole):
            yield self._open(rank).part, held

    def tensor_at(self, row: int, rank: int) -> str:
        """The tensor or value that the block in an extent row of a part belongs to, for messages."""
        tensor = self._plans[rank].tensor_at(row) if rank in self._plans else None
        if tensor is not None:
            return f"tensor {self.layout.tensors[tensor].name!r}"
        return "a large value" if row >= int(self._parts[rank].part.blobs["blocks"][0]) else "the layout"

    # --- values -------------------------------------------------------------------------------------------------------

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""
        data = self._blob(index + 1)  # the layout comes first
        if index in self._parsed_blobs:
            check_msgpack(memoryview(data), f"large value {index} of {self.name}", self.budget)
        return data

    def encoded_layout(self) -> bytes:
        """The layout object, as `decode_layout` takes it."""
        encoded = self._layouts.get(self.part.layout_id) if self._layouts is not None else None
        if encoded is not None:
            claimed_bytes = int(self.part.extents["stored"][: int(self._blob_first[1])].sum(dtype=np.int64))
            self.budget.add_stored(min(len(encoded), claimed_bytes))
            return encoded
        encoded = self._blob(0)
        if encoded[-32:] != self.part.layout_id:
            raise CorruptObjectError(f"{self.name}: its layout is not the one it names", object_id=self.name)
        return encoded

    def _blob(self, index: int) -> bytes:
        if not 0 <= index < len(self.part.blobs):
            raise CorruptObjectError(f"{self.name}: it has no large value {index}", object_id=self.name)
        rows = range(int(self._blob_first[index]), int(self._blob_first[index + 1]))
        size = int(self.part.blobs["size"][index])
        if int(self.part.extents["raw"][rows.start : rows.stop].sum(dtype=np.int64)) != size:
            raise CorruptObjectError(f"{self.name}: large value {index} does not have its size", object_id=self.name)
        require_memory(size, f"{self.name}: large value {index}", "leave it out with select=, or restore it where there is more memory")
        memory = bytearray(size)
        wanted = wanted_blocks(self._parts[self._first], rows, 0, BufferTarget(memoryview(memory)))
        self.budget.add_stored(sum(stored for _, stored in {((block.pack, block.offset), block.stored) for block in wanted}))
        read_blocks(self._engine, self.info, wanted)
        return bytes(memory)

    # --- tensors ------------------------------------------------------------------------------------------------------

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""
        tensors = self.layout.tensors
        self.read_boxes(WantedBox(tensor, tensors[tensor].whole, target) for tensor, target in targets.items())

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors, each into its target; a block is fetched once."""
        self.fetch(self.blocks_of(wanted))

    def blocks_of(self, wanted: Iterable[WantedBox]) -> list[WantedBlock]:
        """The blocks that hold boxes of tensors; bytes that lie in parts are delivered at once."""
        blocks: list[WantedBlock] = []
        only = self._plan(self._first) if len(self.ranks) == 1 and not self.layout.meshes else None
        for box in wanted:
            if only is None:
                for rank, held in self._holding(box.tensor, box.box):
                    self._add_wanted(blocks, self._open(rank), held, box)
            else:
                for held in only.of(box.tensor):
                    self._add_wanted(blocks, self._parts[self._first], held, box)
        return blocks

    def fetch(self, blocks: Sequence[WantedBlock]) -> None:
        """Reads and verifies the blocks that `blocks_of` found."""
        self._read_blocks(self._engine, self.info, blocks)

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor; reads only the blocks that hold them."""
        spec = self.layout.tensors[tensor]
        first, last = start // spec.item_bytes, -(-stop // spec.item_bytes)
        memory = bytearray(max(last - first, 0) * spec.item_bytes)
        wanted, at = [], 0
        for offsets, sizes in row_boxes(spec.shape, first, last):
            size_bytes = prod(sizes) * spec.item_bytes
            wanted.append(WantedBox(tensor, BoxBounds(offsets, sizes), BufferTarget(memoryview(memory)[at : at + size_bytes])))
            at += size_bytes
        self.read_boxes(wanted)
        return memory[start - first * spec.item_bytes : stop - first * spec.item_bytes]

    def _holding(self, tensor: int, box: BoxBounds) -> Iterator[tuple[int, RegionBytes]]:
        """(rank, region in its part) of every region that overlaps the box, where several ranks have this layout."""
        spec = self.layout.tensors[tensor]
        left = prod(box.sizes)
        for region in regions_of_tensor(self.layout, tensor, self.ranks, self._reported_boxes, near=box, order=self._nearest):
            common = region.common_elements(spec, box)
            if not common:
                continue
            left -= common
            missing = region.size_bytes(spec)
            for rank in region.replicas:
                held = self._plan(rank).of_region(region)
                if held is not None:
                    yield rank, held
                    missing -= held.stop - held.start
                if not missing:
                    break
            if missing:
                raise CorruptObjectError(f"{self.name}: no part has all of {spec.name!r}; run `tsck fsck`", object_id=spec.name)
            if not left:
                return  # so that a reader of thousands of ranks opens hardly more parts than it needs
        if left:
            raise CorruptObjectError(f"{self.name}: no rank has saved all of {spec.name!r}; run `tsck fsck`", object_id=spec.name)

    def _reported_boxes(self, rank: int, tensor: int) -> Sequence[BoxBounds]:
        if rank not in self._boxes:
            self._boxes[rank] = {regions.tensor: regions.boxes for regions in self._explicit_of(rank)}
        return self._boxes[rank].get(tensor, ())

    def _add_wanted(self, blocks: list[WantedBlock], opened: OpenPart, held: RegionBytes, wanted: WantedBox) -> None:
        """Adds the blocks of a region of `opened` that hold bytes of a box; its inline bytes are delivered at once."""
        region, spec = held.region, self.layout.tensors[wanted.tensor]
        if not region.is_flat and (region.offsets, region.sizes) == wanted.box:
            if held.is_inline:
                deliver(wanted.target, held.start, memoryview(opened.part.inline)[held.first : held.first + held.lengths[0]])
            else:
                blocks += wanted_blocks(opened, held.rows, held.start, wanted.target)
            return
        target = BoxTarget(region, spec, wanted.box, wanted.target)
        if held.is_inline:
            target.write(held.start, memoryview(opened.part.inline)[held.first : held.first + held.lengths[0]])
        ahead, size_bytes = region.elements_before(spec, wanted.box), prod(wanted.box.sizes) * spec.item_bytes
        start = held.start
        for row, length in zip(held.rows, held.lengths, strict=not held.is_inline):
            at = None if ahead is None else start - ahead * spec.item_bytes
            if at is not None and 0 <= at <= size_bytes - length:  # all of it lies there in one piece: no copy is needed
                blocks += wanted_blocks(opened, range(row, row + 1), at, wanted.target)
            elif (
                -length < at < size_bytes
                if at is not None
                else region.overlaps(spec, wanted.box, start // spec.item_bytes, (start + length) // spec.item_bytes)
            ):
                blocks += wanted_blocks(opened, range(row, row + 1), start, target)
            start += length


class MergedSnapshot:
    """`SnapshotContent` over the several layouts of one snapshot. Thread-safe."""

    def __init__(self, readers: Sequence[SnapshotReader]) -> None:
        """Raises:
        MismatchError: the layouts contradict each other.
        """
        self.readers = readers
        try:
            merged = MergedLayout(readers)
        except LayoutConflictError as exc:
            names = " and ".join(readers[side].name for side in exc.parts)
            raise MismatchError(
                f"the ranks that put this snapshot had different things as {exc.path!r}: see {names}", object_id=exc.path
            ) from exc
        self.values: Sequence[Any] = merged.values
        self.layout = merged.layout
        self._places = merged.locations
        self._blobs = merged.blob_locations

    def reading_with(self, read: ReadBlocks) -> "MergedSnapshot":
        """As `SnapshotReader.reading_with`."""
        other = copy.copy(self)
        other.readers = [reader.reading_with(read) for reader in self.readers]
        return other

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""
        reader, number = self._blobs[index]
        return self.readers[reader].blob(number)

    def read(self, targets: Mapping[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""
        tensors = self.layout.tensors
        self.read_boxes(WantedBox(tensor, tensors[tensor].whole, target) for tensor, target in targets.items())

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors."""
        self.fetch(self.blocks_of(wanted))

    def blocks_of(self, wanted: Iterable[WantedBox]) -> list[WantedBlock]:
        """As `SnapshotReader.blocks_of`."""
        of_reader: dict[int, list[WantedBox]] = {}
        for box in wanted:
            reader, tensor = self._places[box.tensor]
            of_reader.setdefault(reader, []).append(box._replace(tensor=tensor))
        return [block for reader, boxes in of_reader.items() for block in self.readers[reader].blocks_of(boxes)]

    def fetch(self, blocks: Sequence[WantedBlock]) -> None:
        """As `SnapshotReader.fetch`."""
        self.readers[0].fetch(blocks)

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor."""
        reader, number = self._places[tensor]
        return self.readers[reader].read_range(number, start, stop)
