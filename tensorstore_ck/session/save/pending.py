"""`PendingSnapshot`: what users hold of a save in the background."""

from collections.abc import Callable
from typing import Self

from tensorstore_ck.common.save_progress import Progress
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.save_status import SaveMilestone, SaveStatus


class Milestone:
    """A point in the course of a save, which can be waited for."""

    def __init__(self, pending: "PendingSnapshot", status: SaveStatus, stage: SaveMilestone) -> None:
        self._pending = pending
        self._status = status
        self._stage = stage

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
        self.captured = Milestone(self, status, SaveMilestone.CAPTURED)
        """The state may be mutated. Reached when `Store.put_snapshot_async` returns, unless the save was skipped."""
        self.staged = Milestone(self, status, SaveMilestone.STAGED)
        """Survives a crash of this host's processes: durable on the staging disk; without one, in the store."""
        self.published = Milestone(self, status, SaveMilestone.PUBLISHED)
        """Durable in the store, and visible to all."""

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
