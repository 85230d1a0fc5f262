"""Reads blocks that parts name, and verifies each before its bytes count.

Reads are sorted by pack and offset, merged where the blocks are small or the backend is remote, and go straight into the caller's
memory where a block is stored raw. A block that is wanted several times is fetched once. Knows nothing of tensors.
"""

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid, block_id
from tensorstore_ck.common.threads import Scratch, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.engine.reachability import BlockLocations, chain_of, locate_blocks, location_of
from tensorstore_ck.errors import CorruptObjectError, DamageError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, decode
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.block_index import Location

_logger: Final = logging.getLogger("tensorstore_ck.engine")
MERGE_BYTES: Final = 8 << 20
"""Neighbouring blocks are fetched together from a remote backend up to this size; up to `RUN_BYTES`, if there are enough runs."""
DIRECT_BYTES: Final = 1 << 20
"""On a local backend a raw block of this size or more is read straight into its destination, as are several that follow each other; smaller
ones are fetched together up to this size, which stays in the core's cache and touches few fresh pages."""
RUN_BYTES: Final = 16 << 20
"""The bytes that one thread delivers at a time: on 16 cores 20 GB/s into a GPU; in pieces of 4 MiB 7 to 11. From a local backend they are
read and hashed a block at a time, while a block is in the core's cache."""
RUNS_A_THREAD: Final = 4
"""The least number of runs for each thread, if there are enough blocks: so that all threads end at about the same time."""
MAX_GAP_BYTES: Final = 1 << 16
REMOTE_THREADS: Final = 8
DISK_QUEUE: Final = 2
"""Reads that wait for the disk while all cores hash: 0.5 instead of 1.1 s for 1 GiB that is not in the page cache."""


class OpenPart:
    """A part, and where its blocks are now."""

    def __init__(self, part: Part, name: str, places: BlockLocations, describe: Callable[[int], str]) -> None:
        self.part = part
        self.name = name
        self.places = places
        self.describe = describe
        """What the block in an extent row belongs to, for messages."""


class WantedBlock(NamedTuple):
    """One block, and where it goes."""

    source: OpenPart
    row: int
    pack: Ulid
    offset: int
    stored: int
    raw: int
    codec: int
    start: int
    target: ByteTarget


class BufferTarget(ByteTarget):
    """`ByteTarget` over plain memory."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def memory(self) -> memoryview:
        """All of it."""
        return self._view

    def write(self, start: int, data: memoryview) -> None:
        """Copies."""
        self._view[start : start + len(data)] = data


ReadBlocks = Callable[[Engine, SnapshotRow, Sequence[WantedBlock]], None]
"""What reads verified blocks of a snapshot into their targets: `read_blocks`, or something on top of it."""


def wanted_blocks(source: OpenPart, rows: range, start: int, target: ByteTarget) -> list[WantedBlock]:
    """Neighbouring blocks of a part; the first goes to `start` of the target."""
    wanted = []
    places = source.places
    for row, extent in zip(rows, places.extents[rows.start : rows.stop].tolist(), strict=True):
        pack, _, offset, stored, raw, _, codec, _ = extent
        wanted.append(
            WantedBlock(
                source=source,
                row=row,
                pack=places.packs[pack],
                offset=offset,
                stored=stored,
                raw=raw,
                codec=codec,
                start=start,
                target=target,
            )
        )
        start += raw
    return wanted


def read_blocks(
    engine: Engine, info: SnapshotRow, wanted: Sequence[WantedBlock], read: "Callable[[Engine, list[WantedBlock]], None] | None" = None
) -> None:
    """Reads blocks of a snapshot; follows those that gc moved since the snapshot was opened. `read`: by default `read_at_places`.

    Raises:
        DamageError: a block is missing or is not what its id says.
        SnapshotExpiredError: the snapshot was removed in the meantime.
    """
    while wanted:
        try:
            (read or read_at_places)(engine, list(wanted))
        except DamageError as exc:
            view = raise_if_expired(engine.log, info, exc)
            _logger.debug("the blocks of %s@%s, root %s, are located again: %s", info.ref, info.step, info.root.hex(), exc)
            before = {id(block.source): block.source.places.packs for block in wanted}  # bases may have moved, too
            for source in {id(block.source): block.source for block in wanted}.values():
                source.places = locate_blocks(engine, view, source.part)
            moved = [_where_it_is_now(block) for block in wanted]
            if all(now.pack == block.pack for now, block in zip(moved, wanted, strict=True)) and before == {
                id(block.source): block.source.places.packs for block in moved
            }:
                raise
            wanted = moved
        else:
            return


def _where_it_is_now(block: WantedBlock) -> WantedBlock:
    places = block.source.places
    pack, _, offset, stored, _, _, codec, _ = places.extents[block.row].item()
    return block._replace(pack=places.packs[pack], offset=offset, stored=stored, codec=codec)


def read_at_places(engine: Engine, wanted: list[WantedBlock]) -> None:
    """Reads blocks from where their extents say that they are.

    Raises:
        DamageError: a block is missing or is not what its id says.
    """
    local = engine.backend.is_local
    threads = cpu_threads() + DISK_QUEUE if local else REMOTE_THREADS
    wanted.sort(key=attrgetter("pack", "offset"))
    run_bytes = min(len(wanted) * engine.config.block_bytes // (RUNS_A_THREAD * threads), RUN_BYTES) if local else 0
    share_bytes = 0 if local else sum(block.stored for block in wanted) // (RUNS_A_THREAD * threads)
    merge_bytes = DIRECT_BYTES if local else max(MERGE_BYTES, min(share_bytes, RUN_BYTES))
    others = [block for block in wanted if block.codec not in CODECS_WITH_BASES]
    runs = [[block] for block in wanted if block.codec == Codec.DELTA]  # first: the longest tasks, and the masters of weights
    runs += _merge(others, direct=local, merge_bytes=merge_bytes, run_bytes=run_bytes)
    roundings = [[block] for block in wanted if block.codec == Codec.CAST]
    scratch = Scratch()
    at_hand: dict[Digest, memoryview] = {}  # restored whole into one piece of memory
    early: list[list[WantedBlock]] = []

    def fetch(run: list[WantedBlock], *, may_wait: bool = True) -> None:
        block, read, is_rounding = run[0], partial(_fetch, engine, run, scratch), run[0].codec == Codec.CAST
        if block.codec in CODECS_WITH_BASES:
            place = _location(block)
            if is_rounding and may_wait and any(base.block not in at_hand for base in place.bases):
                early.append(run)
                return
            read = partial(_fetch_based, engine, block, place, scratch=scratch, at_hand=at_hand if is_rounding else {})
        try:
            read()
        except CorruptObjectError:
            has_bases = block.codec in CODECS_WITH_BASES
            for pack in {place.pack for place in chain_of(_location(block))} if has_bases else {block.pack}:
                engine.distrust(pack_name(pack))
            read()  # once more: the bytes that came may be wrong although the stored ones are right
        for whole in run if roundings and not is_rounding else ():
            if (memory := whole.target.memory()) is not None:
                at_hand[whole.source.part.block_id(whole.row)] = memory[whole.start : whole.start + whole.raw]
        if engine.on_read is not None:
            engine.on_read(sum(block.raw for block in run))

    for_each(runs + roundings, fetch, min(threads, len(runs) + len(roundings)))
    if early:  # their masters were still being restored, or are not wanted
        for_each(early, partial(fetch, may_wait=False), min(threads, len(early)))


def _fetch(engine: Engine, run: list[WantedBlock], scratch: Scratch) -> None:
    """Reads one merged range, verifies each block in it, and delivers it."""
    first, last = run[0], run[-1]
    name = pack_name(first.pack)
    size = last.offset + last.stored - first.offset
    if _is_straight(run) and _fetch_straight(engine, run, name):
        return
    fetched = scratch.take("stored", size)
    engine.backend.read_into(name, first.offset, fetched)
    for _, same in groupby(run, key=attrgetter("offset")):
        blocks = list(same)
        at = blocks[0].offset - first.offset
        whole = blocks[0].target.memory()
        into = blocks[0].target.window(blocks[0].raw) if whole is None else whole[blocks[0].start : blocks[0].start + blocks[0].raw]
        raw = decode(blocks[0].codec, fetched[at : at + blocks[0].stored], blocks[0].raw, name, into)
        _verify(engine, blocks[0], raw, name)
        expected = blocks[0].source.part.block_id(blocks[0].row) if len(blocks) > 1 else None
        for block in blocks[whole is not None and raw is into :]:
            if block.raw != blocks[0].raw or (expected and block.source.part.block_id(block.row) != expected):
                raise CorruptObjectError(f"{block.source.name}: two blocks claim one place in {name}", object_id=block.source.name)
            deliver(block.target, block.start, raw)


def _is_straight(run: Sequence[WantedBlock]) -> bool:
    """Whether the stored bytes of a run are the raw bytes of its blocks, one after another."""
    pack, end = run[0].pack, run[0].offset
    for block in run:
        if block.codec != Codec.RAW or block.pack != pack or block.offset != end:
            return False
        end += block.stored
    return True


def _is_in_one_place(run: Sequence[WantedBlock]) -> bool:
    """Whether the blocks of a run follow each other in one destination."""
    target, end = run[0].target, run[0].start
    for block in run:
        if block.target is not target or block.start != end:
            return False
        end += block.raw
    return True


def _fetch_straight(engine: Engine, run: Sequence[WantedBlock], name: str) -> bool:
    """Reads a straight run into its destination, or to where that takes it from fastest; returns False if there is no such memory."""
    first, size_bytes = run[0], run[-1].offset + run[-1].raw - run[0].offset
    memory = first.target.memory()
    if memory is None:
        place = first.target.window(size_bytes)
    else:
        place = memory[first.start : first.start + size_bytes] if len(run) == 1 or _is_in_one_place(run) else None
    if place is None:
        return False
    for piece in _pieces(run) if engine.backend.is_local else [run]:
        begin = piece[0].offset - first.offset
        end = piece[-1].offset + piece[-1].raw - first.offset
        engine.backend.read_into(name, piece[0].offset, place[begin:end])
        for block in piece:
            at = block.offset - first.offset
            _verify(engine, block, place[at : at + block.raw], name)
    if memory is None:
        _deliver_run(run, place)
    return True


def _pieces(run: Sequence[WantedBlock]) -> Iterator[Sequence[WantedBlock]]:
    """A straight run in pieces of at least `DIRECT_BYTES` that end where a block ends."""
    begin = 0
    for number, block in enumerate(run, start=1):
        if number == len(run) or block.offset + block.raw - run[begin].offset >= DIRECT_BYTES:
            yield run[begin:number]
            begin = number


def _deliver_run(run: Sequence[WantedBlock], data: memoryview) -> None:
    """Delivers the verified bytes of a run; together where they follow each other."""
    begin = 0
    for number, block in enumerate(run, start=1):
        if number == len(run) or not _is_in_one_place((block, run[number])):
            first = run[begin]
            at = first.offset - run[0].offset
            deliver(first.target, first.start, data[at : block.offset + block.raw - run[0].offset])
            begin = number


def _belong_together(block: WantedBlock, later: WantedBlock) -> bool:
    """Whether large blocks that lie side by side are worth reading together."""
    pair = block, later
    return _is_straight(pair) and (_is_in_one_place(pair) or (block.target.memory() is None and later.target.memory() is None))


def _fetch_based(engine: Engine, block: WantedBlock, place: Location, scratch: Scratch, at_hand: Mapping[Digest, memoryview]) -> None:
    """Reads a block that is encoded against others, and delivers it."""
    whole = block.target.memory()
    into = None if whole is None else whole[block.start : block.start + block.raw]
    raw = decode_at(engine.backend, place, into, at_hand=at_hand, scratch=scratch)
    if not at_hand or block_id(raw) != block.source.part.block_id(block.row):
        if at_hand:  # the caller's memory may have changed since
            raw = decode_at(engine.backend, place, into, scratch=scratch)
        _verify(engine, block, raw, pack_name(place.pack))
    if raw is not into:
        deliver(block.target, block.start, raw)


def decode_at(
    backend: Backend,
    place: Location,
    into: memoryview | None = None,
    *,
    at_hand: Mapping[Digest, memoryview] = MappingProxyType({}),
    scratch: Scratch | None = None,
) -> memoryview:
    """The raw bytes of a block, in `into` or in new memory; not compared with its id. Bases that are `at_hand` are not read.

    Raises:
        DamageError: it, or one that it is encoded against, is missing or damaged.
    """
    scratch, links = scratch or Scratch(), [place]
    while links[-1].codec == Codec.DELTA and len(links[-1].bases) == 1 and links[-1].bases[0].block not in at_hand:
        below = links[-1].bases[0].location
        if below is None:
            break
        links.append(below)
    for link in links:
        _require_right_bases(link)
    # With `into` the bases lie in this thread's memory, else all of the chain in the memory that is returned.
    memory = scratch.take("base", links[1].raw) if into is not None and len(links) > 1 else None
    raw: memoryview | None = None
    for link in reversed(links):
        target = into if link is place and into is not None else memory
        bases = [raw] if raw is not None else []
        for base in link.bases if raw is None else ():
            if base.block in at_hand:
                bases.append(at_hand[base.block])
            elif base.location is not None:
                bases.append(decode_at(backend, base.location, scratch=scratch))
        if link.codec != Codec.RAW:
            stored = scratch.take("stored", link.stored)
        else:
            stored = target if target is not None and len(target) == link.stored else memoryview(bytearray(link.stored))
        name = pack_name(link.pack)
        backend.read_into(name, link.offset, stored)
        raw = decode(link.codec, stored, link.raw, name, target, bases=bases, scratch=scratch)
        if memory is None and not raw.readonly:
            memory = raw
    assert raw is not None
    return raw


def _require_right_bases(place: Location) -> None:
    """Checked before any base is decoded: a block needs at most the fp32 masters of 16-bit weights."""
    base_bytes = sum(base.location.raw for base in place.bases if base.location is not None)
    if base_bytes > 2 * place.raw:
        name = pack_name(place.pack)
        raise CorruptObjectError(f"{name}: a block of {place.raw:,} bytes is said to need {base_bytes:,} bytes of others", object_id=name)


def _location(block: WantedBlock) -> Location:
    places = block.source.places
    return location_of(block.source.part, places.packs, places.extents, block.row)


def _verify(engine: Engine, block: WantedBlock, raw: memoryview, name: str) -> None:
    if block_id(raw) != block.source.part.block_id(block.row):
        raise CorruptObjectError(
            f"{name}: the block at offset {block.offset} of {block.source.describe(block.row)} does not match its hash: the pack was "
            f"damaged; run `tsck fsck --read-data -s {shlex.quote(engine.backend.url)}` to see what it hits, and restore an older snapshot",
            object_id=name,
        )


def deliver(target: ByteTarget, start: int, raw: memoryview) -> None:
    """Hands verified bytes over."""
    memory = target.memory()
    if memory is None:
        target.write(start, raw)
    else:
        memory[start : start + len(raw)] = raw


def _merge(wanted: list[WantedBlock], *, direct: bool, merge_bytes: int, run_bytes: int) -> Iterator[list[WantedBlock]]:
    """Groups sorted blocks by up to `merge_bytes`, to fetch in one request; raw ones that can be read straight by up to `run_bytes`."""
    run: list[WantedBlock] = []
    for block in wanted:
        if run:
            first, last = run[0], run[-1]
            near = block.pack == last.pack and block.offset - last.offset - last.stored <= MAX_GAP_BYTES
            same = block.pack == last.pack and block.offset == last.offset
            span = block.offset + block.stored - first.offset
            alone = direct and max(block.raw, last.raw) >= DIRECT_BYTES
            if not same and (not near or alone or span > merge_bytes) and (span > run_bytes or not _belong_together(last, block)):
                yield run
                run = []
        run.append(block)
    if run:
        yield run
