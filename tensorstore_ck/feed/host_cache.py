"""Followers on one host read each record, part and range of a pack from the store once: the first one writes it to a file for the others.

A file has the bytes of one object or range, then their hash. While it is read from the store, its reader holds a lock on it, which ends
with the process; the others wait. The folder is this user's alone. It never makes a read fail: what cannot be locked, written or read
there comes from the store.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.local_io import read_at, write_at
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import DIGEST_BYTES, block_id
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.errors import StoreError

SHARE: Final = 1 / 8
"""Of the space that the folder's filesystem has free, or these files use, at most."""
KEPT_SECONDS: Final = 600
"""Files that nobody used for so long are removed by the next write: all followers of the host have taken the version by then."""
WAIT_SECONDS: Final = 60.0
"""How long a follower waits for another one's read."""
PAUSE_SECONDS: Final = 0.005
_PACKS: Final = "packs/"
_WHOLE: Final = ("snapshots/", "parts/")
"""Objects that are read whole. Those who read them compare them with a root or an id."""
_SUFFIX: Final = ".range"


class HostCache(ForwardingBackend):
    """A backend that reads records, parts and ranges of packs by way of a folder."""

    def __init__(self, inner: Backend, folder: str) -> None:
        """Makes the folder if it is missing.

        Raises:
            PermissionDeniedError: it is not this user's, or others can put another folder in its place.
            StoreError: it cannot be made.
        """
        super().__init__(inner)
        self._folder = PrivateFolder(os.path.abspath(local_path(folder, "host_cache")), ": give each user a folder of its own")
        with os_errors("write", folder):
            self._folder.make()

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """See `Backend.read_into`."""
        if name.startswith(_PACKS):
            with self._locked(f"{name.rpartition('/')[2]}-{offset}-{len(target)}{_SUFFIX}") as file:
                if file is not None and (file.read(target) or self._fill(file, name, offset, target)):
                    return
        self.inner.read_into(name, offset, target)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """See `Backend.get`."""
        if name.startswith(_WHOLE):
            with self._locked(f"{name.rpartition('/')[2]}-whole{_SUFFIX}") as file:
                if file is not None:
                    data = file.read_whole(max_bytes)
                    return self._fill_whole(file, name, max_bytes) if data is None else data
        return self.inner.get(name, max_bytes=max_bytes)

    def distrust(self, name: str) -> bool:
        """The bytes read for an object were wrong: its files are removed. Returns whether there were any."""
        found, ulid = False, name.rpartition("/")[2]
        with suppress(OSError, StoreError):
            for path, _ in self._folder.files("."):
                if os.path.basename(path).startswith(f"{ulid}-"):
                    self._unlink(path)
                    found = True
        return found

    def _fill(self, file: "_LockedFile", name: str, offset: int, target: memoryview) -> bool:
        """Reads a range from the store, and writes the file; returns False, with nothing read, if there is no space for that."""
        try:
            if not self._has_space(len(target) + DIGEST_BYTES):
                self._unlink(file.name)
                return False
            self.inner.read_into(name, offset, target)
        except BaseException:
            self._unlink(file.name)
            raise
        if not file.write(target):
            self._unlink(file.name)
        return True

    def _fill_whole(self, file: "_LockedFile", name: str, max_bytes: int) -> bytes:
        """Reads an object from the store, and writes the file if it has space."""
        try:
            data = self.inner.get(name, max_bytes=max_bytes)
        except BaseException:
            self._unlink(file.name)
            raise
        if not (self._has_space(len(data) + DIGEST_BYTES) and file.write(memoryview(data))):
            self._unlink(file.name)
        return data

    def _has_space(self, size_bytes: int) -> bool:
        """Whether a file of that size fits; removes what nobody uses, and the oldest ones for it."""
        with suppress(OSError, StoreError):
            listed = self._folder.files(".")
            files = sorted((status.st_mtime, status.st_size, path) for path, status in listed if path.endswith(_SUFFIX))
            total = sum(size for _, size, _ in files)
            disk = os.statvfs(self._folder.fd())
            limit = SHARE * (disk.f_bavail * disk.f_frsize + total)
            fits = size_bytes <= limit
            for modified, size, path in files:
                if time.time() - modified > KEPT_SECONDS or (size and fits and total + size_bytes > limit):
                    self._unlink(path)
                    total -= size
            return total + size_bytes <= limit
        return False

    def _unlink(self, path: str) -> None:
        with suppress(OSError, StoreError):
            os.unlink(path, dir_fd=self._folder.fd())

    @contextmanager
    def _locked(self, name: str) -> "Iterator[_LockedFile | None]":
        """A file, locked; None if that is impossible, or another process reads for too long."""
        fd = None
        with suppress(OSError, StoreError):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=self._folder.fd())
        is_locked = fd is not None and _lock(fd)
        try:
            # It may have been removed meanwhile, and a file with a second name is another one, too.
            yield _LockedFile(fd, name) if is_locked and fd is not None and os.fstat(fd).st_nlink == 1 else None
        finally:
            if fd is not None:
                if is_locked:
                    with suppress(OSError):
                        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, and so the lock
                os.close(fd)


class _LockedFile:
    """The bytes of an object or a range, and their hash."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    def read(self, target: memoryview) -> bool:
        """Whether the file has the bytes, whole."""
        with suppress(OSError):
            digest = memoryview(bytearray(DIGEST_BYTES))
            if os.fstat(self._fd).st_size == len(target) + DIGEST_BYTES and read_at(self._fd, target, 0) == len(target):
                read_at(self._fd, digest, len(target))
                os.utime(self._fd)
                return bytes(digest) == block_id(target)
        return False

    def read_whole(self, max_bytes: int) -> bytes | None:
        """The bytes; None if the file does not have them, whole."""
        with suppress(OSError):
            size_bytes = os.fstat(self._fd).st_size - DIGEST_BYTES
            if 0 < size_bytes <= max_bytes and self.read(data := memoryview(bytearray(size_bytes))):
                return bytes(data)
        return None

    def write(self, data: memoryview) -> bool:
        try:
            write_at(self._fd, [data, memoryview(block_id(data))], 0)
        except OSError:
            return False
        return True


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
