"""What came of the puts that were under way when a job ended."""

from dataclasses import dataclass

from tensorstore_ck.saving.pending import PendingSnapshot
from tensorstore_ck.snapshot import Snapshot


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

    def __str__(self) -> str:
        safe = f"{self.safe.ref}@{self.safe.step} ({self.safe.root[:16]}) is safe" if self.safe else "nothing was published"
        for what, those in (("staged on this host", self.staged), ("given up", (*self.dropped, *self.under_way))):
            if those:
                safe += f"; {what}: " + ", ".join(f"{each.ref}@{each.step}" for each in those)
        return safe
