"""The commit protocol: `Log.sync` follows the log, `Log.append` adds the next entry.

FORMAT.md, "Commits", and docs/decisions/001-one-log-and-create-if-absent.md say why it is correct.
The log is a total order, and its only primitive is create-if-absent of entry n + 1. The ref table is a cache of its fold;
losing the cache costs time only. Knows nothing of packs, parts or tensors.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Clock, IdSource, Ulid
from tensorstore_ck.common.retry import JITTER
from tensorstore_ck.common.threads import ProcessLock, shielded
from tensorstore_ck.errors import BackendUnavailableError, BrokenLogError, CorruptObjectError, DamageError, StoreError
from tensorstore_ck.log.cache import Batch, FailoverTable, Reader, Table, TableBusyError, TableDamagedError, TableError
from tensorstore_ck.log.entry import Appended, Entry, EntryReader, EntryWriter, race_delay, seal_entry
from tensorstore_ck.log.field_checks import PREFIX
from tensorstore_ck.log.follow import Also, EmptiedError, Follower
from tensorstore_ck.log.lost_log import lost_log, sign_of_lost_log, warn_of_broken_log
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.ref_table import RefTable, RowsAtHead, SnapshotRow
from tensorstore_ck.log.table_rows import Head
from tensorstore_ck.log.watermark import Watermark

T = TypeVar("T")

Build = Callable[[RefTable], Sequence[Op]]
"""Checks its preconditions at a view of the log's head, raising `ConflictError` and the like, and returns the operations."""

_logger: Final = logging.getLogger("tensorstore_ck.log")
_CACHE_TRIES: Final = 4


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
        require_store: Callable[[], object] = lambda: None,
        sign: Callable[[RefTable, Sequence[Op]], Iterable[Op]] | None = None,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = JITTER,
    ) -> None:
        """`shared` is false if `create` may overwrite, and only one process writes. `read_only`: no checkpoints are written.

        `require_store` raises if the location does not hold this store any more; it is called before an entry is created, and if the log is
        empty. `may_begin`: whether the log may be empty although the store has another one, as in salvage. `watermark`: what was seen of
        this log; by default only what this object sees itself. `sign` returns the signatures that belong to an entry's operations.
        `on_swept` is called with the packs that an entry sweeps, in the batch that folds it: the block index must drop them in that batch.
        """
        self.chain = EntryReader(backend, uuid=uuid, prefix=prefix)
        self._genesis = Head(0, self.chain.genesis)
        self._watermark = watermark or Watermark(url=backend.url)
        self._follower = Follower(
            backend, self.chain, self._watermark, prefix=prefix, on_swept=on_swept, may_begin=may_begin, require_store=require_store
        )
        self.table = FailoverTable(table, self._fill)
        """The host's cache, or the table in memory that replaces it."""
        self._followed_n = 0
        """The head of the last `sync` or `append`. A view that is older is not used."""
        self._kept: RowsAtHead | None = None
        """Rows that views at the same head share."""
        self._readable: RefTable | None = None  # of a broken log, what this host's cache lacks: nothing may be written after it
        self._is_strict = False
        """Whether a table that was filled from a checkpoint is compared with the log before it is used: see `verify`."""
        self._backend = backend
        self._may_begin = may_begin
        self._prefix = prefix
        self._clock = clock
        self._actor = actor
        self._new_id = new_id
        self._writer = EntryWriter(backend, self.chain, clock=clock, sleep=sleep, require_store=require_store, shared=shared)
        self._make_durable = None if read_only else self._writer.make_durable
        self._shared = shared
        self._sign = sign
        self._sleep = sleep
        self._jitter = jitter
        self._lock = ProcessLock()

    def view(self) -> RefTable:
        """A view of the ref table at one entry, that of the last `sync` or `append` or a later one, which does not change.

        Reads the log only if another process of this host has emptied the table.

        Raises:
            StoreError: the table was emptied, and the log cannot be read.
        """
        if self._readable is not None:
            return self._readable
        for _ in range(_CACHE_TRIES):
            with suppress(CorruptObjectError):  # of the cache: `sync` fills it again
                view = self._take_view()
                if (view.head() or self._genesis).n >= self._followed_n:
                    if not (self._is_strict and self._follower.is_unverified(self.table)):
                        return view
                    self.verify()
            self.sync()

        def fold() -> RefTable:
            with self._lock.here:
                self.table.leave_disk(TableError("its contents are invalid", object_id="cache"))
                self._sync()
                return self._take_view()

        return shielded(fold)

    def sync(self, known: Head | None = None, *, next_first: bool = False) -> Head:
        """Folds every entry that was acknowledged before this call, and returns the head.

        `known`: a head that the table has had; by default it is read. `next_first`: see `readable_view`.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
            LogChangedError: the log went back or was forked, and the store was opened with ``rollback="error"``.
        """

        def sync() -> Head:
            with self._lock.here:
                self.table.return_to_disk()
                for number in range(_CACHE_TRIES):
                    with suppress(EmptiedError, TableError):
                        try:
                            return self._sync(None if number else known, next_first=next_first)
                        except CorruptObjectError:  # of the cache: damage in the log is a BrokenLogError
                            self._follower.fill(self.table)
                            self._kept = None
                self.table.leave_disk(TableError("its contents are invalid", object_id="cache"))
                return self._sync()

        return shielded(sync)

    def newest_view(self, *, next_first: bool = False) -> RefTable:
        """A view at the newest entry that was acknowledged before this call, or a later one. `next_first`: see `readable_view`."""
        view = self.view() if self._readable is None else None
        head = None if view is None else view.head()
        newest = self.sync(head, next_first=next_first)
        return view if view is not None and newest == head else self.view()

    def readable_view(self, *, next_first: bool = False) -> RefTable:
        """As `newest_view`, to read snapshots: of a broken log, what can be read, with a `BrokenLogWarning`.

        `next_first`: two requests where there is no new entry or one, but no two at a time: for readers that look again and again. It does
        not notice that the head's own entry is gone: the next entry proves what that one was.

        Raises:
            BrokenLogError: nothing of the log can be read, or the store was opened with ``rollback="error"``.
        """
        try:
            return self.newest_view(next_first=next_first)
        except BrokenLogError as exc:
            if self._watermark.rollback == "error":
                raise
            with self._lock.here:
                self._readable = self._readable or shielded(lambda: self._follower.fold_readable(self.table))
            head = self.view().head()
            if head is None or not head.n:
                raise
            warn_of_broken_log(self._backend.url, head.n, exc)
            return self.view()

    def look(self, decide: Callable[[RefTable], T]) -> T:
        """The result of `decide` for the cached view. If it raises, it is called again at the newest entry.

        Raises:
            StoreError: `decide` raised it for the newest view; or for the cached one, if the log cannot be read.
        """
        known = self.view()
        try:
            return decide(known)
        except StoreError:
            try:
                newest = self.newest_view()
            except StoreError:
                newest = known
            if newest.head() == known.head():
                raise
        return decide(newest)

    def accept(self) -> tuple[Head, Head | None]:
        """Accepts a log that went back or was forked, on a user's request. Returns the log's head, and the entry that it had lost, if any.

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
                self._is_strict = True
                for _ in range(_CACHE_TRIES):
                    with suppress(EmptiedError, TableError):
                        self.sync()
                        return self._follower.verify(self.table)
                raise BackendUnavailableError("the cache of this host could not be compared with the log: try again", object_id="cache")

        shielded(verify)

    def spare_checkpoints(self) -> list[str]:
        """The names of checkpoints that newer ones replace. Each has all of the ref table, so together they grow with its square."""
        return self._follower.spare_checkpoints(self.sync())

    @property
    def seen_elsewhere(self) -> str:
        """Which other store has the entries that this user has seen; see `Watermark.seen_elsewhere`."""
        return self._watermark.seen_elsewhere()

    @property
    def is_changed(self) -> bool:
        """Whether the log went back, was forked or replaced since this user saw it, as of the last `sync`, and nobody has accepted that."""
        return self._watermark.is_changed

    def close(self) -> None:
        """Saves how far the log was seen."""
        shielded(self._watermark.close, finish=True)

    def _fill(self, table: Table) -> None:
        self._kept = None
        try:
            self._follower.follow(table)
        except EmptiedError as exc:
            raise TableBusyError("another process empties the cache", object_id="cache") from exc
        except CorruptObjectError as exc:  # of the cache: see `sync`
            raise TableDamagedError(str(exc), object_id="cache") from exc

    def _take_view(self) -> RefTable:
        reader = self.table.view(PREFIX)
        try:
            head = RefTable(reader).head()
        except TableError as exc:
            self.table.leave_disk(exc)
            return self._take_view()
        kept = self._kept
        if kept is None or kept.head != head or self._is_strict:
            self._kept = kept = RowsAtHead(head, partial(self._fold_until, head))
        return RefTable(reader, kept)

    def _fold_until(self, head: Head | None, cause: TableError) -> Reader:
        """The rows at `head`, in memory: a view of the table failed."""
        self.table.leave_disk(cause)
        folded = self._follower.fold_until(head)
        if RefTable(folded).head() != head:
            raise cause  # the log was replaced meanwhile
        return folded

    def _sync(self, known: Head | None = None, *, next_first: bool = False) -> Head:
        head, self._readable = self._follower.follow(self.table, known, next_first=next_first), None
        self._followed_n = head.n
        self._follower.write_checkpoint_if_due(self.table, head.n, self._make_durable)
        return head

    def entries(self, start: int = 1) -> Iterator[Entry]:
        """The entries from `start` on, each checked against the one before; reads no cache.

        Raises:
            BrokenLogError: an entry is missing, damaged or off the hash chain.
        """
        return self.chain.entries_from(start)

    def append(self, build: Build, *, write_id: bytes | None = None, also: Also | None = None, at: RefTable | None = None) -> Appended:
        """Adds one entry with the operations that `build` makes at the head; durable and visible to all when it returns.

        `build` is called again, at a newer head, whenever another writer was faster. Without operations nothing is added.

        Args:
            build: Makes the operations.
            write_id: Names the entry of the first try; a write id names one exact content, so each further try draws its own.
            also: Called in the batch that folds the entry, unless the cache fails then.
            at: A view at which the caller has followed the log: the first try is made there, if the log has not moved since.

        Raises:
            UndecidedError: the backend did not say whether the entry is there; the log will show it.
            FormatVersionError: the log holds a critical operation that this build does not know.
        """

        def append() -> Appended:
            with self._lock.here:
                return self._append_until_first(build, write_id, also, at)

        return shielded(append)

    def _append_until_first(self, build: Build, write_id: bytes | None, also: Also | None, at: RefTable | None) -> Appended:
        """Under the lock; see common/waiting.py. Where `create` may overwrite, it does not find out that another process was faster."""
        if at is not None and (head := at.head()) is not None and self._shared and head.n == self._followed_n > 0:
            now = None
            with suppress(StoreError):  # another process of this host may have seen an entry that the log does not have any more
                now = self._take_view().head()
            appended = self._append_once(build, write_id, also, at) if now == head else None
            if appended is not None:
                return appended
            write_id = None
        for lost in itertools.count():
            began_ns = self._clock()
            appended = self._append_once(build, write_id, also)
            if appended is not None:
                return appended
            write_id = None
            delay = race_delay(lost, self._clock() - began_ns) * self._jitter()
            _logger.debug("another writer was faster: the next try, at a newer head, is in %.3f s", delay)
            self._sleep(delay)
        raise AssertionError("unreachable")

    def is_own(self, n: int) -> bool:
        """Whether this object appended entry `n`; False also if a lost reply or an interrupt hid that: `wrote` finds out."""
        return n in self._writer.created

    def wrote(self, n: int) -> bool:
        """See `EntryWriter.wrote`."""
        return self._writer.wrote(n)

    def published(self, appended: Appended, snapshot: Ulid) -> SnapshotRow | None:
        """The snapshot that `appended` should publish; None if an earlier entry aborted it. The log decides, not the cache.

        Raises:
            StoreError: an earlier entry decided it, and the log could not be read.
        """
        for op in appended.ops:
            if op.name == "put" and op.fields["snapshot"] == snapshot:
                info = SnapshotRow.of_op(op.fields, appended.n, appended.time_ns)
                with suppress(StoreError):  # of the cache, or of the log that replaces it: the notes are not worth an error
                    return self._take_view().with_note(info)
                return info
        return self.view().snapshot(snapshot)

    def _append_once(self, build: Build, write_id: bytes | None, also: Also | None, at: RefTable | None = None) -> Appended | None:
        """Checks and builds at `at`, by default at the newest entry, and creates the next entry; None if there is a newer one by then."""
        self._writer.require_decided()
        view = at or self.newest_view()
        if (stop := view.stop()) is not None:
            raise self.chain.unknown_operation(stop.n, stop.op)
        head = view.head() or self._genesis
        try:
            ops = build(view)
        except StoreError as exc:  # a newer entry may allow it; and gc may have freed meanwhile what it read
            if (at is None and not isinstance(exc, DamageError)) or self.sync() == head:
                raise
            return None
        if not ops:
            return Appended(head.n, ())
        if self._sign is not None:
            ops = [*ops, *self._sign(view, ops)]
        if not (head.n or self._may_begin) and (lost := sign_of_lost_log(self._backend, self._prefix, self._watermark, ops)) is not None:
            if self.sync() != head:
                return None  # a save after the first one has left it
            raise lost_log(self.chain.name(1), self._backend.url, lost)
        if at is not None and not self._follower.is_entry(head):
            return None  # the log went back, and the entry would leave a gap
        write_id, time_ns = write_id or self._new_id(), self._clock()
        sealed, entry = seal_entry(head.n + 1, head.hash, ops, write_id=write_id, time_ns=time_ns, actor=self._actor)
        if not self._writer.create(sealed, entry):
            return None
        with suppress(StoreError, Warning):  # errors of the cache, and warnings that are errors, do not change that it was appended
            self._watermark.appended(Head(entry.n, entry.hash))
            try:
                self._follower.fold(self.table, [entry], also)
                self._followed_n = entry.n
            except (EmptiedError, TableError):
                self.sync()
            self._follower.write_checkpoint_if_due(self.table, entry.n, self._make_durable)
        return Appended(entry.n, entry.ops, entry.time_ns)
