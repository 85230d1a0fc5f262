"""The commit protocol: `Log.sync` follows the log, `Log.append` adds the next entry.

FORMAT.md, "Commits", and docs/decisions/001-one-log-and-create-if-absent.md say why it is correct.
The log is a total order, and its only primitive is create-if-absent of entry n + 1. The ref table is a cache of its fold;
losing the cache costs time only. Knows nothing of packs, parts or tensors.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.common.ids import Clock, IdSource, Ulid
from tensorstore_ck.common.retry import JITTER, next_delay
from tensorstore_ck.common.threads import ProcessLock, shielded
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, DamageError, FormatVersionError, StoreError, UndecidedError
from tensorstore_ck.log.cache import Batch, FailoverTable, Table, TableBusyError, TableDamagedError, TableError
from tensorstore_ck.log.entry import Entry, seal_entry
from tensorstore_ck.log.entry_reader import EntryReader
from tensorstore_ck.log.follow import EmptiedError, Follower, empty
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.ref_table import RefTable, SnapshotInfo
from tensorstore_ck.log.table_rows import Head
from tensorstore_ck.log.watermark import Watermark

Build = Callable[[RefTable], Sequence[Op]]
"""Checks its preconditions at a view of the log's head, raising `ConflictError` and the like, and returns the operations."""

_CACHE_TRIES: Final = 4
_REMEMBERED_WRITES: Final = 1000
_FIRST_CONFLICT_DELAY: Final = 0.005
_MAX_CONFLICT_DELAY: Final = 1.0
RESEND_DELAYS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 10, 10, 10, 10, 10, 10, 10, 10)
"""Seconds between tries to find out whether an entry was written: about 100 in all."""
_RESEND_SECONDS: Final = 120.0
"""No try begins later: each may itself wait long for a server that hangs."""


class Appended(NamedTuple):
    """The outcome of an `append`."""

    n: int
    """The entry's number; the head's if nothing was appended."""
    ops: tuple[Op, ...]
    time_ns: int = 0
    """The entry's time; 0 if nothing was appended."""

    def published(self, snapshot: Ulid) -> SnapshotInfo | None:
        """The snapshot, if this entry publishes it: from the log, independent of the cache."""
        for op in self.ops:
            if op.name == "put" and op.fields["snapshot"] == snapshot:
                return SnapshotInfo.of_op(op.fields, self.n, self.time_ns)
        return None


class Log:
    """One store's log, and its fold in a table. Thread-safe. Ctrl-C interrupts no change of either: see `shielded`."""

    def __init__(
        self,
        backend: Backend,
        table: Table,
        *,
        uuid: bytes,
        prefix: str = "log",
        clock: Clock,
        actor: str,
        new_id: IdSource,
        watermark: Watermark | None = None,
        on_swept: Callable[[Batch, Sequence[Ulid]], None] = lambda batch, packs: None,
        shared: bool = True,
        read_only: bool = False,
        may_begin: bool = False,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = JITTER,
    ) -> None:
        """`shared` is false if `create` may overwrite, and only one process writes. `read_only`: no checkpoints are written.

        `may_begin`: it may begin although the store has another log, as salvage's does. `watermark`: what was seen of this log; by default
        only what this object sees itself. `on_swept` is called with the packs that an entry sweeps, in the batch that folds it: the block
        index must drop them in that batch.
        """
        self.chain = EntryReader(backend, uuid=uuid, prefix=prefix)
        self._watermark = watermark or Watermark(url=backend.url)
        self._follower = Follower(backend, self.chain, self._watermark, prefix=prefix, on_swept=on_swept, may_begin=may_begin)
        self.table = FailoverTable(table, self._fill)
        """The host's cache, or the table in memory that takes its place."""
        self._view = RefTable(self.table)
        self._backend = backend
        self._clock = clock
        self._actor = actor
        self._new_id = new_id
        self._shared = shared
        self._read_only = read_only
        self._sleep = sleep
        self._jitter = jitter
        self._lock = ProcessLock()
        self._durable_n = 0
        self._undecided: UndecidedError | None = None
        self._written: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED_WRITES)
        """The numbers and write ids of the entries that this object tried to append."""

    # --- read ---------------------------------------------------------------------------------------------------------

    def view(self) -> RefTable:
        """The ref table as of the last `sync` or `append`; later entries show up when another process of this host folds them."""
        return self._view

    def sync(self) -> Head:
        """Folds every entry that was acknowledged before this call, and returns the head.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
            LogChangedError: the log went back or was forked, and the store was opened with ``rollback="error"``.
        """

        def sync() -> Head:
            with self._lock.here:
                self.table.return_to_disk()
                for _ in range(_CACHE_TRIES):
                    with suppress(EmptiedError, TableError):
                        try:
                            return self._sync()
                        except CorruptObjectError:  # of the cache: damage in the log is a BrokenLogError
                            with self.table.batch() as batch:
                                empty(batch)
                self.table.use_memory()
                return self._sync()

        return shielded(sync)

    def newest_view(self) -> RefTable:
        """The fold of the log after a `sync`."""
        self.sync()
        return self.view()

    def accept(self) -> tuple[Head, Head | None]:
        """Accepts a log that went back or was forked, on a user's request. Returns its head, and the entry that it had lost, if any.

        Raises:
            InvalidOptionError: the state folder cannot be written.
        """

        def accept() -> tuple[Head, Head | None]:
            with self._lock.here:
                head = self.sync()
                return head, self._watermark.accept(head, self._clock())

        return shielded(accept)

    def seen(self) -> Head | None:
        """The highest entry that this user is known to have seen; the log may not hold it any more."""
        return self._watermark.last_seen()

    def verify(self) -> None:
        """As `sync`, and checks that the table is the fold of the log itself, not of a wrong checkpoint: before gc frees anything.

        Raises:
            BrokenLogError: the log is damaged, or this host's first checkpoint was not made from it.
        """

        def verify() -> None:
            with self._lock.here:
                for _ in range(_CACHE_TRIES):
                    with suppress(EmptiedError, TableError):
                        self.sync()
                        return self._follower.verify(self.table)
                raise BackendUnavailableError("the cache of this host could not be compared with the log: try again", object_id="cache")

        shielded(verify)

    @property
    def is_changed(self) -> bool:
        """Whether the log went back, was forked or replaced since this user saw it, as of the last `sync`, and nobody has accepted that."""
        return self._watermark.is_changed

    def close(self) -> None:
        """Saves how far the log was seen."""
        shielded(self._watermark.close, finish=True)

    def _fill(self, table: Table) -> None:
        try:
            self._follower.follow(table)
        except EmptiedError as exc:
            raise TableBusyError("another process empties the cache", object_id="cache") from exc
        except CorruptObjectError as exc:  # of the cache: see `sync`
            raise TableDamagedError(str(exc), object_id="cache") from exc

    def _sync(self) -> Head:
        head = self._follower.follow(self.table)
        self._write_checkpoint_if_due(head.n)
        return head

    def _write_checkpoint_if_due(self, n: int) -> None:
        if not self._read_only:
            self._follower.write_checkpoint_if_due(self.table, n, self._make_durable)

    def entries(self, start: int = 1) -> Iterator[Entry]:
        """The entries from `start` on, each checked against the one before; reads no cache.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
        """
        before = self.chain.read(start - 1) if start > 1 else None
        if start > 1 and before is None:
            return
        prev = self.chain.genesis if before is None else before.hash
        for batch in self.chain.entries(start - 1, prev):
            yield from batch

    # --- append -------------------------------------------------------------------------------------------------------

    def append(self, build: Build, *, write_id: bytes | None = None) -> Appended:
        """Adds one entry with the operations that `build` makes at the head; durable and visible to all when it returns.

        `build` is called again, at a newer head, whenever another writer was faster. Without operations nothing is added.

        Args:
            build: Makes the operations.
            write_id: Names the entry of the first try; a write id names one exact content, so each further try draws its own.

        Raises:
            UndecidedError: the backend did not say whether the entry is there; the log will show it.
            FormatVersionError: the log holds a critical operation that this build does not know.
        """

        def append(write_id: bytes | None) -> Appended:
            with self._lock.here:
                for attempt in itertools.count():
                    appended = self._append_once(build, write_id)
                    if appended is not None:
                        return appended
                    write_id = None
                    self._sleep(next_delay(attempt, _FIRST_CONFLICT_DELAY, _MAX_CONFLICT_DELAY, jitter=self._jitter))
            raise AssertionError("unreachable")

        return shielded(lambda: append(write_id))

    def wrote(self, n: int) -> bool:
        """Whether this object appended entry `n`, even if it never learned that: it was interrupted, or the answer was lost.

        Raises:
            StoreError: the entry cannot be read.
        """
        tried = [write_id for number, write_id in list(self._written) if number == n]
        entry = self.chain.read(n) if tried else None
        return entry is not None and entry.write_id in tried

    def published(self, appended: Appended, snapshot: Ulid) -> SnapshotInfo | None:
        """The snapshot that `appended` should publish; None if the log aborted it before. The log decides that, not the cache.

        Raises:
            StoreError: an earlier entry decided it, and the log could not be read.
        """
        found = appended.published(snapshot)
        try:
            return self.view().snapshot(snapshot) or found  # with earlier notes on its root
        except StoreError:
            if found is None:
                raise
            return found

    def _append_once(self, build: Build, write_id: bytes | None) -> Appended | None:
        """Fold to the head, check and build, create the next entry; None when another writer was faster."""
        if self._undecided is not None and not self._shared:
            raise self._undecided  # arriving late, it would overwrite a later entry
        head = self.sync()
        self._refuse_unknown_operations()
        ops = self._build_at(head, build)
        if ops is None:
            return None
        if not ops:
            return Appended(head.n, ())
        sealed, entry = seal_entry(
            head.n + 1, head.hash, ops, write_id=write_id or self._new_id(), time_ns=self._clock(), actor=self._actor
        )
        if not self._create(sealed, entry):
            return None
        self._remember(entry)
        return Appended(entry.n, entry.ops, entry.time_ns)

    def _build_at(self, head: Head, build: Build) -> Sequence[Op] | None:
        """The operations at `head`; None if other processes of this host changed the table while `build` read it."""
        try:
            ops = build(self.view())
        except StoreError:
            if self._is_at(head):
                raise
            return None
        return ops if self._is_at(head) else None

    def _create(self, sealed: bytes, entry: Entry) -> bool:
        """Creates the entry; whether it is ours that has the number. Sends the same bytes until the number is taken.

        That an entry is absent proves nothing once it was sent: the request may still be under way.
        """
        name = self.chain.name(entry.n)
        self._make_durable(entry.n - 1)
        self._written.append((entry.n, entry.write_id))
        sent, trouble, began_ns = False, "it did not say what came of it", self._clock()
        for delay in RESEND_DELAYS:
            if self._clock() - began_ns > _RESEND_SECONDS * 1e9:
                break
            try:
                outcome = self._backend.create(name, sealed)
            except BackendUnavailableError as exc:
                outcome, trouble = Created.UNKNOWN, str(exc)
            except StoreError as exc:
                if not sent:
                    raise  # refused, and nothing was sent before
                outcome, trouble = Created.UNKNOWN, str(exc)
            if outcome is Created.CREATED:
                self._durable_n = entry.n
                return True
            sent = True
            try:
                winner = self.chain.read(entry.n)
                if winner is not None and winner.write_id != entry.write_id:
                    return False
                if winner is not None:
                    self._make_durable(entry.n)
                    return True
            except DamageError:
                raise
            except StoreError as exc:
                trouble = str(exc)
            self._sleep(delay)
        self._undecided = UndecidedError(
            f"log entry {name} may or may not have been written ({trouble}): open the store again when the backend answers; "
            f"the operation happened if that entry has the write id {entry.write_id.hex()}",
            object_id=entry.write_id.hex(),
        )
        raise self._undecided

    def _make_durable(self, n: int) -> None:
        """An entry found by reading may not be durable yet; later entries must not become durable before it."""
        if n > self._durable_n:
            self._backend.sync_folders(self.chain.name(n))
            self._durable_n = n

    def _remember(self, entry: Entry) -> None:
        """Folds an appended entry. Errors of the cache, and warnings that are errors, do not change that it was appended."""
        with suppress(StoreError, Warning):
            self._watermark.appended(Head(entry.n, entry.hash))
            try:
                self._follower.fold_own(self.table, entry)
            except (EmptiedError, TableError):
                self.sync()
            self._write_checkpoint_if_due(entry.n)

    def _refuse_unknown_operations(self) -> None:
        stop = self.view().stop()
        if stop is not None:
            raise FormatVersionError(
                f"log entry {self.chain.name(stop.n)} has the operation {stop.op!r}, which this build does not know: "
                "it may read this store, not write to it; upgrade tensorstore_ck",
                object_id=self.chain.name(stop.n),
            )

    def _is_at(self, head: Head) -> bool:
        return (self.view().head() or Head(0, self.chain.genesis)) == head
