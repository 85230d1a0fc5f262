"""Long reads: each runs in its own thread; pages show its progress and its last result."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import StoreError

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total); raises `CancelledError` when the server ends, or no page shows the read any more."""
PATIENCE_SECONDS: Final = 1.0
"""A page waits this long for a read that it started: in a small store the read ends within it."""

_LOOK_SECONDS: Final = 1.0
"""A read that waits for another one checks at this interval whether it should end."""


class CancelledError(Exception):
    """The server ends, or no page shows the read any more."""


@dataclass(slots=True)
class Read:
    """One kind of read of one store."""

    result: object = None
    """The result of the last read that ended without an error."""
    result_ns: int | None = None
    error: str = ""
    """The error of the last read that ended; empty without one."""
    started_ns: int | None = None
    """When the running read began; None: none runs."""
    what: str = ""
    done: int = 0
    total: int = 0
    thread: threading.Thread | None = field(default=None, repr=False)
    looked: float = 0.0
    """When a page last looked at it, by the monotonic clock."""

    @property
    def is_running(self) -> bool:
        """Whether one runs now."""
        return self.started_ns is not None


class Background:
    """The reads, by store and kind: one at a time of each. Thread-safe. They are forgotten when the server ends."""

    def __init__(self, most: int | None = None, abandon_seconds: float = math.inf) -> None:
        """Args:
        most: How many ended reads to keep: those that a page showed last; None: all.
        abandon_seconds: A read ends when no page has shown it for this time.
        """
        self._most = most
        self._abandon_seconds = abandon_seconds
        self._reads: OrderedDict[tuple[str, str], Read] = OrderedDict()
        self._lock = threading.Lock()
        self._ends = Flag()
        self._alone = threading.Lock()

    def read(self, uuid: str, kind: str) -> Read:
        """The current state of a kind of read of a store."""
        with self._lock:
            read = self._reads.setdefault((uuid, kind), Read())
            self._reads.move_to_end((uuid, kind))
            read.looked = time.monotonic()
            ended = list(filter(lambda key: not self._reads[key].is_running, self._reads))
            for key in ended[: -self._most] if self._most is not None else ():
                del self._reads[key]
            return read

    def start(self, uuid: str, kind: str, work: Callable[[Progress], object], patience_seconds: float | None = None) -> None:
        """Starts a read, unless one runs; returns when it ended, or after `patience_seconds`, by default `PATIENCE_SECONDS`."""
        read = self.read(uuid, kind)
        with self._lock:
            if not read.is_running and not self._ends.is_set():
                read.started_ns, read.what, read.done, read.total = time.time_ns(), "", 0, 0
                read.thread = Helper(lambda: self._run(read, work), f"tsck-ui-{kind}")
                read.thread.start()
            thread = read.thread
        if thread is not None:
            thread.join(PATIENCE_SECONDS if patience_seconds is None else patience_seconds)

    def read_once(self, uuid: str, kind: str, work: Callable[[Progress], object], patience_seconds: float | None = None) -> Read:
        """The read; unless it has a result, starts it as `start` does."""
        read = self.read(uuid, kind)
        if read.result is None:
            self.start(uuid, kind, work, patience_seconds)
        return read

    @contextmanager
    def alone(self, progress: Progress) -> Iterator[None]:
        """For reads that use all cores and much memory: waits until no other one runs."""
        while not self._alone.acquire(timeout=_LOOK_SECONDS):
            progress("waiting for another read", 0, 0)
        try:
            yield
        finally:
            self._alone.release()

    def close(self, patience_seconds: float) -> bool:
        """Cancels what runs; returns whether it has ended in time, so that nothing uses the stores any more."""
        self._ends.set()
        with self._lock:
            reads = list(self._reads.values())
        threads = [read.thread for read in reads if read.thread is not None]
        until = time.monotonic() + patience_seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _run(self, read: Read, work: Callable[[Progress], object]) -> None:
        def note(what: str, done: int, total: int) -> None:
            if self._ends.is_set():
                raise CancelledError("the server ended")
            if time.monotonic() - read.looked > self._abandon_seconds:
                raise CancelledError("no page asked for it any more")
            read.what, read.done, read.total = what, done, total

        error = "it ended with an error of this program: see what `tsck ui` printed"
        try:
            read.result, read.result_ns = work(note), time.time_ns()
            error = ""
        except CancelledError as exc:
            error = str(exc)
        except StoreError as exc:
            error = str(exc)
        finally:
            read.error, read.started_ns = error, None
