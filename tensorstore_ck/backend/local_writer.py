"""One large local file written by several threads at once, under a name that nobody else uses; on a disk past the page cache.

A lock assigns offsets; the copying to the page cache runs outside it. A failed write is final: `close` then raises, since the
file has a hole. The descriptor is closed only when no write is running, so that its number cannot become another file's.
A crash leaves a torn file whose name nothing refers to.

`DirectWriter` copies bytes into aligned windows of the file; the thread that fills a window writes it with O_DIRECT. On a disk this is
faster than the page cache with an fsync (a warm copy costs a third of a fresh page, and the kernel's write-back does not take the
cores that hash), steadier, and it leaves the training job's page cache alone. A window that is not full at the end goes through
the page cache: a small file is one write.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.local_io import start_write_back, write_at
from tensorstore_ck.backend.os_errors import store_error
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.huge_pages import new_pages
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.errors import BackendUnavailableError

WRITE_BACK_BYTES: Final = 64 << 20
"""Bytes between two requests for early write-back; 1.67 -> 2.44 GB/s for 1 GiB with fsync."""
WINDOW_BYTES: Final = 8 << 20
"""Whole huge pages, and a multiple of any device's block size: two requests of 4 MiB, of which the disk has one while the other is sent."""


class LocalWriter:
    """See `ObjectWriter`."""

    def __init__(self, fd: int, name: str, folder: str, *, seal: Callable[[int], None], unlink: Callable[[], object]) -> None:
        """`folder`: a folder on the same disk. `seal` makes the file durable under its name, and closes it; `unlink` removes it."""
        self._fd = fd
        self._name = name
        self._folder = folder
        self._seal = seal
        self._unlink = unlink
        self._state = Changes()
        self._open = True
        self._failed = False
        self._sealed = False
        self._writes_under_way: set[object] = set()
        """One object of each; added and discarded without the lock, so that Ctrl-C in the wait for it changes nothing."""
        self._end = 0
        self._written_back = 0

    def append(self, data: Sequence[Buffer]) -> int:
        views, write = byte_views(data), object()
        try:
            with self._state.lock:
                if not self._open:
                    raise BackendUnavailableError(f"{self._name} was closed or aborted while it was written", object_id=self._name)
                self._writes_under_way.add(write)
                offset = self._end
                self._end += sum(map(len, views))
            self._write(views, offset)
        except BaseException as exc:
            self._failed |= write in self._writes_under_way
            if isinstance(exc, OSError):
                raise store_error(exc, "write", self._name, self._folder) from exc
            raise
        finally:
            self._writes_under_way.discard(write)
            self._state.notify_all()
        return offset

    def close(self) -> None:
        self._wait_for_writes()
        if self._failed:
            self.abort()
            raise BackendUnavailableError(f"{self._name} has a hole where a write failed; write it again", object_id=self._name)
        try:
            self._finish()
            fd, self._fd = self._fd, -1
            self._seal(fd)
        except OSError as exc:
            raise store_error(exc, "write", self._name, self._folder) from exc
        self._sealed = True

    def abort(self) -> None:
        if self._sealed:
            return
        self._wait_for_writes()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._unlink()

    def _wait_for_writes(self) -> None:
        with self._state.lock:
            self._open = False
        self._state.wait_for(lambda: not self._writes_under_way)

    def _write(self, views: list[memoryview], offset: int) -> None:
        """Writes a range that no other call writes; thread-safe."""
        write_at(self._fd, views, offset)
        # Other threads may still be writing below `_end`: the fsync then writes their pages.
        with self._state.lock:
            start, end = self._written_back, self._end
            if end - start < WRITE_BACK_BYTES:
                return
            self._written_back = end
        start_write_back(self._fd, start, end - start)

    def _finish(self) -> None:
        """Writes what `_write` buffered."""


class _WriteWindow:
    """`WINDOW_BYTES` of the file, on their way to the disk."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.filled = 0


class DirectWriter(LocalWriter):
    """A `LocalWriter` over a descriptor in O_DIRECT mode."""

    def __init__(self, fd: int, name: str, folder: str, *, seal: Callable[[int], None], unlink: Callable[[], object]) -> None:
        super().__init__(fd, name, folder, seal=seal, unlink=unlink)
        self._windows: dict[int, _WriteWindow] = {}
        self._spare: list[mmap.mmap] = []

    def _write(self, views: list[memoryview], offset: int) -> None:
        for view in views:
            source = np.frombuffer(view, np.uint8)  # numpy copies without the GIL
            done = 0
            while done < len(source):
                number, at = divmod(offset + done, WINDOW_BYTES)
                count = min(WINDOW_BYTES - at, len(source) - done)
                window = self._window(number)
                window.array[at : at + count] = source[done : done + count]
                done += count
                with self._state.lock:
                    window.filled += count
                    full = window.filled == WINDOW_BYTES
                if full:
                    self._write_window(number, window)
            offset += len(source)

    def _finish(self) -> None:
        self._leave_direct()
        for number, window in self._windows.items():
            write_at(self._fd, [memoryview(window.memory)[: window.filled]], number * WINDOW_BYTES)
        self._windows.clear()

    def _window(self, number: int) -> _WriteWindow:
        with self._state.lock:
            window = self._windows.get(number)
            if window is None:
                memory = self._spare.pop() if self._spare else new_pages(WINDOW_BYTES)
                window = self._windows[number] = _WriteWindow(memory)
            return window

    def _write_window(self, number: int, window: _WriteWindow) -> None:
        try:
            write_at(self._fd, [memoryview(window.memory)], number * WINDOW_BYTES)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            self._leave_direct()  # the device needs another alignment
            write_at(self._fd, [memoryview(window.memory)], number * WINDOW_BYTES)
        with self._state.lock:
            del self._windows[number]
            self._spare.append(window.memory)

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
