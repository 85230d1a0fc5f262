"""A save in the queue, with the times that its events report; and the errors of saves that were not raised yet."""

import traceback
from typing import TYPE_CHECKING

from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.put_protocol import Put
from tensorstore_ck.session.save.put_status import PutStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot


class QueuedPut:
    """A save in the queue."""

    def __init__(self, put: Put, called: float, *, is_background: bool) -> None:
        self.put = put
        self.number = put.number
        self.status = PutStatus(put.ref, put.step, put.rank)
        self.slot: Slot | None = None
        self.is_background = is_background
        """Whether it was started by `put_snapshot_async`, or resumed."""
        self.waited_seconds = 0.0
        """How long it waited for memory."""
        self.waited_for = 0
        """How many saves were in progress when the wait began."""
        self.is_resumed = False
        """Whether an earlier process started it."""
        self.called = self.captured = self.begun = called

    @property
    def stall_seconds(self) -> float:
        """How long the training was blocked."""
        return self.captured - self.called

    def release(self) -> None:
        """Releases its memory."""
        if self.slot is not None:
            self.slot.release()

    def forget_state(self, error: BaseException | None = None) -> None:
        """Drops all references to the state, including traceback frames of `error`."""
        del self.put
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def sizes(self, snapshot: Snapshot) -> dict[str, int | float]:
        """The sizes that an event reports of a published snapshot."""
        went = self.status.meter.snapshot().stage_bytes
        hashed, new, written = went["hash"], went["encode"], went["write"]
        return {
            "stall_seconds": self.stall_seconds,
            "logical_bytes": snapshot.logical_bytes,
            "hashed_bytes": hashed,
            "new_bytes": snapshot.new_bytes,
            "dedup_ratio": 1 - new / hashed if hashed else 0.0,
            "compression_ratio": new / written if written else 1.0,
        }


class UnraisedErrors:
    """The failed saves whose errors were not raised, oldest first. The caller locks."""

    def __init__(self) -> None:
        self._failed: list[QueuedPut] = []

    def add(self, queued: QueuedPut) -> None:
        """Adds a failed save."""
        self._failed = [*self._waiting(), queued]

    def first(self) -> QueuedPut | None:
        """The oldest one."""
        return next(iter(self._waiting()), None)

    def numbered(self, number: int) -> QueuedPut | None:
        """The save of that number, even if its error was raised meanwhile."""
        return next((each for each in self._failed if each.number == number), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [pop_error(queued) for queued in self._waiting()]
        self._failed = []
        for other in errors[1:]:
            errors[0].add_note(f"and another save failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedPut]:
        return [queued for queued in self._failed if not queued.status.is_raised]


def pop_error(queued: QueuedPut) -> BaseException:
    """The error of a save, for the caller to raise; marks it as raised."""
    error = queued.status.error
    assert error is not None
    if not queued.status.is_raised:
        queued.status.is_raised = True
        error.add_note(f"(of the earlier save of {queued.status}, for which nobody waited)")
    return error
