"""Followers on one host read each range of a pack from the store once: the first one writes it to a file, where the others find it.

A file has the bytes of one range, then their hash. While it is read from the store, its reader holds a lock on it, which ends with the
process; the others wait. The folder never makes a read fail: what cannot be locked, written or read there comes from the store.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from tensorstore_ck.backend.local_io import read_at, write_at
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import DIGEST_BYTES, block_id
from tensorstore_ck.common.owned_files import FILE_MODE

SHARE: Final = 1 / 8
"""Of the space that the folder's filesystem has free, or these files use, at most."""
KEPT_SECONDS: Final = 600
"""Files that nobody used for so long are removed by the next write: all followers of the host have taken the version by then."""
WAIT_SECONDS: Final = 60.0
"""How long a follower waits for another one's read."""
PAUSE_SECONDS: Final = 0.005
_PACKS: Final = "packs/"
_SUFFIX: Final = ".range"


class HostCache:
    """A backend that reads ranges of packs by way of a folder. All other attributes are the inner backend's."""

    def __init__(self, inner: Backend, folder: str) -> None:
        """Makes the folder if it is missing."""
        self._inner, self._folder = inner, folder
        with os_errors("write", folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """See `Backend.read_into`."""
        if not name.startswith(_PACKS):
            self._inner.read_into(name, offset, target)
            return
        path = os.path.join(self._folder, f"{name.rpartition('/')[2]}-{offset}-{len(target)}{_SUFFIX}")
        with _locked(path) as fd:
            if fd is not None and _read(fd, target):
                return
            self._inner.read_into(name, offset, target)
            if fd is not None:
                self._write(fd, path, target)

    def _write(self, fd: int, path: str, data: memoryview) -> None:
        try:
            if self._has_space(len(data) + DIGEST_BYTES):
                write_at(fd, [data, memoryview(block_id(data))], 0)
            else:
                os.unlink(path)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, 0)

    def _has_space(self, size_bytes: int) -> bool:
        """Whether a file of that size fits, after the oldest ones were removed for it."""
        with os.scandir(self._folder) as entries:
            files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries if entry.name.endswith(_SUFFIX))
        total = sum(size for _, size, _ in files)
        disk = os.statvfs(self._folder)
        limit = SHARE * (disk.f_bavail * disk.f_frsize + total)
        for modified, size, path in files:
            if size and (total + size_bytes > limit or time.time() - modified > KEPT_SECONDS):
                os.unlink(path)
                total -= size
        return total + size_bytes <= limit


@contextmanager
def _locked(path: str) -> Iterator[int | None]:
    """The file, locked; None if that is impossible, or another process reads for too long."""
    fd = None
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        yield fd if fd is not None and _lock(fd) else None
    finally:
        if fd is not None:
            os.close(fd)


def _lock(fd: int) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        except OSError:  # a filesystem without locks
            return False
        else:
            return True


def _read(fd: int, target: memoryview) -> bool:
    """Whether the file has the bytes, whole."""
    with suppress(OSError):
        digest = memoryview(bytearray(DIGEST_BYTES))
        if os.fstat(fd).st_size == len(target) + DIGEST_BYTES and read_at(fd, target, 0) == len(target):
            read_at(fd, digest, len(target))
            os.utime(fd)
            return bytes(digest) == block_id(target)
    return False
