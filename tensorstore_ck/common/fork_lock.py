"""Locks that forked children can live with."""

import os
import threading


class ProcessLock:
    """A reentrant lock. A forked child gets a new one: a thread that the child does not have may hold the old one."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
