"""Keys and rows of the ref table: format, because a checkpoint is a dump of them. Pure.

Keys as in a checkpoint; in a host's table `PREFIX` stands before them. Numbers in keys are big-endian, so that keys sort as
numbers do; a step is stored plus 2**63. Rows are msgpack arrays; ``name`` is ASCII without a zero byte. ``?``: or nil.

    key                     row
    b name                  snapshot, root, step?, n, time_ns, length     a branch: where it is, moves so far
    l name 00 seq:8         snapshot, root, step?, n, time_ns, op         its moves, from 0 on
    s name 00 step:8        seq                                           its newest move to a snapshot of that step
    t name                  snapshot, root, n, time_ns                    a tag
    u ulid:16               root, record, parent?, ref, step?, n, time_ns, metrics, logical_bytes, new_bytes
    r root:32               snapshot                                      the newest snapshot of that root
    a root:32               metrics, mark, reason                         what was said later about a root
    x txn:16                put, n                                        how a transaction ended (put: bool), and where
    f                       n, op                                         the first critical operation unknown to this build
    h                       n, hash, fold                                 (not in checkpoints) the entry folded last
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

import msgpack

from tensorstore_ck.envelope import pack_body
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.log.names import is_ref_name
from tensorstore_ck.log.ops import MAX_METRICS, Check, is_count, is_digest, is_mark, is_metrics, is_parent, is_reason, is_step, is_ulid

PREFIX: Final = b"r/"
FOLD_VERSION: Final = 1
"""Raised whenever `fold` comes to know another operation: what an older build folded lacks its effect."""

HEAD_KEY: Final = PREFIX + b"h"
STOP_KEY: Final = PREFIX + b"f"
_STEP_BIAS: Final = 1 << 63


class Head(NamedTuple):
    """The last entry that was folded; 0 with the genesis hash for an empty log."""

    n: int
    hash: Digest
    fold: int = FOLD_VERSION


class BranchRow(NamedTuple):
    """Where a branch is."""

    ulid: Ulid
    root: Digest
    step: int | None
    n: int
    time_ns: int
    length: int


class Move(NamedTuple):
    """One place in a branch's history."""

    ulid: Ulid
    root: Digest
    step: int | None
    n: int
    time_ns: int
    op: str


class StepRow(NamedTuple):
    """Which move was the newest to a step."""

    seq: int


class TagRow(NamedTuple):
    """Where a tag is."""

    ulid: Ulid
    root: Digest
    n: int
    time_ns: int


class SnapshotRow(NamedTuple):
    """What the log says of a snapshot."""

    root: Digest
    record: Digest
    """The hash of the sealed record."""
    parent: Digest | None
    ref: str
    step: int | None
    n: int
    time_ns: int
    metrics: Mapping[str, float]
    logical_bytes: int
    new_bytes: int


class RootRow(NamedTuple):
    """A snapshot by its root."""

    ulid: Ulid


class NoteRow(NamedTuple):
    """What was said about a root after it was put."""

    metrics: Mapping[str, float]
    mark: str
    reason: str


class TxnOutcome(NamedTuple):
    """How a transaction ended."""

    put: bool
    """False: aborted."""
    n: int


class StopRow(NamedTuple):
    """The first critical operation that this build does not know."""

    n: int
    op: str


def branch_key(name: str) -> bytes:
    """See the module docstring; so for the others."""
    return PREFIX + b"b" + name.encode()


def moves_prefix(name: str) -> bytes:
    """What the keys of a branch's moves begin with."""
    return PREFIX + b"l" + name.encode() + b"\0"


def move_key(name: str, seq: int) -> bytes:
    """The key of one move."""
    return moves_prefix(name) + seq.to_bytes(8, "big")


def step_key(name: str, step: int) -> bytes:
    """The key of a branch's step."""
    return PREFIX + b"s" + name.encode() + b"\0" + (step + _STEP_BIAS).to_bytes(8, "big")


def tag_key(name: str) -> bytes:
    """The key of a tag."""
    return PREFIX + b"t" + name.encode()


def snapshot_key(ulid: bytes) -> bytes:
    """The key of a snapshot."""
    return PREFIX + b"u" + ulid


def root_key(root: bytes) -> bytes:
    """The key of a root, or of what begins so."""
    return PREFIX + b"r" + root


def note_key(root: bytes) -> bytes:
    """The key of what was said about a root."""
    return PREFIX + b"a" + root


def txn_key(txn: bytes) -> bytes:
    """The key of a transaction."""
    return PREFIX + b"x" + txn


def _is_short(value: object) -> bool:
    return type(value) is str and len(value) <= 64


def _is_bool(value: object) -> bool:
    return type(value) is bool


_CHECKS: Final[Mapping[type, tuple[Check, ...]]] = {
    Head: (is_count, is_digest, is_count),
    BranchRow: (is_ulid, is_digest, is_step, is_count, is_count, is_count),
    Move: (is_ulid, is_digest, is_step, is_count, is_count, _is_short),
    StepRow: (is_count,),
    TagRow: (is_ulid, is_digest, is_count, is_count),
    SnapshotRow: (is_digest, is_digest, is_parent, is_ref_name, is_step, is_count, is_count, is_metrics, is_count, is_count),
    RootRow: (is_ulid,),
    NoteRow: (is_metrics, is_mark, is_reason),
    TxnOutcome: (_is_bool, is_count),
    StopRow: (is_count, _is_short),
}


def _is_name_key(key: bytes) -> bool:
    return is_ref_name(key[1:].decode("ascii", "replace"))


def _is_sequence_key(key: bytes) -> bool:
    return len(key) > 9 and key[-9] == 0 and _is_name_key(key[:-9])


_KEYS: Final[Mapping[bytes, tuple[type, Callable[[bytes], bool]]]] = {
    b"b": (BranchRow, _is_name_key),
    b"l": (Move, _is_sequence_key),
    b"s": (StepRow, _is_sequence_key),
    b"t": (TagRow, _is_name_key),
    b"u": (SnapshotRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"r": (RootRow, lambda key: len(key) == 1 + DIGEST_BYTES),
    b"a": (NoteRow, lambda key: len(key) == 1 + DIGEST_BYTES),
    b"x": (TxnOutcome, lambda key: len(key) == 1 + ULID_BYTES),
    b"f": (StopRow, lambda key: len(key) == 1),
}

_MAX_FIELDS: Final = 16

Row = TypeVar("Row", bound=tuple[object, ...])


def encode_row(row: tuple[object, ...]) -> bytes:
    """The value of a row."""
    return pack_body(list(row))


def decode_row(kind: type[Row], value: bytes) -> Row:
    """The row of a value.

    Raises:
        CorruptObjectError: it is none of that kind.
    """
    try:
        fields = msgpack.unpackb(value, max_array_len=_MAX_FIELDS, max_map_len=MAX_METRICS, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        fields = None
    checks = _CHECKS[kind]
    if type(fields) is not list or len(fields) != len(checks) or not all(map(_call, checks, fields)):
        raise CorruptObjectError(f"a {kind.__name__} of the ref table is malformed: run `tsck fsck`", object_id=kind.__name__)
    return kind(*fields)


def is_item(key: bytes, value: bytes) -> bool:
    """Whether a checkpoint may hold this."""
    kind, is_key = _KEYS.get(key[:1], (None, None))
    if kind is None or is_key is None or not is_key(key):
        return False
    try:
        decode_row(kind, value)
    except CorruptObjectError:
        return False
    return True


def _call(check: Check, value: object) -> bool:
    return check(value)
