"""Repairs what fsck finds, from this store and another one, and marks what stays damaged. It never deletes anything.

It follows the dependencies: store.json and log, records, relocation maps, parts, packs. Each step checks the store again, since an
unreadable object may hide more damage. Snapshots that stay damaged are marked, so that nobody resumes from them; a mark is removed when
all data of the snapshot was read and is sound.

A lost log entry is written again only if the rest of the log, or this host's memory of it, names its hash.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.common.threads import shielded
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import BlockLocations, locate_blocks
from tensorstore_ck.errors import BrokenLogError, DamageError, SnapshotExpiredError, UnreadableError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.record import Record, record_name
from tensorstore_ck.log import Entry, Head, ObjectKey, Op, RefTable, Relocation, SnapshotRow
from tensorstore_ck.log.cache import TableError
from tensorstore_ck.log.entry import MAX_ENTRY_BYTES
from tensorstore_ck.maintenance.fsck.check_config import is_log_lost, is_of_log, repair_config
from tensorstore_ck.maintenance.fsck.check_data import DataCheck
from tensorstore_ck.maintenance.fsck.check_log import CACHE_NAME, LogCheck, cache_problem, heads_seen, host_saw_more
from tensorstore_ck.maintenance.fsck.check_packs import BadBlocks
from tensorstore_ck.maintenance.fsck.check_snapshot import SnapshotCheck, check_snapshot, placed_parts
from tensorstore_ck.maintenance.fsck.check_storage import repair_markers, repair_modes
from tensorstore_ck.maintenance.fsck.check_store import Fsck
from tensorstore_ck.maintenance.fsck.findings import DAMAGED, UNREADABLE, Finding, FsckOptions, FsckReport
from tensorstore_ck.maintenance.fsck.good_copies import BlockSource, OtherStore, ReadErrors, open_other
from tensorstore_ck.maintenance.fsck.rebuild_packs import rebuild_packs
from tensorstore_ck.maintenance.fsck.rebuild_parts import COPIED, PartRebuilder
from tensorstore_ck.maintenance.fsck.repairable import blocks_in, deltas_in, is_moved_intact, packs_of, relocations_in_force

GIVES_WAY: Final = ("", "drift")
"""Marks that `DAMAGED` replaces: others already keep jobs from resuming there."""
MAX_ROUNDS: Final = 8
MARKS_AN_ENTRY: Final = 500
MAX_REASON: Final = 400


@dataclass(frozen=True, slots=True)
class Repaired:
    """One repaired object."""

    object: str
    how: str


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The damage before, the repairs, and the damage after."""

    before: FsckReport
    mended: tuple[Repaired, ...]
    marked: tuple[str, ...]
    """Roots of snapshots that were marked as damaged."""
    unmarked: tuple[str, ...]
    """Roots of snapshots whose mark was removed."""
    after: FsckReport
    """A second check of the structure; data that was bad before counts as bad."""

    def __repr__(self) -> str:
        marked = f"{len(self.marked):,} snapshots marked, {len(self.unmarked):,} unmarked"
        return f"RepairReport({len(self.mended):,} objects repaired, {marked}; now {self.after!r})"

    @property
    def ok(self) -> bool:
        """Whether no damage is left."""
        return self.after.ok


def run_repair(engine: Engine, options: FsckOptions | None = None, *, other: Engine | None = None) -> RepairReport:
    """Checks a store as `options` say, and repairs it, with objects from `other`: a copy of it, or a store with some of its snapshots.

    Raises:
        UnsafeBackendError: the backend does not support several writers.
        BackendUnavailableError: a backend does not answer. Damage is never raised.
        UnreadableError: an object became unreadable while it ran, or one of `other` is. Nothing is marked.
        InvalidOptionError: an invalid rate limit.
    """
    engine.require_writable()
    options = options or FsckOptions()
    rate = options.rate_limit
    return _Repair(engine.limited_to(rate), options, None if other is None else other.limited_to(rate)).run()


def _unreadable(report: FsckReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == UNREADABLE]


class _Repair:
    def __init__(self, engine: Engine, options: FsckOptions, other: Engine | None) -> None:
        self._read_errors = ReadErrors()
        self._engine = replace(engine, backend=self._read_errors.noting(engine.backend))
        self._options = options
        self._other_engine = None if other is None else replace(other, backend=self._read_errors.noting(other.backend))
        self._other: OtherStore | None = None
        self._repaired: dict[str, str] = {}
        self._modes: dict[str, str] = {}
        """Objects that got another mode; they may be damaged, too."""
        self._bad: dict[Ulid, BadBlocks] = {}
        """Blocks that were found bad; packs are never rewritten in place, so they stay bad."""
        self._made: set[Ulid] = set()
        """New packs. If a part names a block that one of them lacks, no further copy has it: the part is wrong."""
        self._read: Collection[Ulid] = ()
        """Packs whose blocks were all read."""

    def run(self) -> RepairReport:
        log = self._engine.log
        seen = frozenset() if log.seen_elsewhere else heads_seen(log)
        fsck = Fsck(self._engine, self._options, reads_marked=True)
        before = after = fsck.run()
        if _unreadable(before):
            return RepairReport(before=before, mended=(), marked=(), unmarked=(), after=before)
        self._bad, self._read = fsck.packs.bad, fsck.read
        fsck = self._repair_log(fsck, seen)
        if self._is_broken(fsck.log, seen):
            after = self._look_again()[1] if self._all_repaired() else before
            return RepairReport(
                before=before, mended=self._all_repaired(), marked=(), unmarked=(), after=after
            )  # a broken log takes no entries
        if self._all_repaired():
            fsck, after = self._look_again()
        if self._other_engine is not None:
            self._other = open_other(self._other_engine)
        for _ in range(MAX_ROUNDS):
            if not self._repair_objects(fsck) and not self._repair_packs(fsck):
                break
            fsck, after = self._look_again()
        self._read_errors.require_none()
        marked, unmarked = self._mark(fsck)
        if unmarked:
            after = self._look_again()[1]
        return RepairReport(before=before, mended=self._all_repaired(), marked=marked, unmarked=unmarked, after=after)

    def _look_again(self) -> tuple[Fsck, FsckReport]:
        options = FsckOptions(read_data=self._options.reads_data)  # a pack without a footer has no known bad blocks
        fsck = Fsck(self._engine, options, known_bad=self._bad)
        report = fsck.run()
        if unreadable := _unreadable(report):
            raise UnreadableError(f"the repair stops: {unreadable[0].object}: {unreadable[0].message}", object_id=unreadable[0].object)
        self._bad = fsck.packs.bad
        return fsck, report

    def _all_repaired(self) -> tuple[Repaired, ...]:
        return tuple(Repaired(name, how) for name, how in sorted([*self._modes.items(), *self._repaired.items()]))

    def _repair_log(self, fsck: Fsck, seen: Collection[Head]) -> Fsck:
        if repair_config(self._engine, self._other_engine):
            self._repaired["store.json"] = "written again"
        self._modes = repair_modes(self._engine.backend)
        self._repaired |= dict.fromkeys(repair_markers(self._engine.placed), "written again")
        entries = repair_entries(self._engine, self._other_engine, fsck.log, seen) if self._other_engine is not None else []
        self._repaired |= dict.fromkeys(entries, COPIED)
        if entries:
            fsck, _ = self._look_again()
        for name, data in fsck.log.checkpoints.items():
            self._engine.backend.replace(name, data)
        self._repaired |= dict.fromkeys(fsck.log.checkpoints, "made again from the log")
        if not self._is_broken(fsck.log, seen):
            self._repaired |= dict.fromkeys(repair_cache(self._engine, fsck.log), "made again from the log")
        return fsck

    def _is_broken(self, log: LogCheck, seen: Collection[Head]) -> bool:
        """Whether entries are lost: a new entry would then take the number of a lost one."""
        is_damaged = any(problem.kind == BrokenLogError.kind for problem in log.problems)
        is_damaged = is_damaged or is_of_log(self._engine.backend, self._engine.config) is False
        is_damaged = is_damaged or (not log.last and is_log_lost(self._engine.backend, self._engine.config))
        return is_damaged or any(host_saw_more(log, head, self._engine.log.chain) is not None for head in seen)

    def _repair_objects(self, fsck: Fsck) -> bool:
        """Repairs damaged small objects; whether any was repaired, or another check is needed."""
        before, is_expired = len(self._repaired), False
        relocations = {ObjectKey("moved", moved).name: relocation for moved, relocation in relocations_in_force(fsck.log.view).items()}
        rebuilder = self._rebuilder(fsck)
        for info, name in _damaged_objects(fsck):
            if name in self._repaired:
                continue
            try:
                if name == record_name(info.ulid):
                    how = rebuilder.record(info)
                elif name in relocations:
                    how = self._repair_moved(fsck, rebuilder, info, relocations[name])
                else:
                    how = self._repair_part(fsck, rebuilder, info, name)
            except SnapshotExpiredError:
                is_expired = True  # gc freed something meanwhile
            except DamageError:
                continue  # it stays as it is
            else:
                if how is not None:
                    self._repaired[name] = how
        return is_expired or len(self._repaired) > before

    def _repair_moved(self, fsck: Fsck, rebuilder: PartRebuilder, info: SnapshotRow, relocation: Relocation) -> str | None:
        """Rebuilds a relocation map exactly as it was; if that is impossible, or it closes a cycle, the parts that need it."""
        key, data = ObjectKey("moved", relocation.moved), fsck.rebuild(relocation)
        is_intact = is_moved_intact(self._engine.backend, relocation)
        exact = None if is_intact else rebuilder.exact(key, relocation.hash)
        source = (data, "rebuilt from the footers of its packs") if data is not None else exact
        if source is not None:
            rebuilder.overwrite(key, source[0])
            return source[1]
        record = fsck.at_log.read_own_record(info)
        for rank, part in enumerate(record.parts):
            if _is_located(fsck.at_log, record, rank):
                continue
            remade = self._repair_part(fsck, rebuilder, info, part_name(part))
            if remade is not None:
                self._repaired[part_name(part)] = f"{remade}: {key.name} is {'false' if is_intact else 'lost'}"
        return None

    def _repair_part(self, fsck: Fsck, rebuilder: PartRebuilder, info: SnapshotRow, name: str) -> str | None:
        record = fsck.at_log.read_own_record(info)
        for rank, part in enumerate(record.parts):
            if part_name(part) == name:
                return rebuilder.part(part, rank, record, info)
        return None

    def _rebuilder(self, fsck: Fsck) -> PartRebuilder:
        safe = frozenset(key.ulid for key in fsck.needed if key.kind == "pack") - fsck.hit.packs.keys()
        return PartRebuilder(self._engine, fsck.packs, fsck.listed, self._other, safe=safe, anchor=fsck.anchor)

    def _repair_packs(self, fsck: Fsck) -> bool:
        """Rebuilds packs with damaged blocks or footers; whether any block was saved."""
        damaged = {pack for pack in {*fsck.hit.packs, *fsck.packs.problems} - self._made if pack_name(pack) not in self._repaired}
        if not damaged:
            return False
        view = fsck.at_log.log.view()

        def parts() -> Iterator[tuple[Part, BlockLocations]]:
            return (placed for info in view.snapshots() for placed in placed_parts(fsck.at_log, info))

        needed = blocks_in(damaged, parts())
        wanted = [block for pack in needed.packs for block in needed.ids(pack)]
        blind = damaged & fsck.packs.problems.keys()
        deltas = deltas_in(blind, parts()) if blind else {}
        source = BlockSource(self._engine.backend, fsck.packs, self._other, wanted, deltas=deltas)
        try:
            outcomes = rebuild_packs(self._engine, needed, source, fsck.anchor)
        except SnapshotExpiredError:
            return True  # gc freed something meanwhile: check again
        for outcome in outcomes:
            self._made.update(outcome.made)
            if outcome.blocks:
                rest = f"; {outcome.lost} blocks have no good copy" if outcome.lost else ""
                self._repaired[pack_name(outcome.pack)] = f"{outcome.blocks} blocks are in a new pack{rest}"
        return any(outcome.blocks for outcome in outcomes)

    def _mark(self, fsck: Fsck) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Marks snapshots that are still damaged, and removes the marks of sound ones."""
        view = fsck.at_log.log.view()
        infos = list(view.snapshots())
        whole = {info.root for info in infos if info.ulid not in fsck.damaged}
        marked = {
            info.root: Op.mark(info.root, DAMAGED, _reason(fsck.damaged[info.ulid]))
            for info in infos
            if info.ulid in fsck.damaged and info.root not in whole and info.mark in GIVES_WAY
        }
        suspects = [info for info in infos if info.mark == DAMAGED and info.ulid not in fsck.damaged]
        unmarked = {info.root: Op.mark(info.root, "") for info in self._verified(fsck, suspects)}
        self._append([*marked.items(), *unmarked.items()])
        return tuple(root.hex() for root in marked), tuple(root.hex() for root in unmarked)

    def _verified(self, fsck: Fsck, infos: list[SnapshotRow]) -> Iterable[SnapshotRow]:
        """Reads all data of some snapshots; returns the sound ones."""
        packs = {pack for info in infos for pack in packs_of(fsck.at_log, info)} & fsck.packs.listed.keys()
        DataCheck(self._engine, fsck.packs, FsckOptions(), chosen=sorted(packs - set(self._read))).run(lambda count: None)
        return [info for info in infos if not check_snapshot(fsck.at_log, fsck.packs, info, read_data=True).damages]

    def _append(self, marks: list[tuple[bytes, Op]]) -> None:
        for at in range(0, len(marks), MARKS_AN_ENTRY):
            ops = marks[at : at + MARKS_AN_ENTRY]

            def build(view: RefTable, ops: list[tuple[bytes, Op]] = ops) -> list[Op]:
                return [op for root, op in ops if view.by_root(root) is not None]

            self._engine.log.append(build)


def _is_located(engine: Engine, record: Record, rank: int) -> bool:
    """Whether the blocks of a part can be located."""
    try:
        locate_blocks(engine, engine.log.view(), engine.read_part(record, rank))
    except DamageError:
        return False
    return True


def _damaged_objects(fsck: Fsck) -> list[tuple[SnapshotRow, str]]:
    """(snapshot, name) of every damaged object except packs."""
    view = fsck.at_log.log.view()
    checks = ((view.snapshot(ulid), checked) for ulid, checked in fsck.damaged.items())
    return [(info, damage.object) for info, checked in checks if info is not None for damage in checked.damages if damage.blocks is None]


def _reason(checked: SnapshotCheck) -> str:
    return f"found by fsck: {checked.damages[0].message}"[:MAX_REASON]


def repair_entries(engine: Engine, copy: Engine, log: LogCheck, seen: Collection[Head]) -> list[str]:
    """Copies lost log entries from a copy of this store, newest first, as far as their hashes are known; returns their names."""
    if (copy.config.uuid, copy.config.log) != (engine.config.uuid, engine.config.log):
        return []
    repaired: list[str] = []
    known = {**log.vouched, **{head.n: head.hash for head in seen}}
    expected: Digest | None = None
    for n in range(max([log.last, *known]), 0, -1):
        entry, expected = _read(engine, n), expected or known.get(n)
        if entry is None or (expected is not None and entry.hash != expected):
            entry = _read(copy, n) if expected is not None else None
            if entry is not None and entry.hash == expected:
                _write(engine, copy, n)
                repaired.append(engine.log.chain.name(n))
            else:
                entry = None
        expected = entry.prev if entry is not None else None
    return repaired


def repair_cache(engine: Engine, log: LogCheck) -> list[str]:
    """Syncs the log; clears and refills this host's cache if it differs; returns its name if it was repaired.

    Raises:
        BrokenLogError: the log is damaged.
    """
    engine.log.sync()
    log.follow(engine.log.chain)
    if cache_problem(log, engine.log) is None:
        return []

    def clear() -> None:
        with contextlib.suppress(TableError), engine.table.batch() as batch:
            batch.clear(b"")

    shielded(clear, finish=True)
    engine.log.sync()
    return [CACHE_NAME]


def _read(engine: Engine, n: int) -> Entry | None:
    try:
        return engine.log.chain.read(n)
    except DamageError:
        return None


def _write(engine: Engine, copy: Engine, n: int) -> None:
    name = engine.log.chain.name(n)
    engine.backend.replace(name, copy.backend.get(copy.log.chain.name(n), max_bytes=MAX_ENTRY_BYTES + 1))
    engine.backend.sync_folders(name)
