"""One LMDB environment of this process, shared by all who open its folder.

The only file that touches LMDB. py-lmdb refuses a second open of a path in one process (closing one would drop the
other's file locks), therefore `acquire` counts users in a process-wide registry. Invariants: an environment is never
used by a forked child; `set_mapsize` never runs while a transaction of this process is open (`_map_lock`, and
`_write_lock` before it); a batch holds `batch.lock` in the folder from start to end, so that it can begin anew, when
the map has to grow, without any other process's batch in between. LMDB has no checksums: each value ends with a CRC.
"""

import fcntl
import os
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from tensorstore_ck.table.memory import MemoryTable
from tensorstore_ck.table.protocol import MAX_KEY_BYTES, PAGE_ITEMS, Batch, CacheWarning, Item, TableDamagedError, check_key, scan_pages

INITIAL_MAP_BYTES: Final = 64 << 20
_CRC_BYTES = 4
_LOCK_DELAYS: Final = [0.0005] * 100 + [0.01] * 100 + [0.1] * 290  # about 30 s


class _LockedError(Exception):
    """`batch.lock` was not to be had."""


class Environment:
    """The table in one folder; in memory where LMDB cannot go on."""

    def __init__(self, folder: Path, map_bytes: int) -> None:
        self.folder = folder
        self.users = 0
        self._map_bytes = map_bytes
        self._pid = self._memory_pid = os.getpid()
        self._memory: MemoryTable | None = None
        self._write_lock = threading.RLock()
        self._map_lock = threading.RLock()
        self._was_rebuilt = False
        self._lock_file = os.open(folder / "batch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with self._excluding_processes():  # LMDB's own open is not safe against another process's close
                try:
                    self._lmdb = self._open()
                except lmdb.Error:
                    self._lmdb = self._remove_and_open()
        except BaseException:
            os.close(self._lock_file)
            raise

    def memory(self) -> MemoryTable | None:
        """The table to use instead of LMDB: after a fork, or when LMDB failed for good."""
        if self._memory_pid != os.getpid():
            # The environment belongs to the parent, and any lock may be held by a thread that does not exist here.
            self._memory_pid = os.getpid()
            self._memory = MemoryTable()
        return self._memory

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`."""
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        with self._reading() as txn:
            return _get(txn, key)

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        """See `scan_pages`."""
        with self._reading() as txn:
            return _read_page(txn, low, high, reverse)

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        """A batch that excludes those of all threads and processes."""
        with self._write_lock:
            environment = self._lmdb
            try:
                with self._excluding_processes():
                    batch = _LmdbBatch(self)
                    try:
                        yield batch
                        batch.commit()
                    except BaseException:
                        batch.abort()
                        raise
            except lmdb.Error as exc:
                raise self._rebuilt(environment, exc) from exc
            except _LockedError as exc:
                raise self._use_memory(exc) from exc

    def begin(self, *, write: bool) -> Any:
        """A transaction."""
        try:
            return self._lmdb.begin(write=write)
        except lmdb.ReadersFullError:
            self._lmdb.reader_check()
            return self._lmdb.begin(write=write)

    def begin_writing(self) -> Any:
        """A write transaction, in a map as large as other processes made it; the caller holds the batch."""
        with self._map_lock:
            try:
                return self.begin(write=True)
            except lmdb.MapResizedError:
                self._lmdb.set_mapsize(0)
                return self.begin(write=True)

    def grow(self) -> None:
        """Doubles the map; the caller holds the batch and has no transaction open."""
        with self._map_lock:
            self._lmdb.set_mapsize(2 * self._lmdb.info()["map_size"])

    def close(self) -> None:
        """Closes the files, unless they are a parent's."""
        if self._pid == os.getpid():
            with self._write_lock, self._map_lock:
                self._lmdb.close()
                os.close(self._lock_file)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        environment = self._lmdb
        try:
            try:
                with self._map_lock, self.begin(write=False) as txn:
                    yield txn
            except lmdb.MapResizedError:  # only `begin` raises it: nothing was yielded
                # Another process made the map larger. Its size can be adopted only while no thread of ours writes.
                with self._write_lock, self._map_lock:
                    self._lmdb.set_mapsize(0)
                    with self.begin(write=False) as txn:
                        yield txn
        except lmdb.Error as exc:
            raise self._rebuilt(environment, exc) from exc

    @contextmanager
    def _excluding_processes(self) -> Iterator[None]:
        """Holds `batch.lock`: a record lock, since flock's would be inherited by a forked child that lives on."""
        for delay in _LOCK_DELAYS:
            try:
                fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(delay)
        else:
            raise _LockedError("another process has held its lock for long; it may be stopped")
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    def _open(self) -> Any:
        # With sync or metasync off a power failure leaves LMDB damaged, or back in time.
        opened = lmdb.open(
            str(self.folder), map_size=self._map_bytes, sync=True, metasync=True, writemap=False, max_readers=1024, mode=0o600
        )
        try:
            opened.reader_check()  # readers that were killed keep their slots, and the pages that they read
            bytes_used = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
            # The map of a file that was cut short fails with SIGBUS, not with an error.
            if opened.info()["last_txnid"] and (self.folder / "data.mdb").stat().st_size < bytes_used:
                raise lmdb.CorruptedError(f"data.mdb is shorter than the {bytes_used} bytes that it uses")
        except BaseException:
            opened.close()
            raise
        return opened

    def _remove_and_open(self) -> Any:
        for name in ("data.mdb", "lock.mdb"):
            (self.folder / name).unlink(missing_ok=True)  # other processes go on with the files that they have open
        return self._open()

    def _rebuilt(self, broken: Any, cause: Exception) -> TableDamagedError:
        """Makes an empty table: on disk the first time, in memory when that fails or does not last."""
        with self._write_lock, self._map_lock:
            if self._lmdb is not broken or self._memory is not None:
                return self._damaged(cause)  # another thread was faster
            self._lmdb.close()
            if self._was_rebuilt:
                return self._use_memory(cause)
            self._was_rebuilt = True
            try:
                self._lmdb = self._remove_and_open()
            except (OSError, lmdb.Error) as exc:
                return self._use_memory(exc)
            return self._damaged(cause)

    def _use_memory(self, cause: Exception) -> TableDamagedError:
        self._memory = MemoryTable()
        advice = f"the cache in {self.folder} cannot be used ({cause}); using memory. Free space there, or delete the folder"
        warnings.warn(CacheWarning(advice), stacklevel=2)
        return self._damaged(cause)

    def _damaged(self, cause: Exception) -> TableDamagedError:
        return TableDamagedError(f"the cache in {self.folder} was emptied ({cause}); try again", object_id=str(self.folder))


class _LmdbBatch:
    """A write transaction that can begin anew in a larger map."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._journal: list[tuple[bytes, bytes | None]] = []
        self._txn = environment.begin_writing()

    def get(self, key: bytes) -> bytes | None:
        return _get(self._txn, key)

    def scan(self, prefix: bytes, *, start: bytes | None = None, reverse: bool = False) -> Iterator[Item]:
        return scan_pages(lambda low, high, backwards: _read_page(self._txn, low, high, backwards), prefix, start, reverse)

    def put(self, key: bytes, value: bytes) -> None:
        check_key(key)
        self._write(key, value + _checksum(key, value))

    def delete(self, key: bytes) -> None:
        self._write(key, None)

    def clear(self, prefix: bytes) -> None:
        for key in [key for key, _ in self.scan(prefix)]:
            self._write(key, None)

    def commit(self) -> None:
        while True:
            try:
                self._txn.commit()
                return
            except lmdb.MapFullError:
                self._grow()

    def abort(self) -> None:
        self._txn.abort()

    def _write(self, key: bytes, value: bytes | None) -> None:
        self._journal.append((key, value))
        try:
            self._apply(key, value)
        except lmdb.MapFullError:
            self._grow()

    def _apply(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self._txn.delete(key)
        else:
            self._txn.put(key, value)

    def _grow(self) -> None:
        """Writes everything so far again. Nobody else wrote meanwhile, so what was read from this batch still holds."""
        while True:
            self._txn.abort()
            self._environment.grow()
            self._txn = self._environment.begin_writing()
            try:
                for key, value in self._journal:
                    self._apply(key, value)
                return
            except lmdb.MapFullError:
                continue


def _get(txn: Any, key: bytes) -> bytes | None:
    stored = txn.get(key)
    return None if stored is None else _unprotect(key, stored)


def _checksum(key: bytes, value: bytes) -> bytes:
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(_CRC_BYTES, "little")


def _unprotect(key: bytes, stored: bytes) -> bytes:
    value = stored[:-_CRC_BYTES]
    if _checksum(key, value) != stored[-_CRC_BYTES:]:
        raise lmdb.CorruptedError("a value does not match its checksum")
    return value


def _read_page(txn: Any, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
    items: list[Item] = []
    with txn.cursor() as cursor:
        if not reverse:
            found = cursor.set_range(low)
        elif high is not None and cursor.set_range(high):
            found = cursor.prev()
        else:
            found = cursor.last()
        while found and len(items) < PAGE_ITEMS:
            key, stored = cursor.item()
            if key < low if reverse else (high is not None and key >= high):
                break
            items.append((key, _unprotect(key, stored)))
            found = cursor.prev() if reverse else cursor.next()
    return items
