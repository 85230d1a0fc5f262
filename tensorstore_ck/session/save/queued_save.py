"""A save in the queue, what the queue calls of it, the times that its events report, and the errors that were not raised yet."""

import time
import traceback
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from tensorstore_ck.common.save_progress import Progress
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.save_status import SaveStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot


class Admission(NamedTuple):
    """The decision about a save before it is captured."""

    admitted: bool
    dropped: tuple[int, ...] = ()
    """Numbers of queued saves that are dropped to make space for it."""
    failed: int = 0
    """The number of an earlier save, whose error is raised instead."""


class Publishable(Protocol):
    """A save that is staged."""

    def replicate(self, status: SaveStatus, /) -> None:
        """Copies the staged files to other hosts, if the store was opened so; never fails."""

    def publish(self, status: SaveStatus, /) -> SnapshotInfo:
        """Uploads the staged objects and publishes the snapshot."""


class Runnable(Protocol):
    """A save that can be written and committed."""

    @property
    def number(self) -> int:
        """The number of the save, from 1, the same on all ranks; 0 for a save that another process began."""

    @property
    def ref(self) -> str:
        """The branch that it moves."""

    @property
    def step(self) -> int | None:
        """The training step."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def fail(self, error: BaseException, /) -> None:
        """Reports to the other ranks that this one cannot save. May raise the error that all ranks raise."""

    def run(self, status: SaveStatus, /) -> SnapshotInfo | Publishable:
        """Writes and commits: returns the snapshot, or what is staged."""


class Capturable(Runnable, Protocol):
    """A save in the background: its state is copied."""

    @property
    def needed_bytes(self) -> int:
        """How much memory the copy needs."""

    @property
    def frozen_bytes(self) -> int:
        """The bytes of frozen tensors, which are not copied."""

    @property
    def patience_seconds(self) -> float | None:
        """How long it may wait for memory; None: without limit."""

    def decide(self, admit: Callable[[], Admission], /) -> Admission:
        """The result of `admit` on the rank that decides."""

    def skip(self) -> None:
        """Gives the save up before it begins, on all ranks."""

    def copy_into(self, slot: "Slot", /) -> None:
        """Copies the state, which may be changed afterwards."""


class QueuedSave:
    """A save in the queue. It has a `save` until that is staged, and then a `staged` save."""

    def __init__(
        self,
        status: SaveStatus,
        called: float,
        *,
        number: int = 0,
        save: Runnable | None = None,
        staged: Publishable | None = None,
        is_background: bool,
    ) -> None:
        self.status = status
        self.number = number
        self.save = save
        self.staged = staged
        self.slot: Slot | None = None
        self.is_background = is_background
        """Whether it was started by `put_snapshot_async`, or resumed."""
        self.waited_seconds = 0.0
        """How long it waited for memory."""
        self.waited_for = 0
        """How many saves were in progress when the wait began."""
        self.is_replaced_by_newer = False
        """Whether it is obsolete when a newer such save of its ref is made while it waits."""
        self.is_handed_over = False
        """Whether the queue has all of it, so that it goes on even if its caller is interrupted."""
        self.is_resumed = save is None
        """Whether an earlier process started it."""
        self.called = self.captured = self.begun = called

    @classmethod
    def of(cls, save: Runnable, called: float, *, is_background: bool) -> Self:
        """A save of this process; `called`: when its caller asked for it."""
        status = SaveStatus(save.ref, save.step, save.rank)
        return cls(status, called, number=save.number, save=save, is_background=is_background)

    @property
    def has_memory(self) -> bool:
        """Whether it has memory to capture into."""
        return self.slot is not None and self.slot.memory is not None

    def makes_obsolete(self, earlier: "QueuedSave") -> bool:
        """Whether `earlier`, which waits, need not be stored any more."""
        return self.is_replaced_by_newer and earlier.is_replaced_by_newer and earlier.status.ref == self.status.ref

    @property
    def stall_seconds(self) -> float:
        """How long the training was blocked."""
        return self.captured - self.called

    def copy(self, save: Capturable) -> None:
        """Copies the state of `save`, which is this object's save, into the slot."""
        assert self.slot is not None
        with self.status.meter.timed("capture", save.needed_bytes):
            save.copy_into(self.slot)
        self.captured = time.monotonic()

    def release(self) -> None:
        """Releases its memory."""
        if self.slot is not None:
            self.slot.release()

    def forget_state(self, error: BaseException | None = None) -> None:
        """Drops all references to the state, including traceback frames of `error`."""
        self.save = self.staged = None
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def capture_fields(self, save: Capturable) -> dict[str, int | float]:
        """The fields of an event about the capture. `save` is this object's save, which the thread may have dropped already."""
        return {
            "capture_seconds": self.status.meter.seconds("capture"),
            "stall_seconds": self.stall_seconds,
            "captured_bytes": save.needed_bytes,
            "frozen_bytes": save.frozen_bytes,
        }

    def seconds_fields(self, progress: Progress) -> dict[str, float]:
        """The times in the event of a save that has ended, with this `progress`."""
        total, waited = time.monotonic() - self.called, self.begun - self.captured
        return {"total_seconds": total, "queued_seconds": waited, **progress.seconds_fields()}

    def published_fields(self, snapshot: Snapshot) -> dict[str, int | float]:
        """The times and sizes in the event of a published snapshot."""
        progress = self.status.meter.snapshot()
        hashed, new, written = itemgetter("hash", "encode", "write")(progress.stage_bytes)
        return {
            **self.seconds_fields(progress),
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
        self._failed: list[QueuedSave] = []

    def add(self, queued: QueuedSave) -> None:
        """Adds a failed save."""
        self._failed = [*self._waiting(), queued]

    def first(self) -> QueuedSave | None:
        """The oldest one."""
        return next((queued for queued in self._failed if not queued.status.is_raised), None) if self._failed else None

    def numbered(self, number: int) -> QueuedSave | None:
        """The save of that number, even if its error was raised meanwhile."""
        return next((queued for queued in self._failed if queued.number == number), None)

    def take_all(self) -> BaseException | None:
        """The oldest error, with the others as notes."""
        errors = [pop_error(queued) for queued in self._waiting()]
        self._failed = []
        for other in errors[1:]:
            errors[0].add_note(f"and another save failed: {other}")
        return errors[0] if errors else None

    def _waiting(self) -> list[QueuedSave]:
        return [queued for queued in self._failed if not queued.status.is_raised]


def pop_error(queued: QueuedSave) -> BaseException:
    """The error of a save, for the caller to raise; marks it as raised."""
    error = queued.status.error
    assert error is not None
    if not queued.status.is_raised:
        queued.status.is_raised = True
        error.add_note(f"(of the earlier save of {queued.status}, for which nobody waited)")
    return error
