"""A put in the queue, and the times that its events tell."""

import traceback
from typing import TYPE_CHECKING

from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.put_protocol import Put
from tensorstore_ck.session.save.put_status import PutStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot


class QueuedPut:
    """A put in the queue."""

    def __init__(self, put: Put, called: float, *, is_background: bool) -> None:
        self.put = put
        self.number = put.number
        self.status = PutStatus(put.ref, put.step, put.rank)
        self.slot: Slot | None = None
        self.is_background = is_background
        """Whether nobody waits for it."""
        self.waited_seconds = 0.0
        """For memory."""
        self.waited_for = 0
        """How many puts were under way when the wait began."""
        self.is_resumed = False
        """Whether an earlier process began it."""
        self.called = self.captured = self.begun = called

    @property
    def stall_seconds(self) -> float:
        """How long the training stood still."""
        return self.captured - self.called

    def release(self) -> None:
        """Gives its memory back."""
        if self.slot is not None:
            self.slot.release()

    def forget_state(self, error: BaseException | None = None) -> None:
        """It is over: what is held of it, the frames of its `error` among that, holds the state no longer."""
        del self.put
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def sizes(self, snapshot: Snapshot) -> dict[str, int | float]:
        """What an event says of what was published."""
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
    """The puts that failed, and whose errors nobody has seen, oldest first. The caller locks."""

    def __init__(self) -> None:
        self._failed: list[QueuedPut] = []

    def add(self, queued: QueuedPut) -> None:
        """Keeps the error of a put that has failed."""
        self._failed = [*self._waiting(), queued]

    def first(self) -> QueuedPut | None:
        """The oldest one."""
        return next(iter(self._waiting()), None)

    def numbered(self, number: int) -> QueuedPut | None:
        """The put of that number, whether or not somebody was told meanwhile."""
        return next((each for each in self._failed if each.number == number), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [pop_error(queued) for queued in self._waiting()]
        self._failed = []
        for other in errors[1:]:
            errors[0].add_note(f"and another put failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedPut]:
        return [queued for queued in self._failed if not queued.status.is_raised]


def pop_error(queued: QueuedPut) -> BaseException:
    """The error of a put, which is raised now."""
    error = queued.status.error
    assert error is not None
    if not queued.status.is_raised:
        queued.status.is_raised = True
        error.add_note(f"(of the earlier put of {queued.status}, which nobody waited for)")
    return error
