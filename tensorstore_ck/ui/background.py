"""Reads of a whole store that take long: each runs in a thread of its own, and pages show how far it is, and its last result."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tensorstore_ck.errors import StoreError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); raises `CancelledError` when the server ends."""
PATIENCE_SECONDS: Final = 1.0
"""A page waits this long for a read that it started: in a small store it is done then."""


class CancelledError(Exception):
    """The server ends."""


@dataclass(slots=True)
class Read:
    """One kind of read of one store."""

    result: object = None
    """Of the last that ended without an error."""
    result_ns: int | None = None
    error: str = ""
    """Of the last that ended."""
    started_ns: int | None = None
    """Of the one that runs."""
    what: str = ""
    done: int = 0
    total: int = 0
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def is_running(self) -> bool:
        """Whether one runs now."""
        return self.started_ns is not None


class Background:
    """The reads, by store and kind: one at a time of each. Thread-safe. They are forgotten when the server ends."""

    def __init__(self) -> None:
        self._reads: dict[tuple[str, str], Read] = {}
        self._lock = threading.Lock()
        self._ends = threading.Event()

    def read(self, uuid: str, kind: str) -> Read:
        """How a kind of read of a store is now."""
        with self._lock:
            return self._reads.setdefault((uuid, kind), Read())

    def start(self, uuid: str, kind: str, work: Callable[[Progress], object]) -> None:
        """Starts a read, unless one runs; returns when it ended, or after `PATIENCE_SECONDS`."""
        read = self.read(uuid, kind)
        with self._lock:
            if not read.is_running and not self._ends.is_set():
                read.started_ns, read.what, read.done, read.total = time.time_ns(), "", 0, 0
                read.thread = threading.Thread(target=self._run, args=(read, work), name=f"tsck-ui-{kind}", daemon=True)
                read.thread.start()
            thread = read.thread
        if thread is not None:
            thread.join(PATIENCE_SECONDS)

    def close(self, patience_seconds: float) -> bool:
        """Cancels what runs; returns whether it has ended in time, so that nothing uses the stores any more."""
        self._ends.set()
        with self._lock:
            threads = [read.thread for read in self._reads.values() if read.thread is not None]
        until = time.monotonic() + patience_seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self, read: Read, work: Callable[[Progress], object]) -> None:
        def note(what: str, done: int, total: int) -> None:
            if self._ends.is_set():
                raise CancelledError
            read.what, read.done, read.total = what, done, total

        error = "it ended with an error of this program: see what `tsck ui` printed"
        try:
            read.result, read.result_ns = work(note), time.time_ns()
            error = ""
        except CancelledError:
            error = "the server ended"
        except StoreError as exc:
            error = str(exc)
        finally:
            read.error, read.started_ns = error, None
