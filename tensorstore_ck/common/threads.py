"""Threads: a start that cannot hang, a bounded number of threads over a stream of tasks (hashing, copying and I/O release the GIL), work
that Ctrl-C does not interrupt, a lock that survives a fork, and memory of each thread.
"""

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from tensorstore_ck.common.waiting import Flag

Task = TypeVar("Task")
T = TypeVar("T")


REMOTE_THREADS: Final = 8
"""Requests to a remote backend at the same time."""
BEGIN_SECONDS: Final = 30.0
"""How long a new thread may take to begin."""
SCRATCH_BYTES: Final = 1 << 16
"""Scratch memory has a multiple of it, so that what is a little larger than before still fits."""
_LOOK_SECONDS: Final = 0.5
"""How long it may take to notice that a thread died of too little memory."""
_RUNS_HERE: Final = contextvars.ContextVar("runs_here", default=False)
"""Whether `shielded` calls what it is given in this thread, since no other one could be started."""


def cpu_threads() -> int:
    """The number of cores that this process may use, at most 16."""
    return min(len(os.sched_getaffinity(0)), 16)


class Helper(threading.Thread):
    """A daemon thread that either begins or never will, even if its start is interrupted.

    `threading.Thread.start` waits for a thread that died of too little memory without limit, and Ctrl-C in that wait can leave a lock
    locked that the new thread needs.
    """

    def __init__(
        self, work: Callable[[], object], name: str, *, begin_seconds: float = BEGIN_SECONDS, is_restartable: bool = False
    ) -> None:
        """`begin_seconds`: how long `start` waits for the thread. `is_restartable`: `work` can begin again after a `MemoryError`.

        It does so until there is memory: somebody waits for it.
        """
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], object] = work
        self._is_restartable = is_restartable
        self._given_up = False
        self._begin_seconds = begin_seconds
        self._claim = threading.Lock()
        """The new thread takes it to begin, the caller to give the thread up; the first one wins."""
        self._begun = threading.Lock()
        self._begun.acquire()
        self._started = _Started(self, self._begun, begin_seconds)

    def start(self) -> None:
        """Starts it.

        Raises:
            RuntimeError, MemoryError: the system has no thread or memory for it now; it never begins.
        """
        try:
            super().start()
        except Exception:
            self.give_up()
            raise
        if self.give_up():
            raise RuntimeError(f"can't start new thread: {self.name} did not begin in {self._begin_seconds:g} s")

    def give_up(self) -> bool:
        """Keeps the thread from beginning; returns False if it has begun."""
        if not self._given_up and self._claim.acquire(blocking=False):
            self._given_up = True
            del self._work
        return self._given_up

    def end(self) -> None:
        """Waits for the thread's end if it has begun; otherwise keeps it from beginning."""
        if not self.give_up():
            self.join()

    def run(self) -> None:
        """Calls `work`, unless it was given up."""
        if self._claim.acquire(blocking=False):
            self._begun.release()
            work = self._work
            del self._work  # a thread and its event refer to each other: what the work holds must not wait for garbage collection
            while True:
                try:
                    work()
                    return
                except MemoryError:
                    if not self._is_restartable:
                        raise
                    time.sleep(_LOOK_SECONDS)


class _Started(threading.Event):
    """Replaces the event by which `Thread.start` waits for the new thread: waits until it holds `begun` no more, or is dead."""

    def __init__(self, thread: threading.Thread, begun: threading.Lock, begin_seconds: float) -> None:
        super().__init__()
        self._thread, self._begun, self._begin_seconds = thread, begun, begin_seconds

    def set(self) -> None:
        self._flag = True

    def wait(self, timeout: float | None = None) -> bool:
        deadline = time.monotonic() + self._begin_seconds
        while not self._begun.acquire(timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or (self._flag and not self._thread.is_alive()):
                return True
        self._begun.release()
        return True


def for_each(tasks: Iterable[Task], work: Callable[[Task], None], threads: int, *, failed: Flag | None = None) -> None:
    """Calls `work` on each task, from up to `threads` threads, and returns when all are done.

    If the system can start fewer threads, it uses those. After the first error, or Ctrl-C, no further task begins; the error is raised when
    the running tasks have ended. `failed` is set at once, so that they can stop waiting. Tasks are drawn lazily, under a lock.
    """
    if threads <= 1 and failed is None:
        for task in tasks:
            work(task)
        return
    queue = iter(tasks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        if failed is not None:
            failed.set()

    def drain() -> None:
        try:
            while not errors:
                with lock:
                    task = next(queue, stop)
                if task is stop:
                    return
                work(task)  # type: ignore[arg-type]
        except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
            fail(exc)

    stop = object()
    helpers: list[Helper] = []
    try:
        for _ in range(threads - 1):
            try:
                helpers.append(Helper(drain, "tsck"))
                helpers[-1].start()
            except (RuntimeError, MemoryError):
                break
        drain()
        for helper in helpers:
            helper.end()
    except BaseException as exc:  # noqa: BLE001 - Ctrl-C: raised below, once the others have ended
        fail(exc)
        for helper in helpers:
            helper.end()
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])


def shielded(call: Callable[[], T], *, finish: bool = False) -> T:
    """The result of `call`, which Ctrl-C does not interrupt: signal handlers run in the main thread, and another thread runs `call`.

    In the main thread, Ctrl-C is raised at once, and `call` goes on in the background; with `finish` it is raised when `call` has ended.
    """
    if threading.get_ident() != threading.main_thread().ident or _RUNS_HERE.get():
        return call()
    outcome = SimpleQueue[tuple[bool, T | BaseException]]()
    helper = Helper(partial(_put_outcome, outcome, contextvars.copy_context(), call), "tsck-shielded")
    try:
        try:
            helper.start()
        except (RuntimeError, MemoryError):
            return _unshielded(call)
        while True:
            is_alive = helper.is_alive()
            try:
                is_result, result = outcome.get(timeout=_LOOK_SECONDS)
            except Empty:
                if not is_alive:
                    raise MemoryError("a thread ended without a result") from None
            else:
                return result_or_raise(is_result, result)
    except BaseException:
        if finish:
            helper.end()
        raise


def within_seconds(seconds: float, call: Callable[[], T], *, notice_seconds: float, notice: Callable[[], object]) -> T:
    """The result of `call`, which runs in another thread; if it takes longer than `seconds`, it goes on in the background.

    Calls `notice` when it has taken `notice_seconds`.

    Raises:
        TimeoutError: it takes longer.
    """
    outcome = SimpleQueue[tuple[bool, T | BaseException]]()
    helper = Helper(partial(_put_outcome, outcome, contextvars.copy_context(), call), "tsck-limited")
    try:
        helper.start()
    except (RuntimeError, MemoryError):  # no thread: it may take longer
        return call()
    for number, wait_seconds in enumerate([notice_seconds, seconds - notice_seconds] if notice_seconds < seconds else [seconds]):
        if number:
            notice()
        try:
            is_result, result = outcome.get(timeout=wait_seconds)
        except Empty:
            continue
        return result_or_raise(is_result, result)
    raise TimeoutError(f"no answer within {seconds:.3g} s")


def _put_outcome(outcome: "SimpleQueue[tuple[bool, T | BaseException]]", context: contextvars.Context, call: Callable[[], T]) -> None:
    """Calls `call` in the caller's `context`, in another thread, and puts its result or its error into `outcome`."""
    try:
        result = True, context.run(call)
    except BaseException as exc:  # noqa: BLE001 - raised by the caller
        outcome.put((False, exc))
    else:
        outcome.put(result)


def _unshielded(call: Callable[[], T]) -> T:
    """The result of `call` in this thread, for want of another. Nested shielded calls run here, too: this thread may hold its lock."""
    token = _RUNS_HERE.set(True)
    try:
        return call()
    finally:
        _RUNS_HERE.reset(token)


def result_or_raise(is_result: bool, result: T | BaseException) -> T:
    """The result of a call in another thread, or its error.

    Raises:
        BaseException: the call raised it.
    """
    if is_result:
        return result  # type: ignore[return-value]
    assert isinstance(result, BaseException)
    try:
        raise result
    finally:
        del result  # it would be in its own traceback


class ProcessLock:
    """A reentrant lock. A forked child has a new one: a thread that the child does not have may hold the old one."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @property
    def here(self) -> AbstractContextManager[object]:
        """This process's lock, for `with`: taking it is C code, so that Ctrl-C cannot leave it locked."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        return self._lock


class Scratch(threading.local):
    """Memory for one block after another: fresh pages take longer than the work that is done in them.

    Each thread has its own, which lives as long as the thread, or this object.
    """

    def __init__(self) -> None:
        self._memory: dict[str, bytearray] = {}

    def take(self, use: str, size_bytes: int) -> memoryview:
        """Memory for a use, with any content. What this thread got for the same use before must not be needed any more."""
        memory = self._memory.get(use)
        if memory is None or len(memory) < size_bytes:
            self._memory.pop(use, None)  # freed before there is more
            memory = self._memory[use] = bytearray(-(-size_bytes // SCRATCH_BYTES) * SCRATCH_BYTES)
        return memoryview(memory)[:size_bytes]
