"""A read view of a table in LMDB: one read transaction.

The pages that it reads are not used again while it lives, so views are dropped soon. LMDB's map must not grow while a read transaction
of this process is open: the environment then lets each view copy its rows into memory.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

from tensorstore_ck.log.cache.lmdb_rows import get_row, read_page
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import Item, scan_pages

T = TypeVar("T")
P = ParamSpec("P")


class Guarded(Protocol):
    """Calls a read after a check of the environment, and turns errors of LMDB into `TableError`."""

    def __call__(self, use: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `use`."""


class LmdbView:
    """The rows whose keys begin with a prefix, as of the view's beginning. Thread-safe."""

    def __init__(self, txn: Any, prefix: bytes, guarded: Guarded, release: Callable[[Any], object]) -> None:
        """`release` drops the transaction."""
        self._txn = txn
        self._prefix = prefix
        self._guarded = guarded
        self._release = release
        self._copied: MemoryTable | None = None
        self._lock = threading.RLock()

    def __del__(self) -> None:
        self._release(self._txn)

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        with self._lock:
            if self._copied is not None:
                return self._copied.get(key)
            return self._guarded(get_row, self._txn, key)

    def scan(self, prefix: bytes, *, start: bytes | None = None, reverse: bool = False) -> Iterator[Item]:
        """See `Reader.scan`."""
        return scan_pages(self._page, prefix, start, reverse)

    def copy_into_memory(self) -> None:
        """Ends the transaction; the rows stay. If the rows cannot be read, each later read raises the error of a closed transaction."""
        with self._lock:
            if self._copied is not None:
                return
            copied = MemoryTable()
            try:
                with copied.batch() as batch:
                    for key, value in self.scan(self._prefix):
                        batch.put(key, value)
            finally:
                self.end()
            self._copied = copied

    def end(self) -> None:
        """Ends the transaction, before the environment is closed."""
        with self._lock:
            self._txn.abort()

    def _page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        with self._lock:
            if self._copied is not None:
                return list(self._copied._page(low, high, reverse))
            return self._guarded(read_page, self._txn, low, high, reverse)
