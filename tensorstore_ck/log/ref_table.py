"""Typed reads of the ref table: branches, tags and snapshots as of the entry that was folded last."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.log import table_keys, table_rows
from tensorstore_ck.log.cache import Reader
from tensorstore_ck.log.object_set import ObjectKey, split_ulids
from tensorstore_ck.log.ref_names import is_ref_name
from tensorstore_ck.log.table_rows import BranchMove, Head, TxnOutcome

__all__ = ["BranchHead", "BranchMove", "Head", "Pin", "RefTable", "Relocation", "SnapshotInfo", "TxnOutcome", "UndoWindow"]

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
    """The number of all its moves so far."""


class SnapshotInfo(NamedTuple):
    """A published snapshot."""

    ulid: Ulid
    root: Digest
    record: Digest
    """The hash of its sealed record."""
    parent: Digest | None
    ref: str
    """The branch that it was saved to."""
    step: int | None
    n: int
    """The entry that published it."""
    time_ns: int
    metrics: Mapping[str, float]
    """With those added later."""
    mark: str
    reason: str
    logical_bytes: int
    new_bytes: int

    @classmethod
    def of_put(cls, put: Mapping[str, Any], n: int, time_ns: int) -> "SnapshotInfo":
        """The snapshot that entry `n`, of that time, publishes with the fields of a put."""
        at = (put["snapshot"], put["root"], put["record"], put["parent"], put["ref"], put["step"], n, time_ns)
        return cls(*at, put["metrics"], "", "", put["logical_bytes"], put["new_bytes"])


class Pin(NamedTuple):
    """A pin of a snapshot."""

    ulid: Ulid
    owner: str
    reason: str
    expires_ns: int | None
    n: int
    time_ns: int


class UndoWindow(NamedTuple):
    """What one entry removed from a branch, or the tag that it removed."""

    n: int
    """That entry."""
    name: str
    time_ns: int
    kind: str
    """``branch``: all of it; ``snapshots`` of one; ``tag``."""
    moves: list[BranchMove]


class Relocation(NamedTuple):
    """Entries of a pack that are in other packs now."""

    pack: Ulid
    moved: Ulid
    """The object that lists them."""
    n: int
    hash: Digest
    targets: tuple[Ulid, ...]


class RefTable:
    """A view of a table or batch. Reads of a table see entries that are folded meanwhile; reads of a batch see its own writes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def head(self) -> Head | None:
        """The entry folded last; None if there is none, or another version of the fold folded it."""
        head = self._row(Head, table_keys.HEAD_KEY)
        return head if head is not None and head.fold == table_rows.FOLD_VERSION else None

    def branches(self) -> list[str]:
        """The names of all branches, in order."""
        return self._names(table_keys.branch_key(""))

    def branch(self, name: str) -> BranchHead | None:
        """Where a branch is."""
        row = self._row(table_rows.BranchRow, table_keys.branch_key(name)) if is_ref_name(name) else None
        return BranchHead(name, *row) if row is not None else None

    def length(self, name: str) -> int:
        """How many moves a branch of that name had so far, even if it was removed: the number of its next one."""
        branch = self.branch(name)
        row = self._row(table_rows.StepRow, table_keys.length_key(name)) if branch is None else None
        return branch.length if branch is not None else row.seq if row is not None else 0

    def moves(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[BranchMove]:
        """The history of a branch, as moves."""
        if not is_ref_name(name):
            return
        items = self._reader.scan(table_keys.moves_prefix(name), reverse=newest_first)
        for count, (_, value) in enumerate(items):
            if count == limit:
                return
            yield table_rows.decode_row(BranchMove, value)

    def history(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[SnapshotInfo]:
        """The history of a branch, as snapshots: one to which it moved twice occurs twice."""
        for move in self.moves(name, newest_first=newest_first, limit=limit):
            info = self.snapshot(move.ulid)
            if info is not None:
                yield info

    def newest_with_step(self, branch: str, step: int) -> Ulid | None:
        """The newest snapshot of that step in a branch's history."""
        if not is_ref_name(branch) or not -(1 << 63) <= step < 1 << 63:
            return None
        row = self._row(table_rows.StepRow, table_keys.step_key(branch, step))
        move = self._row(BranchMove, table_keys.move_key(branch, row.seq)) if row is not None else None
        return move.ulid if move is not None else None

    def tags(self) -> list[str]:
        """The names of all tags, in order."""
        return self._names(table_keys.tag_key(""))

    def tag(self, name: str) -> Digest | None:
        """The root that a tag names."""
        row = self.tag_row(name)
        return row.root if row is not None else None

    def tag_row(self, name: str) -> table_rows.TagRow | None:
        """The snapshot that a tag names, with the tag's time."""
        return self._row(table_rows.TagRow, table_keys.tag_key(name)) if is_ref_name(name) else None

    def snapshot(self, ulid: bytes) -> SnapshotInfo | None:
        """A snapshot by the ULID of its record."""
        value = self._reader.get(table_keys.snapshot_key(ulid)) if len(ulid) == ULID_BYTES else None
        return self._info(Ulid(ulid), value) if value is not None else None

    def snapshots(self, *, live: bool = True) -> Iterator[SnapshotInfo]:
        """All live snapshots, or all others, by ULID: roughly in order of time."""
        prefix = table_keys.snapshot_key(b"")
        for key, value in self._reader.scan(prefix):
            ulid = Ulid(key[len(prefix) :])
            if self.is_live(ulid) is live:
                yield self._info(ulid, value)

    def is_live(self, ulid: bytes) -> bool:
        """Whether a snapshot has a holder: a history, a tag, a pin, or an undo window."""
        return self.holds(ulid) > 0

    def holds(self, ulid: bytes) -> int:
        """How many holders a snapshot has; each move of a branch to it counts."""
        row = self._row(table_rows.HoldsRow, table_keys.holds_key(ulid))
        return row.holds if row is not None else 0

    def expired_at(self, ulid: bytes) -> int | None:
        """The entry since which a snapshot has no holder; None if it has one."""
        row = self._row(table_rows.HoldsRow, table_keys.holds_key(ulid))
        return row.n if row is not None and not row.holds else None

    def by_root(self, root: bytes) -> SnapshotInfo | None:
        """The newest snapshot with this root; live ones first."""
        if len(root) != DIGEST_BYTES:
            return None
        prefix = table_keys.root_key(root)
        found = [(Ulid(key[len(prefix) :]), table_rows.decode_row(table_rows.RootRow, value).n) for key, value in self._reader.scan(prefix)]
        newest = max(found, key=lambda item: (self.is_live(item[0]), item[1]), default=None)
        return self.snapshot(newest[0]) if newest is not None else None

    def marked(self, mark: str) -> Iterator[SnapshotInfo]:
        """The newest snapshot of each root with that mark."""
        prefix = table_keys.note_key(b"")
        for key, value in self._reader.scan(prefix):
            info = self.by_root(key[len(prefix) :]) if table_rows.decode_row(table_rows.NoteRow, value).mark == mark else None
            if info is not None:
                yield info

    def roots_with_prefix(self, prefix: str, *, limit: int = 8) -> list[Digest]:
        """Up to `limit` roots that begin with these hex digits."""
        if not _HEX.fullmatch(prefix):
            return []
        found: list[Digest] = []
        whole_bytes = table_keys.root_key(bytes.fromhex(prefix[: len(prefix) // 2 * 2]))
        start = table_keys.root_key(bytes.fromhex(prefix + "0" * (len(prefix) % 2)))
        for key, _ in self._reader.scan(whole_bytes, start=start):
            root = Digest(key[-DIGEST_BYTES - ULID_BYTES : -ULID_BYTES])
            if len(found) == limit or not root.hex().startswith(prefix):
                break
            if root not in found[-1:]:
                found.append(root)
        return found

    def outcome(self, txn: bytes) -> TxnOutcome | None:
        """How a transaction ended; None while the log has neither its put nor its abort."""
        return self._row(TxnOutcome, table_keys.txn_key(txn)) if len(txn) == ULID_BYTES else None

    def staged(self, txn: bytes) -> SnapshotInfo | None:
        """The snapshot staged under a transaction, neither published nor aborted."""
        row = self._row(table_rows.StagedRow, table_keys.staged_key(txn)) if len(txn) == ULID_BYTES else None
        return _staged_info(row) if row is not None else None

    def all_staged(self) -> Iterator[tuple[Ulid, SnapshotInfo]]:
        """(transaction, snapshot) of all staged snapshots, roughly in order of time."""
        prefix = table_keys.staged_key(b"")
        for key, value in self._reader.scan(prefix):
            yield Ulid(key[len(prefix) :]), _staged_info(table_rows.decode_row(table_rows.StagedRow, value))

    # --- retention and gc ---------------------------------------------------------------------------------------------

    def pins(self) -> Iterator[Pin]:
        """All pins."""
        prefix = table_keys.pin_key(b"")
        for key, value in self._reader.scan(prefix):
            ulid, owner = key[len(prefix) :][:ULID_BYTES], key[len(prefix) + ULID_BYTES :]
            yield Pin(Ulid(ulid), owner.decode(), *table_rows.decode_row(table_rows.PinRow, value))

    def policies(self) -> dict[str, table_rows.PolicyRow]:
        """Glob -> the retention rules of the branches that match it."""
        prefix = table_keys.policy_key("")
        return {
            key[len(prefix) :].decode("ascii"): table_rows.decode_row(table_rows.PolicyRow, value)
            for key, value in self._reader.scan(prefix)
        }

    def is_pinned(self, ulid: bytes, owner: str) -> bool:
        """Whether `owner` has a pin on a snapshot."""
        return self._reader.get(table_keys.pin_key(ulid, owner)) is not None

    def windows(self, entry: int | None = None, *, newest_first: bool = False) -> Iterator[UndoWindow]:
        """The undo windows of that entry, or of all, oldest first."""
        prefix = table_keys.window_key(0, "")[:-8]
        for key, value in self._reader.scan(prefix if entry is None else table_keys.window_key(entry, ""), reverse=newest_first):
            n, name = int.from_bytes(key[len(prefix) :][:8], "big"), key[len(prefix) + 8 :].decode("ascii")
            moves = [table_rows.decode_row(BranchMove, value) for _, value in self._reader.scan(table_keys.forgotten_prefix(n, name))]
            yield UndoWindow(n, name, *table_rows.decode_row(table_rows.WindowRow, value), moves)

    def object_state(self, key: ObjectKey) -> table_rows.ObjectRow | None:
        """Whether an object is condemned or swept; None if neither."""
        return self._row(table_rows.ObjectRow, table_keys.object_key(*key))

    def objects(self) -> Iterator[tuple[ObjectKey, table_rows.ObjectRow]]:
        """All condemned objects, and those swept after the horizon."""
        for key, value in self._reader.scan(table_keys.OBJECTS_PREFIX):
            yield ObjectKey(*table_keys.object_of(key)), table_rows.decode_row(table_rows.ObjectRow, value)

    def relocations(self, pack: bytes) -> list[Relocation]:
        """The current relocations of a pack, newest first."""
        prefix = table_keys.relocation_key(pack)
        found = [
            (Ulid(key[len(prefix) :]), table_rows.decode_row(table_rows.RelocationRow, value)) for key, value in self._reader.scan(prefix)
        ]
        ordered = sorted(found, key=lambda item: (item[1].n, item[0]), reverse=True)
        return [Relocation(Ulid(pack), moved, row.n, row.hash, tuple(split_ulids(row.targets))) for moved, row in ordered]

    def all_relocations(self) -> Iterator[tuple[Ulid, Ulid]]:
        """(pack, moved object) of every current relocation."""
        prefix = table_keys.relocation_key(b"")
        for key, _ in self._reader.scan(prefix):
            yield Ulid(key[len(prefix) :][:ULID_BYTES]), Ulid(key[len(prefix) + ULID_BYTES :])

    def location_of(self, pack: bytes) -> str | None:
        """The URL of a pack's cold location; None: the store's own."""
        row = self._row(table_rows.LocationRow, table_keys.location_key(pack))
        return row.url if row is not None else None

    def locations(self) -> dict[Ulid, str]:
        """The URL of each pack at a cold location."""
        prefix = table_keys.location_key(b"")
        return {
            Ulid(key[len(prefix) :]): table_rows.decode_row(table_rows.LocationRow, value).url for key, value in self._reader.scan(prefix)
        }

    def horizon(self) -> int:
        """Tombstones of entries up to this one are dropped, and nothing anchored before it may commit."""
        row = self._row(table_rows.HorizonRow, table_keys.HORIZON_KEY)
        return row.n if row is not None else 0

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every row, as it is stored."""
        return self._reader.scan(table_keys.PREFIX)

    def stop(self) -> table_rows.StopRow | None:
        """The first critical operation that this build does not know."""
        return self._row(table_rows.StopRow, table_keys.STOP_KEY)

    def _row(self, kind: type[Row], key: bytes) -> Row | None:
        value = self._reader.get(key)
        return None if value is None else table_rows.decode_row(kind, value)

    def _names(self, prefix: bytes) -> list[str]:
        return [key[len(prefix) :].decode("ascii") for key, _ in self._reader.scan(prefix)]

    def _info(self, ulid: Ulid, value: bytes) -> SnapshotInfo:
        row = table_rows.decode_row(table_rows.SnapshotRow, value)
        note = self._row(table_rows.NoteRow, table_keys.note_key(row.root)) or table_rows.NoteRow({}, "", "")
        return SnapshotInfo(ulid, *row[:7], {**row.metrics, **note.metrics}, note.mark, note.reason, row.logical_bytes, row.new_bytes)


def _staged_info(row: table_rows.StagedRow) -> SnapshotInfo:
    return SnapshotInfo(*row[:8], row.metrics, "", "", row.logical_bytes, row.new_bytes)
