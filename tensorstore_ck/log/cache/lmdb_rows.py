"""Rows in LMDB, read by key or in pages, and a read view of them: one read transaction.

Each row has a checksum, since LMDB has none. The pages that a view reads are not used again while it lives, so views are dropped soon.
LMDB's map must not grow while a read transaction of this process is open: the environment then lets each view copy its rows into memory.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, Protocol, TypeVar
from zlib import crc32

import lmdb

from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import MAX_KEY_BYTES, PAGE_ITEMS, Item, Reader

CRC_BYTES: Final = 4
"""Of the checksum after each value."""

T = TypeVar("T")
P = ParamSpec("P")


def get_row(txn: Any, key: bytes) -> bytes | None:
    """The value of `key`.

    Raises:
        lmdb.Error: it, or the file, is damaged.
    """
    stored = txn.get(key) if 0 < len(key) <= MAX_KEY_BYTES else None
    return None if stored is None else _unprotect(key, stored)


def get_rows(txn: Any, keys: Iterable[bytes]) -> list[bytes | None]:
    """The value of each key: see `get_row`."""
    with txn.cursor() as cursor:
        stored = dict(cursor.getmulti(keys))
    return [_unprotect(key, stored[key]) if key in stored else None for key in keys]


def read_page(txn: Any, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
    """See `Reader.page`.

    Raises:
        lmdb.Error: a row, or the file, is damaged.
    """
    items: list[Item] = []
    with txn.cursor() as cursor:
        if not reverse:
            has_row = cursor.set_range(low)
        elif high is not None and cursor.set_range(high):
            has_row = cursor.prev()
        else:
            has_row = cursor.last()
        while has_row and len(items) < PAGE_ITEMS:
            key, stored = cursor.item()
            if key < low if reverse else (high is not None and key >= high):
                break
            items.append((key, _unprotect(key, stored)))
            has_row = cursor.prev() if reverse else cursor.next()
    return items


def _unprotect(key: bytes, stored: bytes) -> bytes:
    value = stored[:-CRC_BYTES]
    if crc32(value, crc32(key)) != int.from_bytes(stored[-CRC_BYTES:], "little") or len(stored) < CRC_BYTES:
        raise lmdb.CorruptedError("a value does not match its checksum")
    return value


class Guarded(Protocol):
    """Calls a read after a check of the environment, and turns errors of LMDB into `TableError`."""

    def __call__(self, use: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `use`."""


class LmdbView(Reader):
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

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        """See `Reader.page`."""
        with self._lock:
            if self._copied is not None:
                return self._copied.page(low, high, reverse)
            return self._guarded(read_page, self._txn, low, high, reverse)
