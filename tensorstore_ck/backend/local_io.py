"""System calls on one file: complete reads and writes, and early write-back.

Short reads and writes are looped (Python itself repeats calls that a signal interrupted);
errors are `OSError`, for the caller to translate.

Reads of a store's files are tried again where a network folder lost its handle for a moment. After a server of NFS or SMB restarted, one
read fails (ESTALE, EIO), and the next one, with a new handle, succeeds. EIO of a disk of this host stays, and is reported at once. So is
a file that is too short; over a network that may be an old size. Only reads are tried again: a failed write or fsync is final.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, TypeVar

from tensorstore_ck.common.filesystem_kind import NETWORK_FILESYSTEM, filesystem_of
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError

T = TypeVar("T")

PAUSES_SECONDS: Final = (0.1, 0.4, 1.0)
"""The pauses before further tries of a read. NFS itself waits much longer before it reports an error."""
MAX_VECTORS: Final = 512
"""Buffers in one pwritev; Linux and macOS take 1,024."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us
_SYNC_FILE_RANGE_WRITE: Final = 2
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_STATX_BYTES: Final = 256
_DIO_OFFSET_ALIGN: Final = Struct("=I")
_DIO_OFFSET_ALIGN_AT: Final = 0x9C
"""In Linux's `struct statx`; 0 where the kernel (before 6.1) or the filesystem says nothing of O_DIRECT."""


def write_at(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Writes all of `views`, one after another, from `offset`."""
    pending = list(views)
    while pending:
        written = os.pwritev(fd, pending[:MAX_VECTORS], offset)
        offset += written
        done = 0
        while done < len(pending) and written >= len(pending[done]):
            written -= len(pending[done])
            done += 1
        del pending[:done]
        if written:
            pending[0] = pending[0][written:]


def read_at(fd: int, target: memoryview, offset: int) -> int:
    """Fills `target` from `offset`; returns how many bytes were there."""
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def read_whole(fd: int, size: int) -> bytes:
    """The first `size` bytes, or all. The kernel fills the result itself: 9 times as fast as `read_at` and a copy."""
    data = os.pread(fd, size, 0)
    while len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
        data += more
    return data


def start_write_back(fd: int, offset: int, size: int) -> None:
    """Asks the kernel to begin writing a range to disk, if it can; does not wait.

    The fsync at the end then finds most pages written, and reports the errors: this call does not consume a write-back error.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


def is_disk_of_this_host(status: os.stat_result) -> bool:
    """Whether a file is on a disk of this host: not in memory, and not on a network filesystem."""
    return os.major(status.st_dev) != 0


def use_direct(fd: int) -> bool:
    """Switches a file on a disk of this host to O_DIRECT; in memory or over a network that would only cost a copy."""
    if not hasattr(os, "O_DIRECT") or not (is_disk_of_this_host(os.fstat(fd)) or _is_aligned(fd)):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


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


def wait_for_size(path: str, read: Callable[[], int], size: int) -> int:
    """The result of `read`, which is tried again while it is below `size` and `path` is in a network folder.

    This host may have looked at the file while another one wrote it, and such folders keep the size of then for a second or more.
    """
    count = try_again(path, read)
    for pause in PAUSES_SECONDS if _is_on_network(path) else ():
        if count >= size:
            break
        time.sleep(pause)
        count = try_again(path, read)
    return count


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


def read_ahead(path: str, offset: int, size: int) -> None:
    """Reads bytes of a file into the page cache, if the system can; returns when they are there or about to be."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not Linux
        fd = os.open(path, _READ)
        try:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def copy_range(path: str, offset: int, fd: int, at: int, size: int) -> int:
    """Copies bytes of the file `path` to `at` of the file `fd`, without this process's memory; returns how many bytes.

    Fewer where the system or the filesystem cannot: then a copy through memory says what is wrong.
    """
    done = 0
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not Linux
        source = os.open(path, _READ)
        try:
            while done < size and (count := os.copy_file_range(source, fd, size - done, offset_src=offset + done, offset_dst=at + done)):
                done += count
        finally:
            os.close(source)
    return done


def regular_size(status: os.stat_result, name: str) -> int:
    """The size of an object's file.

    Raises:
        MissingObjectError: it is a folder, a link or a device.
    """
    if not stat.S_ISREG(status.st_mode):
        raise MissingObjectError(f"{name} is not a file; only this package makes the store's files", object_id=name)
    return status.st_size


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):  # not Linux
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    return call


def _is_aligned(fd: int) -> bool:
    """Whether the kernel says how O_DIRECT must be aligned: on overlay, which has no device, it does if the folder below is on a disk."""
    status = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = ctypes.CDLL(None).statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status)
    except (AttributeError, OSError):  # not Linux, or before 4.11
        return False
    return not failed and _DIO_OFFSET_ALIGN.unpack_from(status, _DIO_OFFSET_ALIGN_AT)[0] > 0


def _is_on_network(path: str) -> bool:
    return NETWORK_FILESYSTEM.fullmatch(filesystem_of(Path(path).parent)) is not None
