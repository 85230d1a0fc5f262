"""Ranges of local files, past the page cache where it has nothing of them.

On a disk, a read with O_DIRECT into warm memory takes at most a tenth of the processor time of one that fills the page cache, and about
half the time, before the copy to its target. But what it reads is not there for the next reader. So the first one leaves one page of each
range in the page cache: a second reader finds it and reads through the page cache, from which a third one reads. A reader that finds more
than its own page there afterwards reads at the same time as others, such as the ranks of a host: it then reads the file through the page
cache, as they do.
"""

import ctypes
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tensorstore_ck.backend.local_io import READ_FLAGS, read_at, use_direct
from tensorstore_ck.common.huge_pages import new_pages

DIRECT_FROM_BYTES: Final = 1 << 19
"""Smaller reads go through the page cache, which reads ahead."""
WINDOW_BYTES: Final = 8 << 20
PAGE_BYTES: Final = max(mmap.PAGESIZE, 4096)
"""A multiple of the alignment that any disk asks for."""
_CACHESTAT: Final = 451
"""The number of the system call, on all processors; Linux 6.5 and later have it."""


class RangeReader:
    """Reads ranges of files. Thread-safe; each thread has one window of memory, as long as the thread or this object lives."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._shared: set[str] = set()
        """The files that others were found to read at the same time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeReader, ()

    def read(self, path: str, dir_fd: int | None, offset: int, target: memoryview) -> int:
        """Fills `target` from `offset` of the file; returns how many bytes were there. Not tried again: see `try_again`."""
        fd = os.open(path, READ_FLAGS, dir_fd=dir_fd)
        try:
            done = self._read_direct(fd, path, offset, target) if len(target) >= DIRECT_FROM_BYTES else 0
            return done + read_at(fd, target[done:], offset + done)
        finally:
            os.close(fd)

    def _read_direct(self, fd: int, path: str, offset: int, target: memoryview) -> int:
        """Reads as much as can and should be read past the page cache."""
        first = -(-offset // PAGE_BYTES) * PAGE_BYTES
        size = (offset + len(target)) // PAGE_BYTES * PAGE_BYTES - first
        if path in self._shared or pages_in_cache(fd, first, size) != 0 or not use_direct(fd):
            return 0
        try:
            os.posix_fadvise(fd, first, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
            done = self._fill(fd, offset, target)
        except OSError:  # it asks for another alignment, or the disk failed: the read through the page cache reports that
            return 0
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        if pages_in_cache(fd, first, size) > 1:
            self._shared.add(path)
        return done

    def _fill(self, fd: int, offset: int, target: memoryview) -> int:
        window = self._window()
        memory, filled = np.frombuffer(window, np.uint8), np.frombuffer(target, np.uint8)  # numpy copies without the GIL
        done = 0
        while done < len(target):
            skipped = (offset + done) % PAGE_BYTES
            wanted = min(len(target) - done, WINDOW_BYTES - skipped)
            whole = -(-(skipped + wanted) // PAGE_BYTES) * PAGE_BYTES
            count = min(os.preadv(fd, [memoryview(window)[:whole]], offset + done - skipped) - skipped, wanted)
            if count <= 0:
                break
            filled[done : done + count] = memory[skipped : skipped + count]
            done += count
            if count < wanted:
                break  # the file ends there
        return done

    def _window(self) -> mmap.mmap:
        window: mmap.mmap | None = getattr(self._of_thread, "window", None)
        if window is None:
            window = self._of_thread.window = new_pages(WINDOW_BYTES)
        return window


def pages_in_cache(fd: int, offset: int, size: int) -> int:
    """How many pages of a range of a file the page cache has; -1: the system does not say."""
    call, found = _syscall(), (ctypes.c_uint64 * 5)()
    if call is None or call(_CACHESTAT, fd, (ctypes.c_uint64 * 2)(offset, size), found, 0):
        return -1
    return found[0]


@functools.cache
def _syscall() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(None).syscall
    except (AttributeError, OSError):  # not Linux
        return None
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    call.restype = ctypes.c_long
    return call
