"""The rows of the ref table and their keys. Pure; format, because a checkpoint is a dump of them.

Keys as in a checkpoint; in a host's table they begin with `PREFIX`. Numbers in keys are big-endian, so that keys sort as
numbers do; a step is stored plus 2**63. ``name`` is ASCII without a zero byte. ``?``: or nil. A row is a msgpack array, decoded
strictly, whether it comes from this host's cache or from a checkpoint.

    key                     row
    b name                  snapshot, root, step?, n, time_ns, length     a branch: where it is, moves so far
    l name 00 seq:8         snapshot, root, step?, n, time_ns, op         its moves, from 0 on, without removed ones
    s name 00 step:8        seq                                           its newest move to a snapshot of that step
    q name                  seq                                           a removed branch: moves so far
    t name                  snapshot, root, n, time_ns                    a tag
    u ulid:16               root, record, parent?, ref, step?, n, time_ns, metrics, logical_bytes, new_bytes, arrived_ns, triggers, epoch?,
                            attributes?, duration_ns?
    r root:32 ulid:16       n                                             the snapshots of that root, and their entries
    a root:32               metrics, mark, reason                         what was added to a root later
    x txn:16                put, n                                        how a transaction ended (put: bool), and where
    y txn:16                snapshot, and the row of `u`                  a staged snapshot
    k ulid:16               holds, n      how many moves, tags, pins and undo windows hold a snapshot; where that changed last
    p ulid:16 owner         reason, expires_ns?, n, time_ns               a pin; the owner in UTF-8
    e n:8 name              time_ns, kind                                 an undo window; kind: branch, snapshots or tag
    d n:8 name 00 seq:8     as l                                          what was removed then
    o glob                  rules, n, time_ns                             the policy of matching refs: FORMAT.md, "Policies"
    g kind:1 ulid:16        swept, n                                      an object that is condemned or swept (swept: bool), and where
    m pack:16 moved:16      n, hash, targets                              a relocation of a pack
    w moved:16              pack                                          the same, by its moved object
    c pack:16               url                                           the cold location of a pack
    i glob                  warn_bytes?, refuse_bytes?, used_bytes, n, time_ns     the quota of matching refs; used: the sum of their `j`
    j name                  new_bytes                                     of all held snapshots that were put to that ref; no row: 0
    v run                   outcome, duration_ns, counts, message, actor, n, time_ns     the last report of gc or fsck
    z                       n                                             the horizon
    f                       n, op                                         the first critical operation unknown to this build
    h                       n, hash, fold                                 (not in checkpoints) the entry folded last
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.log.field_checks import (
    ACTOR,
    ATTRIBUTES,
    COUNT,
    COUNTS,
    DATE,
    DIGEST,
    EPOCH,
    FLAG,
    GLOB,
    KINDS_BY_BYTE,
    LIMIT,
    MARK,
    MESSAGE,
    METRICS,
    OWNER,
    PARENT,
    REASON,
    REF,
    RULES,
    RUN,
    SHORT_TEXT,
    STEP,
    TRIGGERS,
    ULID,
    ULIDS,
    URL,
    RowKind,
)
from tensorstore_ck.log.snapshot import SnapshotRow

FOLD_VERSION: Final = 9
"""Incremented whenever `fold` handles another operation or field: the fold of an older build lacks its effect."""


class Head(NamedTuple):
    """The last entry that was folded; 0 with the genesis hash for an empty log."""

    n: int
    hash: Digest
    fold: int = FOLD_VERSION


class BranchHead(NamedTuple):
    """Where a branch is."""

    name: str
    ulid: Ulid
    root: Digest
    step: int | None
    n: int
    """The entry that moved it last."""
    time_ns: int
    length: int
    """The number of all its moves so far."""


class BranchMove(NamedTuple):
    """One step of a branch's history."""

    ulid: Ulid
    root: Digest
    step: int | None
    n: int
    time_ns: int
    op: str


class StepRow(NamedTuple):
    """The number of a branch's move."""

    seq: int


class TagRow(NamedTuple):
    """Where a tag is."""

    ulid: Ulid
    root: Digest
    n: int
    time_ns: int


class NoteRow(NamedTuple):
    """Metrics and mark added to a root after it was saved."""

    metrics: Mapping[str, float]
    mark: str
    reason: str


class TxnOutcome(NamedTuple):
    """How a transaction ended."""

    put: bool
    """False: aborted."""
    n: int


class HoldsRow(NamedTuple):
    """How many holders a snapshot has."""

    holds: int
    """Moves in histories, tags, pins, and removed moves and tags that can be restored."""
    n: int
    """The entry of the last change: where it became 0, if it is 0."""


class Pin(NamedTuple):
    """A pin of a snapshot."""

    ulid: Ulid
    owner: str
    reason: str
    expires_ns: int | None
    n: int
    time_ns: int


class PolicyRow(NamedTuple):
    """The retention rules of some branches."""

    rules: Mapping[str, Any]
    n: int
    time_ns: int


class UndoWindow(NamedTuple):
    """The history that one entry removed from a branch, or the tag that it removed."""

    n: int
    """That entry."""
    name: str
    time_ns: int
    kind: str
    """``branch``: all of it; ``snapshots`` of one; ``tag``."""
    moves: list[BranchMove]


class ObjectRow(NamedTuple):
    """An object that gc condemned or swept."""

    swept: bool
    n: int


class RelocationRow(NamedTuple):
    """The present packs of a relocated pack's entries."""

    n: int
    hash: Digest
    """Of the sealed moved object."""
    targets: bytes
    """The packs, as joined ULIDs."""


class Relocation(NamedTuple):
    """Entries of a pack that are in other packs now."""

    pack: Ulid
    moved: Ulid
    """The object that lists them."""
    n: int
    hash: Digest
    targets: tuple[Ulid, ...]


class QuotaRow(NamedTuple):
    """The bytes that the snapshots of some branches may add to the store."""

    warn_bytes: int | None
    refuse_bytes: int | None
    used_bytes: int
    """The sum of `AddedRow` over all branches that match."""
    n: int
    time_ns: int


class AddedRow(NamedTuple):
    """The bytes that the held snapshots of one branch added to the store."""

    new_bytes: int


class ReportRow(NamedTuple):
    """The last report of gc or fsck."""

    outcome: str
    duration_ns: int
    counts: Mapping[str, int]
    message: str
    actor: str
    n: int
    time_ns: int
    """When it ended."""


class EntryRow(NamedTuple):
    """The number of a log entry."""

    n: int


class StopRow(NamedTuple):
    """The first critical operation that this build does not know."""

    n: int
    op: str


class MovedRow(NamedTuple):
    """The pack of a moved object."""

    pack: Ulid


class LocationRow(NamedTuple):
    """The cold location of a pack."""

    url: str


def _has(size: int) -> Callable[[bytes], bool]:
    return lambda key: len(key) == size


def _is_name(key: bytes) -> bool:
    return REF.accepts(key.decode("ascii", "replace"))


def _is_numbered(key: bytes) -> bool:
    return len(key) > 8 and key[-9] == 0 and _is_name(key[:-9])


_MOVE: Final = (ULID, DIGEST, STEP, COUNT, COUNT, SHORT_TEXT)
_SNAPSHOT: Final = (DIGEST, DIGEST, PARENT, REF, STEP, COUNT, COUNT, METRICS, COUNT, COUNT, COUNT, TRIGGERS, EPOCH, ATTRIBUTES, LIMIT)

HEAD: Final = RowKind(b"h", Head, COUNT, DIGEST, COUNT, is_key=_has(0))
BRANCHES: Final = RowKind(b"b", BranchHead, ULID, DIGEST, STEP, COUNT, COUNT, COUNT, is_key=_is_name, named_by_key=1)
MOVES: Final = RowKind(b"l", BranchMove, *_MOVE, is_key=_is_numbered)
STEPS: Final = RowKind(b"s", StepRow, COUNT, is_key=_is_numbered)
LENGTHS: Final = RowKind(b"q", StepRow, COUNT, is_key=_is_name)
TAGS: Final = RowKind(b"t", TagRow, ULID, DIGEST, COUNT, COUNT, is_key=_is_name)
SNAPSHOTS: Final = RowKind(b"u", SnapshotRow, *_SNAPSHOT, is_key=_has(ULID_BYTES), named_by_key=1)
ROOTS: Final = RowKind(b"r", EntryRow, COUNT, is_key=_has(DIGEST_BYTES + ULID_BYTES))
NOTES: Final = RowKind(b"a", NoteRow, METRICS, MARK, REASON, is_key=_has(DIGEST_BYTES))
TXNS: Final = RowKind(b"x", TxnOutcome, FLAG, COUNT, is_key=_has(ULID_BYTES))
STAGED: Final = RowKind(b"y", SnapshotRow, ULID, *_SNAPSHOT, is_key=_has(ULID_BYTES))
HOLDS: Final = RowKind(b"k", HoldsRow, COUNT, COUNT, is_key=_has(ULID_BYTES))
PINS: Final = RowKind(
    b"p", Pin, REASON, DATE, COUNT, COUNT, is_key=lambda key: OWNER.accepts(key[ULID_BYTES:].decode("utf-8", "replace")), named_by_key=2
)
POLICIES: Final = RowKind(b"o", PolicyRow, RULES, COUNT, COUNT, is_key=lambda key: GLOB.accepts(key.decode("ascii", "replace")))
WINDOWS: Final = RowKind(b"e", UndoWindow, COUNT, SHORT_TEXT, is_key=lambda key: _is_name(key[8:]), named_by_key=2)
FORGOTTEN: Final = RowKind(b"d", BranchMove, *_MOVE, is_key=lambda key: _is_numbered(key[8:]))
OBJECTS: Final = RowKind(b"g", ObjectRow, FLAG, COUNT, is_key=lambda key: len(key) == 1 + ULID_BYTES and key[:1] in KINDS_BY_BYTE)
RELOCATIONS: Final = RowKind(b"m", RelocationRow, COUNT, DIGEST, ULIDS, is_key=_has(2 * ULID_BYTES))
MOVED: Final = RowKind(b"w", MovedRow, ULID, is_key=_has(ULID_BYTES))
LOCATIONS: Final = RowKind(b"c", LocationRow, URL, is_key=_has(ULID_BYTES))
QUOTAS: Final = RowKind(b"i", QuotaRow, LIMIT, LIMIT, COUNT, COUNT, COUNT, is_key=lambda key: GLOB.accepts(key.decode("ascii", "replace")))
ADDED: Final = RowKind(b"j", AddedRow, COUNT, is_key=_is_name)
REPORTS: Final = RowKind(
    b"v",
    ReportRow,
    *(SHORT_TEXT, COUNT, COUNTS, MESSAGE, ACTOR, COUNT, COUNT),
    is_key=lambda key: RUN.accepts(key.decode("ascii", "replace")),
)
HORIZON: Final = RowKind(b"z", EntryRow, COUNT, is_key=_has(0))
STOP: Final = RowKind(b"f", StopRow, COUNT, SHORT_TEXT, is_key=_has(0))

IN_CHECKPOINTS: Final[Sequence[RowKind[Any]]] = (
    *(BRANCHES, MOVES, STEPS, LENGTHS, TAGS, SNAPSHOTS, ROOTS, NOTES, TXNS, STAGED, HOLDS, PINS, POLICIES, WINDOWS, FORGOTTEN),
    *(OBJECTS, RELOCATIONS, MOVED, LOCATIONS, QUOTAS, ADDED, REPORTS, HORIZON, STOP),
)
