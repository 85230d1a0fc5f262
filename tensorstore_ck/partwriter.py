"""Writes what one rank contributes to a snapshot: its blocks, and the part that says where they lie. Both are durable then.

Knows neither refs nor the log, and no torch: it takes a state that was taken apart.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Buffer
from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import FrozenChangedError
from tensorstore_ck.ids import ZERO_DIGEST, Digest, Ulid
from tensorstore_ck.index import Location
from tensorstore_ck.layout import Captured, layout_id
from tensorstore_ck.metering import Meter
from tensorstore_ck.packwriter import PackWriter
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.part import BLOB_DTYPE, EXTENT_DTYPE, Extents, Part, encode_values, part_name
from tensorstore_ck.split import Region, Share, encode_regions, regions, shares

RUN_BYTES: Final = 4 << 20
RUN_BLOCKS: Final = 512
"""Small blocks are hashed and appended together, up to this many."""
MAX_OPEN_PACKS: Final = 4
"""On local files, packs written side by side: one thread at a time gets into a file."""


Known = Callable[[Digest], Location | None]
"""Where a block lies already, if it may be relied on."""


class Seat(NamedTuple):
    """Which of a snapshot's parts it is."""

    rank: int
    world_size: int
    alike: tuple[int, ...]
    """The ranks that have the same layout, in order. The first of them stores the layout, and the values and large values of the state."""
    layout_of: bytes | None
    """See `Part.layout_of`."""


ALONE: Final = Seat(0, 1, (0,), None)


class WrittenPart(NamedTuple):
    """A part that a snapshot may name."""

    ulid: Ulid
    part: Part
    added: Mapping[Digest, Location]
    """Where the blocks lie that were not in the store before."""
    new_bytes: int
    """Of its packs and of itself."""


class _Block(NamedTuple):
    """A block to store."""

    row: int
    """Among the tensors' blocks."""
    tensor: int
    start: int
    """Where it begins in the tensor's source."""
    stop: int


class BlobBlocks(NamedTuple):
    """What a rank has stored of the layout and the large values."""

    rows: Extents
    """The part's `blobs`."""
    ids: list[Digest]
    """Of their blocks, in order."""


class TensorBlocks(NamedTuple):
    """What a rank has stored of the tensors."""

    ids: list[Digest]
    """Of its blocks, in order."""
    inline: bytes
    """What lies inside the part."""


def write_part(
    engine: Engine,
    captured: Captured,
    known: Known,
    *,
    anchor: int,
    seat: Seat = ALONE,
    meter: Meter | None = None,
    apart: bool = False,
) -> WrittenPart:
    """Hashes and stores everything that this rank has to store.

    Args:
        engine: The store.
        captured: The state.
        known: Which blocks need not be written.
        anchor: The log entry that `known` goes by.
        seat: Which part it is.
        meter: Is told how it goes; what it raises gives the work up.
        apart: Whether the layout and large values get packs of their own, which are small.
    """
    with open_packs(engine, known, meter) as first:
        blobs = write_blobs(captured, first, seat)
        if not apart:
            tensors = write_tensors(captured, first, seat, engine.config.block_bytes)
    packs = [first]
    if apart:
        with open_packs(engine, known, meter) as second:
            tensors = write_tensors(captured, second, seat, engine.config.block_bytes)
        packs.append(second)
    return store_part(engine, captured, blobs, tensors, packs, anchor=anchor, seat=seat)


@contextmanager
def open_packs(engine: Engine, known: Known, meter: Meter | None = None) -> Iterator[PackWriter]:
    """A writer of blocks that are not `known`; every pack is durable when the block ends."""
    side_by_side = min(cpu_threads(), MAX_OPEN_PACKS) if engine.backend.is_local else 1
    packs = PackWriter(engine.backend, engine.new_id, known, open_packs=side_by_side, meter=meter)
    try:
        yield packs
        packs.close()
    except BaseException:
        packs.abort()
        raise


def write_blobs(captured: Captured, packs: PackWriter, seat: Seat) -> BlobBlocks:
    """Stores the layout and the large values, if this rank is the one that does."""
    encoded_layout = captured.layout.encode()
    is_first = seat.rank == seat.alike[0]
    ids: list[Digest] = []
    blobs = np.zeros(1 + len(captured.blobs) if is_first else 1, BLOB_DTYPE)
    blobs["size"][0] = len(encoded_layout)
    for number, blob in enumerate((encoded_layout, *captured.blobs) if is_first else ()):
        lengths = cut_opaque(blob)
        ends = np.cumsum(lengths).tolist()
        view = memoryview(blob)
        ids += packs.add([view[end - length : end] for end, length in zip(ends, lengths, strict=True)], compress=True)
        blobs[number] = (len(lengths), 0, len(blob))
    return BlobBlocks(blobs, ids)


def write_tensors(captured: Captured, packs: PackWriter, seat: Seat, block_bytes: int) -> TensorBlocks:
    """Stores this rank's share of the tensors.

    Raises:
        FrozenChangedError: a tensor that was said to be frozen has other bytes than when it was last read.
    """
    inline: list[bytes] = []
    blocks: list[_Block] = []
    for tensor, start, share in places_of(captured, seat, block_bytes):
        if share.is_inline:
            inline.append(bytes(captured.sources[tensor].read(start, start + share.lengths[0])))
            continue
        for length in share.lengths:
            blocks.append(_Block(len(blocks), tensor, start, start + length))
            start += length
    ids = [ZERO_DIGEST] * len(blocks)
    frozen = _rows_of_frozen(captured, blocks)
    for tensor in [*frozen]:
        said = captured.frozen[tensor]
        if not said.is_due and len(said.ids) == len(frozen[tensor]) and packs.rely_on(said.ids):
            said.unread += 1
            for row, block in zip(frozen.pop(tensor), said.ids, strict=True):
                ids[row] = block

    def store(run: list[_Block]) -> None:
        buffers: list[Buffer] = []
        for block in run:
            data = captured.sources[block.tensor].read(block.start, block.stop)
            # A frozen tensor lies in its owner's memory: should it change all the same, no block may have other bytes than its id says.
            buffers.append(bytes(data) if block.tensor in captured.frozen else data)
        for block, found in zip(run, packs.add(buffers), strict=True):
            ids[block.row] = found

    for_each(_runs(block for block in blocks if ids[block.row] is ZERO_DIGEST), store, cpu_threads() + 1)
    for tensor, rows in frozen.items():
        _note_frozen(captured, tensor, [ids[row] for row in rows])
    return TensorBlocks(ids, b"".join(inline))


def inline_bytes(captured: Captured, seat: Seat, block_bytes: int) -> bytes:
    """What of the tensors lies inside the part."""
    found = places_of(captured, seat, block_bytes)
    return b"".join(captured.sources[tensor].read(start, start + share.lengths[0]) for tensor, start, share in found if share.is_inline)


def places_of(captured: Captured, seat: Seat, block_bytes: int) -> Iterator[tuple[int, int, Share]]:
    """What this rank stores: the tensor, where in its source it begins, and how it is cut."""
    held = regions(captured.layout, seat.rank, seat.alike, captured.explicit)
    bases = source_offsets(captured, held)
    for share in shares(captured.layout, held, seat.rank, block_bytes):
        yield held[share.region].tensor, bases[share.region] + share.start, share


def store_part(
    engine: Engine,
    captured: Captured,
    blobs: BlobBlocks,
    tensors: TensorBlocks,
    packs: Sequence[PackWriter],
    *,
    anchor: int,
    seat: Seat,
) -> WrittenPart:
    """Writes the part that names these blocks, which lie where the closed `packs` say."""
    ids = [*blobs.ids, *tensors.ids]
    places = ChainMap(*(known for writer in packs for known in (writer.added, writer.found)))
    pack_numbers: dict[Ulid, int] = {}
    extents = np.zeros(len(ids), EXTENT_DTYPE)
    rows = []
    for block in ids:
        place = places[block]
        number = pack_numbers.setdefault(place.pack, len(pack_numbers))
        rows.append((number, place.entry, place.offset, place.stored, place.raw, -1, place.codec, 0))
    extents[:] = rows
    part = Part(
        layout_id(captured.layout.encode()),
        seat.rank,
        seat.world_size,
        blobs.rows,
        b"".join(ids),
        encode_values(captured.values if seat.rank == seat.alike[0] else ()),
        tensors.inline,
        list(pack_numbers),
        extents,
        b"",
        anchor,
        seat.layout_of,
        encode_regions(captured.explicit),
    )
    ulid, encoded = engine.new_id(), part.encode()
    engine.backend.put(part_name(ulid), encoded)
    added = {block: place for writer in packs for block, place in writer.added.items()}
    return WrittenPart(ulid, part, added, sum(writer.new_bytes for writer in packs) + len(encoded))


def source_offsets(captured: Captured, held: Sequence[Region]) -> list[int]:
    """Where each region that a rank holds begins in its tensor's source, which has one region after another."""
    ends: dict[int, int] = {}
    bases = []
    for region in held:
        base = ends.get(region.tensor, 0)
        bases.append(base)
        ends[region.tensor] = base + region.size_bytes(captured.layout.tensors[region.tensor])
    return bases


def _rows_of_frozen(captured: Captured, blocks: Sequence[_Block]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    if captured.frozen:
        for block in blocks:
            if block.tensor in captured.frozen:
                rows.setdefault(block.tensor, []).append(block.row)
    return rows


def _note_frozen(captured: Captured, tensor: int, ids: list[Digest]) -> None:
    """What a frozen tensor was found to be when it was read."""
    said, name = captured.frozen[tensor], captured.layout.tensors[tensor].name
    if len(said.ids) == len(ids) and said.ids != ids:
        raise FrozenChangedError(
            f"{name} was put as frozen, but has changed since it was last read: nothing was published, and the {said.unread} "
            "snapshots since then have its earlier values. Leave it out of frozen=",
            object_id=name,
        )
    said.ids, said.unread = ids, 0


def _runs(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """The blocks in order, in runs that one thread handles at a time, of up to `RUN_BYTES`."""
    run: list[_Block] = []
    run_bytes = 0
    for block in blocks:
        size = block.stop - block.start
        if run and (run_bytes + size > RUN_BYTES or len(run) == RUN_BLOCKS):
            yield run
            run, run_bytes = [], 0
        run.append(block)
        run_bytes += size
    if run:
        yield run
