"""`EntryWriter`: creates the next entry of a log, and finds out whether it is there when the backend did not say.

On a full disk, an entry that frees space uses the reserve, which other entries leave alone.
"""

import logging
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.backend.reserve import within_reserve
from tensorstore_ck.common.ids import Clock, Ulid
from tensorstore_ck.errors import BackendUnavailableError, DamageError, NoSpaceError, StoreError, UndecidedError
from tensorstore_ck.log.entry import Entry, EntryReader
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.table_rows import SnapshotInfo

_logger: Final = logging.getLogger("tensorstore_ck.log")
_LONGEST_DELAY_TRIES: Final = 3
"""The first pause after a lost race, in multiples of a try. Pauses must not grow: a winner never pauses, so losers would starve."""
_LEAST_TRY_SECONDS: Final = 0.001
_MOST_TRY_SECONDS: Final = 1.0
_REMEMBERED_WRITES: Final = 1000
RESEND_DELAYS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 10, 10, 10, 10, 10, 10, 10, 10)
"""Seconds between tries to find out whether an entry was written: about 100 in all."""
_RESEND_SECONDS: Final = 120.0
"""No try begins after this time. A single try may wait long for a server that hangs."""
_FREEING: Final = frozenset(
    {"expire", "untag", "unpin", "purge", "policy", "reset", "abort", "condemn", "sweep", "relocate", "place", "rescue", "settle"}
)
"""Operations of which an entry can consist that lets gc free something, or ends a save that failed for space."""


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


class EntryWriter:
    """Creates the entries of one open log. The caller holds the lock of the `Log`."""

    def __init__(
        self,
        backend: Backend,
        chain: EntryReader,
        *,
        clock: Clock,
        sleep: Callable[[float], object],
        require_store: Callable[[], object],
        shared: bool,
    ) -> None:
        """See `Log`."""
        self._backend = backend
        self._chain = chain
        self._clock = clock
        self._sleep = sleep
        self._require_store = require_store
        self._shared = shared
        self._durable_n = 0
        self._undecided: UndecidedError | None = None
        self._written: deque[tuple[int, bytes]] = deque(maxlen=_REMEMBERED_WRITES)
        """The numbers and write ids of the entries that this object tried to create."""
        self.created: set[int] = set()
        """The numbers of those that it knows it has created."""

    def require_decided(self) -> None:
        """Checks that no earlier entry can arrive late and overwrite a later one, which only a backend for a single writer allows.

        Raises:
            UndecidedError: one can.
        """
        if self._undecided is not None and not self._shared:
            raise self._undecided

    def create(self, sealed: bytes, entry: Entry) -> bool:
        """Creates the entry; returns whether the number is ours. Sends the same bytes until the number is taken.

        Once the bytes were sent, an absent entry proves nothing: the request may still be in progress.
        """
        name = self._chain.name(entry.n)
        self._require_store()
        self.make_durable(entry.n - 1)
        self._written.append((entry.n, entry.write_id))
        sent, trouble, began_ns = False, "the backend did not report the outcome", self._clock()
        for delay in RESEND_DELAYS:
            if self._clock() - began_ns > _RESEND_SECONDS * 1e9:
                break
            try:
                outcome = _create_entry(self._backend, name, sealed, entry.ops)
            except BackendUnavailableError as exc:
                outcome, trouble = Created.UNKNOWN, str(exc)
            except StoreError as exc:
                if not sent:
                    raise  # refused, and nothing was sent before
                outcome, trouble = Created.UNKNOWN, str(exc)
            if _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("entry %d (%s): %s", entry.n, ", ".join(op.name for op in entry.ops), outcome.value)
            if outcome is Created.CREATED:
                self._durable_n = entry.n
                self.created.add(entry.n)
                self._chain.last = entry
                return True
            sent = True
            try:
                winner = self._chain.read(entry.n)
                if winner is not None and winner.write_id != entry.write_id:
                    return False
                if winner is not None:
                    self.make_durable(entry.n)
                    self.created.add(entry.n)
                    return True
            except DamageError:
                raise
            except StoreError as exc:
                trouble = str(exc)
            self._sleep(delay)
        next_step = "`Store.retrying` or `Store.checkout` reads the log" if self._shared else "open the store again"
        self._undecided = UndecidedError(
            f"log entry {name} may or may not have been written ({trouble}): {next_step} when the backend answers; "
            f"the operation happened if that entry has the write id {entry.write_id.hex()}",
            object_id=entry.write_id.hex(),
        )
        if not self._shared:
            self._undecided.retry = "after_reopen"
        raise self._undecided

    def make_durable(self, n: int) -> None:
        """An entry found by reading may not be durable yet; later entries must not become durable before it."""
        if n > self._durable_n:
            self._backend.sync_folders(self._chain.name(n))
            self._durable_n = n

    def wrote(self, n: int) -> bool:
        """Whether this object created entry `n`, even if an interrupt or a lost reply hid the success.

        Raises:
            StoreError: the entry cannot be read.
        """
        tried = [write_id for number, write_id in list(self._written) if number == n]
        entry = self._chain.read(n) if tried else None
        return entry is not None and entry.write_id in tried


def race_delay(lost: int, try_ns: int) -> float:
    """Seconds until the next try, after `lost` lost races before this one: shorter for those that have waited longer."""
    try_seconds = min(max(try_ns * 1e-9, _LEAST_TRY_SECONDS), _MOST_TRY_SECONDS)
    return try_seconds * max(_LONGEST_DELAY_TRIES - lost, 1)


def _create_entry(backend: Backend, name: str, sealed: bytes, ops: Sequence[Op]) -> Created:
    """See `Backend.create`. Raises `NoSpaceError` if the disk is full."""
    create, kinds = partial(backend.create, name, sealed), {op.name for op in ops} - {"sign"}
    try:
        return within_reserve(backend, create) if kinds and kinds <= _FREEING else create()
    except NoSpaceError as exc:
        if not backend.is_local:
            raise
        command = shlex.join(["tsck", "usage", "-s", backend.url])
        raise NoSpaceError(f"{exc}. `{command}` shows what gc can free, and how", object_id=exc.object_id) from exc
