"""What came of the puts that were under way when a job ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tensorstore_ck.errors import ConflictError, DamageError, SnapshotAbortedError
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.save.pending import PendingSnapshot
from tensorstore_ck.session.save.put_status import PutStatus, Stage


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What came of the puts that were under way."""

    published: tuple[Snapshot, ...]
    staged: tuple[PendingSnapshot, ...]
    """Durable on the staging disk, and not published: the next `tensorstore_ck.open` with that disk goes on with them."""
    dropped: tuple[PendingSnapshot, ...]
    """Given up, or failed; nothing of them is visible."""
    under_way: tuple[PendingSnapshot, ...]
    """Did not give up in time: the log will tell what became of them."""
    safe: Snapshot | None
    """The newest snapshot that this handle published."""

    @classmethod
    def of(cls, courses: Sequence[PutStatus], safe: Snapshot | None) -> Self:
        """What has come of these."""
        unpublished = [course for course in courses if course.snapshot is None]
        on_disk = [course for course in unpublished if _is_on_disk(course)]
        others = [course for course in unpublished if course not in on_disk]
        return cls(
            tuple(course.snapshot for course in courses if course.snapshot is not None),
            tuple(map(PendingSnapshot, on_disk)),
            tuple(PendingSnapshot(course) for course in others if course.has_ended),
            tuple(PendingSnapshot(course) for course in others if not course.has_ended),
            safe,
        )

    def __str__(self) -> str:
        said = f"{_address(self.safe)} ({self.safe.root[:16]}) is safe" if self.safe is not None else "nothing was published"
        for what, those in (("staged on this host", self.staged), ("given up", (*self.dropped, *self.under_way))):
            if those:
                said += f"; {what}: " + ", ".join(map(_address, those))
        return said


def _is_on_disk(course: PutStatus) -> bool:
    """What can never be published any more, or was cancelled, is not kept."""
    gone = isinstance(course.error, ConflictError | SnapshotAbortedError | DamageError) and course.dropped != "abandoned"
    return course.has_reached(Stage.STAGED) and not gone


def _address(of: Snapshot | PendingSnapshot) -> str:
    return of.ref if of.step is None else f"{of.ref}@{of.step}"
