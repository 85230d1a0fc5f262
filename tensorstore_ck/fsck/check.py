"""Checks a whole store and changes nothing: configuration, log, snapshots, packs and leftovers; with `read_data` every stored byte.

Damage becomes findings; an error at one object never stops the rest. Runs beside writers: the log is read first, so that whatever its
snapshots need is there when the packs are listed, and what appears later is not judged. What no snapshot refers to is told as a notice.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from tensorstore_ck.config import CONFIG_NAME, MAX_CONFIG_BYTES, decode_config
from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import MAX_OBJECT_BYTES, unseal
from tensorstore_ck.errors import BrokenLogError, CorruptObjectError, MissingObjectError, StoreError
from tensorstore_ck.fsck.findings import Finding, Findings, FsckReport, Severity, require_reachable
from tensorstore_ck.fsck.logcheck import LogCheck, check_log, host_saw_more
from tensorstore_ck.fsck.packcheck import Listed, Packs
from tensorstore_ck.fsck.snapshotcheck import check_snapshot, hit_text
from tensorstore_ck.gc.roots import roots
from tensorstore_ck.ids import Ulid, parse_ulid
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.checkpoint import checkpoint_folder
from tensorstore_ck.pack import pack_name
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.part import decode_part, part_name
from tensorstore_ck.record import Record, decode_record, record_name

__all__ = ["Finding", "FsckReport", "abort_stale_uploads", "run_fsck"]

STALE_SECONDS: Final = 24 * 3600
REMOTE_THREADS: Final = 8
LEFT_BEHIND: Final = "nothing refers to it: an interrupted save left it, or one is under way; gc will free it"

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def run_fsck(engine: Engine, *, read_data: bool, progress: Progress | None = None) -> FsckReport:
    """Checks the store.

    Raises:
        BackendUnavailableError: the backend does not answer. Damage is never raised.
    """
    return _Fsck(engine, read_data, progress).run()


def abort_stale_uploads(engine: Engine, older_than_seconds: int = STALE_SECONDS) -> list[str]:
    """Frees what unfinished writes left behind long ago; returns their names."""
    names = [upload.name for upload in engine.backend.list_uploads() if _is_older(engine, upload.modified_ns, older_than_seconds)]
    for name in names:
        engine.backend.abort_upload(name)
    return names


class _Objects(NamedTuple):
    """What was listed."""

    packs: dict[Ulid, Listed]
    parts: dict[Ulid, Listed]
    records: dict[Ulid, Listed]
    other_logs: list[str]
    """Objects of logs that are not in force."""


class _Fsck:
    def __init__(self, engine: Engine, read_data: bool, progress: Progress | None) -> None:
        self._engine = engine
        self._backend = engine.backend
        self._read_data = read_data
        self._progress = progress
        self._started_ns = engine.clock()
        self._found = Findings()
        self._lock = threading.Lock()
        self._done_bytes = self._total_bytes = 0
        self._referenced: set[Ulid] = set()
        """Parts and packs."""
        self._broken: list[str] = []
        """Log entries that are missing or damaged."""
        self._unsure = False
        """Whether there are records or parts that could not be read, so that what they refer to is not known."""

    def run(self) -> FsckReport:
        self._check_config()
        log = self._check_log()
        objects = self._list()
        packs = Packs(self._backend, objects.packs)
        self._total_bytes = sum(listed.size_bytes for listed in (*objects.parts.values(), *objects.records.values()))
        if self._read_data:
            self._total_bytes += sum(listed.size_bytes for listed in objects.packs.values())
            packs.check_data(self._engine.config.block_bytes, self._advance)
        else:
            packs.check_footers()
        infos = {info.ulid: info for info in log.view.snapshots()}
        self._check_snapshots(log, infos, packs)
        self._judge_packs(packs)
        self._check_leftovers(infos, objects)
        if self._progress is not None:
            self._progress(self._total_bytes, self._total_bytes)
        return FsckReport(self._found.all(), log.entries, len(infos), len(objects.packs), packs.blocks, packs.data_bytes)

    # --- configuration and log ----------------------------------------------------------------------------------------

    def _check_config(self) -> None:
        try:
            config = decode_config(self._backend.get(CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES), self._backend.url)
            if config != self._engine.config:
                raise CorruptObjectError(f"{CONFIG_NAME} was replaced since this store was opened: open it again", object_id=CONFIG_NAME)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            message = f"{exc}; until then nothing in the store can be opened"
            self._found.add(exc.kind, CONFIG_NAME, message, hit="every ref: the store cannot be opened", repairable=True)

    def _check_log(self) -> LogCheck:
        config, head = self._engine.config, None
        with contextlib.suppress(StoreError):  # a host's cache that cannot be read tells nothing
            head = self._engine.log.view().head()
        log = check_log(self._backend, prefix=config.log, uuid=uuid.UUID(config.uuid).bytes)
        more = host_saw_more(log, head, self._engine.log.chain)
        for problem in [*log.problems, *([more] if more else [])]:
            severity: Severity = "error" if problem.is_error else "notice"
            self._found.add(problem.kind, problem.object, problem.message, severity=severity, repairable=problem.is_error)
            if problem.kind == "broken_log":
                self._broken.append(problem.object)
        return log

    # --- snapshots and packs ------------------------------------------------------------------------------------------

    def _list(self) -> _Objects:
        objects = _Objects({}, {}, {}, [])
        config = self._engine.config
        in_force = (f"{config.log}/", checkpoint_folder(config.log))
        for name, size_bytes, modified_ns in self._backend.list(""):
            if name == CONFIG_NAME or name.startswith(in_force):
                continue
            folder, ulid = name.partition("/")[0], parse_ulid(name[-26:])
            listed = {"packs": objects.packs, "parts": objects.parts, "snapshots": objects.records}.get(folder)
            if listed is not None and ulid is not None and name == f"{folder}/{name[-2:]}/{name[-26:]}":
                listed[ulid] = Listed(size_bytes, modified_ns)
            elif folder in {"log", "checkpoint"} or folder.startswith("log-"):
                objects.other_logs.append(name)
            else:
                self._found.add("foreign_object", name, "it is none of a store's objects: delete it if nobody knows it", severity="notice")
        return objects

    def _check_snapshots(self, log: LogCheck, infos: Mapping[Ulid, SnapshotInfo], packs: Packs) -> None:
        refs = roots(log.view)

        def check(info: SnapshotInfo) -> None:
            checked = check_snapshot(self._engine, packs, info, read_data=self._read_data)
            step = "" if info.step is None else f"@{info.step}"
            addresses = [f"{ref}{step}" for ref in refs.get(info.ulid, ())]
            for damage in checked.damages:
                self._found.add(damage.kind, damage.object, damage.message, hit=hit_text(addresses, info, damage.names))
            with self._lock:
                self._referenced.update(checked.parts, checked.packs)
                self._unsure = self._unsure or not checked.is_complete
            self._advance(checked.object_bytes)

        for_each(infos.values(), check, cpu_threads() if self._backend.is_local else REMOTE_THREADS)

    def _judge_packs(self, packs: Packs) -> None:
        """What was found about packs, but hits no snapshot."""
        for pack, listed in packs.listed.items():
            name, problem, bad = pack_name(pack), packs.problems.get(pack), packs.bad.get(pack)
            if self._found.names(name) or (pack not in self._referenced and listed.modified_ns >= self._started_ns):
                continue
            if pack not in self._referenced:
                self._left_behind(name, problem or ((CorruptObjectError.kind, bad.message) if bad else None))
            elif problem is not None:
                rest = (
                    "what snapshots refer to in it is intact" if self._read_data else "its data was not read: run `tsck fsck --read-data`"
                )
                self._found.add(problem.kind, name, f"{problem.message}; {rest}")
            elif bad is not None:
                self._found.add(CorruptObjectError.kind, name, f"{bad.message}; no snapshot refers to that block", severity="notice")

    # --- leftovers ----------------------------------------------------------------------------------------------------

    def _check_leftovers(self, infos: Mapping[Ulid, SnapshotInfo], objects: _Objects) -> None:
        for ulid, listed in objects.parts.items():
            if ulid not in self._referenced and listed.modified_ns < self._started_ns:
                name = part_name(ulid)
                self._left_behind(name, self._problem_of(name, decode_part))
        for ulid, listed in objects.records.items():
            if ulid not in infos and listed.modified_ns < self._started_ns:
                self._check_stray_record(ulid)
        for name in objects.other_logs:
            kind = "checkpoint" if "checkpoint/" in name else "log"
            problem = self._problem_of(name, partial(unseal, kind))
            detail = f" ({problem[1]})" if problem else ""
            self._found.add("old_log", name, f"it belongs to a log that is not in force any more{detail}", severity="notice")
        for upload in self._backend.list_uploads():
            if _is_older(self._engine, upload.modified_ns, STALE_SECONDS):
                message = "an unfinished write of more than a day ago: `tsck fsck --abort-uploads` frees it"
                self._found.add("stale_upload", upload.name, message, severity="notice", repairable=True)

    def _check_stray_record(self, ulid: Ulid) -> None:
        name = record_name(ulid)
        records: list[Record] = []
        self._left_behind(name, self._problem_of(name, lambda data, name: records.append(decode_record(data, name))))
        for record in records:
            for entry in self._broken:
                step = "" if record.step is None else f"@{record.step}"
                hit = f"perhaps {record.ref}{step} (root {record.root().hex()[:12]}), which no other entry publishes"
                self._found.add(BrokenLogError.kind, entry, "", hit=hit)

    def _problem_of(self, name: str, decode: Callable[[bytes, str], object]) -> tuple[str, str] | None:
        try:
            decode(self._backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except MissingObjectError:
            return None  # freed meanwhile
        except StoreError as exc:
            require_reachable(self._backend, exc)
            return exc.kind, str(exc)
        return None

    def _left_behind(self, name: str, problem: tuple[str, str] | None) -> None:
        who = "no snapshot that can be read refers to it" if self._unsure or self._broken else LEFT_BEHIND
        kind, message = ("unreferenced", who) if problem is None else (problem[0], f"{problem[1]}; {who}")
        self._found.add(kind, name, message, severity="notice")

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done_bytes = min(self._done_bytes + count, self._total_bytes)
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def _is_older(engine: Engine, modified_ns: int, seconds: float) -> bool:
    return modified_ns < engine.clock() - seconds * 1_000_000_000
