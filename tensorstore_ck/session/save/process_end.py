"""A process that ends, by itself or by a signal: finishes saves in time, and reports which snapshot is safe."""

import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Final

from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.save_queue import GIVE_UP_SECONDS, SaveQueue

_logger: Final = logging.getLogger("tensorstore_ck")


class Preemption:
    """Waits for a signal. Make it with `Store.on_preemption`.

    From the signal until the deadline the saves in progress go on, and a loop that checks `requested` can save once more, call `finish` and
    exit. Shortly before the deadline the remaining saves are given up, the safe snapshot is logged, and the former handler of the signal
    gets it: by default it ends the process. Python handles signals between two steps of the main thread: while that hangs in a collective,
    the signal is not seen.
    """

    def __init__(self, queue: SaveQueue, signal_number: int, *, deadline_seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidOptionError(
                "on_preemption must be called on the main thread, where Python handles signals", object_id="on_preemption"
            )
        if deadline_seconds <= 0:
            raise InvalidOptionError(f"deadline_seconds must be more than 0, not {deadline_seconds}", object_id="deadline_seconds")
        self._queue = queue
        self._pid = os.getpid()
        self._signal_number = signal_number
        self._deadline_seconds = deadline_seconds
        self._deadline = 0.0
        self._requested = Flag()
        self._finished = Flag()
        self._former = signal.signal(signal_number, self._handle)

    @property
    def requested(self) -> bool:
        """Whether the signal came."""
        return self._requested.is_set()

    @property
    def seconds_left(self) -> float:
        """The time until the deadline; the full time if the signal did not come."""
        return max(0.0, self._deadline - time.monotonic()) if self.requested else self._deadline_seconds

    def finish(self) -> DrainReport:
        """Waits for the saves in progress while there is time, and gives up the others. The caller then ends the process."""
        report = self._queue.drain(max(0.0, self.seconds_left - self._margin_seconds), give_up_seconds=self._margin_seconds)
        self._finished.set()
        _logger.warning("preempted: %s", report)
        return report

    def cancel(self) -> None:
        """Restores the former handler of the signal, on the main thread."""
        self._finished.set()
        self._restore()

    def _restore(self) -> None:
        signal.signal(self._signal_number, signal.SIG_DFL if self._former is None else self._former)  # None: it was set in C

    @property
    def _margin_seconds(self) -> float:
        """The time that giving up may take."""
        return min(GIVE_UP_SECONDS, self._deadline_seconds / 4)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked helper process
            self._restore()
            os.kill(os.getpid(), number)
        elif not self._requested.is_set():
            self._deadline = time.monotonic() + self._deadline_seconds
            self._requested.set()
            # On a thread of its own: the main thread may be in the middle of anything, such as a save that holds locks.
            Helper(self._wait_for_deadline, "tsck-preempted").start()
        elif self._finished.is_set():
            self.cancel()
            os.kill(os.getpid(), self._signal_number)

    def _wait_for_deadline(self) -> None:
        if not self._finished.wait(max(0.0, self.seconds_left - self._margin_seconds)):
            self.finish()
            os.kill(os.getpid(), self._signal_number)  # only the main thread can restore the former handler: see `_handle`


def finish_at_exit(queue: SaveQueue) -> None:
    """Lets the interpreter wait for the saves of `queue` before it ends; logs those that are not published then."""
    reference, pid = weakref.ref(queue), os.getpid()

    def finish() -> None:
        queue = reference()
        if queue is None or os.getpid() != pid:  # a forked child has neither the saves nor usable locks
            return
        report = queue.end_process()
        if report.staged or report.dropped or report.under_way:
            _logger.error("the process ends with saves in progress: %s", report)

    # Not atexit: its callbacks run when executors accept no work, and backends use those.
    try:
        threading._register_atexit(finish)  # type: ignore[attr-defined]
    except RuntimeError:  # the main thread has ended: this is another thread, or a callback of atexit
        queue.end_process()
