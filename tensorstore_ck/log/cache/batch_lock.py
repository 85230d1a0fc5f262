"""The lock that a batch holds against other processes, with a counter that shows waiting processes the holder's progress.

It is a record lock: a forked child would inherit a lock of flock. The lock file contains two numbers of 8 bytes, little-endian: a count
that grows while a batch works, and the process id of the last holder. They are only hints.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tensorstore_ck.log.cache.protocol import TableBusyError

_POLL_SECONDS: Final = 0.0005
_NUMBERS: Final = struct.Struct("<QQ")


class BatchLock:
    """One process's side of the lock; its threads exclude each other otherwise."""

    def __init__(self, path: Path, patience_seconds: float) -> None:
        """`patience_seconds`: how long to wait for a holder without progress that is not stopped, such as one that syncs a busy disk."""
        self._path = path
        self._patience_seconds = patience_seconds
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
        with suppress(OSError):  # a full disk: waiting processes give up sooner
            os.pwrite(self._file, _NUMBERS.pack((self._progress()[0] + 1) % (1 << 64), os.getpid()), 0)

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
