"""Writes what one rank contributes to a snapshot: its blocks, and the part that says where they lie. Both are durable then.

Knows neither refs nor the log, and no torch: it takes a state that was taken apart.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Buffer
from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.engine import Engine
from tensorstore_ck.ids import Digest, Ulid
from tensorstore_ck.index import Location
from tensorstore_ck.knownblocks import KnownBlocks
from tensorstore_ck.layout import Captured, layout_id
from tensorstore_ck.packwriter import PackWriter
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.part import BLOB_DTYPE, EXTENT_DTYPE, Extents, Part, encode_values, part_name
from tensorstore_ck.split import Region, Share, encode_regions, regions, shares

RUN_BYTES: Final = 4 << 20
RUN_BLOCKS: Final = 512
"""Small blocks are hashed and appended together, up to this many."""
MAX_OPEN_PACKS: Final = 4
"""On local files, packs written side by side: one thread at a time gets into a file."""


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


class _Run(NamedTuple):
    """Consecutive blocks that one thread handles at a time: (tensor, start, stop) in its source, and their first row."""

    row: int
    blocks: list[tuple[int, int, int]]


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


def write_part(engine: Engine, captured: Captured, known: KnownBlocks, *, anchor: int, seat: Seat = ALONE) -> WrittenPart:
    """Hashes and stores everything that this rank has to store. `anchor`: the log entry that `known` goes by."""
    with open_packs(engine, known) as packs:
        blobs = write_blobs(captured, packs, seat)
        tensors = write_tensors(captured, packs, seat, engine.config.block_bytes)
    return store_part(engine, captured, blobs, tensors, [packs], anchor=anchor, seat=seat)


@contextmanager
def open_packs(engine: Engine, known: Callable[[Digest], Location | None]) -> Iterator[PackWriter]:
    """A writer of blocks that are not `known`; every pack is durable when the block ends."""
    side_by_side = min(cpu_threads(), MAX_OPEN_PACKS) if engine.backend.is_local else 1
    packs = PackWriter(engine.backend, engine.new_id, known, open_packs=side_by_side)
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
    """Stores this rank's share of the tensors."""
    inline: list[bytes] = []
    blocks: list[tuple[int, int, int]] = []
    for tensor, start, share in places_of(captured, seat, block_bytes):
        if share.is_inline:
            inline.append(bytes(captured.sources[tensor].read(start, start + share.lengths[0])))
            continue
        for length in share.lengths:
            blocks.append((tensor, start, start + length))
            start += length

    ids: dict[int, list[Digest]] = {}

    def store(run: _Run) -> None:
        buffers: list[Buffer] = [captured.sources[tensor].read(start, stop) for tensor, start, stop in run.blocks]
        ids[run.row] = packs.add(buffers)

    for_each(_runs(blocks), store, cpu_threads() + 1)
    return TensorBlocks([block for row in sorted(ids) for block in ids[row]], b"".join(inline))


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


def _runs(blocks: list[tuple[int, int, int]]) -> Iterator[_Run]:
    """The blocks in order, in runs of up to `RUN_BYTES`."""
    first = run_bytes = 0
    for number, (_, start, stop) in enumerate(blocks):
        if number > first and (run_bytes + stop - start > RUN_BYTES or number - first == RUN_BLOCKS):
            yield _Run(first, blocks[first:number])
            first, run_bytes = number, 0
        run_bytes += stop - start
    if blocks:
        yield _Run(first, blocks[first:])
