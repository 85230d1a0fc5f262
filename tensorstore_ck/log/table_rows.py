"""Rows of the ref table: format, because a checkpoint is a dump of them. Pure. Their keys and meaning: table_keys.py.

A row is a msgpack array, decoded strictly, whether it comes from this host's cache or from a checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgpack

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.log.field_checks import (
    MAX_METRICS,
    MAX_RULE_ITEMS,
    Check,
    is_count,
    is_date,
    is_digest,
    is_mark,
    is_metrics,
    is_owner,
    is_parent,
    is_reason,
    is_rules,
    is_step,
    is_ulid,
    is_url,
)
from tensorstore_ck.log.object_set import is_ulids
from tensorstore_ck.log.ref_names import is_ref_glob, is_ref_name
from tensorstore_ck.log.table_keys import KINDS_BY_BYTE

FOLD_VERSION: Final = 5
"""Incremented whenever `fold` learns another operation: the fold of an older build lacks its effect."""


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


class BranchMove(NamedTuple):
    """One step of a branch's history."""

    ulid: Ulid
    root: Digest
    step: int | None
    n: int
    time_ns: int
    op: str


class StepRow(NamedTuple):
    """The newest move to a snapshot of a step."""

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


class StagedRow(NamedTuple):
    """What the log says of a snapshot that is durable on its hosts, and not published."""

    ulid: Ulid
    root: Digest
    record: Digest
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

    n: int


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


class PinRow(NamedTuple):
    """A pin."""

    reason: str
    expires_ns: int | None
    n: int
    time_ns: int


class PolicyRow(NamedTuple):
    """The retention rules of some branches."""

    rules: Mapping[str, Any]
    n: int
    time_ns: int


class WindowRow(NamedTuple):
    """An undo window."""

    time_ns: int
    kind: str
    """``branch``: a whole one; ``snapshots`` of one; ``tag``."""


class ObjectRow(NamedTuple):
    """An object that gc condemned or swept."""

    swept: bool
    n: int


class RelocationRow(NamedTuple):
    """Where entries of a pack are now."""

    n: int
    hash: Digest
    """Of the sealed moved object."""
    targets: bytes
    """The packs, as joined ULIDs."""


class MovedRow(NamedTuple):
    """The pack of a moved object."""

    pack: Ulid


class LocationRow(NamedTuple):
    """The cold location of a pack."""

    url: str


class HorizonRow(NamedTuple):
    """Tombstones of entries up to this one are dropped."""

    n: int


class StopRow(NamedTuple):
    """The first critical operation that this build does not know."""

    n: int
    op: str


def _is_short(value: object) -> bool:
    return type(value) is str and len(value) <= 64


def _is_bool(value: object) -> bool:
    return type(value) is bool


_CHECKS: Final[Mapping[type, tuple[Check, ...]]] = {
    Head: (is_count, is_digest, is_count),
    BranchRow: (is_ulid, is_digest, is_step, is_count, is_count, is_count),
    BranchMove: (is_ulid, is_digest, is_step, is_count, is_count, _is_short),
    StepRow: (is_count,),
    TagRow: (is_ulid, is_digest, is_count, is_count),
    SnapshotRow: (is_digest, is_digest, is_parent, is_ref_name, is_step, is_count, is_count, is_metrics, is_count, is_count),
    StagedRow: (is_ulid, is_digest, is_digest, is_parent, is_ref_name, is_step, is_count, is_count, is_metrics, is_count, is_count),
    RootRow: (is_count,),
    NoteRow: (is_metrics, is_mark, is_reason),
    TxnOutcome: (_is_bool, is_count),
    StopRow: (is_count, _is_short),
    HoldsRow: (is_count, is_count),
    PinRow: (is_reason, is_date, is_count, is_count),
    PolicyRow: (is_rules, is_count, is_count),
    WindowRow: (is_count, _is_short),
    ObjectRow: (_is_bool, is_count),
    RelocationRow: (is_count, is_digest, is_ulids),
    MovedRow: (is_ulid,),
    LocationRow: (is_url,),
    HorizonRow: (is_count,),
}


def _is_name_key(key: bytes) -> bool:
    return is_ref_name(key[1:].decode("ascii", "replace"))


def _is_sequence_key(key: bytes) -> bool:
    return len(key) > 9 and key[-9] == 0 and _is_name_key(key[:-9])


_KEYS: Final[Mapping[bytes, tuple[type, Callable[[bytes], bool]]]] = {
    b"b": (BranchRow, _is_name_key),
    b"l": (BranchMove, _is_sequence_key),
    b"s": (StepRow, _is_sequence_key),
    b"t": (TagRow, _is_name_key),
    b"u": (SnapshotRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"r": (RootRow, lambda key: len(key) == 1 + DIGEST_BYTES + ULID_BYTES),
    b"a": (NoteRow, lambda key: len(key) == 1 + DIGEST_BYTES),
    b"x": (TxnOutcome, lambda key: len(key) == 1 + ULID_BYTES),
    b"y": (StagedRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"f": (StopRow, lambda key: len(key) == 1),
    b"q": (StepRow, _is_name_key),
    b"k": (HoldsRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"p": (PinRow, lambda key: len(key) > 1 + ULID_BYTES and is_owner(key[1 + ULID_BYTES :].decode("utf-8", "replace"))),
    b"o": (PolicyRow, lambda key: is_ref_glob(key[1:].decode("ascii", "replace"))),
    b"e": (WindowRow, lambda key: _is_name_key(key[8:])),
    b"d": (BranchMove, lambda key: _is_sequence_key(key[8:])),
    b"g": (ObjectRow, lambda key: len(key) == 2 + ULID_BYTES and key[1:2] in KINDS_BY_BYTE),
    b"m": (RelocationRow, lambda key: len(key) == 1 + 2 * ULID_BYTES),
    b"w": (MovedRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"c": (LocationRow, lambda key: len(key) == 1 + ULID_BYTES),
    b"z": (HorizonRow, lambda key: len(key) == 1),
}

_MAX_FIELDS: Final = 16

Row = TypeVar("Row", bound=tuple[object, ...])


def encode_row(row: tuple[object, ...]) -> bytes:
    """The value of a row."""
    return pack_body(list(row))


def decode_row(kind: type[Row], value: bytes) -> Row:
    """The row of a value.

    Raises:
        CorruptObjectError: not a row of that kind.
    """
    try:
        fields = msgpack.unpackb(value, max_array_len=max(_MAX_FIELDS, MAX_RULE_ITEMS), max_map_len=MAX_METRICS, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        fields = None
    checks = _CHECKS[kind]
    if type(fields) is not list or len(fields) != len(checks) or not all(map(_call, checks, fields)):
        raise CorruptObjectError(f"a {kind.__name__} of the ref table is malformed: run `tsck fsck`", object_id=kind.__name__)
    return kind(*fields)


def is_item(key: bytes, value: bytes) -> bool:
    """Whether a checkpoint may contain this item."""
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
