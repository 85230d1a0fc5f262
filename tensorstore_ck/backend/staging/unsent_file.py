"""One open object that is not published yet: read by its upload and for peers, each byte verified before it leaves this host.

The hashes of an object are known to what `OpenVerifier` opens; this module knows the file.
"""

import fcntl
import io
import os
import threading
from collections.abc import Callable
from typing import Final

from tensorstore_ck.backend.local_io import read_at
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.errors import CorruptObjectError

Verify = Callable[[int, memoryview], None]
"""Raises CorruptObjectError unless these are the object's bytes from an offset."""
ReadInto = Callable[[int, memoryview], None]
"""Fills memory with an object's bytes from an offset."""
OpenVerifier = Callable[[str, int, ReadInto], Verify]
"""Given an object's name, its size, and what reads it."""

_READ_BYTES: Final = 16 << 20


class StagedDamageError(CorruptObjectError):
    """The bytes of a staged object are not those that were written: only another copy of it can be published."""


def unverified(name: str, size_bytes: int, read: ReadInto) -> Verify:
    """The `OpenVerifier` of a folder whose objects stay there."""
    return lambda offset, data: None


def verify_all(verify: Verify, size_bytes: int, read: ReadInto) -> None:
    """Reads and verifies a whole object.

    Raises:
        CorruptObjectError: it is damaged.
    """
    memory = memoryview(bytearray(min(_READ_BYTES, size_bytes)))
    for offset in range(0, size_bytes, _READ_BYTES):
        piece = memory[: size_bytes - offset]
        read(offset, piece)
        verify(offset, piece)


def inode_of(status: os.stat_result) -> tuple[int, int]:
    """Identifies a file, also after another one took its name."""
    return status.st_dev, status.st_ino


class UnsentFile:
    """An open object that is not published yet. Reads are thread-safe."""

    def __init__(
        self, fd: int, name: str, folder: str, inode: Callable[[], tuple[int, int] | None], open_verifier: OpenVerifier = unverified
    ) -> None:
        """`inode` is called for the file that the object has now."""
        self.name = name
        self._inode = inode
        self.size_bytes = os.fstat(fd).st_size
        self._fd = fd
        self.raw = io.FileIO(fd)
        """Its owner closes it, by C code alone: nothing that interrupts `close` may keep the lock."""
        self._folder = folder
        self._open_verifier = open_verifier
        self._verify: Verify | None = None
        self._lock = threading.Lock()

    def lock(self) -> bool:
        """Whether this process got the right to upload it, until it is closed or the process dies.

        False if another process has it, or published it or dropped it since the file was opened.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with os_errors("look at", self.name):
            return inode_of(os.fstat(self._fd)) == self._inode()

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset`, and verifies it.

        Raises:
            StagedDamageError: the disk has other bytes than those that were written, or fewer.
        """
        try:
            self._read(offset, target)
            self._verifier()(offset, target)
        except CorruptObjectError as exc:
            raise self._damage(exc) from exc

    def verify(self) -> None:
        """Reads and verifies all of it.

        Raises:
            StagedDamageError: the disk has other bytes than those that were written, or fewer.
        """
        try:
            verify_all(self._verifier(), self.size_bytes, self._read)
        except CorruptObjectError as exc:
            raise self._damage(exc) from exc

    def close(self) -> None:
        """Closes the file, which releases its lock; idempotent."""
        self._fd = -1
        self.raw.close()

    def _damage(self, cause: CorruptObjectError) -> StagedDamageError:
        return StagedDamageError(
            f"the staging disk damaged {self.name} in {self._folder} after it was written ({cause}), and there is no other copy: save "
            "again, and check that disk",
            object_id=self.name,
        )

    def _verifier(self) -> Verify:
        with self._lock:
            if self._verify is None:
                self._verify = self._open_verifier(self.name, self.size_bytes, self._read)
            return self._verify

    def _read(self, offset: int, target: memoryview) -> None:
        with os_errors("read", self.name):
            count = read_at(self._fd, target, offset)
        if count < len(target):
            raise CorruptObjectError(f"it ends at {offset + count:,}, before byte {offset + len(target):,}", object_id=self.name)
