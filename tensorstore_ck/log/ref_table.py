"""Typed reads of the ref table: branches, tags and snapshots as of the entry that was folded last."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid, split_ulids
from tensorstore_ck.log import table_rows as rows
from tensorstore_ck.log.cache import MAX_KEY_BYTES, Reader, TableError
from tensorstore_ck.log.cache.protocol import PAGE_ITEMS, Item
from tensorstore_ck.log.field_checks import (
    MAX_INTEGER,
    MIN_STEP,
    PREFIX,
    Row,
    RowKind,
    is_ref_name,
    name_key,
    numbered,
    object_key,
    object_of,
    window_key,
)
from tensorstore_ck.log.object_set import ObjectKey
from tensorstore_ck.log.snapshot import SnapshotRow
from tensorstore_ck.log.table_rows import BranchHead, BranchMove, Head, Pin, Relocation, TxnOutcome, UndoWindow

__all__ = ["BranchHead", "BranchMove", "Head", "Pin", "RefTable", "Relocation", "SnapshotRow", "TxnOutcome", "UndoWindow"]

_WILDCARD: Final = re.compile(r"[*?\[]")
_AFTER_ALL: Final = b"\xff" * (MAX_KEY_BYTES + 1)
"""After a prefix: greater than every key that begins with it."""
_HEX: Final = re.compile(r"[0-9a-f]{0,64}")
_MAX_KEPT_ROWS: Final = 64
"""Per head. A save reads a few rows many times; gc reads each of many rows once."""


def _not_folded(cause: TableError) -> Reader:
    raise cause


@dataclass(frozen=True, slots=True)
class RowsAtHead:
    """What is known of the rows at one head. They do not change, so later views at it need not read them again."""

    head: Head | None
    fold_again: Callable[[TableError], Reader] = _not_folded
    """The same rows, in memory, when the cache has failed as the argument says."""
    rows: dict[bytes, Any] = field(default_factory=dict)
    """Key -> row, or None. A root with its prefix -> its snapshots. The prefix of a kind that is read as a whole -> its rows by key."""
    has_rows: dict[bytes, bool] = field(default_factory=dict)
    """Prefix of a kind -> whether there is a row of it."""


class RefTable:
    """A view of a table or batch. Reads of a table see entries that are folded meanwhile; reads of a batch see its own writes."""

    def __init__(self, reader: Reader, kept: RowsAtHead | None = None) -> None:
        """`kept`: of a reader whose rows do not change. If that reader fails, the log is folded again up to its head."""
        self._reader = reader
        self._kept = kept
        self._rows = None if kept is None else kept.rows

    def read(self, kind: RowKind[Row], key: bytes, *named: Any) -> Row | None:
        """One row; `key` without the prefix, `named`: the fields that it holds."""
        whole_key = kind.prefix + key
        rows = self._rows
        if rows is not None and whole_key in rows:
            kept: Row | None = rows[whole_key]
            return kept
        reader = self._reader
        try:
            value = reader.get(whole_key)
        except TableError as exc:
            value = self._instead_of(reader, exc).get(whole_key)
        row = None if value is None else kind.row(*named, *kind.check(value))
        if rows is not None and len(rows) < _MAX_KEPT_ROWS:
            rows[whole_key] = row
        return row

    def read_all(self, kind: RowKind[Row]) -> Mapping[str, Row]:
        """All rows of a kind that has few, by their ASCII keys."""
        rows = {} if self._rows is None else self._rows
        if kind.prefix not in rows:
            rows[kind.prefix] = {key.decode("ascii"): kind.decode(value) for key, value in self.scan(kind)}
        read: Mapping[str, Row] = rows[kind.prefix]
        return read

    def scan(self, kind: RowKind[Row], prefix: bytes = b"", *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """(key after `prefix`, value) of the rows of a kind whose keys begin with `prefix`."""
        whole_prefix = kind.prefix + prefix
        for key, value in self._items(whole_prefix, reverse=reverse):
            yield key[len(whole_prefix) :], value

    def items(self) -> Iterator[Item]:
        """Every row, as it is stored."""
        return self._items(PREFIX)

    def _items(self, prefix: bytes, *, start: bytes = b"", reverse: bool = False) -> Iterator[Item]:
        """The rows whose whole keys begin with `prefix`, from `start` on, as they are stored."""
        low, high = max(prefix, start), prefix + _AFTER_ALL
        while True:
            reader = self._reader
            try:
                items = reader.page(low, high, reverse)
            except TableError as exc:
                items = self._instead_of(reader, exc).page(low, high, reverse)
            yield from items
            if len(items) < PAGE_ITEMS:
                return
            if reverse:
                high = items[-1][0]
            else:
                low = items[-1][0] + b"\0"

    def _instead_of(self, reader: Reader, cause: TableError) -> Reader:
        """The rows of a reader that failed, read from the log, so that a view stays at its head."""
        if self._kept is None:
            raise cause
        if reader is self._reader:
            self._reader = self._kept.fold_again(cause)
        return self._reader

    def head(self) -> Head | None:
        """The entry folded last; None if there is none, or another version of the fold folded it."""
        if self._kept is not None:
            return self._kept.head
        head = self.read(rows.HEAD, b"")
        return head if head is not None and head.fold == rows.FOLD_VERSION else None

    def stop(self) -> rows.StopRow | None:
        """The first critical operation that this build does not know."""
        return self.read(rows.STOP, b"")

    # --- branches and tags --------------------------------------------------------------------------------------------

    def branches(self) -> list[str]:
        """The names of all branches, in order."""
        return [name.decode("ascii") for name, _ in self.scan(rows.BRANCHES)]

    def heads(self) -> Iterator[BranchHead]:
        """Where all branches are, in the order of their names."""
        return (rows.BRANCHES.decode(value, name.decode("ascii")) for name, value in self.scan(rows.BRANCHES))

    def branch(self, name: str) -> BranchHead | None:
        """Where a branch is."""
        return self.read(rows.BRANCHES, name_key(name), name)

    def length(self, name: str) -> int:
        """How many moves a branch of that name had so far, even if it was removed: the number of its next one."""
        branch = self.branch(name)
        row = self.read(rows.LENGTHS, name.encode()) if branch is None else None
        return branch.length if branch is not None else row.seq if row is not None else 0

    def moves(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[BranchMove]:
        """The history of a branch, as moves."""
        if not is_ref_name(name):
            return
        for count, (_, value) in enumerate(self.scan(rows.MOVES, name.encode() + b"\0", reverse=newest_first)):
            if count == limit:
                return
            yield rows.MOVES.decode(value)

    def history(self, name: str, *, newest_first: bool = True, limit: int | None = None) -> Iterator[SnapshotRow]:
        """The history of a branch, as snapshots: one to which it moved twice occurs twice."""
        for move in self.moves(name, newest_first=newest_first, limit=limit):
            info = self.snapshot(move.ulid)
            if info is not None:
                yield info

    def newest_with_step(self, branch: str, step: int) -> Ulid | None:
        """The newest snapshot of that step in a branch's history."""
        if not is_ref_name(branch) or not MIN_STEP <= step <= MAX_INTEGER:
            return None
        row = self.read(rows.STEPS, numbered(branch, step - MIN_STEP))
        move = self.read(rows.MOVES, numbered(branch, row.seq)) if row is not None else None
        return move.ulid if move is not None else None

    def tags(self) -> list[str]:
        """The names of all tags, in order."""
        return [name.decode("ascii") for name, _ in self.scan(rows.TAGS)]

    def tag_rows(self) -> Iterator[tuple[str, rows.TagRow]]:
        """The names of all tags, in order, and what they name: one scan."""
        return ((name.decode("ascii"), rows.TAGS.decode(value)) for name, value in self.scan(rows.TAGS))

    def tag(self, name: str) -> Digest | None:
        """The root that a tag names."""
        row = self.tag_row(name)
        return row.root if row is not None else None

    def tag_row(self, name: str) -> rows.TagRow | None:
        """The snapshot that a tag names, with the tag's time."""
        return self.read(rows.TAGS, name_key(name))

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, ulid: bytes) -> SnapshotRow | None:
        """A snapshot by the ULID of its record."""
        info = self.read(rows.SNAPSHOTS, ulid, ulid) if len(ulid) == ULID_BYTES else None
        return self.with_note(info) if info is not None else None

    def snapshots(self, *, live: bool = True) -> Iterator[SnapshotRow]:
        """All live snapshots, or all others, by ULID: roughly in order of time."""
        for ulid, value in self.scan(rows.SNAPSHOTS):
            if self.is_live(ulid) is live:
                yield self.with_note(rows.SNAPSHOTS.decode(value, ulid))

    def is_live(self, ulid: bytes) -> bool:
        """Whether a snapshot has a holder: a history, a tag, a pin, or an undo window."""
        return (row := self.read(rows.HOLDS, ulid)) is not None and row.holds > 0

    def holds(self, ulid: bytes) -> int:
        """How many holders a snapshot has; each move of a branch to it counts."""
        return row.holds if (row := self.read(rows.HOLDS, ulid)) is not None else 0

    def expired_at(self, ulid: bytes) -> int | None:
        """The entry since which a snapshot has no holder; None if it has one."""
        return row.n if (row := self.read(rows.HOLDS, ulid)) is not None and not row.holds else None

    def by_root(self, root: bytes) -> SnapshotRow | None:
        """The newest snapshot with this root; live ones first."""
        ulids = self.with_root(root)
        return self.snapshot(ulids[0]) if ulids else None

    def with_root(self, root: bytes) -> list[Ulid]:
        """The snapshots with this root, the newest first; live ones before all others."""
        if len(root) != DIGEST_BYTES:
            return []
        kept, key = {} if self._rows is None else self._rows, rows.ROOTS.prefix + root
        if key in kept:
            known: list[Ulid] = kept[key]
            return known
        found = dict(self.scan(rows.ROOTS, root))
        ulids = [*map(Ulid, found)]
        if len(ulids) > 1:
            ulids.sort(key=lambda ulid: (self.is_live(ulid), rows.ROOTS.decode(found[ulid]).n), reverse=True)
        if len(kept) < _MAX_KEPT_ROWS:
            kept[key] = ulids
        return ulids

    def marked(self, mark: str) -> Iterator[SnapshotRow]:
        """The newest snapshot of each root with that mark."""
        for root, value in self.scan(rows.NOTES):
            if mark.encode() not in value:
                continue  # each save asks, and most notes are metrics
            info = self.by_root(root) if rows.NOTES.decode(value).mark == mark else None
            if info is not None:
                yield info

    def roots_with_prefix(self, prefix: str, *, limit: int = 8) -> list[Digest]:
        """Up to `limit` roots that begin with these hex digits."""
        if not _HEX.fullmatch(prefix):
            return []
        roots: list[Digest] = []
        whole_bytes, start = bytes.fromhex(prefix[: len(prefix) // 2 * 2]), bytes.fromhex(prefix + "0" * (len(prefix) % 2))
        for key, _ in self._items(rows.ROOTS.prefix + whole_bytes, start=rows.ROOTS.prefix + start):
            root = Digest(key[-DIGEST_BYTES - ULID_BYTES : -ULID_BYTES])
            if len(roots) == limit or not root.hex().startswith(prefix):
                break
            if root not in roots[-1:]:
                roots.append(root)
        return roots

    def outcome(self, txn: bytes) -> TxnOutcome | None:
        """How a transaction ended; None while the log has neither its put nor its abort."""
        return self.read(rows.TXNS, txn) if len(txn) == ULID_BYTES else None

    def staged(self, txn: bytes) -> SnapshotRow | None:
        """The snapshot staged under a transaction, neither published nor aborted."""
        return self.read(rows.STAGED, txn) if len(txn) == ULID_BYTES else None

    def all_staged(self) -> Iterator[tuple[Ulid, SnapshotRow]]:
        """(transaction, snapshot) of all staged snapshots, roughly in order of time."""
        return ((Ulid(txn), rows.STAGED.decode(value)) for txn, value in self.scan(rows.STAGED))

    def note(self, root: bytes) -> rows.NoteRow:
        """Metrics and mark added to a root after it was saved."""
        return self.read(rows.NOTES, root) or rows.NoteRow({}, "", "")

    # --- retention and gc ---------------------------------------------------------------------------------------------

    def pins(self) -> Iterator[Pin]:
        """All pins."""
        for key, value in self.scan(rows.PINS):
            yield rows.PINS.decode(value, Ulid(key[:ULID_BYTES]), key[ULID_BYTES:].decode())

    def has_pin(self, ulid: bytes) -> bool:
        """Whether anybody has a pin on a snapshot."""
        return next(self.scan(rows.PINS, ulid), None) is not None

    def policies(self) -> Mapping[str, rows.PolicyRow]:
        """Glob -> the retention rules of the branches that match it."""
        return self.read_all(rows.POLICIES)

    def is_pinned(self, ulid: bytes, owner: str) -> bool:
        """Whether `owner` has a pin on a snapshot."""
        return self.read(rows.PINS, ulid + owner.encode(), Ulid(ulid), owner) is not None

    def windows(self, entry: int | None = None, *, newest_first: bool = False) -> Iterator[UndoWindow]:
        """The undo windows of that entry, or of all, oldest first."""
        prefix = b"" if entry is None else window_key(entry, "")
        for rest, value in self.scan(rows.WINDOWS, prefix, reverse=newest_first):
            key = prefix + rest
            moves = [rows.FORGOTTEN.decode(move) for _, move in self.scan(rows.FORGOTTEN, key + b"\0")]
            time_ns, kind = rows.WINDOWS.check(value)
            yield UndoWindow(n=int.from_bytes(key[:8], "big"), name=key[8:].decode("ascii"), time_ns=time_ns, kind=kind, moves=moves)

    def was_forgotten(self, name: str) -> bool:
        """Whether an undo window has this branch or tag."""
        kinds = (rows.WINDOWS.check(value)[1] for key, value in self.scan(rows.WINDOWS) if key[8:] == name.encode())
        return any(kind != "snapshots" for kind in kinds)

    def object_state(self, key: ObjectKey) -> rows.ObjectRow | None:
        """Whether an object is condemned or swept; None if neither."""
        return self.read(rows.OBJECTS, object_key(key)) if self.may_have(rows.OBJECTS) else None

    def objects(self) -> Iterator[tuple[ObjectKey, rows.ObjectRow]]:
        """All condemned objects, and those swept after the horizon."""
        return ((object_of(key), rows.OBJECTS.decode(value)) for key, value in self.scan(rows.OBJECTS))

    def relocations(self, pack: bytes) -> list[Relocation]:
        """The current relocations of a pack, newest first."""
        if not self.may_have(rows.RELOCATIONS):
            return []
        current = ((Ulid(moved), rows.RELOCATIONS.decode(value)) for moved, value in self.scan(rows.RELOCATIONS, pack))
        ordered = sorted(current, key=lambda item: (item[1].n, item[0]), reverse=True)
        return [Relocation(Ulid(pack), moved, row.n, row.hash, targets=tuple(split_ulids(row.targets))) for moved, row in ordered]

    def may_have(self, kind: RowKind[Row]) -> bool:
        """Whether there may be rows of a kind: false only if the rows do not change. One look replaces those for each object of a save."""
        if self._kept is None:
            return True
        known = self._kept.has_rows
        if kind.prefix not in known:
            known[kind.prefix] = next(self.scan(kind), None) is not None
        return known[kind.prefix]

    def all_relocations(self) -> Iterator[tuple[Ulid, Ulid]]:
        """(pack, moved object) of every current relocation."""
        return ((Ulid(key[:ULID_BYTES]), Ulid(key[ULID_BYTES:])) for key, _ in self.scan(rows.RELOCATIONS))

    def moved_pack(self, moved: bytes) -> Ulid | None:
        """The pack that a moved object relocates."""
        return row.pack if (row := self.read(rows.MOVED, moved)) is not None else None

    def location_of(self, pack: bytes) -> str | None:
        """The URL of a pack's cold location; None: the store's own."""
        return row.url if (row := self.read(rows.LOCATIONS, pack)) is not None else None

    def locations(self) -> dict[Ulid, str]:
        """The URL of each pack at a cold location."""
        return {Ulid(pack): rows.LOCATIONS.decode(value).url for pack, value in self.scan(rows.LOCATIONS)}

    def quotas(self) -> Mapping[str, rows.QuotaRow]:
        """Glob -> the quota of the branches that match it."""
        return self.read_all(rows.QUOTAS)

    def added_bytes_of(self, glob: str) -> int:
        """What the held snapshots of all branches that match `glob`, removed ones included, added to the store. Reads a row per branch."""
        start = _WILDCARD.split(glob, maxsplit=1)[0]
        candidates = self.scan(rows.ADDED, start.encode())
        sizes = (rows.ADDED.decode(value).new_bytes for rest, value in candidates if fnmatchcase(start + rest.decode("ascii"), glob))
        return min(sum(sizes), MAX_INTEGER)

    def reports(self) -> dict[str, rows.ReportRow]:
        """``gc``, ``fsck`` -> what its last run reported."""
        return {run.decode("ascii"): rows.REPORTS.decode(value) for run, value in self.scan(rows.REPORTS)}

    def horizon(self) -> int:
        """Tombstones of entries up to this one are dropped, and nothing anchored before it may commit."""
        row = self.read(rows.HORIZON, b"")
        return row.n if row is not None else 0

    def with_note(self, info: SnapshotRow) -> SnapshotRow:
        """A snapshot, with the metrics and the mark that were added to its root after it was saved."""
        note = self.read(rows.NOTES, info.root)
        return info if note is None else info._replace(metrics={**info.metrics, **note.metrics}, mark=note.mark, reason=note.reason)
