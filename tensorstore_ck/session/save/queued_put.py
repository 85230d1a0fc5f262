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
