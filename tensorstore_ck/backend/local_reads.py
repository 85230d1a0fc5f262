"""Reads of local files, tried again where a network folder lost its handle for a moment.

After a server of NFS or SMB restarted, one read fails (ESTALE, EIO), and the next one, with a new handle, succeeds. EIO of a disk of
this host stays, and is reported at once. Only reads are tried again: a failed write or fsync is final. Errors are
`OSError`, for the caller to translate.
"""

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from tensorstore_ck.backend.local_io import read_at, read_whole
from tensorstore_ck.common.filesystem_kind import NETWORK_FILESYSTEM, filesystem_of
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError

T = TypeVar("T")

PAUSES_SECONDS: Final = (0.1, 0.4, 1.0)
"""The pauses before further tries. NFS itself waits much longer before it reports an error."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us


def try_again(path: str, read: Callable[[], T]) -> T:
    """The result of `read`, which looks at `path` and changes nothing."""
    for pause in PAUSES_SECONDS:
        try:
            return read()
        except OSError as exc:
            if exc.errno != errno.ESTALE and not (exc.errno == errno.EIO and _is_on_network(path)):
                raise
        time.sleep(pause)
    return read()


def read_file(path: str, dir_fd: int | None, name: str, max_bytes: int) -> bytes:
    """All bytes of the file of object `name`. Not tried again: see `try_again`.

    Raises:
        CorruptObjectError: it has more than `max_bytes`.
    """
    fd = os.open(path, _READ, dir_fd=dir_fd)
    try:
        size_bytes = regular_size(os.fstat(fd), name)
        if size_bytes > max_bytes:
            raise CorruptObjectError(f"{name} has {size_bytes} bytes, more than the {max_bytes} it may have", object_id=name)
        return read_whole(fd, size_bytes)
    finally:
        os.close(fd)


def read_range(path: str, dir_fd: int | None, offset: int, target: memoryview) -> int:
    """Fills `target` from `offset` of the file; returns how many bytes were there. Not tried again: see `try_again`."""
    fd = os.open(path, _READ, dir_fd=dir_fd)
    try:
        return read_at(fd, target, offset)
    finally:
        os.close(fd)


def regular_size(status: os.stat_result, name: str) -> int:
    """The size of an object's file.

    Raises:
        MissingObjectError: it is a folder, a link or a device.
    """
    if not stat.S_ISREG(status.st_mode):
        raise MissingObjectError(f"{name} is not a file; only this package makes the store's files", object_id=name)
    return status.st_size


def _is_on_network(path: str) -> bool:
    return NETWORK_FILESYSTEM.fullmatch(filesystem_of(Path(path).parent)) is not None
