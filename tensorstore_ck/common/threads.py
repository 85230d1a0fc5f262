"""Threads: a bounded number of them over a stream of tasks (hashing, copying and I/O release the GIL), and a lock that survives a fork."""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

Task = TypeVar("Task")


REMOTE_THREADS: Final = 8
"""Requests to a remote backend at the same time."""


def cpu_threads() -> int:
    """The number of cores that this process may use, at most 16."""
    return min(len(os.sched_getaffinity(0)), 16)


def for_each(tasks: Iterable[Task], work: Callable[[Task], None], threads: int, *, failed: threading.Event | None = None) -> None:
    """Calls `work` on each task, from up to `threads` threads, and returns when all are done.

    After the first error, or Ctrl-C, no further task begins; the error is raised when the running tasks have ended. `failed` is set at
    once, so that they can stop waiting. Tasks are drawn lazily, under a lock.
    """
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
    helpers = [threading.Thread(target=drain, name="tsck", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    drain()
    try:
        for helper in helpers:
            helper.join()
    except BaseException as exc:  # noqa: BLE001 - Ctrl-C: raised below, once the others have ended
        fail(exc)
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[0]


class ProcessLock:
    """A reentrant lock. A forked child has a new one: the old one may be held by a thread that is not there."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
