"""The status of one save: which milestones it has passed, how it ended, and which threads wait for that. Thread-safe.

A save ends once: published, or with an error, which is kept until it was raised. `PendingSnapshot` is what users hold of it. Does not know
how a save is done.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final, Self

from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.common.save_progress import Progress, SaveMeter
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.common.waiting import Changes
from tensorstore_ck.errors import InvalidOptionError, SnapshotDroppedError, WaitTimeoutError
from tensorstore_ck.log.snapshot import Snapshot

_logger: Final = logging.getLogger("tensorstore_ck")


class SaveMilestone(IntEnum):
    """Milestones, in order."""

    CAPTURED = 1
    STAGED = 2
    PUBLISHED = 3


class SaveStatus:
    """One save, from its call to its end."""

    def __init__(self, ref: str, step: int | None, rank: int = 0) -> None:
        self.id = ulid_text(new_ulid())
        self.ref = ref
        self.step = step
        self.rank = rank
        self.meter = SaveMeter(check=self.check)
        self.snapshot: Snapshot | None = None
        self.error: BaseException | None = None
        self.is_raised = False
        """Whether the error was raised to the user."""
        self.dropped = ""
        """Why it was or will be dropped; empty: nobody asked for that."""
        self.is_ending = False
        """Whether the work is over, though waiting threads do not know it yet."""
        self._reached = 0
        self.has_ended = False
        """Whether it is published or failed."""
        self._pid = os.getpid()
        self.on_drop: Callable[[], object] = _nothing
        """Called by `drop`."""
        self._changed = Changes()
        self.is_awaited = False
        """Whether the thread that made the save stores it, as no other one could be started."""
        self.queue_changes: Changes | None = None
        """Of the queue: a thread that waits for its saves, or for their memory, waits for these."""
        self._callbacks: list[tuple[SaveMilestone, Callable[[], object]]] = []

    def __str__(self) -> str:
        return self.ref if self.step is None else f"{self.ref}@{self.step}"

    # --- changes -----------------------------------------------------------------------------------------------------

    def reach(self, stage: SaveMilestone) -> None:
        """Notes that the save has passed this milestone and those before it."""
        with self._changed.lock:
            self._reached = max(self._reached, stage)
        self._tell()

    def succeed(self, snapshot: Snapshot) -> None:
        """Notes that the save is published."""
        with self._changed.lock:
            self.snapshot, self._reached, self.has_ended = snapshot, SaveMilestone.PUBLISHED, True
            self.on_drop = _nothing
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Notes that the save will not be published."""
        with self._changed.lock:
            self.error, self.has_ended = error, True
            self.on_drop = _nothing
            self.is_raised |= isinstance(error, SnapshotDroppedError)  # the user asked for it
        self._tell()

    def drop(self, reason: str) -> bool:
        """Asks the save to give up; returns whether it had not ended yet."""
        with self._changed.lock:
            if not self.has_ended and not self.dropped:
                self.dropped = reason
            self._changed.notify_all()
            has_ended = self.has_ended
        if not has_ended:
            self.on_drop()
        return not has_ended

    def check(self) -> None:
        """Raises if the save was asked to give up.

        Raises:
            SnapshotDroppedError: it was dropped.
        """
        if self.dropped:
            raise SnapshotDroppedError(f"the save of {self} was {self.dropped}; nothing of it is visible", object_id=self.ref)

    def pause(self, seconds: float) -> None:
        """Waits; raises as soon as the save is asked to give up.

        Raises:
            SnapshotDroppedError: it was dropped.
        """
        self._changed.wait_for(lambda: bool(self.dropped), seconds)
        self.check()

    def wait_turn(self, seconds: float) -> None:
        """As `pause`, but ends early, within a second, when another thread waits for the save, or for any of its queue.

        Raises:
            SnapshotDroppedError: it was dropped.
        """

        def is_over() -> bool:
            is_queue_awaited = self.queue_changes is not None and self.queue_changes.waiting > 0
            return bool(self.dropped) or self.is_awaited or is_queue_awaited or self._changed.waiting > 1

        self._changed.wait_for(is_over, seconds)
        self.check()

    # --- queries ------------------------------------------------------------------------------------------------------

    def has_reached(self, stage: SaveMilestone) -> bool:
        """Whether it has passed a milestone."""
        return self._reached >= stage

    def wait(self, stage: SaveMilestone, timeout_seconds: float | None) -> None:
        """Waits for a milestone.

        Raises:
            WaitTimeoutError: it was not reached in time.
            StoreError: it will never be reached.
        """
        is_settled = partial(self._is_settled, stage)
        if not is_settled():  # asked without the lock: in a forked child, a thread that is not there may hold it
            if os.getpid() != self._pid:
                raise InvalidOptionError(
                    f"the save of {self} belongs to the process from which this one was forked: wait there", object_id=self.ref
                )
            if not self._changed.wait_for(is_settled, timeout_seconds):
                raise WaitTimeoutError(
                    f"the save of {self} is not {stage.name.lower()} after {timeout_seconds:g} s; the save continues", object_id=self.ref
                )
        if self._reached >= stage:
            return
        self.is_raised = True
        assert self.error is not None
        raise self.error

    def result(self, timeout_seconds: float | None = None) -> Snapshot:
        """Waits for the snapshot; see `wait` for errors."""
        self.wait(SaveMilestone.PUBLISHED, timeout_seconds)
        assert self.snapshot is not None
        return self.snapshot

    def call_when_settled(self, stage: SaveMilestone, callback: Callable[[], object]) -> None:
        """Calls back when the save has reached the milestone or never will; at once if that is known."""
        with self._changed.lock:
            if not self._is_settled(stage):
                self._callbacks.append((stage, callback))
                return
        _call(callback)

    def _is_settled(self, stage: SaveMilestone) -> bool:
        return self.has_ended or self._reached >= stage

    def _tell(self) -> None:
        with self._changed.lock:
            due = self._take_settled() if self._callbacks else ()
            self._changed.notify_all()
        for callback in due:
            _call(callback)

    def _take_settled(self) -> list[Callable[[], object]]:
        """Under the caller's lock. A function for the same reason as `items_of`."""
        due = [callback for stage, callback in self._callbacks if self._is_settled(stage)]
        self._callbacks = [(stage, callback) for stage, callback in self._callbacks if not self._is_settled(stage)]
        return due


def _nothing() -> None:
    """The drop callback of a save that has ended: it must hold no references."""


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException:  # not even SystemExit may end the thread, which later saves need
        _logger.exception("a callback of a save failed")


@dataclass(frozen=True, slots=True, repr=False)
class Milestone:
    """A point in the course of a save, which can be waited for."""

    _pending: "PendingSnapshot"
    _status: SaveStatus
    _stage: SaveMilestone

    def __repr__(self) -> str:
        return f"<{self._stage.name.lower()}: {'reached' if self.reached() else 'not yet'}>"

    def reached(self) -> bool:
        """Whether the save has passed it."""
        return self._status.has_reached(self._stage)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits until the save has passed it.

        Raises:
            WaitTimeoutError: not yet; the save goes on.
            StoreError: it never will: the save failed or was dropped.
        """
        self._status.wait(self._stage, timeout_seconds)

    def on_settled(self, callback: "Callable[[PendingSnapshot], object]") -> None:
        """Calls ``callback(pending)`` once the save has passed it or never will; at once if that is known. On the thread of the save."""
        pending = self._pending
        self._status.call_when_settled(self._stage, lambda: callback(pending))


@short_errors
class PendingSnapshot:
    """A save in the background; what `Store.put_snapshot_async` returns. Thread-safe.

    As a context manager it waits at the end of the block. If nobody waits, the next save raises the error.
    """

    def __init__(self, status: SaveStatus) -> None:
        self._status = status

    @property
    def captured(self) -> Milestone:
        """The state may be mutated. Reached when `Store.put_snapshot_async` returns, unless the save was skipped."""
        return Milestone(self, self._status, SaveMilestone.CAPTURED)

    @property
    def staged(self) -> Milestone:
        """Survives a crash of this host's processes: durable on the staging disk; without one, in the store."""
        return Milestone(self, self._status, SaveMilestone.STAGED)

    @property
    def published(self) -> Milestone:
        """Durable in the store, and visible to all."""
        return Milestone(self, self._status, SaveMilestone.PUBLISHED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.wait()

    def __repr__(self) -> str:
        state = "published" if self.published.reached() else "failed" if self.done() else "under way"
        return f"<PendingSnapshot {self._status}: {state}>"

    @property
    def id(self) -> str:
        """Names the save in events."""
        return self._status.id

    @property
    def ref(self) -> str:
        """The branch that it moves."""
        return self._status.ref

    @property
    def step(self) -> int | None:
        """The training step."""
        return self._status.step

    @property
    def snapshot(self) -> Snapshot | None:
        """The published snapshot; None until then."""
        return self._status.snapshot

    @property
    def error(self) -> BaseException | None:
        """Why it was not published; None while it still may be."""
        return self._status.error

    def wait(self, timeout_seconds: float | None = None) -> Snapshot:
        """The snapshot, durable and published.

        Raises:
            WaitTimeoutError: not yet; the save goes on.
            SnapshotDroppedError: it was skipped, replaced by a newer one, or cancelled.
            StoreError: it failed; nothing of it is visible.
        """
        return self._status.result(timeout_seconds)

    def done(self) -> bool:
        """Whether it has ended: published, failed or dropped."""
        return self._status.has_ended

    def progress(self) -> Progress:
        """How far it is."""
        return self._status.meter.snapshot()

    def cancel(self) -> bool:
        """Asks all ranks to give the save up, if it is not published yet: see `wait`. False if it has ended already."""
        return self._status.drop("cancelled")
