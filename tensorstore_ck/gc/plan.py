"""Computes what gc would free now and later. gc, `usage`, `fsck` and errors report the same figures. Changes nothing.

For later runs it plans again: first as if all objects were old, then as if no undo window were left, then as if dated pins had expired. So
these sizes add up, and each one is what gc frees at that time.
"""

import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS, ZERO_DIGEST, series_of
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.pack import ENTRY_DTYPE, HEADER, PACK_LIMIT_BYTES, TRAILER, Footer
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, RelocationMap
from tensorstore_ck.gc.compact import SparsePack, interchangeable, live_bytes, read_footer
from tensorstore_ck.gc.ended_writers import WriterRecords
from tensorstore_ck.gc.listing import ListedObject, list_objects, part_sizes
from tensorstore_ck.gc.mark_reachable import LiveSet, RootNeeds
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.gc.part_summary import PackCounts
from tensorstore_ck.gc.released import Released, Releases
from tensorstore_ck.gc.report import Freeable, FreedLater, Progress, due_time, forget_command, gc_command, ignore_progress, unpin_command
from tensorstore_ck.log import FOLDERS, ChildRecord, Entry, ObjectKey, Op, Pin, RefTable, SnapshotRow, fold, without_named_parent
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.ref_table import RowsAtHead
from tensorstore_ck.log.table_rows import ObjectRow

THREADS: Final = 8
_NS: Final = 1_000_000_000


class GcPlan(NamedTuple):
    """The plan of one run of gc at `view`."""

    view: RefTable
    ending: list[Op]
    """Undo windows and pins that have run out; `view` is without them."""
    listed: dict[ObjectKey, ListedObject]
    garbage: list[ObjectKey]
    """Objects to condemn, unless they are needed by then."""
    young: frozenset[ObjectKey]
    """Unreferenced, and too young to be judged."""
    sparse: list[SparsePack]
    doomed: frozenset[ObjectKey]
    """The objects that this run deletes."""
    expired: list[SnapshotRow]
    """Snapshots that nothing holds."""
    useless_records: list[str]
    """Writer records to delete."""
    unnamed: list[ChildRecord]
    """Records whose parents no log entry names: the log was lost, and may be worth more than the space that gc would free."""
    freeable: Freeable
    options: GcOptions

    def when_old(self, key: ObjectKey) -> str:
        """When a young object is old enough."""
        return f"by {due_time(self.listed[key].modified_ns + int(self.options.min_age_seconds * _NS))}"


class _Level(NamedTuple):
    """The objects that are needed when some holds have ended."""

    why: str
    needs: RootNeeds
    due_ns: int
    """When the last of these holds ends; 0: they have ended."""
    pins: tuple[Pin, ...]
    """The pins to remove for that."""


class SparsePacks:
    """Packs worth rewriting, in the order of bytes freed per byte written, up to a budget of live bytes. Thread-safe.

    Packs beyond the budget are dropped as others come: the footers of all take 80 bytes for each block of a store.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._packs: list[SparsePack] = []
        """Those within the budget, the first one beyond it, which ends them, and those that came since the last cut."""
        self._new_bytes = 0
        """Live bytes of the packs that came since the last cut."""
        self._added = 0
        self._lock = threading.Lock()

    def add(self, pack: SparsePack) -> None:
        """Considers another pack."""
        with self._lock:
            self._added += 1
            self._packs.append(pack)
            self._new_bytes += live_bytes(pack)
            if self._new_bytes > self._budget_bytes:
                self._packs = self._packs[: self._count_within() + 1]
                self._new_bytes = 0

    def chosen(self) -> tuple[list[SparsePack], int]:
        """The packs to rewrite, and the number of further ones."""
        with self._lock:
            packs = self._packs[: self._count_within()]
            return packs, self._added - len(packs)

    def _count_within(self) -> int:
        self._packs.sort(key=lambda pack: (live_bytes(pack) / pack.size_bytes, pack.pack))
        return bisect_right([*accumulate(map(live_bytes, self._packs))], self._budget_bytes)


class Planner:
    """Plans one run."""

    def __init__(self, engine: Engine, options: GcOptions, progress: Progress = ignore_progress) -> None:
        self._engine = engine
        self._options = options
        self._progress = progress
        self._now_ns = engine.clock()
        self._view = engine.log.view()
        self._ends: list[Op] = []
        self._levels: list[_Level] = []
        self._listed: dict[ObjectKey, ListedObject] = {}
        self._due: dict[int, int] = {}
        self._releases = Releases(engine, options.undo_window_seconds, self._now_ns)
        self.live = LiveSet(engine, {})
        self.anchor = 0
        """The entry that `live` was marked at."""
        self.requests = 0
        self.notes: list[str] = []

    def make(self) -> GcPlan:
        """The plan at the newest head. Raises `UnreadableError` if a held snapshot cannot be read, so what it needs is unknown."""
        self._engine.log.sync()  # an unreadable log is reported before all else
        self._listed = list_objects(self._engine.backend)
        self._releases = Releases(self._engine, self._options.undo_window_seconds, self._now_ns, self._listed.keys())
        at_newest(self._engine.log, self._mark)
        return self._plan()

    def ending(self, view: RefTable) -> list[Op]:
        """Ends the undo windows and pins that ran out by this host's clock; other hosts follow the log entry."""
        seconds, is_over = self._options.undo_window_seconds, self._releases.is_over
        windows = [window for window in view.windows() if not self._is_younger(window.time_ns, seconds) and is_over(window.n)]
        pins = [pin for pin in view.pins() if pin.expires_ns is not None and pin.expires_ns <= self._now_ns and is_over(pin.n)]
        return [*(Op.purge(window.n, window.name) for window in windows), *(Op.unpin(pin.ulid, pin.owner, view) for pin in pins)]

    def is_due(self, n: int) -> bool:
        """Whether the grace period of what entry `n` condemned is over."""
        return not self._options.grace_seconds or self._due_ns(n) <= self._now_ns

    def _is_younger(self, time_ns: int, seconds: float) -> bool:
        """Whether less than `seconds` passed since a time. Nothing is younger than 0 s, even if another host's clock was ahead."""
        return seconds > 0 and self._now_ns - time_ns < seconds * _NS

    def _due_ns(self, n: int) -> int:
        if n not in self._due:
            entry = self._engine.log.chain.read(n)
            self._due[n] = 0 if entry is None else entry.time_ns + int(self._options.grace_seconds * _NS)
        return self._due[n]

    def _mark(self, anchor: int, view: RefTable) -> None:
        """Marks what the newest head needs: first without the holds that end later, then with them; never by holds that have run out."""
        self.live = LiveSet(self._engine, part_sizes(self._listed), lambda done, total: self._progress("marking snapshots", done, total))
        self.anchor = anchor
        self._ends = self.ending(view)
        self._view = current = simulate(view, self._ends) if self._ends else view
        windows = [*current.windows()]
        pins = tuple(pin for pin in current.pins() if pin.expires_ns is not None)
        purges = [Op.purge(window.n, window.name) for window in windows]
        unpins = [Op.unpin(pin.ulid, pin.owner, current) for pin in pins]
        self._levels = []
        if pins:
            self.live.update(simulate(current, [*purges, *unpins]))
            self._levels.append(_Level("pins", self.live.frozen(), max(pin.expires_ns or 0 for pin in pins), pins))
        released = self._releases.at(view)
        if windows or released != Released():
            self.live.update(simulate(current, purges))
            window_ns, last_ns = int(self._options.undo_window_seconds * _NS), max((window.time_ns for window in windows), default=0)
            last_ns = last_ns if released == Released() else self._now_ns
            self._levels.append(_Level("undo window", self.live.frozen(), last_ns + window_ns, ()))
        self._levels.reverse()
        self.live.keep(self._releases)
        self.live.update(current)

    def _plan(self) -> GcPlan:
        options, listed = self._options, self._listed
        self.requests += len(FOLDERS) + len(listed) // 1000
        needed = {key for key in listed if self.live.needs(key)}
        states = {key: state for key in listed if key not in needed and (state := self._view.object_state(key)) is not None}
        unneeded = [key for key in listed if key not in states and key not in needed]
        young = {key for key in unneeded if self._is_young(key)}
        writers = WriterRecords(self._engine)
        ended = writers.ended({series_of(key.ulid) for key in young})
        young = {key for key in young if series_of(key.ulid) not in ended}
        self.requests += writers.requests
        garbage = [key for key in unneeded if key not in young]
        due = [key for key, state in states.items() if state.swept or self.is_due(state.n)]
        sparse, rewritable_bytes = self._find_sparse(states)
        packs, left = sparse[-1].chosen()
        if left:
            self.notes.append(f"{left} more packs are sparse: the next run continues with them")
        doomed = [*due, *(garbage if not options.grace_seconds else ())]
        doomed += [ObjectKey("pack", pack.pack) for pack in packs if not options.grace_seconds]
        records = [key.ulid for key in unneeded if key.kind == "snapshot" and self._view.snapshot(key.ulid) is None]
        unnamed = without_named_parent(self._engine.backend, self._view, records)
        return GcPlan(
            view=self._view,
            ending=self._ends,
            listed=listed,
            garbage=garbage,
            young=frozenset(young),
            sparse=packs,
            doomed=frozenset(doomed),
            expired=[*self._view.snapshots(live=False)],
            useless_records=writers.useless(ended, self._now_ns, options.min_age_seconds),
            unnamed=unnamed,
            freeable=Freeable(0, "", ())
            if unnamed
            else self._freeable(
                states, unneeded, young, doomed=doomed, sparse=[level.chosen()[0] for level in sparse], rewritable_bytes=rewritable_bytes
            ),
            options=options,
        )

    def _is_young(self, key: ObjectKey) -> bool:
        return self._is_younger(self._listed[key].modified_ns, self._options.min_age_seconds)

    def _find_sparse(self, states: Mapping[ObjectKey, ObjectRow]) -> tuple[list[SparsePacks], int]:
        """The packs worth rewriting at each level, those of now last; and the bytes that rewriting all other packs in use would free."""
        stages = [*(level.needs for level in self._levels), self.live]
        sparse = [SparsePacks(self._options.compact_bytes) for _ in stages]
        rewritable: list[int] = []
        below = self._options.compact_below
        packs = (key for key in self._listed if key.kind == "pack" and self.live.needs(key))
        candidates = [key for key in packs if self._view.object_state(key) is None]
        counts = PackCounts(self._engine.table, {key.ulid for key in self._listed if key.kind == "pack"})

        def judge(key: ObjectKey) -> None:
            size_bytes, count = self._listed[key].size_bytes, counts.get(key.ulid)
            entries_at = [needs.live_entries(key.ulid) for needs in stages]
            if count is not None and all(len(entries) in {0, count} for entries in entries_at):
                return
            try:
                footer = read_footer(self._engine.backend, key.ulid, size_bytes)
            except DamageError as exc:
                self.notes.append(f"{key.name} was not changed: {exc}")
                return
            counts.note(key.ulid, len(footer.entries))
            for packs, needs, entries in zip(sparse, stages, entries_at, strict=True):
                if len(entries) and int(entries[-1]) < len(footer.entries):
                    pack = SparsePack(key.ulid, footer, entries, size_bytes)
                    if live_bytes(pack) < below * _stored_bytes(footer):
                        packs.add(pack)
                    elif needs is self.live and len(entries) < len(footer.entries):
                        rewritable.append(size_bytes - written_bytes([pack]))

        is_all_local = self._engine.backend.is_local and not self._engine.placed.locations()
        if below:
            for_each(candidates, judge, 1 if is_all_local else THREADS)
            self.requests += 3 * len(candidates)
            counts.flush()
        return sparse, sum(freed for freed in rewritable if freed > 0)

    def _freeable(
        self,
        states: Mapping[ObjectKey, ObjectRow],
        unneeded: Sequence[ObjectKey],
        young: Collection[ObjectKey],
        *,
        doomed: Sequence[ObjectKey],
        sparse: Sequence[list[SparsePack]],
        rewritable_bytes: int,
    ) -> Freeable:
        """The bytes that are freed now and later. `sparse` has the packs of each level; the last entry has those of now."""
        if not self._engine.config.exclusive_create:
            return Freeable(0, "", ())  # gc never runs there
        total = sum(listed.size_bytes for listed in self._listed.values())
        now_bytes = freed = self._size(doomed) - written_bytes(sparse[-1])
        later: list[FreedLater] = []

        def command(options: GcOptions, freed_bytes: int) -> str:
            return gc_command(self._engine.backend.url, options, exceeds=freed_bytes > options.max_delete * total)

        def add(why: str, then_bytes: int, count: int, *, due_ns: int | None, options: GcOptions, before: Iterable[str] = ()) -> None:
            nonlocal freed
            if then_bytes > freed:
                commands = (*before, command(options, then_bytes))
                later.append(FreedLater(why, bytes=then_bytes - freed, objects=count, due_ns=due_ns, commands=commands))
            freed = max(freed, then_bytes)

        at_once = replace(self._options, grace_seconds=0.0)
        if self._options.grace_seconds:
            waiting = [key for key, state in states.items() if not state.swept and not self.is_due(state.n)]
            begun = [key for key in unneeded if key not in young] + [ObjectKey("pack", pack.pack) for pack in sparse[-1]]
            due_ns = max((self._due_ns(states[key].n) for key in waiting), default=0)
            due_ns = max(due_ns, self._now_ns + int(self._options.grace_seconds * _NS) if begun else 0)
            add("grace", freed + self._size(waiting) + self._size(begun), len(waiting) + len(begun), due_ns=due_ns, options=at_once)
        ageless = replace(at_once, min_age_seconds=0.0)
        grace_ns = int(self._options.grace_seconds * _NS)
        add("age", freed + self._size(young), len(young), due_ns=self._old_ns(young) + grace_ns, options=ageless)
        gone = {*unneeded}
        for level, packs in zip(self._levels, sparse, strict=False):
            more = [key for key in self._listed if key not in states and key not in gone and not level.needs.needs(key)]
            gone.update(more)
            rewritten = [ObjectKey("pack", pack.pack) for pack in packs]
            then_bytes = self._size(states) + self._size(gone) + self._size(rewritten) - written_bytes(packs)
            options = ageless if any(map(self._is_young, more)) else at_once
            if self._levels[0].why == "undo window":
                options = replace(options, undo_window_seconds=0.0)
            unpins = dict.fromkeys(unpin_command(self._engine.backend.url, self._root(pin), pin.owner) for pin in level.pins)
            due_ns = max(level.due_ns, self._old_ns(more)) + grace_ns
            add(level.why, then_bytes, len(more), due_ns=due_ns, options=options, before=unpins)
        if rewritable_bytes:
            every = replace(at_once, compact_below=1.0)
            commands = (command(every, now_bytes + rewritable_bytes),)
            later.append(FreedLater("packs in use", bytes=rewritable_bytes, objects=0, due_ns=None, commands=commands))
        forget = self._forget_command() if now_bytes <= 0 and not later else ""
        return Freeable(now_bytes, command(self._options, now_bytes), tuple(later), forget)

    def _forget_command(self) -> str:
        """Forgets the oldest snapshot of the longest history, of those that only a branch holds; empty if that leaves none."""
        view = self._view
        candidates = (
            (len(moves), f"{name}@{moves[0].step}" if moves[0].step is not None else moves[0].root.hex()[:SHOWN_ROOT_DIGITS])
            for name in view.branches()
            if len(moves := [*view.moves(name, newest_first=False)]) > 1 and view.holds(moves[0].ulid) == 1
        )
        address = max(candidates, default=(0, ""))[1]
        return forget_command(self._engine.backend.url, address) if address else ""

    def _size(self, keys: Iterable[ObjectKey]) -> int:
        return sum(self._listed[key].size_bytes for key in keys)

    def _old_ns(self, keys: Iterable[ObjectKey]) -> int:
        """When all of the objects are old enough."""
        return max((self._listed[key].modified_ns for key in keys), default=0) + int(self._options.min_age_seconds * _NS)

    def _root(self, pin: Pin) -> str:
        info = self._view.snapshot(pin.ulid)
        return info.root.hex() if info is not None else ""


def plan_gc(engine: Engine, options: GcOptions | None = None, progress: Progress = ignore_progress) -> GcPlan:
    """What gc would do, for reports. Raises `UnreadableError` if a held snapshot cannot be read, so what it needs is unknown."""
    return Planner(engine, options or GcOptions(), progress).make()


def simulate(view: RefTable, ops: Sequence[Op]) -> RefTable:
    """A copy of `view` with these operations applied, still at the head of `view`."""
    table = MemoryTable()
    head = view.head()
    with table.batch() as batch:
        for key, value in view.items():
            batch.put(key, value)
        # entry 0: what it releases was released long ago
        fold(Entry(0, ZERO_DIGEST, bytes(16), 0, actor="", ops=tuple(ops), hash=ZERO_DIGEST, size_bytes=0), batch)
    return RefTable(table, RowsAtHead(head))


def written_bytes(packs: Sequence[SparsePack]) -> int:
    """Bytes that rewriting writes: each block once of those that are interchangeable, and a header and a trailer per GiB."""
    pack_bytes = 0
    for group in interchangeable(packs):
        rows = np.concatenate([pack.footer.entries[pack.entries] for pack in group])
        _, first = np.unique(rows["id"], return_index=True)
        pack_bytes += int(rows["stored"][first].sum(dtype=np.int64)) + len(first) * ENTRY_DTYPE.itemsize
    moved = [len(RelocationMap(pack.pack, [pack.pack], np.zeros(len(pack.entries), RELOCATION_DTYPE)).encode()) for pack in packs]
    return pack_bytes + sum(moved) + (HEADER.size + TRAILER.size) * -(-pack_bytes // PACK_LIMIT_BYTES)


def _stored_bytes(footer: Footer) -> int:
    return int(footer.entries["stored"].sum(dtype=np.int64))
