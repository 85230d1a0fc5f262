"""The memory that captured states are copied into, and which save gets it. The first copy allocates it; a save waits while it is full."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, get_args

from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, WaitTimeoutError
from tensorstore_ck.session.save.queued_save import Admission, Capturable, QueuedSave

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Arena

WARN_SECONDS: Final = 5.0
"""A save that has waited for this time logs a warning."""

PREPARED: Final = 2
"""The number of copies to allocate for: one is made while the one before it is stored."""

OnFull = Literal["block", "skip", "replace", "newest"]
"""What a save does if no memory is left for its copy: wait; be skipped; or replace the oldest queued save. `newest`: as `replace`; with
memory left it still replaces the queued saves of its ref that were made with `newest`, so that the newest is stored next."""

_logger: Final = logging.getLogger("tensorstore_ck")


def check_on_full(on_full: OnFull) -> None:
    """Raises `InvalidOptionError` if it is no value of the option `on_full`."""
    if on_full not in get_args(OnFull):
        raise InvalidOptionError(f"on_full must be 'block', 'skip', 'replace' or 'newest', not {on_full!r}", object_id="on_full")


class CaptureMemory:
    """Slots of one arena. `changed` is notified when a slot is released."""

    def __init__(self, open_arena: "Callable[[], Arena]", changed: Changes) -> None:
        self._open_arena = open_arena
        self._changed = changed
        self.arena: Arena | None = None
        self._preparing: Helper | None = None

    def try_take(self, queued: QueuedSave, save: Capturable) -> bool:
        """Gives `queued` a slot for its copy; returns False if there is none now.

        Raises:
            NoSpaceError: it needs more than there is in all.
        """
        from tensorstore_ck.state.arena import Slot  # noqa: PLC0415 - loads torch

        arena = self._opened()
        needed, limit = save.needed_bytes, arena.limit_bytes
        if needed > limit:
            raise NoSpaceError(
                f"the save of {queued.status} needs {human_bytes(needed)} of host memory to capture into, and host_memory_bytes is "
                f"{human_bytes(limit)}: raise it, name tensors that do not change in frozen=, or use put_snapshot, which copies nothing",
                object_id="host_memory_bytes",
            )
        queued.slot = Slot(arena, needed)  # set before it has memory, so that the queue releases it after any interrupt
        return arena.fill(queued.slot)

    def admit(
        self, queued: QueuedSave, save: Capturable, on_full: OnFull, *, waiting: Callable[[], Iterable[QueuedSave]], under_way: int
    ) -> Admission:
        """Gives `queued` a slot, or decides that it is skipped; drops what it replaces. `waiting`: the queue, oldest first, under the lock.

        Raises:
            NoSpaceError, WaitTimeoutError: see `try_take` and `wait`.
        """
        queued.is_replaced_by_newer = on_full == "newest"
        dropped: list[bytes] = []

        def drop(other: QueuedSave) -> None:
            other.status.drop("replaced")
            dropped.append(other.key)

        def replaceable() -> list[QueuedSave]:
            with self._changed.lock:
                return _replaceable(queued, waiting())

        while not self.try_take(queued, save):
            if on_full == "skip":
                return Admission(admitted=False)
            others = replaceable() if on_full in ("replace", "newest") else []
            if others:
                drop(others[0])
            elif self.wait(queued, save, under_way):
                break
        for other in filter(queued.makes_obsolete, replaceable() if on_full == "newest" else ()):
            drop(other)
        return Admission(True, tuple(dropped))

    def prepare(self, size_bytes: int, warm_up: Callable[[], object]) -> None:
        """Allocates memory for copies of this size, in a thread, which then calls `warm_up`. Saves raise what the system refuses."""
        arena = self._opened()

        def allocate() -> None:
            with suppress(NoSpaceError):
                arena.prepare(size_bytes, PREPARED)
            warm_up()

        self._preparing = Helper(allocate, "tsck-pin")
        with suppress(RuntimeError, MemoryError):
            self._preparing.start()

    def _opened(self) -> "Arena":
        with self._changed.lock:
            if self.arena is None:
                self.arena = self._open_arena()
        return self.arena

    def wait_until_taken(self, queued: QueuedSave, save: Capturable, under_way: int) -> None:
        """As `wait`, until there is a slot. A function of its own, so that the caller's `except` meets Ctrl-C: see common/waiting.py."""
        while not self.try_take(queued, save) and not self.wait(queued, save, under_way):
            pass

    def wait(self, queued: QueuedSave, save: Capturable, under_way: int) -> bool:
        """Waits some seconds for a slot; returns whether `queued` has one.

        Raises:
            WaitTimeoutError: the other ranks do not wait for it any longer.
        """
        began, patience = time.monotonic(), save.patience_seconds
        queued.waited_for = queued.waited_for or under_way
        left = WARN_SECONDS if patience is None else max(0.0, patience - queued.waited_seconds)
        has_slot = self._changed.wait_for(lambda: self.try_take(queued, save), min(left, WARN_SECONDS))
        was_quiet = queued.waited_seconds < WARN_SECONDS
        queued.waited_seconds += time.monotonic() - began
        if was_quiet and queued.waited_seconds >= WARN_SECONDS:
            _logger.warning("training waits for memory to capture %s: %d saves are in progress", queued.status, queued.waited_for)
        if not has_slot and patience is not None and queued.waited_seconds >= patience:
            raise WaitTimeoutError(
                f"no memory came free for the save of {queued.status} in {patience:g} s: the other ranks would not wait longer; put less "
                "often, raise host_memory_bytes, or pass on_full='skip'",
                object_id=save.ref,
            )
        return has_slot

    def close(self) -> None:
        """Frees the memory that nobody uses."""
        if self._preparing is not None:
            self._preparing.end()
        if self.arena is not None:
            self.arena.close()
            self.arena = None


def _replaceable(queued: QueuedSave, waiting: Iterable[QueuedSave]) -> list[QueuedSave]:
    """The waiting saves that `queued` may replace: first those that it makes obsolete, then the oldest. Under the caller's lock.

    Only those of the same ranks: others would not learn that theirs was dropped.
    """
    left = [other for other in waiting if other.scope == queued.scope and not other.status.dropped]
    return sorted(left, key=lambda other: not queued.makes_obsolete(other))
