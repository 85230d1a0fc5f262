"""Reads a whole log, damaged or not, for fsck and salvage: checks every entry and checkpoint, and folds the readable entries.

After a gap the fold continues with the next entries, and with a trusted checkpoint after the gap. It uses no cache of a host, and never
raises for damage. fsck and repair read through an engine at that log, so that a damaged or outdated cache does not mislead them.
"""

import contextlib
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BrokenLogError, DamageError, FormatVersionError, MissingObjectError, StoreError
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.log import Entry, EntryReader, Head, Log, RefTable, chain_break
from tensorstore_ck.log.block_index import BlockIndex
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.checkpoint import Checkpoint, checkpoint_folder, checkpoint_name, checkpoint_number, decode_checkpoint, dump, load
from tensorstore_ck.log.fold import fold
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, kind_of, require_reachable

CACHE_NAME: Final = "cache of this host"
MAX_NUMBER: Final = (1 << 63) - 1
_WINDOW: Final = 256
_READERS: Final = 16
_UNLISTED_TRIES: Final = 16
"""A listing alongside writers can miss an entry: gaps up to this size are read by name before entries count as missing."""
_FROM_COPY: Final = "`tsck fsck --repair --from OTHER_STORE` takes it from a copy of this store"
_DERIVED: Final = "it is derived from the log, and ignored; `tsck fsck --repair` makes it again"


class LogProblem(NamedTuple):
    """A problem of the log or of a checkpoint."""

    kind: str
    object: str
    message: str
    is_error: bool = True
    is_repairable: bool = False
    """From the log and this host alone."""
    advice: str = ""
    """What to do about it, appended to the message."""


@dataclass(slots=True)
class LogCheck:
    """The readable content of a log."""

    table: MemoryTable = field(default_factory=MemoryTable)
    """The fold of all readable entries."""
    problems: list[LogProblem] = field(default_factory=list)
    last: int = 0
    """The highest number of an entry or trusted checkpoint."""
    last_hash: Digest | None = None
    entries: int = 0
    """Number of readable entries."""
    lost: list[range] = field(default_factory=list)
    """Numbers of entries whose operations are not in `table`."""
    checkpoints: dict[str, bytes] = field(default_factory=dict)
    """Damaged checkpoints -> their correct content."""
    vouched: dict[int, Digest] = field(default_factory=dict)
    """Entry hashes that sound checkpoints name."""

    @property
    def is_unreadable(self) -> bool:
        """Whether an entry could not be read, so that nothing is known of what depends on it."""
        return any(problem.kind == UNREADABLE for problem in self.problems) and bool(self.lost)

    @property
    def view(self) -> RefTable:
        """The ref table."""
        return RefTable(self.table)

    def follow(self, chain: EntryReader) -> bool:
        """Folds entries that were appended meanwhile; whether there were any. It stops at damage, which the next check reports."""
        before, last_hash = self.last, self.last_hash if self.last else chain.genesis
        if last_hash is None:
            return False
        with contextlib.suppress(DamageError):
            for entries in chain.entries(before, last_hash):
                with self.table.batch() as batch:
                    for entry in entries:
                        fold(entry, batch)
                self.last, self.last_hash = entries[-1].n, entries[-1].hash
        return self.last > before


def check_log(backend: Backend, *, prefix: str, uuid: bytes | None, fill: Mapping[int, Sequence[Entry]] | None = None) -> LogCheck:
    """Reads the log under `prefix`. Raises `BackendUnavailableError` if the backend does not answer.

    Without `uuid`, entry 1 is not compared with it. `fill`: entries to fold instead of lost ones, and after the last one, by number.
    """
    return _LogChecker(backend, prefix, uuid, fill or {}).run()


class _LogChecker:
    def __init__(self, backend: Backend, prefix: str, uuid: bytes | None, fill: Mapping[int, Sequence[Entry]]) -> None:
        self._backend = backend
        self._fill = fill
        self._prefix = prefix
        self._chain = EntryReader(backend, uuid=uuid or bytes(16), prefix=prefix)
        self._check = LogCheck()
        self._prev: Digest | None = self._chain.genesis if uuid is not None else None
        """The hash of the previous entry, if known."""
        self._unverified: Checkpoint | None = None
        """A checkpoint whose entry is lost: the next entry must name its hash."""

    def run(self) -> LogCheck:
        checkpoints = self._list_checkpoints()  # before the entries, so that each has its own
        for n, entry in self._entries(self._list_entries()):
            behind = self._check.last + 1
            if n > behind:
                self._lose(range(behind, n), checkpoints)
            if isinstance(entry, LogProblem):
                self._check.problems.append(entry)
                self._lose(range(n, n + 1), checkpoints, reported=True)
            else:
                self._take(entry)
                if n in checkpoints:
                    checkpoints.discard(n)
                    self._compare(n)
        if self._unverified is not None:  # no later entry contradicts it
            self._adopt(self._unverified)
        for n in sorted(checkpoints):
            checkpoint = self._load_checkpoint(n)
            if checkpoint is not None:
                self._lose(range(self._check.last + 1, n + 1), set())
                self._adopt(checkpoint)
                self._check.last, self._check.last_hash = n, checkpoint.entry_hash
        self._fold_instead(range(self._check.last + 1, MAX_NUMBER))
        return self._check

    def _list_entries(self) -> list[int]:
        pattern = re.compile(rf"{re.escape(self._prefix)}/([0-9]{{17}})/(\1[0-9]{{3}})")
        numbers = []
        for info in self._backend.list(f"{self._prefix}/"):
            match = pattern.fullmatch(info.name)
            if match and 0 < int(match[2]) <= MAX_NUMBER:
                numbers.append(int(match[2]))
            else:
                self._check.problems.append(_foreign_object(info.name, "log entry"))
        return sorted(numbers)

    def _entries(self, listed: list[int]) -> Iterator[tuple[int, Entry | LogProblem]]:
        """The existing entries, in order; for a damaged one, its problem."""
        pending = iter(self._with_unlisted(listed))
        while window := list(islice(pending, _WINDOW)):
            found: dict[int, Entry | LogProblem | None] = {}

            def read(n: int, found: dict[int, Entry | LogProblem | None] = found) -> None:
                found[n] = self._read(n)

            for_each(window, read, 1 if self._backend.is_local else _READERS)
            for n in window:
                entry = found[n]
                if entry is not None:
                    yield n, entry
        last = max(listed, default=0)
        while isinstance(newer := self._read(last + 1), Entry):  # listings of network folders and of some servers are old
            last += 1
            yield last, newer

    def _read(self, n: int) -> Entry | LogProblem | None:
        try:
            return self._chain.read(n)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            return LogProblem(kind_of(exc), self._chain.name(n), str(exc))

    @staticmethod
    def _with_unlisted(listed: list[int]) -> Iterator[int]:
        behind = 1
        for n in listed:
            yield from range(behind, n) if n - behind <= _UNLISTED_TRIES else ()
            yield n
            behind = n + 1

    def _take(self, entry: Entry) -> None:
        check = self._check
        if self._unverified is not None and entry.prev == self._unverified.entry_hash:
            self._adopt(self._unverified)
        elif self._prev is not None and entry.prev != self._prev:
            exc = chain_break(self._chain.name(entry.n))
            self._note("broken_log", self._chain.name(entry.n), str(exc))
            check.lost.append(range(entry.n, entry.n))
        self._unverified = None
        with check.table.batch() as batch:
            fold(entry, batch)
        self._prev = check.last_hash = entry.hash
        check.last = entry.n
        check.entries += 1

    def _lose(self, numbers: range, checkpoints: set[int], *, reported: bool = False) -> None:
        """Notes missing or damaged entries; a checkpoint among them may have their effect."""
        check = self._check
        first, last = self._chain.name(numbers[0]), self._chain.name(numbers[-1])
        if not reported:
            these = f"log entry {first} is" if len(numbers) == 1 else f"log entries {first} to {last} are"
            advice = f"{_FROM_COPY}; without one, `tsck salvage` makes a new log from what is left"
            self._check.problems.append(LogProblem("broken_log", first, f"{these} missing", advice=advice))
        check.lost.append(numbers)
        self._fold_instead(numbers)
        self._prev = check.last_hash = None
        check.last = numbers[-1]
        self._unverified = None
        for n in sorted(n for n in checkpoints if n in numbers):
            checkpoints.discard(n)
            checkpoint = self._load_checkpoint(n)
            self._unverified = checkpoint if n == numbers[-1] else None

    def _fold_instead(self, numbers: range) -> None:
        for n in sorted(n for n in self._fill if n in numbers):
            with self._check.table.batch() as batch:
                for entry in self._fill[n]:
                    fold(entry, batch)

    def _list_checkpoints(self) -> set[int]:
        listed = set()
        for info in self._backend.list(checkpoint_folder(self._prefix)):
            number = checkpoint_number(info.name)
            if number and number <= MAX_NUMBER and info.name == checkpoint_name(self._prefix, number):
                listed.add(number)
            else:
                self._check.problems.append(_foreign_object(info.name, "checkpoint"))
        return listed

    def _load_checkpoint(self, n: int) -> Checkpoint | None:
        name = checkpoint_name(self._prefix, n)
        try:
            checkpoint = decode_checkpoint(self._backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except (MissingObjectError, FormatVersionError):  # of a build with other operations: ignored, as in `Log`
            return None
        except StoreError as exc:
            require_reachable(self._backend, exc)
            self._note(kind_of(exc), name, f"{exc}; {_DERIVED}" if isinstance(exc, DamageError) else str(exc), is_repairable=True)
            return None
        if checkpoint.n != n:
            self._note("corrupt_object", name, f"it is the checkpoint of entry {checkpoint.n}; {_DERIVED}", is_repairable=True)
            return None
        self._check.vouched[n] = checkpoint.entry_hash
        return checkpoint

    def _compare(self, n: int) -> None:
        """Compares the checkpoint of the entry that was just folded with the fold."""
        check, name = self._check, checkpoint_name(self._prefix, n)
        before = len(check.problems)
        checkpoint = self._load_checkpoint(n)
        if check.last_hash is None or (checkpoint is None and len(check.problems) == before):
            return
        if checkpoint is not None and checkpoint.entry_hash != check.last_hash:
            self._note("corrupt_object", name, f"it was not made from this log; {_DERIVED}", is_repairable=True)
        elif checkpoint is not None and check.lost:
            self._adopt(checkpoint)
        if check.lost:
            return
        with check.table.batch() as batch:
            expected = dump(batch, n, check.last_hash)
        if expected is None:
            return
        if len(check.problems) == before and decode_checkpoint(expected, name) != checkpoint:
            self._note("corrupt_object", name, f"it differs from what the log folds to; {_DERIVED}", is_repairable=True)
        if len(check.problems) > before:
            check.checkpoints[name] = expected

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """Takes the ref table of a checkpoint: no operation up to there is lost."""
        with self._check.table.batch() as batch:
            load(batch, checkpoint)
        self._check.lost.clear()

    def _note(self, kind: str, object_name: str, message: str, *, is_repairable: bool = False) -> None:
        self._check.problems.append(LogProblem(kind, object_name, message, is_repairable=is_repairable))


def _foreign_object(name: str, kind: str) -> LogProblem:
    return LogProblem("foreign_object", name, f"it is not a {kind}, and nothing reads it: delete it if nobody knows it", is_error=False)


def host_head(log: Log) -> Head | None:
    """The last entry in this host's cache; None also if the cache is unreadable, which says nothing of the log."""
    try:
        return log.view().head()
    except StoreError:
        return None


def heads_seen(log: Log) -> frozenset[Head]:
    """The last entries that this host's cache has, and that this user is known to have seen."""
    return frozenset(head for head in (host_head(log), log.seen()) if head is not None)


def host_saw_more(check: LogCheck, head: Head, chain: EntryReader, elsewhere: str = "") -> LogProblem | None:
    """The problem if this host's cache, or this user, has seen the entry `head`, and the log has lost it.

    `elsewhere`: which other store has that entry; then it is no damage.
    """
    if head.n == check.last and check.last_hash in (None, head.hash):
        return None
    if head.n < check.last:
        try:
            there = chain.read(head.n)
        except StoreError:
            return None
        if there is None or there.hash == head.hash:  # a gap before later entries is reported anyway
            return None
    name = chain.name(head.n)
    if elsewhere:
        message = f"this store's log is another one from here on than that of the store {elsewhere}: one is a copy of the other's files; "
        message += "if both are used, give this one an identity of its own with `tsck adopt`, else accept its log with `tsck accept-log`"
        return LogProblem("log_changed", name, message, is_error=False)
    advice = (
        "if the store was restored from a copy, accept that with `tsck accept-log`; if not, entries were destroyed or replaced: "
        f"{_FROM_COPY}; without one, `tsck salvage` makes a new log with every complete snapshot"
    )
    return LogProblem("broken_log", name, f"this host read log entry {name} earlier, and it is gone now", advice=advice)


def cache_problem(check: LogCheck, log: Log) -> LogProblem | None:
    """The problem if this host's cache differs from the log at the same entry."""
    if check.last_hash is None or any(problem.kind == BrokenLogError.kind for problem in check.problems):
        return None
    view = log.view()
    if view.head() != Head(check.last, check.last_hash):
        return None
    if all(one == other for one, other in zip_longest(view.items(), check.view.items())):
        return None
    message = f"this host's cache differs from the log at entry {check.last}: `tsck fsck --repair` makes it again"
    return LogProblem("damaged_cache", CACHE_NAME, message, is_repairable=True)


class _FrozenLog(Log):
    """A log that stays at its fold."""

    def sync(self, known: Head | None = None, *, next_first: bool = False) -> Head:
        return self.view().head() or Head(0, self.chain.genesis)


def read_only_engine(engine: Engine, check: LogCheck) -> Engine:
    """An engine over the same backend, with the ref table of `check`."""
    config = engine.config
    log = _FrozenLog(
        engine.backend,
        check.table,
        uuid=uuid.UUID(config.uuid).bytes,
        prefix=config.log,
        clock=engine.clock,
        actor="fsck",
        new_id=engine.new_id,
    )
    engine.placed.add_locations(check.view.locations())
    return Engine(
        backend=engine.backend,
        config=config,
        table=check.table,
        log=log,
        index=BlockIndex(check.table),
        clock=engine.clock,
        new_id=engine.new_id,
        placed=engine.placed,
    )
