"""A table on disk, and one in memory that replaces it when it fails: the cache never blocks a save.

Readers and the fold of the log see one table that always answers. When the table on disk fails, or a stopped process holds its lock,
a table in memory is filled from the log and used instead. It is used until the lock is free; after a failure, until this handle is closed.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import Batch, CacheWarning, Item, Reader, Table, TableBusyError, TableError

_logger: Final = logging.getLogger("tensorstore_ck")
_STUCK_SECONDS: Final = 5.0
"""After this long without the lock, a warning names the process that holds it."""


class FailoverTable(Table):
    """A `Table` whose reads never raise `TableError`; a batch raises it at most once, and works when it is tried again."""

    def __init__(self, disk: Table, fill: Callable[[Table], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`fill` brings a table to the log's head. It may raise what a backend raises, and `TableError`."""
        self._disk = disk
        self._fill = fill
        self._clock = clock
        self._lock = ProcessLock()
        self._memory: MemoryTable | None = None
        self._busy_since: float | None = None
        """Since when memory is used because the lock was held; None: the disk is in use, or failed."""
        self._warned = False
        self._pid = os.getpid()

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        while True:
            table = self._current()
            try:
                return table.get(key)
            except TableError as exc:
                self._leave(table, exc)

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        """See `Reader.page`."""
        while True:
            table = self._current()
            try:
                return table.page(low, high, reverse)
            except TableError as exc:
                self._leave(table, exc)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """See `Table.get_many`."""
        while True:
            table = self._current()
            try:
                return table.get_many(keys)
            except TableError as exc:
                self._leave(table, exc)

    def view(self, prefix: bytes) -> Reader:
        """See `Table.view`. Its reads may raise `TableError`."""
        while True:
            table = self._current()
            try:
                return table.view(prefix)
            except TableError as exc:
                self._leave(table, exc)

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        """See `Table.batch`. After a `TableError` the next batch is in memory."""
        table = self._current()
        try:
            with table.batch(wait=wait) as batch:
                yield batch
        except TableBusyError as exc:
            if wait:
                self._leave(table, exc)
            raise
        except TableError as exc:
            self._leave(table, exc)
            raise

    def leave_disk(self, cause: TableError) -> None:
        """Uses memory from now on: a view of the table failed, or its contents are invalid."""
        self._leave(self._disk, cause)

    def return_to_disk(self) -> None:
        """Returns to the table on disk if its lock was held before and is free now. Never waits for it."""
        since = self._busy_since
        if since is None or self._pid != os.getpid():
            return
        try:
            with self._disk.batch(wait=False):
                pass
            self._fill(self._disk)
        except TableBusyError as exc:
            if self._clock() - since > _STUCK_SECONDS:
                self._warn(f"{exc}: it may be stopped. Using memory until the lock is free")
            return
        except TableError as exc:
            self._busy_since = None
            self._warn(_advice(exc))
            return
        with self._lock.here:
            self._memory = self._busy_since = None

    def close(self) -> None:
        """See `Table.close`. A thread that goes on with it uses memory, without advice about the disk."""
        self._warned = True
        self._disk.close()

    def _current(self) -> Table:
        if self._pid != os.getpid():
            self._enter_child()
        return self._disk if self._memory is None else self._memory

    def _enter_child(self) -> None:
        """A forked child reads the log itself, since it must not use the parent's files and locks."""
        memory = MemoryTable()
        self._fill(memory)
        with self._lock.here:
            if self._pid != os.getpid():
                self._memory, self._busy_since, self._pid = memory, None, os.getpid()

    def _leave(self, reader: Reader, cause: TableError) -> None:
        """Uses memory, if `reader` is the table on disk and still in use."""
        if reader is not self._disk or reader is not self._current():
            return
        is_busy = isinstance(cause, TableBusyError)
        memory = MemoryTable()
        self._fill(memory)
        with self._lock.here:
            is_first = reader is self._current()
            if is_first:
                self._memory, self._busy_since = memory, self._clock() if is_busy else None
        if is_first and not is_busy:
            self._warn(_advice(cause))

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            try:
                warnings.warn(CacheWarning(message), stacklevel=user_stacklevel())
            except CacheWarning:  # warnings are errors: raised here, it would make a published save look like a failed one
                _logger.warning("%s", message)


def _advice(cause: TableError) -> str:
    return f"the cache cannot be used ({cause}); using memory. Nothing is lost: free space there, or delete the folder"
