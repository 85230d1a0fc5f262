"""Copies one snapshot in crash-safe order: packs, parts, record, log entry.

Content, block ids, part ids and the root stay the same; block locations are new in the target, under the rules of any save. The caller
chooses the operations that publish the snapshot.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from tensorstore_ck.backend.protocol import finishing
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.executor import Executor
from tensorstore_ck.common.ids import Digest, Ulid, block_id
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import raise_if_expired
from tensorstore_ck.engine.reachability import BlockLocations, chain_of, extents_of, locate_blocks, location_of
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.pack_writer import BlockEncoding, PackWriter
from tensorstore_ck.engine.write.publish import condemned_of, publish, retry_expired
from tensorstore_ck.errors import CorruptObjectError, DamageError, SnapshotExpiredError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, HEAD_BYTES, Encoder, elements_in
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.record import Record, record_name
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.maintenance.copy_store.blocks import BLOCK_DTYPE, Blocks, Copied, CopyPiece, Pace, copy_piece, cut_pieces
from tensorstore_ck.maintenance.copy_store.report import Progress

Arrange = Callable[[RefTable, Op], list[Op]]
"""Given the target at its head and a put: checks the ref, and returns the operations that publish the snapshot."""


class CopyMeter:
    """Adds up what was copied, and reports the progress."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self.snapshots = self.blocks = self.blocks_there = self.read_bytes = self.written_bytes = 0
        self._progress = progress
        self._total = total_bytes
        self._lock = threading.Lock()
        self._before = self._within = self._size = 0

    def begin(self, content_bytes: int) -> None:
        """Starts a snapshot, perhaps again."""
        self._within, self._size = 0, content_bytes

    def advance(self, content_bytes: int) -> None:
        """More of its content is in the target. Thread-safe."""
        with self._lock:
            self._within = min(self._within + content_bytes, self._size)  # small tensors have no blocks, and layouts do not count
            self._progress(self._before + self._within, self._total)

    def end(self) -> None:
        """Ends the snapshot."""
        self.advance(self._size)
        self._before += self._size
        self._within = self._size = 0


class SnapshotCopier:
    """Copies snapshots from one store to another, one at a time."""

    def __init__(self, source: Engine, target: Engine, pace: Pace | None, meter: CopyMeter, executor: Executor | None = None) -> None:
        """Without an executor, pieces are copied one after another, each by the threads of this process."""
        self._source = source
        self._target = target
        self._pace = pace
        self._meter = meter
        self._executor = executor

    def copy(self, info: SnapshotRow, ref: str, arrange: Arrange) -> SnapshotRow | None:
        """Copies a snapshot and publishes it; None when the source has forgotten and freed it meanwhile.

        Starts again if gc of the target freed something that the copy relied on, as after a long sleep of this process.

        Raises:
            ConflictError: from `arrange`; nothing is visible.
            DamageError: the source's snapshot cannot be read; nothing is visible.
        """

        def attempt() -> SnapshotRow | None:
            anchor = self._anchor()
            written_before = self._meter.written_bytes
            self._meter.begin(info.logical_bytes)
            try:
                record, parts = self._copy_parts(info, ref, anchor)
            except SnapshotExpiredError:
                self._meter.end()
                return None
            new_bytes = self._meter.written_bytes - written_before
            record = record._replace(ref=ref, parts=[ulid for ulid, _ in parts], new_bytes=new_bytes)
            published = self._publish(record, parts, arrange)
            self._meter.end()
            return published

        return retry_expired(attempt, self._target.log.sync)

    def _anchor(self) -> int:
        """The copy's anchor in the target.

        The block index is kept with the fold of the log, and an empty log has none. So that a killed copy into a new store can resume, an
        empty log gets a first entry, which aborts a put that never existed.
        """
        log = self._target.log
        head = log.view().head()
        return log.append(lambda view: [] if view.head() else [Op.abort(self._target.new_id())]).n if head is None else head.n

    def _copy_parts(self, info: SnapshotRow, ref: str, anchor: int) -> tuple[Record, list[tuple[Ulid, Part]]]:
        parts = []
        try:
            record = self._source.read_record(info)
            nearest = self._nearest(record, ref)
            for rank in range(len(record.parts)):
                theirs = self._source.read_part(record, rank)
                known = DedupIndex(self._target, nearest, theirs.rank, theirs.world_size)
                part = self._copy_part(info, theirs, known, anchor)
                ulid, encoded = self._target.new_id(), part.encode()
                self._put(part_name(ulid), encoded)
                parts.append((ulid, part))
        except DamageError as exc:
            raise_if_expired(self._source.log, info, exc)
            raise
        return record, parts

    def _nearest(self, record: Record, ref: str) -> Digest | None:
        """The snapshot of the target that probably shares most blocks."""
        view = self._target.log.view()
        parent, branch = view.by_root(record.parent or b""), view.branch(ref)
        if parent is not None and view.is_live(parent.ulid):
            return parent.root
        return branch.root if branch is not None else None

    def _copy_part(self, info: SnapshotRow, part: Part, known: DedupIndex, anchor: int) -> Part:
        """The part for the target, where all its blocks are durable."""
        ids = [part.block_id(row) for row in range(part.block_count)]
        there = known.find([*dict.fromkeys(ids)])
        located: dict[Digest, Location] = {}
        missing: dict[Digest, int] = {}
        for row, (block, raw) in enumerate(zip(ids, part.extents["raw"][: len(ids)].tolist(), strict=True)):
            if block in located or block in missing:
                continue
            location = there.get(block)
            if location is not None and location.raw == raw:
                located[block] = location
                self._meter.advance(raw)
            else:
                missing[block] = row
        self._meter.blocks_there += len(ids) - len(missing)
        locations = locate_blocks(self._source, self._source.log.view(), part)
        while missing:
            try:
                based = {block: row for block, row in missing.items() if locations.extents["codec"][row] in CODECS_WITH_BASES}
                plain = {block: row for block, row in missing.items() if block not in based}
                for copied in self._run(cut_pieces(locations.packs, _rows(locations, plain))):
                    self._note(copied, anchor)
                    located.update(copied.locations)
                if based:
                    copied = copy_decoded(
                        self._source, target=self._target, part=part, locations=locations, rows=based, advance=self._meter.advance
                    )
                    self._note(copied, anchor)
                    located.update(copied.locations)
            except DamageError as exc:
                view = raise_if_expired(self._source.log, info, exc)
                now = locate_blocks(self._source, view, part)
                missing = {block: row for block, row in missing.items() if block not in located}
                if all(locations.packs[locations.extents[row]["pack"]] == now.packs[now.extents[row]["pack"]] for row in missing.values()):
                    raise
                locations = now  # compaction moved some blocks: read them from there
            else:
                break
        return _relocated(part, ids, located, anchor)

    def _run(self, pieces: Iterable[CopyPiece]) -> Iterator[Copied]:
        source, target = self._source.backend, self._target.backend
        work = partial(copy_piece, source, target, self._target.new_id, self._pace)
        if self._executor is not None:
            return self._executor.run(work, pieces)
        return (work(piece, advance=self._meter.advance) for piece in pieces)

    def _note(self, copied: Copied, anchor: int) -> None:
        """Indexes blocks that are durable in the target, for later snapshots and for a resumed copy."""
        self._meter.blocks += len(copied.locations)
        self._meter.read_bytes += copied.read_bytes
        self._meter.written_bytes += copied.written_bytes
        self._target.index.add(copied.locations.items(), published_at=anchor)

    def _publish(self, record: Record, parts: Sequence[tuple[Ulid, Part]], arrange: Arrange) -> SnapshotRow:
        ulid, encoded = self._target.new_id(), record.encode()
        self._put(record_name(ulid), encoded)
        info = publish(
            self._target,
            record,
            txn=ulid,
            stored=encoded,
            anchor=min(part.anchor for _, part in parts),
            arrange=arrange,
            condemned=lambda view: condemned_of(self._target, view, [ulid], parts),
        )
        for part_ulid, part in parts:
            self._target.keep_part(part_ulid, part)
        self._meter.snapshots += 1
        return info

    def _put(self, name: str, data: Buffer) -> None:
        self._target.backend.put(name, data)
        self._meter.written_bytes += len(data)


def _rows(locations: BlockLocations, missing: dict[Digest, int]) -> Blocks:
    rows = np.zeros(len(missing), BLOCK_DTYPE)
    extents = locations.extents[list(missing.values())]
    for field in ("pack", "offset", "stored", "raw", "codec"):
        rows[field] = extents[field]
    rows["id"] = np.frombuffer(b"".join(missing), BLOCK_DTYPE["id"])
    return rows


def _relocated(part: Part, ids: Sequence[Digest], located: dict[Digest, Location], anchor: int) -> Part:
    """The part with its blocks at their locations in the target."""
    extents = extents_of(ids, located)
    return part._replace(packs=extents.packs, extents=extents.rows, base_ids=extents.base_ids, anchor=anchor)


def copy_decoded(
    source: Engine, target: Engine, part: Part, locations: BlockLocations, rows: Mapping[Digest, int], *, advance: Callable[[int], None]
) -> Copied:
    """Copies the blocks in these extent `rows`; all of them are durable when it returns.

    Raises:
        DamageError: a block, or one of its bases, is missing or damaged.
    """
    located = {block: location_of(part, locations.packs, locations.extents, row) for block, row in rows.items()}
    writer = PackWriter(target.backend, target.new_id, lambda _: {})

    def copy(block: Digest) -> None:
        location = located[block]
        name = pack_name(location.pack)
        raw = decode_at(source.backend, location)
        if block_id(raw) != block:
            raise CorruptObjectError(f"{name}: the block at offset {location.offset}, or one of its bases, is damaged", object_id=name)
        head = bytearray(min(location.stored, HEAD_BYTES))
        source.backend.read_into(name, location.offset, memoryview(head))
        writer.add([raw], lambda _: BlockEncoding(Encoder("fast").encode_tensor(raw, elements_in(location.codec, head))))
        advance(len(raw))

    with finishing(writer):
        for_each(located, copy, cpu_threads())
    return Copied(writer.added, sum(extent.stored for location in located.values() for extent in chain_of(location)), writer.new_bytes)
