"""Puts one snapshot, in the order that makes a crash harmless:

    packs (durable) -> part (durable) -> record (durable) -> log entry

A crash or an error before the last step leaves orphans only. Knows no torch: it takes a state that was taken apart.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.common.put_progress import PutMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.reachability import condemned_among, resolve
from tensorstore_ck.engine.write.branch_conflict import moved_away
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import ALONE, WrittenPart, write_part
from tensorstore_ck.engine.write.sampled_checks import Finiteness, Sampling, turn_of
from tensorstore_ck.engine.write.suspicious_save import SaveChecks, SaveClaim, SaveFindings, judge
from tensorstore_ck.errors import (
    ConflictError,
    InvalidOptionError,
    MissingObjectError,
    SnapshotAbortedError,
    SnapshotExpiredError,
    UndecidedError,
)
from tensorstore_ck.format.codec import Coding
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.record import Record, record_name, with_note
from tensorstore_ck.log import BranchHead, ObjectKey, Objects, Op, RefTable, SnapshotInfo
from tensorstore_ck.log.retention import expire_at_put

MAX_TRIES: Final = 4


class AnyHead:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "tsck.ANY"


ANY: Final = AnyHead()
"""As ``expect=``: move the ref from wherever it is."""

Expected = Digest | AnyHead | None
"""Root that the ref must have, `ANY`, or None for a ref that must not exist."""


class PutRequest(NamedTuple):
    """What a put says besides the state."""

    ref: str
    step: int | None
    parent: Digest | None
    """What the new snapshot continues: part of its root."""
    expect: Expected
    metadata: bytes
    metrics: dict[str, float]
    coding: Coding = Coding("raw")
    base: Digest | None = None
    """Another snapshot than the parent that more likely has the same blocks."""
    checks: SaveChecks = SaveChecks()

    @property
    def nearest(self) -> Digest | None:
        """The snapshot in which blocks are looked for first: a hint, of which the new snapshot's root knows nothing."""
        return self.base or self.parent

    @property
    def sampling(self) -> Sampling:
        """What of the state is looked at twice."""
        return Sampling(turn_of(self.parent, self.step), self.checks.verify_capture)

    @property
    def claim(self) -> SaveClaim:
        """What it says of the state's place in the training."""
        return SaveClaim(self.ref, self.step, self.parent)

    def examine(self, engine: Engine, written: WrittenPart, captured: CapturedState) -> SaveFindings:
        """What a rank finds in the part that it has written."""
        return ParentComparison(engine, written, captured, self.claim).examine()

    def judged(self, engine: Engine, found: SaveFindings) -> "PutRequest":
        """As `noted`, after what all ranks found was judged.

        Raises:
            SuspiciousSaveError: it is not to be published like that.
        """
        judge(engine, found, self.checks, self.claim)
        return self.noted(found.finiteness)

    def noted(self, finiteness: Finiteness) -> "PutRequest":
        """The same, with the share of numbers that are not finite in its metadata."""
        return self._replace(metadata=with_note(self.metadata, {"non_finite": finiteness.share})) if finiteness.non_finite else self


def put(engine: Engine, captured: CapturedState, request: PutRequest, meter: PutMeter | None = None) -> SnapshotInfo:
    """Stores a state and moves the ref to it; returns once both are durable. The caller has synced the log.

    `meter` is told how it goes; what it raises gives the put up.

    When gc freed something that this put relies on before it could commit, as after a long sleep of this process, it starts anew:
    the bytes are still in memory.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    for _ in range(MAX_TRIES - 1):
        try:
            return _try_put(engine, captured, request, meter)
        except SnapshotExpiredError:
            engine.log.sync()
    return _try_put(engine, captured, request, meter)


def _try_put(engine: Engine, captured: CapturedState, request: PutRequest, meter: PutMeter | None) -> SnapshotInfo:
    head = engine.log.view().head()
    known = DedupIndex(engine, request.nearest)
    seat = ALONE._replace(layout_of=b"") if captured.explicit else ALONE  # the part id covers regions only together with it
    anchor, sampling = head.n if head else 0, request.sampling
    written = write_part(engine, captured, known, anchor=anchor, seat=seat, coding=request.coding, meter=meter, sampling=sampling)
    request = request.judged(engine, request.examine(engine, written, captured))
    with (meter or PutMeter()).timed("commit"):
        return _publish(engine, written, captured, request)


def check_expected(engine: Engine, view: RefTable, ref: str, expect: Expected) -> None:
    """The precondition of a put: fencing, so that a job that was given up for dead cannot move its successor's ref.

    Raises:
        ConflictError: the ref is elsewhere; the message says who moved it, and how to go on.
    """
    if view.tag(ref) is not None:
        raise InvalidOptionError(f"{ref!r} is a tag, and tags never move: put to a branch", object_id=ref)
    branch = view.branch(ref)
    if is_expected(branch, expect):
        return
    if branch is None:
        raise ConflictError(f"ref {ref!r} does not exist, but was expected to", object_id=ref)
    raise moved_away(engine, view, branch, expect if isinstance(expect, bytes) else None)


def is_expected(branch: BranchHead | None, expect: Expected) -> bool:
    """Whether a branch is where a put expects it."""
    return expect is ANY or (branch.root if branch else None) == expect


def _publish(engine: Engine, written: WrittenPart, captured: CapturedState, request: PutRequest) -> SnapshotInfo:
    """Record, log entry; then what may be lost: caches."""
    part_ulid, part, snapshot_ulid = written.ulid, written.part, engine.put_id()
    record = Record(
        request.ref,
        request.step,
        request.parent,
        request.metadata,
        request.metrics,
        engine.clock(),
        [part_ulid],
        part.part_id(),
        captured.logical_bytes,
        written.new_bytes,
    )
    encoded_record = record.encode()
    engine.backend.put(record_name(snapshot_ulid), encoded_record)

    operation = Op.put(request.ref, snapshot_ulid, record, encoded_record, anchor=part.anchor, txn=snapshot_ulid)

    def build(view: RefTable) -> list[Op]:
        check_expected(engine, view, request.ref, request.expect)
        going = expire_at_put(view, request.ref, snapshot_ulid, record, engine.clock())
        return [operation, *going, *commit_rescue(engine, view, snapshot_ulid, [(part_ulid, part)])]

    try:
        appended = engine.log.append(build)
    except UndecidedError as exc:
        exc.txn = snapshot_ulid
        raise
    info = engine.log.published(appended, snapshot_ulid)
    if info is None:
        raise SnapshotAbortedError(
            f"the put to {request.ref!r} was aborted by another process before it was published", object_id=request.ref
        )
    engine.note_published()
    engine.keep_part(part_ulid, part)
    engine.index.add(written.added.items(), published_at=appended.n)
    return info


def commit_rescue(engine: Engine, view: RefTable, snapshot: Ulid, parts: Sequence[tuple[Ulid, Part]]) -> list[Op]:
    """What must be in the entry that publishes a snapshot, whose head is `view`, so that gc frees nothing of it.

    Raises:
        SnapshotExpiredError: gc freed something of it already: its blocks must be written anew.
    """
    condemned = condemned_of(engine, view, [snapshot], parts)
    return [Op.rescue(condemned)] if condemned else []


def condemned_of(engine: Engine, view: RefTable, snapshots: Sequence[Ulid], parts: Sequence[tuple[Ulid, Part]]) -> Objects:
    """What of these parts and records is condemned in `view`.

    Raises:
        SnapshotExpiredError: gc freed something of them already: their blocks must be written anew.
    """
    needed = [ObjectKey("snapshot", snapshot) for snapshot in snapshots]
    try:
        for ulid, part in parts:
            needed += [ObjectKey("part", ulid), *resolve(engine, view, part).objects()]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return condemned_among(view, needed, min(part.anchor for _, part in parts), "this snapshot")
