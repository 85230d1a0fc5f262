"""One large local file written past the page cache.

Bytes are copied into aligned windows of the file; the thread that fills a window writes it with O_DIRECT. On a disk this is faster
than the page cache with an fsync (a warm copy costs a third of a fresh page, and the kernel's write-back does not take the
cores that hash), steadier, and it leaves the training job's page cache alone. A window that is not full at the end goes through
the page cache: a small file is one write.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.local_io import write_at
from tensorstore_ck.backend.local_writer import LocalWriter
from tensorstore_ck.common.huge_pages import new_pages

WINDOW_BYTES: Final = 8 << 20
"""Whole huge pages, and a multiple of any device's block size: two requests of 4 MiB, of which the disk has one while the other is sent."""


class _WriteWindow:
    """`WINDOW_BYTES` of the file, on their way to the disk."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.filled = 0


class DirectWriter(LocalWriter):
    """A `LocalWriter` over a descriptor in O_DIRECT mode."""

    def __init__(self, fd: int, unlink: Callable[[], object], name: str, seal: Callable[[int], None], folder: str) -> None:
        super().__init__(fd, unlink, name, seal, folder)
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
