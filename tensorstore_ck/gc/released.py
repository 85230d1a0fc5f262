"""The snapshots and objects that were released within the undo window, by the store's time: gc keeps them, even if later log entries give
them up.

Anybody who may create objects can append an entry that releases a snapshot, ends its undo window, carries a time of long ago, or sweeps
what is needed. So an entry counts as young until the store has had it for the undo window. Objects that young entries released stay, except
for entries of this process. PROTOCOL.md, "Forged entries".
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import DamageError, FormatVersionError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.relocation import decode_relocation
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.gc.listing import list_kind
from tensorstore_ck.log import ObjectKey, Objects, RefTable, Relocation, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable, write_rows
from tensorstore_ck.log.entry import ENTRIES_A_FOLDER, folder_name
from tensorstore_ck.log.object_set import join_ulids
from tensorstore_ck.log.table_rows import RELOCATIONS, RelocationRow

_SEEN: Final = b"n/"
"""Entry -> when this host saw it at the head, where the backend has no times."""


class Released(NamedTuple):
    """The objects and snapshots that young entries of other writers released, at one head."""

    snapshots: tuple[SnapshotRow, ...] = ()
    """Snapshots that nothing holds."""
    ended: tuple[Relocation, ...] = ()
    """Relocations whose map was swept. It may never have been in force."""
    doubted: frozenset[Ulid] = frozenset()
    """Relocation maps that may be wrong: the packs that they lead away from stay, too."""

    def is_same(self, other: "Released") -> bool:
        """Whether both name the same. Snapshots are compared by ULID: a row with a metric that is NaN is not equal to itself."""
        return self._named() == other._named()

    def _named(self) -> tuple[list[Ulid], tuple[Relocation, ...], frozenset[Ulid]]:
        return [info.ulid for info in self.snapshots], self.ended, self.doubted

    def restored(self, view: RefTable) -> RefTable:
        """`view` with the relocations that ended, older than all others."""
        if not self.ended:
            return view
        table = MemoryTable()
        with table.batch() as batch:
            for key, value in view.items():
                batch.put(key, value)
            for relocation in self.ended:
                row = RelocationRow(0, relocation.hash, join_ulids(relocation.targets))
                RELOCATIONS.put(batch, relocation.pack + relocation.moved, row)
        return RefTable(table)


class Releases:
    """Which entries are young, and what they released."""

    def __init__(self, engine: Engine, window_seconds: float, now_ns: int, listed: Collection[ObjectKey] | None = None) -> None:
        """`listed`: the objects that are there; None: records and relocation maps are listed if that matters."""
        self._engine = engine
        self._window_ns = int(window_seconds * 1e9)
        self._now_ns = now_ns
        self._listed = listed
        self._last_old_n: int | None = None
        self._read_n = 0
        self._swept_by_entry: set[tuple[ObjectKey, int]] = set()

    def is_over(self, n: int) -> bool:
        """Whether what entry `n` released may be freed: the store has had it for the window, or this process appended it."""
        return not self._window_ns or self._engine.log.is_own(n) or n <= self._last_old()

    def at(self, view: RefTable) -> Released:
        """What young entries of other writers released, at `view`."""
        if not self._window_ns:
            return Released()
        expired = ((info, view.expired_at(info.ulid)) for info in view.snapshots(live=False))
        snapshots = {info.ulid: info for info, n in expired if n is not None and not self.is_over(n)}
        swept = {key for key, n in self._swept(view) if key.kind in {"snapshot", "moved"} and not self.is_over(n)}
        there = self._there() if swept else ()
        for key in sorted(swept.intersection(there)):
            if key.kind == "snapshot" and key.ulid not in snapshots and (info := self._info(key.ulid)) is not None:
                snapshots[key.ulid] = info
        maps = (self._relocation(key.ulid) for key in sorted(swept.intersection(there)) if key.kind == "moved")
        ended = tuple(relocation for relocation in maps if relocation is not None)
        young = {row.moved for pack, _ in view.all_relocations() for row in view.relocations(pack) if not self.is_over(row.n)}
        return Released(tuple(snapshots.values()), ended, frozenset(young.union(relocation.moved for relocation in ended)))

    def _last_old(self) -> int:
        """The last entry that the store has had for the window. Entries are created in order, so those before it are as old."""
        if self._last_old_n is None:  # no `cached_property`: in Python 3.11 it holds one lock for all instances while it computes
            self._last_old_n = self._find_last_old()
        return self._last_old_n

    def _find_last_old(self) -> int:
        head = self._engine.log.view().head()
        last = 0 if head is None else head.n
        before_ns, is_timed = self._now_ns - self._window_ns, False
        for number in range(last // ENTRIES_A_FOLDER * ENTRIES_A_FOLDER, -1, -ENTRIES_A_FOLDER):
            folder = folder_name(self._engine.config.log, number)
            stored = [(int(info.name[-20:]), info.stored_ns) for info in self._engine.backend.list(folder) if info.name[-20:].isdecimal()]
            is_timed = is_timed or any(stored_ns for _, stored_ns in stored)
            old = [n for n, stored_ns in stored if stored_ns and stored_ns <= before_ns and n <= last]
            if old:
                return max(old)
            if not is_timed:
                return self._last_seen(last, before_ns)
        return 0

    def _last_seen(self, head_n: int, before_ns: int) -> int:
        """The same entry for a backend without times: by what this host saw."""
        table = self._engine.table
        seen = {int.from_bytes(key[len(_SEEN) :], "big"): int.from_bytes(value, "big") for key, value in table.scan(_SEEN)}
        old = max((n for n, at_ns in seen.items() if at_ns <= before_ns and n <= head_n), default=0)
        useless = [n for n in seen if n < old or n > head_n]
        rows: dict[bytes, bytes | None] = {_seen_key(n): None for n in useless}
        write_rows(table, rows if head_n in seen else rows | {_seen_key(head_n): self._now_ns.to_bytes(16, "big")})
        return old

    def _swept(self, view: RefTable) -> Iterator[tuple[ObjectKey, int]]:
        """(object, entry) of each swept object, also if a later entry made the log forget that a young entry swept it."""
        yield from ((key, state.n) for key, state in view.objects() if state.swept)
        head = view.head()
        if head is None or not view.horizon() or view.horizon() <= self._last_old():
            return
        for entry in self._engine.log.entries(max(self._last_old(), self._read_n) + 1):
            swept = (key for op in entry.ops if op.name == "sweep" for key in Objects.of_fields(op.fields))
            self._swept_by_entry.update((key, entry.n) for key in swept)
            self._read_n = entry.n
        yield from self._swept_by_entry

    def _there(self) -> Collection[ObjectKey]:
        if self._listed is None:
            kinds = ("snapshot", "moved")
            self._listed = {ObjectKey(kind, ulid) for kind in kinds for ulid in list_kind(self._engine.backend, kind)}
        return self._listed

    def _info(self, ulid: Ulid) -> SnapshotRow | None:
        """A snapshot whose row the log has dropped."""
        with suppress(DamageError, FormatVersionError):
            name = record_name(ulid)
            data = self._engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
            return SnapshotRow.of_record(ulid, decode_record(data, name), data)
        return None

    def _relocation(self, ulid: Ulid) -> Relocation | None:
        with suppress(DamageError, FormatVersionError):
            name = ObjectKey("moved", ulid).name
            data = self._engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
            moved = decode_relocation(data, name, object_hash(data))
            return Relocation(pack=moved.pack, moved=ulid, n=0, hash=object_hash(data), targets=tuple(moved.targets))
        return None


def _seen_key(n: int) -> bytes:
    return _SEEN + n.to_bytes(8, "big")
