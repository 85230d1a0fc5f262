"""Checks a whole store without changing it: configuration, log, snapshots, packs, leftovers, and as much data as `FsckOptions` says.

Damage becomes findings; an error at one object never stops the check. It runs alongside writers and gc: the log is read first, so
everything that its snapshots need is there when packs are listed, except what gc frees meanwhile. So apparent damage is checked again at
the newest log. Unreferenced objects are reported as notices.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final
from uuid import UUID

from tensorstore_ck.common.executor import Executor, require_no_rate
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import relocations_in_order
from tensorstore_ck.errors import BrokenLogError, CorruptObjectError, MissingObjectError, PlaceUnavailableError, StoreError
from tensorstore_ck.format.part import decode_part
from tensorstore_ck.format.record import Record, decode_record
from tensorstore_ck.format.relocation import decode_relocation
from tensorstore_ck.format.sealed import unseal
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.format.writer_record import WRITERS
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.gc.roots import roots
from tensorstore_ck.log import FOLDERS, ObjectKey, Relocation, SnapshotRow, lost_log, sign_of_lost_log, store_objects
from tensorstore_ck.log.checkpoint import checkpoint_folder
from tensorstore_ck.maintenance.fsck.check_config import config_problem, is_of_log
from tensorstore_ck.maintenance.fsck.check_data import DataCheck
from tensorstore_ck.maintenance.fsck.check_log import (
    LogCheck,
    LogProblem,
    cache_problem,
    check_log,
    heads_seen,
    host_head,
    host_saw_more,
    read_only_engine,
)
from tensorstore_ck.maintenance.fsck.check_packs import BadBlocks, BlockTables, Packs, find_copies
from tensorstore_ck.maintenance.fsck.check_snapshot import SnapshotCheck, check_snapshot, describe_hit, merge_damages, parts_of
from tensorstore_ck.maintenance.fsck.check_storage import FreeableObjects, check_markers, check_modes, stale_uploads, why_unreferenced
from tensorstore_ck.maintenance.fsck.findings import (
    UNREADABLE,
    Findings,
    FsckOptions,
    FsckReport,
    Progress,
    Severity,
    kind_of,
    object_problem,
)
from tensorstore_ck.maintenance.fsck.repairable import (
    check_marks,
    is_moved_intact,
    other_store_advice,
    pack_advice,
    packs_of_marked,
    readable_parts,
    rebuild_moved,
    relocations_in_force,
    repair_command,
)

_KIND_OF: Final = {folder: kind for kind, folder in FOLDERS.items()}


def run_fsck(
    engine: Engine,
    options: FsckOptions | None = None,
    *,
    read_data: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> FsckReport:
    """Checks the store as `options` say; `read_data` and `progress` are short for these options. `executor` reads the data.

    Raises:
        BackendUnavailableError: the backend does not answer. Damage is never raised.
        InvalidOptionError: an invalid rate limit, or one for a remote executor.
    """
    options = options or FsckOptions(read_data=read_data, progress=progress)
    require_no_rate(options.rate_limit, executor)
    return Fsck(engine.limited_to(options.rate_limit), options, executor=executor).run()


class Fsck:
    """One check of a store; repair uses what it found."""

    def __init__(
        self,
        engine: Engine,
        options: FsckOptions,
        *,
        known_bad: Mapping[Ulid, BadBlocks] | None = None,
        reads_marked: bool = False,
        executor: Executor | None = None,
    ) -> None:
        """`known_bad`: blocks that an earlier check found bad; if given, data is read of packs without a footer alone, and marks are
        not checked.

        `reads_marked`: reads the data of snapshots that are marked as damaged, whatever `options` say.
        """
        self._backend = engine.backend
        self._options = options
        self._known_bad = known_bad
        self._reads_marked = reads_marked
        self._executor = executor
        self._started_ns = engine.clock()
        self._found = Findings()
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self.needed: set[ObjectKey] = set()
        """The objects that the snapshots need, as far as they could be read."""
        self._broken: list[str] = []
        """Missing or damaged log entries."""
        self._rebuilt: dict[Ulid, bytes | None] = {}
        self._freeing = FreeableObjects(engine)
        self._unsure = False
        """Whether a record or part could not be read, so that what it refers to is unknown."""
        self.engine = engine
        self.log = LogCheck()
        self.at_log: Engine = engine
        """An engine at the log as this check folded it."""
        self.anchor = 0
        """The last entry that was folded before the store was listed."""
        self.listed: dict[str, dict[Ulid, ListedObject]] = {kind: {} for kind in FOLDERS}
        """The listed objects by kind."""
        self._other_logs: list[str] = []
        """Objects of logs that are not in use."""
        self.packs = Packs(self._backend, {})
        self.hit = BlockTables()
        """Unreadable blocks that snapshots need."""
        self.damaged: dict[Ulid, SnapshotCheck] = {}
        """Damaged snapshots."""
        self.read: Collection[Ulid] = ()
        """Packs whose blocks were all read."""

    def run(self) -> FsckReport:
        """Runs all checks.

        Raises:
            PlaceUnavailableError: packs lie at a location that cannot be used; its message names damage that was found before.
        """
        self._check_config()
        check_modes(self._backend, self._found)
        self._check_log()
        if self.log.is_unreadable:
            return FsckReport(findings=self._found.all(), log_entries=self.log.entries, snapshots=0, packs=0, blocks=0, data_bytes=0)
        try:
            return self._check_objects()
        except PlaceUnavailableError as exc:
            raise PlaceUnavailableError(f"{exc}{self._found.also_damaged()}", object_id=exc.object_id) from exc

    def _check_objects(self) -> FsckReport:
        """Checks all that the log and a listing name; returns the report with everything that was found."""
        check_markers(self.engine.placed, self._found)
        self._list()
        self.packs = packs = Packs(self._backend, self.listed["pack"])
        packs.bad.update(self._known_bad or {})
        packs.check_footers()
        suspects = packs_of_marked(self.at_log) if self._reads_marked else ()
        chosen = None if self._known_bad is None else list[Ulid]()
        data = DataCheck(self.engine, packs, self._options, started_ns=self._started_ns, chosen=chosen, suspects=suspects)
        sizes = (listed.size_bytes for kind in ("part", "snapshot") for listed in self.listed[kind].values())
        self._total_bytes = sum(sizes) + sum(packs.listed[pack].size_bytes for pack in data.chosen)
        data.run(self._advance, self._executor)
        self.read, self._data = data.read, data
        snapshots = self._check_snapshots()
        if self._known_bad is None:
            check_marks(self.at_log, self._found, damaged=self.damaged, read=data.read)
        self._judge_packs()
        self._check_leftovers()
        self._advise()
        self._advance(self._total_bytes)
        return FsckReport(
            findings=self._found.all(self._backend.url),
            log_entries=self.log.entries,
            snapshots=snapshots,
            packs=len(packs.listed),
            blocks=packs.blocks,
            data_bytes=data.read_bytes,
            read_packs=data.packs,
            never_verified=data.verified.never(),
            oldest_verified_ns=data.verified.oldest_ns(),
            out_of_time=data.is_out_of_time,
            freeable=None if self._broken else self._freeing.freeable,  # gc refuses a broken log
        )

    def _check_config(self) -> None:
        problem = config_problem(self.engine)
        if problem is not None:
            self._found.add(kind_of(problem.error), CONFIG_NAME, str(problem.error), hit="every ref: the store cannot be opened")
            self._found.advise(CONFIG_NAME, problem.advice, repairable=problem.is_repairable)

    def _check_log(self) -> None:
        config, is_new, seen = self.engine.config, host_head(self.engine.log) is None, heads_seen(self.engine.log)
        uuid = None if self._found.names(CONFIG_NAME) and is_of_log(self._backend, config) is False else UUID(config.uuid).bytes
        self.log = log = check_log(self._backend, prefix=config.log, uuid=uuid)
        self.at_log, self.anchor = read_only_engine(self.engine, log), log.last
        if is_new and not log.problems:  # a later first sync would clear the cache with this check's notes
            with contextlib.suppress(StoreError):
                self.engine.log.sync()
        chain, elsewhere, more = self.engine.log.chain, self.engine.log.seen_elsewhere, list[LogProblem | None]()
        if not log.is_unreadable:
            more = [*(host_saw_more(log, head, chain, elsewhere) for head in seen), cache_problem(log, self.engine.log)]
            more += [self._lost_log()] if not log.last and not self._found.names(CONFIG_NAME) else []
        for problem in [*log.problems, *(problem for problem in more if problem)]:
            severity: Severity = "error" if problem.is_error else "notice"
            message = f"{problem.message}: {problem.advice}" if problem.advice else problem.message
            self._found.add(problem.kind, problem.object, message, severity=severity, repairable=problem.is_repairable)
            if problem.kind == "broken_log":
                self._broken.append(problem.object)

    def _lost_log(self) -> LogProblem | None:
        """The problem if the log is empty and was not."""
        sign, name = sign_of_lost_log(self._backend, self.engine.config.log), self.engine.log.chain.name(1)
        return None if sign is None else LogProblem("broken_log", name, str(lost_log(name, self._backend.url, sign)))

    def _list(self) -> None:
        config = self.engine.config
        in_force = (f"{config.log}/", checkpoint_folder(config.log))
        for name, size_bytes, modified_ns, _ in store_objects(self._backend):
            if name.startswith((*in_force, WRITERS)):
                continue
            folder, ulid = name.partition("/")[0], parse_ulid(name[-26:])
            kind = _KIND_OF.get(folder)
            if kind is not None and ulid is not None and ObjectKey(kind, ulid).name == name:
                self.listed[kind][ulid] = ListedObject(size_bytes, modified_ns)
            elif folder in {"log", "checkpoint"} or folder.startswith("log-"):
                self._other_logs.append(name)
            else:
                self._found.add("foreign_object", name, "it is not an object of a store: delete it if nobody knows it", severity="notice")

    def _check_snapshots(self) -> int:
        """Checks all snapshots, then checks again, at the newest log, those that seem damaged.

        If an object is missing, and a later read of the log still needs it, gc did not free it.
        """
        infos = {info.ulid: info for info in self.log.view.snapshots()}
        suspects = self._check_all(infos.values())
        met = {damage.object for checked in suspects.values() for damage in checked.damages if damage.blocks is None}
        if unread := self.packs.unread(met):  # damage in a layout: a read of the whole pack shows which blocks are damaged
            self._data.read_also(unread)
            suspects = self._check_all(infos.values())
        while suspects and self.log.follow(self.engine.log.chain):
            sound = self.packs.look_again()
            if self._options.reads_data:
                self._data.read_also(sound)
            before = {(ulid, damage.object) for ulid, checked in suspects.items() for damage in checked.damages}
            suspects = self._check_all(infos[ulid] for ulid in suspects if self.log.view.is_live(ulid))
            if all((ulid, damage.object) in before for ulid, checked in suspects.items() for damage in checked.damages):
                break
        self.damaged = suspects
        refs = roots(self.log.view)
        for ulid, checked in suspects.items():
            self._unsure = self._unsure or not checked.is_complete
            step = "" if infos[ulid].step is None else f"@{infos[ulid].step}"
            addresses = [f"{ref}{step}" for ref in refs.get(ulid, ())]
            for damage in checked.damages:
                if damage.blocks is not None and damage.kind != UNREADABLE:
                    self.hit.add(*damage.blocks)
            for damage in merge_damages(checked.damages):
                self._found.add(damage.kind, damage.object, damage.message, hit=describe_hit(addresses, infos[ulid], damage.names))
        return len(infos)

    def _check_all(self, infos: Iterable[SnapshotRow]) -> dict[Ulid, SnapshotCheck]:
        """Checks snapshots; returns the damaged ones."""
        damaged: dict[Ulid, SnapshotCheck] = {}

        def check(info: SnapshotRow) -> None:
            checked = check_snapshot(self.at_log, self.packs, info, read_data=self._options.reads_data)
            with self._lock:
                self.needed |= checked.needs
                if checked.damages:
                    damaged[info.ulid] = checked
            self._advance(checked.object_bytes)

        for_each(infos, check, cpu_threads() if self._backend.is_local else REMOTE_THREADS)
        return damaged

    def _judge_packs(self) -> None:
        """Adds findings about packs that affect no snapshot."""
        for pack, listed in self.packs.listed.items():
            key, problem, bad = ObjectKey("pack", pack), self.packs.problems.get(pack), self.packs.bad.get(pack)
            is_needed = key in self.needed
            if self._found.names(key.name) or (not is_needed and listed.modified_ns >= self._started_ns):
                continue
            if problem is not None and problem.kind == MissingObjectError.kind:
                continue  # freed meanwhile: snapshots that needed it have findings
            if not is_needed:
                self._left_behind(key, problem or ((bad.kind, bad.message) if bad else None))
            elif problem is not None:
                rest = "its data was not read: run `tsck fsck --read-data`"
                if self._options.reads_data:
                    rest = f"the blocks that snapshots refer to are intact: {repair_command()} copies them to a new pack"
                message = problem.message if problem.kind == UNREADABLE else f"{problem.message}; {rest}"
                self._found.add(problem.kind, key.name, message, repairable=True)
            elif bad is not None:
                self._found.add(bad.kind, key.name, f"{bad.message}; no snapshot refers to that block", severity="notice")

    def _advise(self) -> None:
        """Adds to the findings how damage can be repaired."""
        for pack, (advice, repairable) in pack_advice(self.packs, self.hit, reads_data=self._options.reads_data).items():
            self._found.advise(ObjectKey("pack", pack).name, advice, repairable=repairable)
        moved = {ObjectKey("moved", moved).name: relocation for moved, relocation in relocations_in_force(self.log.view).items()}
        objects = {damage.object for checked in self.damaged.values() for damage in checked.damages if damage.blocks is None}
        for name in objects:
            relocation = moved.get(name)
            if relocation is not None and (self.rebuild(relocation) is not None or self._has_blocks_of(name)):
                self._found.advise(name, f"{repair_command()} rebuilds it, or the parts that need it", repairable=True)
            elif name.partition("/")[0] in _KIND_OF:
                self._found.advise(name, other_store_advice(), repairable=False)

    def _has_blocks_of(self, name: str) -> bool:
        """Whether all blocks of the snapshots that a damaged object affects are in some pack."""
        hit = (ulid for ulid, checked in self.damaged.items() if any(damage.object == name for damage in checked.damages))
        infos = (info for ulid in hit if (info := self.log.view.snapshot(ulid)) is not None)
        wanted = {part.block_id(row) for info in infos for part in parts_of(self.at_log, info) for row in range(part.block_count)}
        return wanted == find_copies(self.packs, wanted, unless={}).keys()

    def rebuild(self, relocation: Relocation) -> bytes | None:
        """Rebuilds the map of a relocation, if it is damaged."""
        if relocation.moved not in self._rebuilt:
            if is_moved_intact(self._backend, relocation):
                return None
            parts = readable_parts(self.at_log, self.listed["part"])
            self._rebuilt[relocation.moved] = rebuild_moved(self.packs, relocation, parts)
        return self._rebuilt[relocation.moved]

    def _check_leftovers(self) -> None:
        in_force = relocations_in_force(self.log.view)
        try:
            relocations_in_order(self.log.view, sorted({relocation.pack for relocation in in_force.values()}))
        except CorruptObjectError as exc:
            if not self._found.names(exc.object_id):
                self._found.add(exc.kind, exc.object_id, f"{exc}; no snapshot needs them", severity="notice")
        for key in self._unneeded("part"):
            self._check_left_behind(key, decode_part)
        for key in self._unneeded("moved"):
            if key.ulid not in in_force:
                self._check_left_behind(key, partial(unseal, "moved"))
        for ulid, relocation in in_force.items():
            key = ObjectKey("moved", ulid)
            if key not in self.needed and not self._found.names(key.name):
                self._check_left_behind(key, partial(decode_relocation, expected=relocation.hash), only_damaged=True)
        for key in self._unneeded("snapshot"):
            self._check_stray_record(key)
        for name in self._other_logs:
            kind = "checkpoint" if "checkpoint/" in name else "log"
            with contextlib.suppress(MissingObjectError):
                problem = object_problem(self._backend, name, partial(unseal, kind))
                detail = f" ({problem[1]})" if problem else ""
                self._found.add("old_log", name, f"it belongs to a log that is no longer in use{detail}", severity="notice")
        for name in stale_uploads(self.engine):
            message = "an unfinished write, more than a day old: `tsck fsck --abort-uploads` frees it"
            self._found.add("stale_upload", name, message, severity="notice", repairable=True)

    def _unneeded(self, kind: str) -> Iterator[ObjectKey]:
        """The objects that no snapshot needs, and that are older than this check."""
        for ulid, listed in self.listed[kind].items():
            key = ObjectKey(kind, ulid)
            if key not in self.needed and listed.modified_ns < self._started_ns:
                yield key

    def _check_left_behind(self, key: ObjectKey, decode: Callable[[bytes, str], object], *, only_damaged: bool = False) -> None:
        """Adds a finding about an unneeded object, unless it is freed meanwhile."""
        with contextlib.suppress(MissingObjectError):
            problem = object_problem(self._backend, key.name, decode)
            if problem is not None or not only_damaged:
                self._left_behind(key, problem)

    def _check_stray_record(self, key: ObjectKey) -> None:
        records: list[Record] = []
        self._check_left_behind(key, lambda data, name: records.append(decode_record(data, name)))
        if self.log.view.snapshot(key.ulid) is not None:
            return  # nothing holds it
        for record in records:
            for entry in self._broken:
                step = "" if record.step is None else f"@{record.step}"
                hit = f"perhaps {record.ref}{step} (root {record.root().hex()[:12]}), which no other entry publishes"
                self._found.add(BrokenLogError.kind, entry, "", hit=hit)

    def _left_behind(self, key: ObjectKey, problem: tuple[str, str] | None) -> None:
        who = why_unreferenced(self.log.view, key) + self._freeing.when(key)
        if self._unsure or self._broken:
            who = "no snapshot that can be read refers to it"
        kind, message = ("unreferenced", who) if problem is None else (problem[0], f"{problem[1]}; {who}")
        self._found.add(kind, key.name, message, severity="notice")

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done_bytes = min(self._done_bytes + count, self._total_bytes)
            if self._options.progress is not None:
                self._options.progress(self._done_bytes, self._total_bytes)
