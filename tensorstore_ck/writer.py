"""Puts one snapshot, in the order that makes a crash harmless:

    packs (durable) -> part (durable) -> record (durable) -> log entry

A crash or an error before the last step leaves orphans only. Knows no torch: it takes a state that was taken apart.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Buffer
from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.closure import Places, rescue, resolve
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import (
    ConflictError,
    DamageError,
    InvalidOptionError,
    MissingObjectError,
    SnapshotAbortedError,
    SnapshotExpiredError,
)
from tensorstore_ck.ids import Digest, Ulid
from tensorstore_ck.index import Location
from tensorstore_ck.layout import INLINE_TENSOR_BYTES, Captured
from tensorstore_ck.log import ObjectKey, Op, RefTable, SnapshotInfo
from tensorstore_ck.pack import pack_name
from tensorstore_ck.packwriter import PackWriter
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.part import BLOB_DTYPE, EXTENT_DTYPE, Part, encode_values, part_name
from tensorstore_ck.reader import block_lengths
from tensorstore_ck.record import MAX_STEP, Record, record_name

RUN_BYTES: Final = 4 << 20
RUN_BLOCKS: Final = 512
"""Small blocks are hashed and appended together, up to this many."""
MAX_TRIES: Final = 4
MAX_OPEN_PACKS: Final = 4
"""On local files, packs written side by side: one thread at a time gets into a file."""


class Anything:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "tsck.ANY"


ANY: Final = Anything()
"""As ``expect=``: move the ref from wherever it is."""

Expected = Digest | Anything | None
"""Root that the ref must have, `ANY`, or None for a ref that must not exist."""


class PutRequest(NamedTuple):
    """What a put says besides the state."""

    ref: str
    step: int | None
    parent: Digest | None
    expect: Expected
    metadata: bytes
    metrics: dict[str, float]


class _Run(NamedTuple):
    """Consecutive blocks that one thread handles at a time: (source number, start, stop), and their first row."""

    row: int
    blocks: list[tuple[int, int, int]]


def put(engine: Engine, captured: Captured, request: PutRequest) -> SnapshotInfo:
    """Stores a state and moves the ref to it; returns once both are durable. The caller has synced the log.

    When gc freed something that this put relies on before it could commit, as after a long sleep of this process, it starts anew:
    the bytes are still in memory.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    if request.step is not None and not 0 <= request.step <= MAX_STEP:
        raise InvalidOptionError(f"step {request.step} must be from 0 to {MAX_STEP}", object_id="step")
    for _ in range(MAX_TRIES - 1):
        try:
            return _try_put(engine, captured, request)
        except SnapshotExpiredError:
            engine.log.sync()
    return _try_put(engine, captured, request)


def _try_put(engine: Engine, captured: Captured, request: PutRequest) -> SnapshotInfo:
    head = engine.log.view().head()
    anchor = head.n if head else 0
    known = KnownBlocks(engine, request.parent)
    open_packs = min(cpu_threads(), MAX_OPEN_PACKS) if engine.backend.is_local else 1
    packs = PackWriter(engine.backend, engine.new_id, known, open_packs=open_packs)
    try:
        part = _write_blocks(engine, captured, packs, anchor)
    except BaseException:
        packs.abort()
        raise
    return _publish(engine, part, packs, captured, request)


def check_expected(view: RefTable, ref: str, expect: Expected) -> None:
    """The precondition of a put: fencing, so that a job that was given up for dead cannot move its successor's ref."""
    if view.tag(ref) is not None:
        raise InvalidOptionError(f"{ref!r} is a tag, and tags never move: put to a branch", object_id=ref)
    branch = view.branch(ref)
    if expect is ANY or (branch.root if branch else None) == expect:
        return
    if branch is None:
        raise ConflictError(f"ref {ref!r} does not exist, but was expected to", object_id=ref)
    seen = f"this store handle last saw {expect.hex()[:16]} there" if isinstance(expect, bytes) else "this store handle has not restored it"
    raise ConflictError(
        f"ref {ref!r} is at {branch.root.hex()[:16]}, and {seen}: another process moved it. "
        f"Resume with checkout({ref!r}), or pass expect=root or expect=tsck.ANY to put on top of it",
        object_id=ref,
    )


def _write_blocks(engine: Engine, captured: Captured, packs: PackWriter, anchor: int) -> Part:
    """Hashes and stores everything; every pack is durable when it returns."""
    encoded_layout = captured.layout.encode()
    ids: list[Digest] = []
    blobs = np.zeros(1 + len(captured.blobs), BLOB_DTYPE)
    for number, blob in enumerate((encoded_layout, *captured.blobs)):
        lengths = cut_opaque(blob)
        ends = np.cumsum(lengths).tolist()
        view = memoryview(blob)
        ids += packs.add([view[end - length : end] for end, length in zip(ends, lengths, strict=True)], compress=True)
        blobs[number] = (len(lengths), 0, len(blob))

    sizes = [spec.size_bytes for spec in captured.layout.tensors]
    inline = b"".join(
        bytes(source.read(0, size)) for source, size in zip(captured.sources, sizes, strict=True) if 0 < size <= INLINE_TENSOR_BYTES
    )
    tensor_ids: dict[int, list[Digest]] = {}

    def store(run: _Run) -> None:
        buffers: list[Buffer] = [captured.sources[number].read(start, stop) for number, start, stop in run.blocks]
        tensor_ids[run.row] = packs.add(buffers)

    for_each(_runs(captured, sizes, engine.config.block_bytes), store, cpu_threads() + 1)
    packs.close()
    for row in sorted(tensor_ids):
        ids += tensor_ids[row]

    pack_numbers: dict[Ulid, int] = {}
    extents = np.zeros(len(ids), EXTENT_DTYPE)
    rows = []
    for block in ids:
        place = packs.location(block)
        number = pack_numbers.setdefault(place.pack, len(pack_numbers))
        rows.append((number, place.entry, place.offset, place.stored, place.raw, -1, place.codec, 0))
    extents[:] = rows
    return Part(
        Digest(encoded_layout[-32:]),
        0,
        1,
        blobs,
        b"".join(ids),
        encode_values(captured.values),
        inline,
        list(pack_numbers),
        extents,
        b"",
        anchor,
    )


def _runs(captured: Captured, sizes: list[int], target_bytes: int) -> Iterator[_Run]:
    """All blocks of all tensors that are not inline, in order, as runs of up to `RUN_BYTES`."""
    blocks: list[tuple[int, int, int]] = []
    run_bytes = row = 0
    for number, (spec, size) in enumerate(zip(captured.layout.tensors, sizes, strict=True)):
        if size <= INLINE_TENSOR_BYTES:
            continue
        start = 0
        for length in block_lengths(spec, size, target_bytes).tolist():
            if blocks and (run_bytes + length > RUN_BYTES or len(blocks) == RUN_BLOCKS):
                yield _Run(row, blocks)
                row += len(blocks)
                blocks, run_bytes = [], 0
            blocks.append((number, start, start + length))
            start += length
            run_bytes += length
    if blocks:
        yield _Run(row, blocks)


def _publish(engine: Engine, part: Part, packs: PackWriter, captured: Captured, request: PutRequest) -> SnapshotInfo:
    """Part, record, log entry; then what may be lost: caches."""
    part_ulid, snapshot_ulid = engine.new_id(), engine.new_id()
    encoded_part = part.encode()
    engine.backend.put(part_name(part_ulid), encoded_part)
    record = Record(
        request.ref,
        request.step,
        request.parent,
        request.metadata,
        request.metrics,
        engine.clock(),
        [part_ulid],
        part.part_id(),
        sum(spec.size_bytes for spec in captured.layout.tensors) + sum(len(blob) for blob in captured.blobs),
        packs.new_bytes + len(encoded_part),
    )
    encoded_record = record.encode()
    engine.backend.put(record_name(snapshot_ulid), encoded_record)

    operation = Op.put(request.ref, snapshot_ulid, record, encoded_record, anchor=part.anchor, txn=snapshot_ulid)

    def build(view: RefTable) -> list[Op]:
        check_expected(view, request.ref, request.expect)
        return [operation, *commit_rescue(engine, view, snapshot_ulid, [(part_ulid, part)])]

    appended = engine.log.append(build)
    info = engine.log.view().snapshot(snapshot_ulid)
    if info is None:
        raise SnapshotAbortedError(
            f"the put to {request.ref!r} was aborted by another process before it was published", object_id=request.ref
        )
    engine.keep_part(part_ulid, part)
    engine.index.add(packs.added.items(), published_at=appended.n)
    return info


def commit_rescue(engine: Engine, view: RefTable, snapshot: Ulid, parts: Sequence[tuple[Ulid, Part]]) -> list[Op]:
    """What must be in the entry that publishes a snapshot, whose head is `view`, so that gc frees nothing of it.

    Raises:
        SnapshotExpiredError: gc freed something of it already: its blocks must be written anew.
    """
    needed = [ObjectKey("snapshot", snapshot)]
    try:
        for ulid, part in parts:
            needed += [ObjectKey("part", ulid), *resolve(engine, view, part).objects()]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return rescue(view, needed, min(part.anchor for _, part in parts), "this snapshot")


class KnownBlocks:
    """Where blocks lie already: in the parent's part, else in this host's index; only in packs that are there in full and stay."""

    def __init__(self, engine: Engine, parent: Digest | None) -> None:
        self._engine = engine
        self._view = engine.log.view()
        self._parent: Part | None = None
        self._places: Places | None = None
        self._rows: dict[bytes, int] = {}
        self._usable_bytes: dict[Ulid, int] = dict.fromkeys(packs_of_damaged(engine, self._view), 0)
        info = self._view.by_root(parent) if parent else None
        if info is None or not self._view.is_live(info.ulid):
            return
        try:
            self._parent = engine.read_part(engine.read_record(info), 0)
            self._places = resolve(engine, self._view, self._parent)
        except DamageError as exc:
            warnings.warn(f"cannot reuse the blocks of the parent snapshot, all are written again: {exc}", stacklevel=2)
            return
        ids = self._parent.ids
        self._rows = {ids[row * 32 : row * 32 + 32]: row for row in range(self._parent.block_count)}

    def __call__(self, block: Digest) -> Location | None:
        """Where a block lies, if it may be relied on."""
        row = self._rows.get(block)
        if row is not None and self._places is not None:
            pack, entry, offset, stored, raw, base, codec, _ = self._places.extents[row].item()
            location = Location(self._places.packs[pack], entry, offset, stored, raw, codec) if base == -1 else None
            if location is not None and self._is_usable(location):
                return location
        location = self._engine.index.get(block)
        return location if location is not None and self._is_usable(location) else None

    def _is_usable(self, location: Location) -> bool:
        if location.pack not in self._usable_bytes:
            self._usable_bytes[location.pack] = self._bytes_of(location.pack)
        return location.offset + location.stored <= self._usable_bytes[location.pack]

    def _bytes_of(self, pack: Ulid) -> int:
        """The pack's size; 0 if it goes, is gone (a lost pack must not be relied on by every later snapshot), or was moved from."""
        if self._view.object_state(ObjectKey("pack", pack)) is not None or any(self._view.relocations(pack)):
            return 0
        try:
            return self._engine.backend.size(pack_name(pack))
        except DamageError:
            return 0


def packs_of_damaged(engine: Engine, view: RefTable) -> Iterator[Ulid]:
    """The packs of snapshots that are marked as damaged: their blocks are written again by whoever has them."""
    for info in view.marked("damaged"):
        with contextlib.suppress(DamageError):
            record = engine.read_record(info)
            for rank in range(len(record.parts)):
                with contextlib.suppress(DamageError):
                    yield from resolve(engine, view, engine.read_part(record, rank)).packs
