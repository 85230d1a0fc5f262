"""The calls of a save to the store before it is staged. A store that does not answer must delay neither the save nor the end of the
process.
"""

import os
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from tensorstore_ck.common.threads import Helper, result_or_raise
from tensorstore_ck.errors import BackendUnavailableError

T = TypeVar("T")

PATIENCE_SECONDS: Final = 5.0
"""How long a save waits for one answer. Without an answer the save also stages blocks that the store has."""
GONE_SECONDS: Final = 60.0
"""A process that ends does not wait for a store that has answered nothing, or taken no byte of an upload, for this time."""


class StoreContact:
    """Asks the store in threads of its own. After a call that took too long, nobody waits for the store until it has answered one."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._asking: list[Helper] = []
        self._is_silent = False
        """Whether a call took too long, and none was answered since."""
        self._answered_at = float("-inf")
        self._asked_since: float | None = None
        """When the first call since the last answer began."""
        self._moved_at = self._clock()
        """When the store last took a byte of an upload, or an upload began."""
        self._has_refused = False
        """Whether an upload has failed since."""

    def ask(self, call: Callable[[], T]) -> T:
        """The result of `call`. If the call takes too long, this raises, and the call goes on in the background.

        Raises:
            BackendUnavailableError: the store did not answer in time, or has not answered an earlier call yet.
        """
        was_silent, is_asked = self._is_silent, self._is_asked()
        if was_silent and is_asked:
            raise self._error()
        outcome = SimpleQueue[tuple[bool, T | BaseException]]()
        try:
            self._begin(lambda: outcome.put(self._answer(call)))
        except (RuntimeError, MemoryError):  # no thread: the save may have to wait
            return call()
        try:
            is_result, result = outcome.get(timeout=0.0 if was_silent else self._patience_seconds)
        except Empty:
            self._is_silent = True
            raise self._error() from None
        return result_or_raise(is_result, result)

    def is_gone(self, probe: Callable[[], object]) -> bool:
        """Whether the store has answered nothing, or taken nothing, for `GONE_SECONDS`. Asks it by `probe`, in the background."""
        if self._has_refused and self._clock() - self._moved_at >= GONE_SECONDS:
            return True
        if not self._is_asked() and self._clock() - self._answered_at >= self._patience_seconds:
            try:
                self._begin(lambda: self._answer(probe))
            except (RuntimeError, MemoryError):
                return False
        since = self._asked_since
        return since is not None and self._clock() - since >= GONE_SECONDS

    def upload_moved(self) -> None:
        """Notes that an upload begins, or that the store took a part of it."""
        self._moved_at, self._has_refused = self._clock(), False

    def upload_failed(self) -> None:
        """Notes that a request of an upload failed, for now."""
        self._has_refused = True

    def _is_asked(self) -> bool:
        if os.getpid() != self._pid:  # a forked child has none of the threads
            self._reset()
        self._asking = [helper for helper in self._asking if helper.is_alive()]
        return bool(self._asking)

    def _begin(self, work: Callable[[], object]) -> None:
        if self._asked_since is None:
            self._asked_since = self._clock()
        helper = Helper(work, "tsck-ask")
        helper.start()
        self._asking = [*self._asking, helper]

    def _answer(self, call: Callable[[], T]) -> tuple[bool, T | BaseException]:
        try:
            answer: tuple[bool, T | BaseException] = (True, call())
        except BackendUnavailableError as exc:
            return False, exc
        except BaseException as exc:  # noqa: BLE001 - raised by `ask`
            answer = (False, exc)
        self._is_silent, self._asked_since, self._answered_at = False, None, self._clock()
        return answer

    def _error(self) -> BackendUnavailableError:
        return BackendUnavailableError(f"the store has not answered within {self._patience_seconds:g} s")
