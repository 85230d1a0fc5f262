"""A table in LMDB: its rows with their checksums, a read view of them, a batch, and the handles of one process on an environment.

Each row has a checksum, since LMDB has none. LMDB's map must not grow while a read transaction of this process is open: the environment
then lets each view copy its rows into memory. The registry below is global, since LMDB environments are per process and path. A forked
child inherits it but must not use its environments: in the child, an inherited table raises `TableDamagedError`.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from zlib import crc32

import lmdb

from tensorstore_ck.log.cache.lmdb_environment import DEFAULT_PATIENCE_SECONDS, INITIAL_MAP_BYTES, Environment
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import (
    MAX_KEY_BYTES,
    PAGE_ITEMS,
    Batch,
    Item,
    Reader,
    Table,
    TableBusyError,
    TableDamagedError,
    bad_key,
)

T = TypeVar("T")
P = ParamSpec("P")

CRC_BYTES: Final = 4
"""Of the checksum after each value."""


class _Registry:
    def __init__(self, inherited: "_Registry | None" = None) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.environments: dict[Path, Environment] = {}
        # Only kept alive: dropping a parent's environment would close it.
        self.inherited = inherited

    def has_inherited(self, folder: Path) -> bool:
        return self.inherited is not None and (folder in self.inherited.environments or self.inherited.has_inherited(folder))


_registry = _Registry()


def _own_registry() -> _Registry:
    global _registry  # noqa: PLW0603 - see the module docstring
    if _registry.pid != os.getpid():
        _registry = _Registry(inherited=_registry)  # a thread that does not exist here may hold the old one's lock
    return _registry


def open_lmdb_table(folder: Path, *, map_bytes: int = INITIAL_MAP_BYTES, patience_seconds: float = DEFAULT_PATIENCE_SECONDS) -> Table:
    """The table in `folder`, which exists and is ours; in memory in a child whose parent has it open.

    `map_bytes` is the map's first size. It waits `patience_seconds` for another process's batch that makes no progress. Raises `lmdb.Error`
    or `OSError` if the folder cannot be used.
    """
    folder = folder.resolve()
    registry = _own_registry()
    with registry.lock:
        if registry.has_inherited(folder):
            return MemoryTable()
    table = LmdbHandle(folder, map_bytes, patience_seconds)
    with suppress(TableBusyError):  # opened later, when the lock is free
        table.open(wait=True)
    return table


class LmdbHandle(Table):
    """A `Table` on local disk, shared with the other processes of this host."""

    def __init__(self, folder: Path, map_bytes: int, patience_seconds: float) -> None:
        self._folder = folder
        self._map_bytes = map_bytes
        self._patience_seconds = patience_seconds
        self._environment: Environment | None = None
        self._closed = False
        self._pid = os.getpid()

    def open(self, *, wait: bool) -> Environment:
        """The environment; the first call that gets the lock opens it.

        Raises:
            TableBusyError: another process holds it.
            lmdb.Error, OSError: the folder cannot be used.
        """
        if self._environment is None:
            registry = _own_registry()
            with registry.lock:
                if self._pid != os.getpid() or registry.has_inherited(self._folder):
                    raise TableDamagedError(f"{self._folder} belongs to the parent process", object_id=str(self._folder))
                environment = registry.environments.get(self._folder)
                if environment is None:
                    environment = Environment(self._folder, self._map_bytes, self._patience_seconds, wait=wait)
                    registry.environments[self._folder] = environment
                environment.users += 1
                self._environment = environment
        return self._environment

    def get(self, key: bytes) -> bytes | None:
        return self._read(get_row, key)

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        return self._read(read_page, low, high, reverse)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return (self._environment or self._opened(wait=False)).in_map(partial(read_rows, keys))

    def view(self, prefix: bytes) -> Reader:
        environment = self._environment or self._opened(wait=False)
        return environment.in_map(partial(LmdbView, environment, prefix))

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        environment = self._environment or self._opened(wait=wait)
        with environment.writing(wait=wait):
            batch = environment.in_map(partial(_LmdbBatch, environment), write=True)
            try:
                yield batch
                batch.commit()
            except BaseException:
                batch.abort()
                raise

    def close(self) -> None:
        registry, environment = _own_registry(), self._environment
        with registry.lock:
            if environment is None or self._closed or registry.environments.get(environment.folder) is not environment:
                return
            self._closed = True
            environment.users -= 1
            if not environment.users:
                del registry.environments[environment.folder]
                environment.close()

    def _read(self, read: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `read` with a transaction that ends with it: unlike a view, it is not copied when the map grows."""

        def use(txn: Any) -> T:
            with txn:
                return read(txn, *args, **kwargs)

        return (self._environment or self._opened(wait=False)).in_map(use)

    def _opened(self, *, wait: bool) -> Environment:
        try:
            return self.open(wait=wait)
        except (OSError, lmdb.Error) as exc:
            raise TableDamagedError(f"{self._folder}: {exc}", object_id=str(self._folder)) from exc


def get_row(txn: Any, key: bytes) -> bytes | None:
    """The value of `key`.

    Raises:
        lmdb.Error: it, or the file, is damaged.
    """
    stored = txn.get(key) if 0 < len(key) <= MAX_KEY_BYTES else None
    return None if stored is None else _unprotect(key, stored)


def read_rows(keys: Iterable[bytes], txn: Any) -> dict[bytes, bytes]:
    """The values of those `keys` that are there; ends the transaction. Raises as `get_row`."""
    with txn, txn.cursor() as cursor:
        return {key: _unprotect(key, stored) for key, stored in cursor.getmulti(keys)}


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


class LmdbView(Reader):
    """The rows whose keys begin with a prefix, as of the view's beginning. Thread-safe."""

    def __init__(self, environment: Environment, prefix: bytes, txn: Any) -> None:
        """In `Environment.in_map`: the map does not grow before the environment knows the view."""
        self._txn = txn
        self._prefix = prefix
        self._environment = environment
        self._copied: MemoryTable | None = None
        self._lock = threading.RLock()
        environment.views.add(self)

    def __del__(self) -> None:
        if self._environment.pid != os.getpid():
            self._environment.parents_txns.append(self._txn)

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            if self._copied is not None:
                return self._copied.get(key)
            return self._environment.guarded(get_row, self._txn, key)

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
        with self._lock:
            if self._copied is not None:
                return self._copied.page(low, high, reverse)
            return self._environment.guarded(read_page, self._txn, low, high, reverse)


class _LmdbBatch(Batch):
    """A write transaction that can begin again in a larger map."""

    def __init__(self, environment: Environment, txn: Any) -> None:
        self._environment = environment
        self._journal: list[tuple[bytes, bytes | None]] = []
        self._txn = txn

    def get(self, key: bytes) -> bytes | None:
        return get_row(self._txn, key)

    def put(self, key: bytes, value: bytes | None) -> None:
        stored = None if value is None else value + crc32(value, crc32(key)).to_bytes(CRC_BYTES, "little")  # as `get_row` checks
        self._journal.append((key, stored))
        if len(self._journal) % PAGE_ITEMS == 0:
            self._environment.lock.show_progress()
        try:
            if stored is None:
                self._txn.delete(key)
            else:
                self._txn.put(key, stored)
        except lmdb.BadValsizeError as exc:
            raise bad_key(key) from exc
        except lmdb.MapFullError:
            self._grow()

    def delete(self, key: bytes) -> None:
        self.put(key, None)

    def clear(self, prefix: bytes) -> None:
        for key in [key for key, _ in self.scan(prefix)]:
            self.put(key, None)

    def commit(self) -> None:
        while True:
            try:
                self._txn.commit()
            except lmdb.MapFullError:
                self._grow()
            else:
                self._environment.cover_last_page()
                return

    def abort(self) -> None:
        self._txn.abort()

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        self._environment.lock.show_progress()
        return read_page(self._txn, low, high, reverse)

    def _grow(self) -> None:
        """Repeats all writes so far. Nobody else wrote meanwhile, so what was read in this batch is still valid."""
        while True:
            self._txn.abort()
            self._environment.lock.show_progress()
            self._environment.grow()
            self._txn = self._environment.begin(write=True)
            try:
                for key, value in self._journal:
                    if value is None:
                        self._txn.delete(key)
                    else:
                        self._txn.put(key, value)
                return
            except lmdb.MapFullError:
                continue
