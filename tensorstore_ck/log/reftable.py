"""Typed reads of the ref table: branches, tags and snapshots as of the entry that was folded last."""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from tensorstore_ck.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.log import rows
from tensorstore_ck.log.names import is_ref_name
from tensorstore_ck.log.rows import Head, Move, TxnOutcome
from tensorstore_ck.table import Reader

__all__ = ["BranchHead", "Head", "Move", "RefTable", "SnapshotInfo", "TxnOutcome"]

_HEX: Final = re.compile(r"[0-9a-f]{0,64}")

Row = TypeVar("Row", bound=tuple[object, ...])


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
    """Moves in its history."""


class SnapshotInfo(NamedTuple):
    """A published snapshot."""

    ulid: Ulid
    root: Digest
    record: Digest
    """The hash of its sealed record."""
    parent: Digest | None
    ref: str
    """The branch that it was put to."""
    step: int | None
    n: int
    """The entry that published it."""
    time_ns: int
    metrics: Mapping[str, float]
    """With those that came later."""
    mark: str
    reason: str
    logical_bytes: int
    new_bytes: int


class RefTable:
    """A view of a table or batch. Reads of a table see each entry that is folded meanwhile; those of a batch its own writes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def head(self) -> Head | None:
        """The entry that was folded last; None when none was, or by another version of the fold."""
        head = self._row(Head, rows.HEAD_KEY)
        return head if head is not None and head.fold == rows.FOLD_VERSION else None

    def branches(self) -> list[str]:
        """The names of all branches, in order."""
        return self._names(rows.branch_key(""))

    def branch(self, name: str) -> BranchHead | None:
        """Where a branch is."""
        row = self._row(rows.BranchRow, rows.branch_key(name)) if is_ref_name(name) else None
        return BranchHead(name, *row) if row is not None else None

    def moves(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[Move]:
        """The history of a branch, as moves."""
        if not is_ref_name(name):
            return
        items = self._reader.scan(rows.moves_prefix(name), reverse=newest_first)
        for count, (_, value) in enumerate(items):
            if count == limit:
                return
            yield rows.decode_row(Move, value)

    def history(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[SnapshotInfo]:
        """The history of a branch, as snapshots: one that it was moved to twice comes twice."""
        for move in self.moves(name, newest_first=newest_first, limit=limit):
            info = self.snapshot(move.ulid)
            if info is not None:
                yield info

    def newest_with_step(self, branch: str, step: int) -> Ulid | None:
        """The newest snapshot of that step in a branch's history."""
        if not is_ref_name(branch) or not -(1 << 63) <= step < 1 << 63:
            return None
        row = self._row(rows.StepRow, rows.step_key(branch, step))
        move = self._row(Move, rows.move_key(branch, row.seq)) if row is not None else None
        return move.ulid if move is not None else None

    def tags(self) -> list[str]:
        """The names of all tags, in order."""
        return self._names(rows.tag_key(""))

    def tag(self, name: str) -> Digest | None:
        """The root that a tag names."""
        row = self._row(rows.TagRow, rows.tag_key(name)) if is_ref_name(name) else None
        return row.root if row is not None else None

    def snapshot(self, ulid: bytes) -> SnapshotInfo | None:
        """A snapshot by the ULID of its record."""
        value = self._reader.get(rows.snapshot_key(ulid)) if len(ulid) == ULID_BYTES else None
        return self._info(Ulid(ulid), value) if value is not None else None

    def snapshots(self) -> Iterator[SnapshotInfo]:
        """All snapshots, by ULID: roughly in the order of time."""
        prefix = rows.snapshot_key(b"")
        for key, value in self._reader.scan(prefix):
            yield self._info(Ulid(key[len(prefix) :]), value)

    def by_root(self, root: bytes) -> SnapshotInfo | None:
        """The newest snapshot with this root."""
        row = self._row(rows.RootRow, rows.root_key(root)) if len(root) == DIGEST_BYTES else None
        return self.snapshot(row.ulid) if row is not None else None

    def roots_with_prefix(self, prefix: str, *, limit: int = 8) -> list[Digest]:
        """Up to `limit` roots that begin with these hex digits."""
        if not _HEX.fullmatch(prefix):
            return []
        found: list[Digest] = []
        whole_bytes = rows.root_key(bytes.fromhex(prefix[: len(prefix) // 2 * 2]))
        start = rows.root_key(bytes.fromhex(prefix + "0" * (len(prefix) % 2)))
        for key, _ in self._reader.scan(whole_bytes, start=start):
            root = Digest(key[-DIGEST_BYTES:])
            if len(found) == limit or not root.hex().startswith(prefix):
                break
            found.append(root)
        return found

    def outcome(self, txn: bytes) -> TxnOutcome | None:
        """How a transaction ended; None while the log has neither its put nor its abort."""
        return self._row(TxnOutcome, rows.txn_key(txn)) if len(txn) == ULID_BYTES else None

    def stop(self) -> rows.StopRow | None:
        """The first critical operation that this build does not know."""
        return self._row(rows.StopRow, rows.STOP_KEY)

    def _row(self, kind: type[Row], key: bytes) -> Row | None:
        value = self._reader.get(key)
        return None if value is None else rows.decode_row(kind, value)

    def _names(self, prefix: bytes) -> list[str]:
        return [key[len(prefix) :].decode("ascii") for key, _ in self._reader.scan(prefix)]

    def _info(self, ulid: Ulid, value: bytes) -> SnapshotInfo:
        row = rows.decode_row(rows.SnapshotRow, value)
        note = self._row(rows.NoteRow, rows.note_key(row.root)) or rows.NoteRow({}, "", "")
        return SnapshotInfo(
            ulid,
            row.root,
            row.record,
            row.parent,
            row.ref,
            row.step,
            row.n,
            row.time_ns,
            {**row.metrics, **note.metrics},
            note.mark,
            note.reason,
            row.logical_bytes,
            row.new_bytes,
        )
