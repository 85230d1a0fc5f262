"""Makes a new log of what is left, when log entries or store.json were destroyed. Offline: no other process may write meanwhile.

A snapshot is kept when its record, parts, layout and packs are there and fit each other. Refs, histories and tags come from the entries and
checkpoints that survived; a record that none of them knows goes where its lost entry was, by the ref that it names and the entry
that its part was made under. Nothing is deleted, and store.json is replaced last: a crash before that leaves everything as it was.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from tensorstore_ck.backend import probe_create
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.config import CONFIG_NAME, MAX_CONFIG_BYTES, StoreConfig, decode_config, new_config
from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.errors import BrokenLogError, CorruptObjectError, DamageError, FormatVersionError, NotAStoreError, StoreError
from tensorstore_ck.fsck.findings import require_reachable
from tensorstore_ck.fsck.logcheck import LogCheck, check_log
from tensorstore_ck.fsck.packcheck import Listed, Packs
from tensorstore_ck.fsck.snapshotcheck import check_snapshot
from tensorstore_ck.ids import Clock, Digest, IdSource, Ulid, new_ulid, parse_ulid, ulid_text
from tensorstore_ck.log import Chain, Entry, Op, RefTable, SnapshotInfo, keys, rows, validate_ref_name
from tensorstore_ck.opening import make_engine
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.record import Record, decode_record, record_name
from tensorstore_ck.table import MemoryTable

REMOTE_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Salvaged:
    """One snapshot in the report."""

    id: str
    ref: str
    step: int | None
    root: str
    note: str
    """Where it was found, or why it is not in the new log."""


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What salvage did; with ``dry_run``, would do."""

    log: str
    """Prefix of the new log; empty when the old one is intact, and nothing was done."""
    problems: tuple[str, ...]
    """What was wrong."""
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    kept: int
    """Snapshots in the new log."""
    recovered: tuple[Salvaged, ...]
    """Those of them that no surviving entry or checkpoint names. One whose save was interrupted just before its end may be among them."""
    lost: tuple[Salvaged, ...]
    """Damaged: not in the new log."""
    left_out: tuple[Salvaged, ...]
    """Intact, but never published: saves that were interrupted, lost a race or were aborted."""


def salvage(backend: Backend, *, dry_run: bool = False, clock: Clock = time.time_ns, new_id: IdSource = new_ulid) -> SalvageReport:
    """Makes a new log of every snapshot that is intact, if the log or store.json is damaged; else does nothing.

    Raises:
        NotAStoreError: there is nothing of a store.
        FormatVersionError: a newer build wrote to this store: salvage with that one.
    """
    return _Salvage(backend, clock, new_id).run(dry_run=dry_run)


class _Stray(NamedTuple):
    """A record that the surviving log does not name."""

    info: SnapshotInfo
    record: Record
    data: bytes


class _Event(NamedTuple):
    """Operations for the new log."""

    n: int
    """Number of the old entry; negative for none."""
    time_ns: int
    ops: list[Op]


class _Salvage:
    def __init__(self, backend: Backend, clock: Clock, new_id: IdSource) -> None:
        self._backend = backend
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
        engine = make_engine(self._backend, config, MemoryTable(), clock=self._clock, new_id=self._new_id)
        known = {info.ulid: info for info in log.view.snapshots()}
        strays = {stray.info.ulid: stray for stray in self._read_strays(known)}
        anchors = self._check_snapshots(engine, [*known.values(), *(stray.info for stray in strays.values())])
        fill = self._place(log, {ulid: stray for ulid, stray in strays.items() if ulid in anchors}, anchors)
        filled = self._check_log(config, genesis_uuid, fill)
        recovered = [info for info in filled.view.snapshots() if info.ulid in strays]
        kept = [info for info in filled.view.snapshots() if info.ulid in anchors]
        if not self._problems and not recovered:
            return self._report("", filled.view, kept, recovered)
        config = replace(config, log=f"log-{ulid_text(self._new_id()).lower()}")
        if not dry_run:
            self._write(config, filled.table, kept)
            self._backend.replace(CONFIG_NAME, config.encode())
        return self._report(config.log, filled.view, kept, recovered)

    # --- what is left -------------------------------------------------------------------------------------------------

    def _read_config(self, *, dry_run: bool) -> tuple[StoreConfig, bytes | None]:
        """The configuration, made anew where it is lost; and the uuid that the log began with, where that is known."""
        data = b""
        try:
            data = self._backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
            config = decode_config(data, self._backend.url)
        except DamageError as exc:
            self._problems.append(str(exc))
        except FormatVersionError as exc:
            raise FormatVersionError(f"{exc}; or, if it is just damaged, move it away and salvage again", object_id=CONFIG_NAME) from exc
        else:
            return config, uuid.UUID(config.uuid).bytes
        names = {info.name.partition("/")[0] for info in self._backend.list("")}
        logs = sorted(name for name in names if name == "log" or (name.startswith("log-") and not name.endswith("-checkpoint")))
        if not logs and "snapshots" not in names:
            raise NotAStoreError(f"there is nothing of a store at {self._backend.url}", object_id=self._backend.url)
        config = replace(new_config(exclusive_create=dry_run or probe_create(self._backend)), log=logs[-1] if logs else "log")
        seen = self._uuid_of(data, config.log)
        return (config, None) if seen is None else (replace(config, uuid=str(uuid.UUID(bytes=seen))), seen)

    def _uuid_of(self, data: bytes, prefix: str) -> bytes | None:
        """The uuid in a damaged store.json, if entry 1 confirms it."""
        try:
            found = uuid.UUID(json.loads(data)["uuid"]).bytes
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        chain = Chain(self._backend, uuid=found, prefix=prefix)
        try:
            first = chain.read(1)
        except DamageError:
            return None
        return found if first is not None and first.prev == chain.genesis else None

    def _check_log(self, config: StoreConfig, genesis_uuid: bytes | None, fill: Mapping[int, list[Entry]]) -> LogCheck:
        log = check_log(self._backend, prefix=config.log, uuid=genesis_uuid, fill=fill)
        newer = [problem.message for problem in log.problems if problem.kind == FormatVersionError.kind]
        stop = log.view.stop()
        if stop is not None:
            newer.append(f"entry {stop.n} of {config.log} holds the operation {stop.op!r}, which this build does not know")
        if newer:
            raise FormatVersionError(f"{newer[0]}: salvage with the newer tensorstore_ck that wrote it", object_id=config.log)
        return log

    def _read_strays(self, known: Mapping[Ulid, SnapshotInfo]) -> Iterator[_Stray]:
        for name in sorted(info.name for info in self._backend.list("snapshots/")):
            ulid = parse_ulid(name[-26:])
            if ulid is None or name != record_name(ulid) or ulid in known:
                continue
            try:
                data = self._backend.get(name, max_bytes=MAX_OBJECT_BYTES)
                record = decode_record(data, name)
                validate_ref_name(record.ref)
            except StoreError as exc:
                require_reachable(self._backend, exc)
                self._lost[ulid] = Salvaged(ulid_text(ulid), "", None, "", str(exc))
                continue
            yield _Stray(_info(ulid, record, data), record, data)

    def _check_snapshots(self, engine: Engine, infos: list[SnapshotInfo]) -> dict[Ulid, int]:
        """The snapshots that are intact, and their anchors."""
        listed: dict[Ulid, Listed] = {}
        for info in self._backend.list("packs/"):
            ulid = parse_ulid(info.name[-26:])
            if ulid is not None:
                listed[ulid] = Listed(info.size_bytes, info.modified_ns)
        packs, anchors = Packs(self._backend, listed), {}

        def check(info: SnapshotInfo) -> None:
            checked = check_snapshot(engine, packs, info, read_data=False)
            with self._lock:
                if checked.damages:
                    self._lost[info.ulid] = _salvaged(info, "; ".join(damage.message for damage in checked.damages))
                else:
                    anchors[info.ulid] = checked.anchor

        for_each(infos, check, cpu_threads() if self._backend.is_local else REMOTE_THREADS)
        return anchors

    def _place(self, log: LogCheck, strays: Mapping[Ulid, _Stray], anchors: Mapping[Ulid, int]) -> dict[int, list[Entry]]:
        """Puts in place of the lost entries: by number.

        A put's entry comes after its anchor. One whose anchor is not before any lost entry was never published, unless it continues
        its branch: then its entry was the last, and left no trace.
        """
        heads = {branch: head.root for branch in log.view.branches() if (head := log.view.branch(branch))}
        fill: dict[int, list[Entry]] = {}
        for ulid, stray in sorted(strays.items(), key=lambda item: (anchors[item[0]], item[1].info.time_ns)):
            info, anchor, outcome = stray.info, anchors[ulid], log.view.outcome(ulid)
            n = next((max(gap.start, anchor + 1) for gap in log.lost if gap.stop > max(gap.start, anchor + 1)), log.last + 1)
            continues = anchor >= log.last or heads.get(info.ref) == info.parent
            if outcome is not None or (n > log.last and not continues):
                why = "it was aborted" if outcome else "no entry that could have published it is lost: it was never published"
                self._left_out.append(_salvaged(info, why))
                continue
            if n > log.last:
                heads[info.ref] = info.root
            put = Op.put(info.ref, ulid, stray.record, stray.data, anchor=0, txn=ulid)
            fill.setdefault(n, []).append(Entry(n, Digest(bytes(32)), bytes(16), info.time_ns, "", (put,), Digest(bytes(32)), 0))
        return fill

    # --- the new log --------------------------------------------------------------------------------------------------

    def _write(self, config: StoreConfig, table: MemoryTable, kept: Sequence[SnapshotInfo]) -> None:
        """Writes the new log and checks what it folds to. Its entries have the times of the old ones."""
        now = [0]
        log = make_engine(self._backend, config, MemoryTable(), clock=lambda: now[0], new_id=self._new_id, single_writer=True).log
        for (_, time_ns), events in groupby(self._events(table, kept), key=lambda event: (event.n, event.time_ns)):
            now[0], ops = time_ns, [op for event in events for op in event.ops]
            log.append(lambda _, ops=ops: ops)  # type: ignore[misc]
        new = check_log(self._backend, prefix=config.log, uuid=uuid.UUID(config.uuid).bytes)
        if new.problems or {info.ulid for info in new.view.snapshots()} != {info.ulid for info in kept}:
            raise CorruptObjectError(
                f"the new log {config.log} is not what was written: nothing was changed, try again", object_id=config.log
            )

    def _events(self, table: MemoryTable, kept: Sequence[SnapshotInfo]) -> list[_Event]:
        """Operations that fold to `table` without the lost snapshots, in order."""
        view, ulids, events = RefTable(table), {info.ulid for info in kept}, []
        for branch in view.branches():
            made = False
            for move in view.moves(branch, newest_first=False):
                if move.ulid in ulids:
                    op = self._put(move.ulid) if move.op == "put" else Op.reset(branch, move.root) if made else Op.branch(branch, move.root)
                    events.append(_Event(move.n, move.time_ns, [op]))
                    made = True
        for tag in view.tags():
            row = rows.decode_row(rows.TagRow, table.get(keys.tag_key(tag)) or b"")
            if row.ulid in ulids:
                events.append(_Event(row.n, row.time_ns, [Op.tag(tag, row.root)]))
        events.sort(key=lambda event: (event.n, event.ops[0].name != "put"))  # stable: a branch's moves stay in order
        now = self._clock()
        for number, info in enumerate(kept, 1):
            value = table.get(keys.note_key(info.root))
            if value is not None:
                note = rows.decode_row(rows.NoteRow, value)
                events.append(_Event(-number, now, [Op.annotate(info.root, note.metrics), Op.mark(info.root, note.mark, note.reason)]))
        return events

    def _put(self, ulid: Ulid) -> Op:
        name = record_name(ulid)
        data = self._backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        record = decode_record(data, name)
        return Op.put(record.ref, ulid, record, data, anchor=0, txn=ulid)

    def _report(self, log: str, view: RefTable, kept: Sequence[SnapshotInfo], recovered: Sequence[SnapshotInfo]) -> SalvageReport:
        roots = {info.root for info in kept}
        ulids = {info.ulid for info in kept}
        return SalvageReport(
            log,
            tuple(self._problems),
            tuple(branch for branch in view.branches() if any(move.ulid in ulids for move in view.moves(branch))),
            tuple(tag for tag in view.tags() if view.tag(tag) in roots),
            len(kept),
            tuple(_salvaged(info, "found by its record") for info in recovered),
            tuple(self._lost.values()),
            tuple(self._left_out),
        )


def _info(ulid: Ulid, record: Record, data: bytes) -> SnapshotInfo:
    """What the log would say of a record."""
    return SnapshotInfo(
        ulid,
        record.root(),
        object_hash(data),
        record.parent,
        record.ref,
        record.step,
        0,
        record.time_ns,
        record.metrics,
        "",
        "",
        record.logical_bytes,
        record.new_bytes,
    )


def _salvaged(info: SnapshotInfo, note: str) -> Salvaged:
    return Salvaged(ulid_text(info.ulid), info.ref, info.step, info.root.hex(), note)
