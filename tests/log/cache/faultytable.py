"""A table on disk that fails, at one call or from one on: damaged, locked by another process, or emptied by one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from tensorstore_ck.log.cache import Batch, MemoryTable, TableBusyError, TableDamagedError
from tensorstore_ck.log.cache.protocol import PAGE_ITEMS, Item
from tensorstore_ck.log.follow import empty


class CacheFaults:
    """Counts the calls into all caches of a host; those in `failing` fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.failing = range(0)
        self.is_busy = False
        """Whether they fail like caches whose lock another process holds: reads work."""
        self.emptied: Callable[[], object] | None = None
        """If set, another process empties the table before a call of `failing`, which then works; and does this."""

    def reset(self, failing: range, *, is_busy: bool = False, emptied: Callable[[], object] | None = None) -> None:
        self.calls, self.failing, self.is_busy, self.emptied = 0, failing, is_busy, emptied

    def call(self, table: "FaultyTable", *, is_batch: bool) -> None:
        if self.is_busy and not is_batch:
            return
        self.calls += 1
        if self.calls - 1 not in self.failing:
            return
        if self.emptied is None:
            error = TableBusyError if self.is_busy else TableDamagedError
            raise error("the test's fault", object_id="cache")
        failing, self.failing = self.failing, range(0)
        table.empty()
        self.emptied()
        self.failing = failing


class FaultyTable(MemoryTable):
    """The cache of one store, which all handles of the test share."""

    def __init__(self, faults: CacheFaults) -> None:
        super().__init__()
        self._faults = faults
        self._origin = self
        """The table that a view is of."""
        self._writing: int | None = None
        """The thread that is in a batch."""

    def empty(self) -> None:
        with super().batch() as batch:
            empty(batch)

    def view(self, prefix: bytes) -> Self:
        self._call(is_batch=False)
        view = type(self)(self._faults)
        view._origin = self
        self.share_rows(view)
        return view

    def get(self, key: bytes) -> bytes | None:
        self._call(is_batch=False)
        return super().get(key)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        self._call(is_batch=False)
        return super().get_many(keys)

    def page(self, low: bytes, high: bytes | None, reverse: bool, limit: int = PAGE_ITEMS) -> list[Item]:
        self._call(is_batch=False)
        return super().page(low, high, reverse, limit)

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        self._call(is_batch=True)
        with super().batch(wait=wait) as batch:
            self._writing = threading.get_ident()
            try:
                yield batch
                if not self._faults.is_busy:
                    self._call(is_batch=True)
            finally:
                self._writing = None

    def _call(self, *, is_batch: bool) -> None:
        if self._faults.emptied is None or self._writing != threading.get_ident():  # else nobody else can write meanwhile
            self._faults.call(self._origin, is_batch=is_batch)
