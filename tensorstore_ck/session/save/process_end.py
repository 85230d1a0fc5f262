"""A job that is told to end: finishes what can be durable in time, and says which snapshot is safe."""

import logging
import os
import signal
import threading
import time
import weakref
from types import FrameType
from typing import Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.session.save.drain_report import DrainReport
from tensorstore_ck.session.save.save_queue import EXIT_SECONDS, GIVE_UP_SECONDS, SaveQueue

_logger: Final = logging.getLogger("tensorstore_ck")


class Preemption:
    """Waits for a signal. Make it with `Store.on_preemption`.

    From the signal on there is time until the deadline: for the puts under way, and for a loop that asks `requested` to put once more, to
    `finish`, and to leave. Shortly before the deadline what is still under way is given up, what is safe is logged, and the signal takes
    its former course: by default it ends the process. Python handles signals between two steps of the main thread: while that hangs in a
    collective, nothing is seen of the signal.
    """

    def __init__(self, saver: SaveQueue, signal_number: int, *, deadline_seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidOptionError(
                "on_preemption must be called on the main thread, where Python handles signals", object_id="on_preemption"
            )
        if deadline_seconds <= 0:
            raise InvalidOptionError(f"deadline_seconds must be more than 0, not {deadline_seconds}", object_id="deadline_seconds")
        self._saver = saver
        self._pid = os.getpid()
        self._signal_number = signal_number
        self._deadline_seconds = deadline_seconds
        self._deadline = 0.0
        self._requested = threading.Event()
        self._finished = threading.Event()
        self._former = signal.signal(signal_number, self._handle)

    @property
    def requested(self) -> bool:
        """Whether the signal came."""
        return self._requested.is_set()

    @property
    def seconds_left(self) -> float:
        """Until the deadline; all of it before the signal came."""
        return max(0.0, self._deadline - time.monotonic()) if self.requested else self._deadline_seconds

    def finish(self) -> DrainReport:
        """Waits for the puts under way as long as there is time, and gives up the others. The caller then ends the process."""
        report = self._saver.drain(max(0.0, self.seconds_left - self._margin_seconds), give_up_seconds=self._margin_seconds)
        self._finished.set()
        _logger.warning("preempted: %s", report)
        return report

    def cancel(self) -> None:
        """Gives the signal back its former course, on the main thread."""
        self._finished.set()
        self._restore()

    def _restore(self) -> None:
        signal.signal(self._signal_number, signal.SIG_DFL if self._former is None else self._former)  # None: C had set it

    @property
    def _margin_seconds(self) -> float:
        """What giving up may take."""
        return min(GIVE_UP_SECONDS, self._deadline_seconds / 4)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a helper process, which was forked and is not the job
            self._restore()
            os.kill(os.getpid(), number)
        elif not self._requested.is_set():
            self._deadline = time.monotonic() + self._deadline_seconds
            self._requested.set()
            # A thread, since the main one may be in the middle of anything, such as a put that holds locks.
            threading.Thread(target=self._wait_for_deadline, name="tsck-preempted", daemon=True).start()
        elif self._finished.is_set():
            self.cancel()
            os.kill(os.getpid(), self._signal_number)

    def _wait_for_deadline(self) -> None:
        if not self._finished.wait(max(0.0, self.seconds_left - self._margin_seconds)):
            self.finish()
            os.kill(os.getpid(), self._signal_number)  # the main thread alone can restore the former course: see `_handle`


def finish_at_exit(saver: SaveQueue) -> None:
    """Has the interpreter wait for the puts of `saver` before it ends; what is not published then is said."""
    found, pid = weakref.ref(saver), os.getpid()

    def finish() -> None:
        saver = found()
        if saver is None or os.getpid() != pid:  # a forked child's end is not the puts' business, nor are its locks
            return
        saver.leave_resumed()
        report = saver.drain(EXIT_SECONDS)
        if report.dropped or report.under_way:
            _logger.error("the process ends with puts under way: %s", report)

    # Not atexit: its callbacks come when executors take no work any more, and backends use those.
    threading._register_atexit(finish)  # type: ignore[attr-defined]
