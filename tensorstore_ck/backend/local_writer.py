"""One large local file written by several threads at once, under a name that nobody else uses.

A lock assigns offsets; the copying to the page cache runs outside it. A failed write is final: `close` then raises, since the
file has a hole. The descriptor is closed only when no write is running, so that its number cannot become another file's.
A crash leaves a torn file whose name nothing refers to.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final

from tensorstore_ck.backend.local_io import start_write_back, write_at
from tensorstore_ck.backend.os_errors import os_errors, store_error
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.changes import Changes
from tensorstore_ck.errors import BackendUnavailableError

WRITE_BACK_BYTES: Final = 64 << 20
"""Bytes between two requests for early write-back; 1.67 -> 2.44 GB/s for 1 GiB with fsync."""


class LocalWriter:
    """See `ObjectWriter`. `seal` makes the file durable under its name and closes the descriptor; `unlink` removes it.

    `folder`: a folder on the same disk.
    """

    def __init__(self, fd: int, unlink: Callable[[], object], name: str, seal: Callable[[int], None], folder: str) -> None:
        self._fd = fd
        self._unlink = unlink
        self._name = name
        self._seal = seal
        self._folder = folder
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
        with os_errors("write", self._name, self._folder):
            self._finish()
            fd, self._fd = self._fd, -1
            self._seal(fd)
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
        self._start_write_back()

    def _finish(self) -> None:
        """Writes what `_write` buffered."""

    def _start_write_back(self) -> None:
        # Other threads may still be writing below `_end`: the fsync then writes their pages.
        with self._state.lock:
            start, end = self._written_back, self._end
            if end - start < WRITE_BACK_BYTES:
                return
            self._written_back = end
        start_write_back(self._fd, start, end - start)
