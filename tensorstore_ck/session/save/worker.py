"""One thread that works through a queue in order; it lives only while there is work."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from tensorstore_ck.common.changes import Changes
from tensorstore_ck.common.threads import Helper

Item = TypeVar("Item")

_logger: Final = logging.getLogger("tensorstore_ck")


class Worker(Generic[Item]):
    """A queue and its thread. All but the work itself is done under the lock of `changed`, which is notified at each change."""

    def __init__(
        self, name: str, changed: Changes, work: Callable[[Item], object], broken: Callable[[Item, BaseException], object]
    ) -> None:
        """`broken` is called with an exception of `work`, which should raise none."""
        self._name = name
        self._changed = changed
        self._work = work
        self._broken = broken
        self._waiting: deque[Item] = deque()
        self._working: Item | None = None
        self.thread: threading.Thread | None = None
        """None while there is nothing to do."""

    def put(self, item: Item) -> None:
        """Adds work. In the main thread, call it by `shielded`.

        Raises:
            RuntimeError, MemoryError: no thread can be started.
        """
        with self._changed.lock:
            self._waiting.append(item)
            if self.thread is None:
                # A daemon: a backend that hangs must not keep the process alive; see `process_end`.
                thread = Helper(self._run, self._name)
                try:
                    thread.start()
                except (RuntimeError, MemoryError):
                    self._waiting.pop()
                    raise
                self.thread = thread

    def items(self) -> list[Item]:
        """The item in progress, then the waiting ones."""
        with self._changed.lock:
            return [*([] if self._working is None else [self._working]), *self._waiting]

    def waiting(self) -> Iterator[Item]:
        """The waiting items, oldest first; under the caller's lock."""
        return iter(self._waiting)

    def _run(self) -> None:
        while True:
            try:
                item = self._next()
                self._changed.notify_all()
                if item is None:
                    return
                self._work(item)
            except BaseException as exc:  # noqa: BLE001 - the thread must go on: later work needs it
                if self.thread is not threading.current_thread():
                    return
                self._note_broken(exc)

    def _note_broken(self, exc: BaseException) -> None:
        try:
            if self._working is not None:
                self._broken(self._working, exc)
        except BaseException:
            _logger.exception("%s: an error was not noted", self._name)

    def _next(self) -> Item | None:
        """Ends the work on one item, and returns the next; None: there is none, and the thread ends."""
        with self._changed.lock:
            self._working = self._waiting.popleft() if self._waiting else None
            if self._working is None:
                self.thread = None
            return self._working


def items_of(workers: Iterable[Worker[Item]]) -> list[Item]:
    """The items of all workers that run, each once; under the caller's lock.

    A function, since Python 3.12 and 3.13 leave a lock locked if Ctrl-C comes between two turns of a loop in the lock's own block.
    """
    busy = [worker for worker in workers if worker.thread is not None]
    return list(dict.fromkeys(item for worker in busy for item in worker.items()))
