"""The commit protocol: `Log.sync` follows the log, `Log.append` adds the next entry. DESIGN section 5; FORMAT.md, "Commits".

The log is a total order, and its only primitive is create-if-absent of entry n + 1. The ref table is a cache of its fold;
whatever happens to the cache costs time only. Knows nothing of packs, parts or tensors.
"""

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.envelope import MAX_OBJECT_BYTES
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, DamageError, FormatVersionError, StoreError, UndecidedError
from tensorstore_ck.ids import Clock, IdSource, Ulid
from tensorstore_ck.locks import ProcessLock
from tensorstore_ck.log import checkpoint
from tensorstore_ck.log.chain import Chain
from tensorstore_ck.log.checkpoint import Checkpoint, Tail
from tensorstore_ck.log.entry import Entry, seal_entry
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.ops import Op
from tensorstore_ck.log.reftable import RefTable
from tensorstore_ck.log.rows import Head
from tensorstore_ck.table import Batch, MemoryTable, Table, TableDamagedError

Build = Callable[[RefTable], Sequence[Op]]
"""Checks its preconditions at a view of the log's head, raising `ConflictError` and the like, and returns the operations."""

_CACHE_TRIES: Final = 4
_CHECKPOINT_TRIES: Final = 4
_MAX_CONFLICT_DELAY: Final = 1.0
RESEND_DELAYS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 10, 10, 10, 10, 10, 10, 10, 10)
"""Seconds between tries to settle an entry: about 100 in all."""


class _EmptiedError(Exception):
    """Another process of this host emptied the cache."""


class LogChangedWarning(UserWarning):
    """The log does not continue what this host read earlier: the store was restored from a copy, or entries were destroyed."""


class Appended(NamedTuple):
    """The outcome of an `append`."""

    n: int
    """The entry's number; when there was nothing to append, the head's."""
    ops: tuple[Op, ...]


class Log:
    """One store's log, and its fold in a table. Thread-safe."""

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
        on_swept: Callable[[Batch, Sequence[Ulid]], None] = lambda batch, packs: None,
        shared: bool = True,
        read_only: bool = False,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`shared` is false where `create` may overwrite, and one process alone writes. `read_only`: no checkpoints are written.

        `on_swept` is told the packs that an entry sweeps, in the batch that folds it: what is kept beside the fold must
        forget them at that very moment.
        """
        self.chain = Chain(backend, uuid=uuid, prefix=prefix)
        self._backend = backend
        self._table = table
        self._prefix = prefix
        self._clock = clock
        self._actor = actor
        self._new_id = new_id
        self._on_swept = on_swept
        self._shared = shared
        self._read_only = read_only
        self._sleep = sleep
        self._jitter = jitter
        self._lock = ProcessLock()
        self._verified: Head | None = None
        self._durable_n = 0
        self._undecided: UndecidedError | None = None
        self._next_checkpoint_try = 0

    # --- read ---------------------------------------------------------------------------------------------------------

    def view(self) -> RefTable:
        """The ref table as of the last `sync` or `append`; later entries show up when another process of this host folds them."""
        return RefTable(self._table)

    def sync(self) -> Head:
        """Folds every entry that was acknowledged before this call, and returns the head.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
        """
        with self._lock:
            for _ in range(_CACHE_TRIES):
                try:
                    return self._sync()
                except _EmptiedError:
                    continue
                except (TableDamagedError, CorruptObjectError):  # of the cache: damage in the log is a BrokenLogError
                    self._empty()
            self._table = MemoryTable()
            return self._sync()

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

        `build` is called anew, at a newer head, whenever another writer was faster. Without operations nothing is added.

        Args:
            build: Makes the operations.
            write_id: Names the entry of the first try; a write id names one exact content, so each further one draws its own.

        Raises:
            UndecidedError: the backend did not say whether the entry is there; the log will tell.
            FormatVersionError: the log holds a critical operation that this build does not know.
        """
        with self._lock:
            for attempt in itertools.count():
                appended = self._append_once(build, write_id)
                if appended is not None:
                    return appended
                write_id = None
                self._sleep(self._jitter() * min(_MAX_CONFLICT_DELAY, 0.005 * 2 ** min(attempt, 10)))
        raise AssertionError("unreachable")

    def _append_once(self, build: Build, write_id: bytes | None) -> Appended | None:
        """Fold to the head, check and build, create the next entry; None when another writer was faster."""
        if self._undecided is not None and not self._shared:
            raise self._undecided  # its late arrival would overwrite what came after it
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
        return Appended(entry.n, entry.ops)

    def _build_at(self, head: Head, build: Build) -> Sequence[Op] | None:
        """The operations at `head`; None when other processes of this host moved the table meanwhile, and `build` saw a mixture."""
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
        sent, trouble = False, "it did not say what came of it"
        for delay in RESEND_DELAYS:
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
        """An entry found by reading may not have outlived a power failure yet; what builds on it must not outlive it."""
        if n > self._durable_n:
            self._backend.sync_folders(self.chain.name(n))
            self._durable_n = n

    def _remember(self, entry: Entry) -> None:
        with suppress(StoreError, _EmptiedError):  # it is in the log: whatever fails now, the next sync makes good
            self._fold([entry])
            self._verified = Head(entry.n, entry.hash)
            self._write_checkpoint_if_due(entry.n)

    def _refuse_unknown_operations(self) -> None:
        stop = self.view().stop()
        if stop is not None:
            raise FormatVersionError(
                f"log entry {self.chain.name(stop.n)} holds the operation {stop.op!r}, which this build does not know: "
                "it may read this store, not write to it; upgrade tensorstore_ck",
                object_id=self.chain.name(stop.n),
            )

    # --- follow -------------------------------------------------------------------------------------------------------

    def _sync(self) -> Head:
        cached, at_least = self.view().head(), 0
        while cached is None or not self._is_of_this_log(cached):
            if self._forget(cached):
                cached = self._start_anew()
                at_least = self.chain.last_listed(cached.n)
                break
            cached = self.view().head()  # another process of this host was faster
        head = cached
        for entries in self.chain.entries(head.n, head.hash, at_least=at_least):
            self._fold(entries)
            head = Head(entries[-1].n, entries[-1].hash)
        self._verified = head
        self._write_checkpoint_if_due(head.n)
        return head

    def _is_of_this_log(self, head: Head) -> bool:
        """Whether the table's head is an entry of this log."""
        if head == self._verified:
            return True
        entry = self.chain.read(head.n)
        if entry is not None and entry.hash == head.hash:
            return True
        warnings.warn(
            LogChangedWarning(
                f"{self._backend.url}: log entry {self.chain.name(head.n)} is not what this host read earlier. If the store was not "
                "restored from a copy, entries were destroyed: see `tsck fsck`"
            ),
            stacklevel=2,
        )
        return False

    def _start_anew(self) -> Head:
        """Fills the empty table from the newest checkpoint that fits the log."""
        for n, size_bytes in itertools.islice(self._listed_checkpoints(), _CHECKPOINT_TRIES):
            found = self._read_checkpoint(n)
            if found is not None:
                with self._table.batch() as batch:
                    if RefTable(batch).head() is None:  # else another process of this host was faster
                        checkpoint.load(batch, found)
                        Tail(n, size_bytes, 0, 0).write(batch)
                return Head(n, found.entry_hash)
        return Head(0, self.chain.genesis)

    def _read_checkpoint(self, n: int) -> Checkpoint | None:
        """The checkpoint at `n`, when it can be used and was made from this log."""
        name = checkpoint.checkpoint_name(self._prefix, n)
        try:
            found = checkpoint.decode_checkpoint(self._backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except (DamageError, FormatVersionError):
            return None
        entry = self.chain.read(n)
        if entry is None:
            raise self.chain.broken(n, f"is missing, though {name} was made from it")
        return found if found.n == n and found.entry_hash == entry.hash else None

    def _fold(self, entries: Sequence[Entry]) -> None:
        with self._table.batch() as batch:
            head = RefTable(batch).head() or Head(0, self.chain.genesis)
            tail = Tail.read(batch)
            for entry in entries:
                if entry.n <= head.n:
                    continue  # another process of this host was faster
                if entry.n != head.n + 1 or entry.prev != head.hash:
                    raise _EmptiedError
                swept = fold(entry, batch)
                if swept:
                    self._on_swept(batch, swept)
                head = Head(entry.n, entry.hash)
                tail = tail._replace(entries=tail.entries + 1, entry_bytes=tail.entry_bytes + entry.size_bytes)
            tail.write(batch)

    def _is_at(self, head: Head) -> bool:
        try:
            return (self.view().head() or Head(0, self.chain.genesis)) == head
        except TableDamagedError:
            return False

    def _forget(self, head: Head | None) -> bool:
        """Empties the whole table: the block index in it is only as good as the fold that it was kept beside.

        Unless its head is no longer `head`, which cannot be used: then another process has begun anew. Whether it did.
        """
        with self._table.batch() as batch:
            if RefTable(batch).head() != head:
                return False
            _clear(batch)
        return True

    def _empty(self) -> None:
        """Empties a damaged table."""
        with suppress(TableDamagedError), self._table.batch() as batch:
            _clear(batch)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _write_checkpoint_if_due(self, n: int) -> None:
        if self._read_only or n < self._next_checkpoint_try:
            return
        with suppress(StoreError):  # a checkpoint saves time: nothing is lost without it
            tail = Tail.read(self._table)
            if tail.is_due():
                self._next_checkpoint_try = n + checkpoint.MIN_TAIL_ENTRIES
                tail = self._written_by_others(tail, n)
                if tail.is_due():
                    tail = self._write_checkpoint() or tail
                with self._table.batch() as batch:
                    tail.write(batch)

    def _written_by_others(self, tail: Tail, n: int) -> Tail:
        """The tail since the newest checkpoint in the store."""
        for other, size_bytes in self._listed_checkpoints():
            if tail.checkpoint_n < other <= n:
                entries = n - other
                return Tail(other, size_bytes, entries, tail.entry_bytes * entries // max(tail.entries, 1))
        return tail

    def _write_checkpoint(self) -> Tail | None:
        with self._table.batch() as batch:  # so that nobody folds on meanwhile
            head = RefTable(batch).head()
            sealed = checkpoint.dump(batch, head.n, head.hash) if head is not None else None
        if head is None or sealed is None:
            return None
        self._make_durable(head.n)  # a checkpoint must not outlive its entry
        self._backend.create(checkpoint.checkpoint_name(self._prefix, head.n), sealed)
        return Tail(head.n, len(sealed), 0, 0)

    def _listed_checkpoints(self) -> Iterator[tuple[int, int]]:
        """(entry number, bytes), newest first."""
        listed = self._backend.list(checkpoint.checkpoint_folder(self._prefix))
        numbered = [(checkpoint.checkpoint_number(info.name), info.size_bytes) for info in listed]
        yield from sorted(((n, size) for n, size in numbered if n), reverse=True)


def _clear(batch: Batch) -> None:
    batch.clear(b"")
    Tail(0, 0, 0, 0).write(batch)
