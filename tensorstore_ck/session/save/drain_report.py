"""What became of the saves that were in progress when a job ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from tensorstore_ck.errors import ConflictError, DamageError, SnapshotAbortedError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.save_status import PendingSnapshot, SaveMilestone, SaveStatus


class Staying(NamedTuple):
    """When saves stay on a staging disk at the end of a job."""

    is_store_gone: Callable[[], bool] = lambda: False
    """Whether the store has not answered for long: the job then does not wait for staged saves."""
    resume_command: str = ""
    """The command that publishes them."""


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the saves that were in progress."""

    published: tuple[Snapshot, ...]
    staged: tuple[PendingSnapshot, ...]
    """The saves that are durable on the staging disk, and not published. The next `tensorstore_ck.open` with that disk continues them."""
    dropped: tuple[PendingSnapshot, ...]
    """The saves that were dropped or failed; nothing of them is visible."""
    under_way: tuple[PendingSnapshot, ...]
    """The saves that did not give up in time. The log will show what became of them."""
    safe: Snapshot | None
    """The newest snapshot that this handle published."""
    resume_command: str = ""
    """The command that publishes the staged saves on this host."""

    @classmethod
    def of(cls, statuses: Sequence[SaveStatus], safe: Snapshot | None, resume_command: str = "") -> Self:
        """The report on these saves."""
        unpublished = [status for status in statuses if status.snapshot is None]
        on_disk = [status for status in unpublished if _is_on_disk(status)]
        others = [status for status in unpublished if status not in on_disk]
        return cls(
            published=tuple(status.snapshot for status in statuses if status.snapshot is not None),
            staged=tuple(map(PendingSnapshot, on_disk)),
            dropped=tuple(PendingSnapshot(status) for status in others if status.has_ended),
            under_way=tuple(PendingSnapshot(status) for status in others if not status.has_ended),
            safe=safe,
            resume_command=resume_command if on_disk else "",
        )

    def __str__(self) -> str:
        text = f"{_address(self.safe)} ({self.safe.root[:16]}) is safe" if self.safe is not None else "nothing was published"
        for what, those in (("staged on this host", self.staged), ("given up", (*self.dropped, *self.under_way))):
            if those:
                text += f"; {what}: " + ", ".join(map(_address, those))
        if self.resume_command:
            text += f"; `{self.resume_command}` publishes what is staged, as does the next process that opens the store with that disk"
        return text


def _is_on_disk(status: SaveStatus) -> bool:
    """Whether the save stays on the staging disk. It does not if it was cancelled, or can never be published."""
    gone = isinstance(status.error, ConflictError | SnapshotAbortedError | DamageError) and status.dropped != "abandoned"
    return status.has_reached(SaveMilestone.STAGED) and not gone


def _address(of: Snapshot | PendingSnapshot) -> str:
    return of.ref if of.step is None else f"{of.ref}@{of.step}"
