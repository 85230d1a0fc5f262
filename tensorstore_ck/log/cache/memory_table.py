"""A table in memory: for tests, for forked children, and where no local disk can be used.

A batch writes in place under the table's lock and keeps an undo list, so that other threads never see a part of it.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tensorstore_ck.log.cache.protocol import MAX_KEY_BYTES, PAGE_ITEMS, Batch, Item, Table, bad_key, prefix_end


class MemoryTable(Table):
    """A `Table` that lives as long as its process."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []
        self._is_shared = False
        """Whether a view has the same rows: the next write copies them first."""
        self._lock = threading.RLock()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        with self._lock:
            values = [*map(self._values.get, keys)]
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    def page(self, low: bytes, high: bytes | None, reverse: bool, limit: int = PAGE_ITEMS) -> list[Item]:
        with self._lock:
            first = bisect_left(self._keys, low)
            last = len(self._keys) if high is None else bisect_left(self._keys, high)
            keys = self._keys[max(first, last - limit) : last][::-1] if reverse else self._keys[first : min(last, first + limit)]
            return [(key, self._values[key]) for key in keys]

    def view(self, prefix: bytes) -> "MemoryTable":
        view = MemoryTable()
        self.share_rows(view)
        return view

    def share_rows(self, view: "MemoryTable") -> None:
        """Gives an empty table the rows as they are now."""
        with self._lock:
            self._is_shared = view._is_shared = True
            view._values, view._keys = self._values, self._keys

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        with self._lock:
            batch = _MemoryBatch(self)
            try:
                yield batch
            except BaseException:
                batch.undo()
                raise

    def close(self) -> None:
        pass

    def _set(self, key: bytes, value: bytes | None) -> None:
        if self._is_shared:
            self._values, self._keys, self._is_shared = dict(self._values), list(self._keys), False
        if value is None:
            if self._values.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]
            return
        if key not in self._values:
            insort(self._keys, key)
        self._values[key] = value


class _MemoryBatch(Batch):
    def __init__(self, table: MemoryTable) -> None:
        self._table = table
        self._undo: list[tuple[bytes, bytes | None]] = []

    def get(self, key: bytes) -> bytes | None:
        return self._table.get(key)

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        return self._table.page(low, high, reverse)

    def put(self, key: bytes, value: bytes) -> None:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise bad_key(key)
        self._undo.append((key, self._table.get(key)))
        self._table._set(key, value)

    def delete(self, key: bytes) -> None:
        self._undo.append((key, self._table.get(key)))
        self._table._set(key, None)

    def clear(self, prefix: bytes) -> None:
        for key, _ in self._table.page(prefix, prefix_end(prefix), True, len(self._table._keys)):  # from the end, so that no key moves
            self.delete(key)

    def undo(self) -> None:
        while self._undo:
            self._table._set(*self._undo.pop())
