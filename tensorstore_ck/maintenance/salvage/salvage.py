"""Finds the remaining objects of a store, and writes a new log from them. Offline: no other process may write meanwhile.

A snapshot is kept if something holds it, and its record, parts, layout and packs are intact. Surviving entries and checkpoints tell what
holds it. A record that none of them names takes the place of its lost entry, found by its ref and the anchor of its parts. Swept objects
stay deleted. A lost entry may have held an expired snapshot, so it gets a new undo window if it is intact. Nothing is deleted, and
store.json is replaced last: a crash before that changes nothing.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tensorstore_ck.backend import probe_create
from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.store_backend import StoreBackend
from tensorstore_ck.common.ids import Clock, Digest, IdSource, Ulid, new_ulid, parse_ulid, ulid_text
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine, current_actor
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.errors import (
    BrokenLogError,
    CorruptObjectError,
    DamageError,
    FormatVersionError,
    InvalidOptionError,
    NotAStoreError,
    StoreError,
)
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.format.store_config import CONFIG_NAME, MAX_CONFIG_BYTES, StoreConfig, decode_config, new_config
from tensorstore_ck.gc.listing import list_kind
from tensorstore_ck.log import (
    Entry,
    Log,
    ObjectKey,
    Op,
    RefTable,
    SnapshotRow,
    holds_snapshots,
    logs_in,
    validate_ref_name,
    without_named_parent,
)
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.entry import seal_entry
from tensorstore_ck.maintenance.fsck.check_config import confirmed, is_log_lost
from tensorstore_ck.maintenance.fsck.check_log import LogCheck, check_log, read_only_engine
from tensorstore_ck.maintenance.fsck.check_packs import Packs
from tensorstore_ck.maintenance.fsck.check_snapshot import check_snapshot
from tensorstore_ck.maintenance.fsck.findings import require_reachable
from tensorstore_ck.maintenance.fsck.repairable import relocations_in_force
from tensorstore_ck.maintenance.salvage.lost_relocations import add_relocations, find_relocations, learn_locations, read_lost_relocations
from tensorstore_ck.maintenance.salvage.new_log import KeptHistory, NewLog, rebuild_log
from tensorstore_ck.maintenance.salvage.report import Salvaged, SalvageReport, salvaged


def salvage(
    backend: Backend,
    *,
    dry_run: bool = False,
    leave_out_unknown: bool = False,
    clock: Clock = time.time_ns,
    new_id: IdSource = new_ulid,
    open_place: Callable[[str], Backend] | None = None,
) -> SalvageReport:
    """Makes a new log with every intact snapshot, if the log or store.json is damaged; else does nothing.

    `leave_out_unknown` leaves out entries and operations that this build does not know, as when somebody forged them.
    `open_place` opens the locations of moved packs.

    Raises:
        NotAStoreError: there is no store.
        FormatVersionError: a newer build wrote to this store: salvage with that build, or with `leave_out_unknown`.
    """
    opener = open_place or LocationOpener(backend.url)
    return _Salvage(backend, clock, new_id, opener, leave_out_unknown=leave_out_unknown).run(dry_run=dry_run)


def adopt(backend: Backend, *, clock: Clock = time.time_ns, new_id: IdSource = new_ulid) -> SalvageReport:
    """Gives a copy of a store's files an identity of its own: a new UUID, and a new log of all its snapshots under a new prefix.

    Offline, as `salvage`. Nothing is deleted, and the store whose files were copied is not touched.

    Raises:
        NotAStoreError: there is no store.
        CorruptObjectError: the log or a snapshot is damaged: repair it first.
        InvalidOptionError: packs lie at a location outside the store, which belongs to the other one.
    """
    return _Salvage(backend, clock, new_id, LocationOpener(backend.url)).adopt()


class _Stray(NamedTuple):
    """A record that the surviving log does not name."""

    info: SnapshotRow
    record: Record
    data: bytes


class _Intact(NamedTuple):
    """A readable snapshot."""

    anchor: int
    """The highest anchor of its parts: its log entry came later."""
    moved: frozenset[Ulid]
    """The relocation maps that it needs."""


class _Salvage:
    def __init__(
        self, backend: Backend, clock: Clock, new_id: IdSource, open_place: Callable[[str], Backend], *, leave_out_unknown: bool = False
    ) -> None:
        self._leave_out_unknown = leave_out_unknown
        self._placed = ColdLocations(backend, open_place)
        self._backend = StoreBackend(backend, cold=self._placed)
        self._clock = clock
        self._new_id = new_id
        self._problems: list[str] = []
        self._lost: dict[Ulid, Salvaged] = {}
        self._left_out: list[Salvaged] = []
        self._lock = threading.Lock()

    def run(self, *, dry_run: bool) -> SalvageReport:
        config, genesis_uuid = self._read_config(dry_run=dry_run)
        log = self._check_log(config, genesis_uuid, {})
        self._problems += [problem.message for problem in log.problems if problem.kind == BrokenLogError.kind]
        self._problems += _unknown_in(log, config)
        unknown = read_lost_relocations(self._backend, log.view)
        learn_locations(log.view, unknown, self._placed)
        packs = Packs(self._backend, list_kind(self._backend, "pack"))
        usable = list(find_relocations(packs, log.view, unknown))
        add_relocations(log.table, usable)
        known = [info for live in (True, False) for info in log.view.snapshots(live=live)]
        strays = {stray.info.ulid: stray for stray in self._read_strays(log.view)}
        engine = make_engine(self._placed.at(None), config, MemoryTable(), clock=self._clock, new_id=self._new_id)
        engine = read_only_engine(replace(engine, backend=self._backend, placed=self._placed), log)
        intact = self._check_snapshots(engine, packs, [*known, *(stray.info for stray in strays.values())])
        filled = self._check_log(config, genesis_uuid, self._place(log, strays, intact))
        self._lost = {ulid: lost for ulid, lost in self._lost.items() if filled.view.expired_at(ulid) is None}
        held = [info for info in filled.view.snapshots() if info.ulid in intact]
        recovered = [salvaged(info, "found by its record") for info in held if info.ulid in strays]
        are_entries_lost = bool(log.lost or recovered)
        doubtful = [info for info in filled.view.snapshots(live=False) if info.ulid in intact] if are_entries_lost else []
        needed = {moved for info in (*held, *doubtful) for moved in intact[info.ulid].moved}
        in_use = [relocation for moved, relocation in relocations_in_force(log.view).items() if moved in needed]
        self._problems += [
            f"no log entry names {ObjectKey('moved', lost.moved).name}, which relocates the blocks of {pack_name(lost.pack)}"
            for lost in usable
            if lost in in_use and lost.pack not in packs.listed
        ]
        if not self._problems and not recovered:
            return self._report("", filled.view, held, [])
        config = replace(config, log=f"log-{ulid_text(self._new_id()).lower()}")
        if not dry_run:
            kept = KeptHistory(
                held=held,
                doubtful=doubtful,
                relocations=in_use,
                locations={pack: url for pack, url in self._placed.locations().items() if pack in packs.listed},
                are_entries_lost=are_entries_lost,
                left=[Digest(bytes.fromhex(left.root)) for left in (*self._lost.values(), *self._left_out) if left.root],
            )
            self._write(config, rebuild_log(filled.table, kept, self._put, self._clock()))
            self._backend.replace(CONFIG_NAME, config.encode())
            if genesis_uuid is None:  # store.json was lost, and with it the UUID in the marks of locations
                self._placed.claim_all(config.uuid)
        note = "no surviving entry holds it: `tsck undo` brings it back, until gc frees it"
        return self._report(config.log, filled.view, held, [*recovered, *(salvaged(info, note) for info in doubtful)])

    def adopt(self) -> SalvageReport:
        config, _ = self._read_config(dry_run=True)
        log = self._check_log(config, uuid.UUID(config.uuid).bytes, {})
        self._problems += [problem.message for problem in log.problems if problem.is_error]
        packs = Packs(self._backend, list_kind(self._backend, "pack"))
        if locations := sorted(set(log.view.locations().values())):
            raise InvalidOptionError(
                f"packs of {self._backend.url} lie at {locations[0]}, which belongs to the store that moved them: make an independent copy "
                "of that store with `tsck copy` instead",
                object_id=locations[0],
            )
        known = [info for live in (True, False) for info in log.view.snapshots(live=live)]
        engine = read_only_engine(make_engine(self._backend, config, MemoryTable(), clock=self._clock, new_id=self._new_id), log)
        intact = self._check_snapshots(engine, packs, known)
        if damage := [*self._problems, *(lost.note for lost in self._lost.values())]:
            raise CorruptObjectError(
                f"{self._backend.url} is damaged ({damage[0]}): run `tsck fsck --repair`, then adopt it", object_id=CONFIG_NAME
            )
        held = [info for info in log.view.snapshots() if info.ulid in intact]
        needed = {moved for info in held for moved in intact[info.ulid].moved}
        in_use = [relocation for moved, relocation in relocations_in_force(log.view).items() if moved in needed]
        kept = KeptHistory(held, [], in_use, {}, are_entries_lost=False)
        config = replace(config, uuid=str(uuid.uuid4()), log=f"log-{ulid_text(self._new_id()).lower()}")
        self._write(config, rebuild_log(log.table, kept, self._put, self._clock()))
        self._backend.replace(CONFIG_NAME, config.encode())
        return self._report(config.log, log.view, held, [])

    def _read_config(self, *, dry_run: bool) -> tuple[StoreConfig, bytes | None]:
        """The configuration, a new one if it is lost; and the UUID that the log began with, if known."""
        data = b""
        try:
            data = self._backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
            config = decode_config(data, self._backend.url)
        except DamageError as exc:
            self._problems.append(str(exc))
        except FormatVersionError as exc:
            raise FormatVersionError(f"{exc}; or, if it is only damaged, move it away and salvage again", object_id=CONFIG_NAME) from exc
        else:
            if is_log_lost(self._backend, config):
                self._problems.append(f"{CONFIG_NAME} names the log {config.log}, which is not there")
                config = replace(config, log=logs_in(self._backend)[-1])
            return config, uuid.UUID(config.uuid).bytes
        logs = logs_in(self._backend)
        if not holds_snapshots(self._backend):
            raise NotAStoreError(f"there is no store at {self._backend.url}", object_id=self._backend.url)
        config = replace(new_config(exclusive_create=dry_run or probe_create(self._backend)), log=logs[-1] if logs else "log")
        seen = confirmed(self._backend, data, config)
        return (config, None) if seen is None else (seen, uuid.UUID(seen.uuid).bytes)

    def _check_log(self, config: StoreConfig, genesis_uuid: bytes | None, fill: Mapping[int, list[Entry]]) -> LogCheck:
        log = check_log(self._backend, prefix=config.log, uuid=genesis_uuid, fill=fill)
        unknown = _unknown_in(log, config)
        if unknown and not self._leave_out_unknown:
            raise FormatVersionError(
                f"{unknown[0]}: salvage with the newer build that wrote it, or leave it out with `tsck salvage --leave-out-unknown`",
                object_id=config.log,
            )
        return log

    def _read_strays(self, view: RefTable) -> Iterator[_Stray]:
        """Records that the log does not name, without expired and freed ones."""
        for name in sorted(info.name for info in self._backend.list("snapshots/")):
            ulid = parse_ulid(name[-26:])
            if ulid is None or name != record_name(ulid) or _was_published(view, ulid):
                continue
            try:
                data = self._backend.get(name, max_bytes=MAX_OBJECT_BYTES)
                record = decode_record(data, name)
                validate_ref_name(record.ref)
            except StoreError as exc:
                require_reachable(self._backend, exc)
                self._lost[ulid] = Salvaged(id=ulid_text(ulid), ref="", step=None, root="", note=str(exc))
                continue
            yield _Stray(SnapshotRow.of_record(ulid, record, data), record, data)

    def _check_snapshots(self, engine: Engine, packs: Packs, infos: list[SnapshotRow]) -> dict[Ulid, _Intact]:
        """The intact snapshots.

        A snapshot that gc freed is not reported as lost: the entry that released it is lost, so the surviving log still holds it.
        """
        view, intact = engine.log.view(), dict[Ulid, _Intact]()

        def check(info: SnapshotRow) -> None:
            checked = check_snapshot(engine, packs, info, read_data=False)
            problem = None if checked.damages else self._put_problem(info.ulid)
            is_freed = any((state := view.object_state(key)) is not None and state.swept for key in checked.needs)
            with self._lock:
                if checked.damages and not is_freed and view.object_state(ObjectKey("snapshot", info.ulid)) is None:
                    self._lost[info.ulid] = salvaged(info, "; ".join(damage.message for damage in checked.damages))
                elif problem is not None and not is_freed:
                    self._lost[info.ulid] = salvaged(info, problem)
                elif not checked.damages and not is_freed:
                    moved = frozenset(key.ulid for key in checked.needs if key.kind == "moved")
                    intact[info.ulid] = _Intact(checked.anchor, moved)

        for_each(infos, check, cpu_threads() if self._backend.is_local else REMOTE_THREADS)
        return intact

    def _place(self, log: LogCheck, strays: Mapping[Ulid, _Stray], intact: Mapping[Ulid, _Intact]) -> dict[int, list[Entry]]:
        """Puts for lost entries, by number.

        A put's entry comes after its anchor, and after the entry at which gc condemned its record, if it did. If it does not fit into a
        gap, it was never published, unless it continues its branch: then its entry was the last one, and left no trace. If the log was
        lost and began again, all were published before; the branches stay where they are.
        """
        after: dict[Ulid, int] = {}
        for ulid in strays.keys() & intact.keys():
            condemned = log.view.object_state(ObjectKey("snapshot", ulid))
            after[ulid] = max(intact[ulid].anchor, condemned.n if condemned is not None else 0)
        _order_parents_first(after, strays, log.view)
        has_begun_again = not log.lost and bool(without_named_parent(self._backend, log.view, strays))
        heads = {branch: head.root for branch in log.view.branches() if (head := log.view.branch(branch))}
        refs, fill = set(heads), dict[int, list[Entry]]()
        for ulid, anchor in sorted(after.items(), key=lambda item: (item[1], strays[item[0]].info.time_ns)):
            stray, info, outcome = strays[ulid], strays[ulid].info, log.view.outcome(ulid)
            n = next((max(gap.start, anchor + 1) for gap in log.lost if gap.stop > max(gap.start, anchor + 1)), log.last + 1)
            continues = has_begun_again or intact[ulid].anchor >= log.last or heads.get(info.ref) == info.parent
            if outcome is not None or (n > log.last and not continues):
                why = "it was aborted" if outcome else "no lost entry can have published it: it was never published"
                self._left_out.append(salvaged(info, why))
                continue
            back = [Op.reset(info.ref, heads[info.ref])] if has_begun_again and info.ref in refs else []
            if n > log.last and not back:
                heads[info.ref] = info.root
            put = Op.put(info.ref, ulid, stray.record, stray.data, anchor=0, txn=ulid)
            fill.setdefault(n, []).append(
                Entry(
                    n=n,
                    prev=Digest(bytes(32)),
                    write_id=bytes(16),
                    time_ns=info.time_ns,
                    actor="",
                    ops=(put, *back),
                    hash=Digest(bytes(32)),
                    size_bytes=0,
                )
            )
        return fill

    def _write(self, config: StoreConfig, new: NewLog) -> None:
        """Writes the new log with the times of the old entries, and verifies its fold."""
        now = [0]
        log = Log(
            self._backend,
            MemoryTable(),
            uuid=uuid.UUID(config.uuid).bytes,
            prefix=config.log,
            clock=lambda: now[0],
            actor=current_actor(),
            new_id=self._new_id,
            shared=False,
            may_begin=True,
        )
        for now[0], ops in new.entries:
            log.append(lambda _, ops=ops: ops)  # type: ignore[misc]
        written = check_log(self._backend, prefix=config.log, uuid=uuid.UUID(config.uuid).bytes)
        if written.problems or not new.is_fold(written.view):
            raise CorruptObjectError(
                f"the new log {config.log} differs from what was written: nothing was changed, try again", object_id=config.log
            )

    def _put(self, ulid: Ulid) -> Op:
        name = record_name(ulid)
        data = self._backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        record = decode_record(data, name)
        return Op.put(record.ref, ulid, record, data, anchor=0, txn=ulid)

    def _put_problem(self, ulid: Ulid) -> str | None:
        """Why no entry can publish a record: anybody can write one with more metrics than an entry may have."""
        try:
            seal_entry(1, Digest(bytes(32)), [self._put(ulid)], write_id=bytes(16), time_ns=0, actor="")
        except InvalidOptionError as exc:
            return f"{record_name(ulid)} cannot be published: {exc}"
        return None

    def _report(self, log: str, view: RefTable, held: Sequence[SnapshotRow], recovered: Sequence[Salvaged]) -> SalvageReport:
        roots = {info.root for info in held}
        ulids = {info.ulid for info in held}
        return SalvageReport(
            log=log,
            problems=tuple(self._problems),
            branches=tuple(branch for branch in view.branches() if any(move.ulid in ulids for move in view.moves(branch))),
            tags=tuple(tag for tag, row in view.tag_rows() if row.root in roots),
            kept=len(held),
            recovered=tuple(recovered),
            lost=tuple(self._lost.values()),
            left_out=tuple(self._left_out),
        )


def _unknown_in(log: LogCheck, config: StoreConfig) -> list[str]:
    """The operations that a newer build, or a forger of entries, wrote to the log."""
    unknown = [problem.message for problem in log.problems if problem.kind == FormatVersionError.kind]
    stop = log.view.stop()
    if stop is not None:
        unknown.append(f"entry {stop.n} of {config.log} holds the operation {stop.op!r}, which this build does not know")
    return unknown


def _was_published(view: RefTable, ulid: Ulid) -> bool:
    outcome, state = view.outcome(ulid), view.object_state(ObjectKey("snapshot", ulid))
    return view.snapshot(ulid) is not None or (outcome is not None and outcome.put) or (state is not None and state.swept)


def _order_parents_first(after: dict[Ulid, int], strays: Mapping[Ulid, _Stray], view: RefTable) -> None:
    """Corrects anchors: a parent was published before its child began, but parts that repair rebuilt have later anchors."""
    by_root: dict[Digest, list[Ulid]] = {}
    for ulid in after:
        by_root.setdefault(strays[ulid].info.root, []).append(ulid)
    for ulid in sorted(after, key=lambda ulid: strays[ulid].info.time_ns, reverse=True):
        parents = by_root.get(strays[ulid].info.parent or Digest(b""), [])
        if len(parents) == 1 and view.object_state(ObjectKey("snapshot", parents[0])) is None:
            after[parents[0]] = min(after[parents[0]], max(after[ulid] - 1, 0))
