"""One LMDB environment of this process, shared by all handles on its folder.

Nothing else opens LMDB's files. py-lmdb refuses a second open of a path in one process (closing one would drop the
other's file locks), so `lmdb_table` counts handles in a process-wide registry. Invariants: a forked child never uses an
environment; `set_mapsize` never runs while a transaction of this process is open (`_map_lock`, and `_write_lock` before it; views
copy their rows first); a batch holds `batch.lock` in the folder from start to end, so that it can begin again in a larger map
without any other process's batch in between; an environment that failed is not used again, and stays open until it is closed, as
a thread may have a transaction.
"""

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import lmdb

from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.log.cache.protocol import TableBusyError, TableDamagedError, TableError

with suppress(ImportError):  # some versions import it at the first `lmdb.open`: a child forked during that would hang
    import_module("lmdb._envid")

T = TypeVar("T")
P = ParamSpec("P")

INITIAL_MAP_BYTES: Final = 64 << 20
DEFAULT_PATIENCE_SECONDS: Final = 1.0
READ_AHEAD_BELOW_BYTES: Final = 256 << 20
"""A larger file is mostly the block index. Lookups in it are random: with the kernel's read-ahead each one that is not in the page cache
reads up to 8 MiB around it."""
_MAX_READERS: Final = 1024
_LOCK_BYTES: Final = (_MAX_READERS + 16) * 64
"""Of lock.mdb: as many readers, and their head."""
_CHECK_TRIES: Final = 3
_CHECK_AGAIN_SECONDS: Final = 0.002
_META: Final = struct.Struct("<16xII112xQ")
"""LMDB's meta page: magic, version, number of the last page in use."""
_META_MAGIC: Final = 0xBEEFC0DE
_DAMAGE: Final = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)
"""Errors that opening the same files again would raise again."""
_POLL_SECONDS: Final = 0.0005
_NUMBERS: Final = struct.Struct("<QQ")
"""Of the lock file: how far the holder is, and its process id."""


class View(Protocol):
    """A read transaction that outlives a call. The pages that it reads are not used again while it lives, so views are dropped soon."""

    def copy_into_memory(self) -> None:
        """Ends the transaction; the rows stay."""

    def end(self) -> None:
        """Ends the transaction, before the environment is closed."""


class Environment:
    """The table in one folder."""

    def __init__(self, folder: Path, map_bytes: int, patience_seconds: float, *, wait: bool) -> None:
        """Raises:
        TableBusyError: another process holds the lock.
        lmdb.Error, OSError: the folder cannot be used.
        """
        self.folder = folder
        self.users = 0
        self._map_bytes = map_bytes
        self.pid = os.getpid()
        self._failure = ""
        self._data_file, self._page_bytes, self._intact = -1, 0, (0, 0)
        self._write_lock = threading.RLock()
        self._map_lock = threading.RLock()
        self.views = weakref.WeakSet[View]()
        """Each adds itself when it is made in `in_map`."""
        self.parents_txns: list[Any] = []
        """Kept as long as a child lives: py-lmdb 1.6 would end them for the parent, too."""
        self.lock = BatchLock(folder / "batch.lock", patience_seconds)
        try:
            with self.lock.held(wait=wait):  # LMDB's own open is not safe against another process's close
                try:
                    self._lmdb = self._open()
                except lmdb.Error:
                    self._remove()
                    self._lmdb = self._open()
        except BaseException:
            self._close_data_file()
            self.lock.close()
            raise

    @contextmanager
    def writing(self, *, wait: bool) -> Iterator[None]:
        """Excludes all other batches of any thread and process.

        The main thread uses it only through `shielded`: Ctrl-C at its end could leave the locks held.
        """
        self._require_usable()  # in a child, a thread that it does not have may hold the locks
        with self._write_lock:
            self._require_usable()  # another thread may have closed it, and its file descriptors may be other files now
            try:
                with self.lock.held(wait=wait):
                    yield
            except lmdb.Error as exc:
                raise self._failed(exc) from exc

    def begin(self, *, write: bool) -> Any:
        """A transaction, for a caller that has looked whether this process may use the environment."""
        if self._failure:
            self._require_usable()
        self._require_intact()
        try:
            return self._lmdb.begin(write=write)
        except lmdb.ReadersFullError:
            self._lmdb.reader_check()
            return self._lmdb.begin(write=write)

    def grow(self) -> None:
        """Doubles the map; the caller holds the batch's lock and has no open transaction."""
        with self._map_lock:
            self._set_map_bytes(2 * self._lmdb.info()["map_size"])

    def cover_last_page(self) -> None:
        """Extends the file to the end of its last page; the caller holds the batch's lock, and has committed.

        LMDB does not write a page that a batch allocated at the file's end and freed, so an intact file may end before it.
        """
        size_bytes = (self._lmdb.info()["last_pgno"] + 1) * self._page_bytes
        with suppress(OSError):  # then `_require_intact` takes the file for a truncated one
            if os.fstat(self._data_file).st_size < size_bytes:
                os.ftruncate(self._data_file, size_bytes)

    def close(self) -> None:
        """Closes the files, unless they are a parent's."""
        if self.pid == os.getpid():
            with self._write_lock, self._map_lock:
                self._failure = self._failure or f"{self.folder} was closed"
                for view in list(self.views):
                    view.end()
                self._lmdb.close()
                self._close_data_file()
                self.lock.close()

    def in_map(self, use: Callable[[Any], T], *, write: bool = False) -> T:
        """The result of `use` with a new transaction, in a map as large as other processes made it; the map does not grow meanwhile.

        No context manager: Ctrl-C could leave one with its locks held.
        """
        if self._failure or self.pid != os.getpid():  # in a child, a thread that it does not have may hold the lock
            self._require_usable()
        try:
            try:
                with self._map_lock:
                    return use(self.begin(write=write))
            except lmdb.MapResizedError:  # only `begin` raises it: nothing was used
                with self._write_lock, self._map_lock:  # the size can be adopted only while no thread of ours writes
                    self._set_map_bytes(0)
                    return use(self.begin(write=write))
        except lmdb.Error as exc:
            if write:
                raise  # `writing` reports it when it has given its lock back
            raise self._failed(exc) from exc

    def _set_map_bytes(self, map_bytes: int) -> None:
        """Enlarges the map; 0: to the size that another process gave it. The caller holds `_map_lock`, and no thread of ours writes."""
        for view in list(self.views):
            with suppress(TableError):  # its next read raises it
                view.copy_into_memory()
        self._lmdb.set_mapsize(map_bytes)

    def guarded(self, use: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `use`; checks the environment before, and reports what LMDB raises as damage."""
        if self._failure or self.pid != os.getpid():
            self._require_usable()
        try:
            status = os.fstat(self._data_file)
            if (status.st_mtime_ns, status.st_size) != self._intact:
                self._require_intact()
            return use(*args, **kwargs)
        except lmdb.Error as exc:
            raise self._failed(exc) from exc

    def _require_usable(self) -> None:
        if self.pid != os.getpid():
            raise TableDamagedError(f"{self.folder} belongs to the parent process", object_id=str(self.folder))
        if self._failure:
            raise TableDamagedError(self._failure, object_id=str(self.folder))

    def _failed(self, cause: lmdb.Error) -> TableDamagedError:
        """Marks the environment as unusable. Removes damaged files, so that other and later processes begin with an empty table."""
        if not self._failure:
            self._failure = f"{self.folder}: {cause}"
            if isinstance(cause, _DAMAGE) and self._write_lock.acquire(blocking=False):  # else a thread of ours holds `lock` in a batch
                try:
                    with suppress(OSError, TableBusyError), self.lock.held(wait=False):
                        self._remove()
                finally:
                    self._write_lock.release()
        return TableDamagedError(self._failure, object_id=str(self.folder))

    def _open(self) -> Any:
        allocate(self.folder / "lock.mdb", _LOCK_BYTES)  # LMDB writes it through a map, and the other one by system calls
        # With sync or metasync off a power failure leaves LMDB damaged, or back in time.
        opened = lmdb.open(
            str(self.folder),
            map_size=self._map_bytes,
            sync=True,
            metasync=True,
            writemap=False,
            max_readers=_MAX_READERS,
            mode=0o600,
            readahead=_size_of(self.folder / "data.mdb") < READ_AHEAD_BELOW_BYTES,
        )
        try:
            opened.reader_check()  # killed readers keep their slots, and the pages that they read
            self._page_bytes = opened.stat()["psize"]
            self._close_data_file()
            self._data_file, self._intact = os.open(self.folder / "data.mdb", os.O_RDWR | os.O_CLOEXEC), (0, 0)
            self._require_intact()
        except BaseException:
            opened.close()
            raise
        return opened

    def _require_intact(self) -> None:
        """Refuses a truncated or overwritten file: LMDB would read beyond its end, which is a SIGBUS and not an error.

        Checks both meta pages (struct MDB_meta in LMDB's mdb.c) if the file was written since the last check.
        """
        for _ in range(_CHECK_TRIES):
            status = os.fstat(self._data_file)
            if (status.st_mtime_ns, status.st_size) == self._intact:
                return
            metas = os.pread(self._data_file, _META.size, 0) + os.pread(self._data_file, _META.size, self._page_bytes)
            size_bytes = os.fstat(self._data_file).st_size  # after the metas: a commit of another process grows the file before its metas
            if len(metas) == 2 * _META.size:
                (magic, version, page), (other_magic, other_version, other_page) = _META.iter_unpack(metas)
                are_metas = (magic, version) == (other_magic, other_version) == (_META_MAGIC, 1)
                if are_metas and (max(page, other_page) + 1) * self._page_bytes <= size_bytes:
                    self._intact = status.st_mtime_ns, status.st_size
                    return
            time.sleep(_CHECK_AGAIN_SECONDS)  # another process may be between its commit and `cover_last_page`
        raise lmdb.CorruptedError("data.mdb is cut short or overwritten")

    def _close_data_file(self) -> None:
        if self._data_file >= 0:
            os.close(self._data_file)
            self._data_file = -1

    def _remove(self) -> None:
        for name in ("data.mdb", "lock.mdb"):
            (self.folder / name).unlink(missing_ok=True)  # other processes continue with their open files


class BatchLock:
    """One process's side of the lock that a batch holds against other processes; its threads exclude each other otherwise.

    It is a record lock: a forked child would inherit a lock of flock. The lock file contains two numbers of 8 bytes, little-endian, which
    are only hints for processes that wait: a count that grows while a batch works, and the process id of the last holder.
    """

    def __init__(self, path: Path, patience_seconds: float) -> None:
        """`patience_seconds`: how long to wait for a holder without progress that is not stopped, such as one that syncs a busy disk."""
        self._path = path
        self._patience_seconds = patience_seconds
        self._count = time.monotonic_ns()  # the next lock of this process begins higher, so that a waiting process sees the change
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextmanager
    def held(self, *, wait: bool) -> Iterator[None]:
        """Holds the lock.

        Raises:
            TableBusyError: another process holds it, and `wait` is false, or the holder is stopped or makes no progress.
        """
        if not self._try():
            if not wait:
                raise self._busy()
            self._wait()
        self.show_progress()
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def show_progress(self) -> None:
        """Called by the holder while it works."""
        self._count += 1
        with suppress(OSError):  # a full disk: waiting processes give up sooner
            os.pwrite(self._file, _NUMBERS.pack(self._count, os.getpid()), 0)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
        self._file = -1

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _wait(self) -> None:
        seen, since = self._progress(), time.monotonic()
        while not self._try():
            time.sleep(_POLL_SECONDS)
            now = self._progress()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience_seconds or _is_stopped(now[1]):
                raise self._busy()

    def _progress(self) -> tuple[int, int]:
        try:
            count, pid = _NUMBERS.unpack(os.pread(self._file, _NUMBERS.size, 0))
        except (OSError, struct.error):
            return 0, 0
        return count, pid

    def _busy(self) -> TableBusyError:
        return TableBusyError(f"process {self._progress()[1]} holds {self._path}", object_id=str(self._path))


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped that process (Linux, proc_pid_stat(5)); False if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def allocate(path: Path, size_bytes: int) -> None:
    """Makes a file of that size if there is none, and allocates all pages of the one that is there.

    Raises:
        OSError: the disk is full, or the file cannot be used.
    """
    with closing_fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as fd:
        try:
            status = os.fstat(fd)
            if not status.st_size or status.st_blocks * 512 < status.st_size:
                os.posix_fallocate(fd, 0, status.st_size or size_bytes)
        except OSError as exc:
            exc.filename = str(path)
            raise
