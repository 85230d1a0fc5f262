"""What gc is asked, and what it says that it did and does."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.errors import InvalidOptionError

DAY_SECONDS: Final = 86_400.0

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, of how many)."""


@dataclass(frozen=True, slots=True)
class GcOptions:
    """How gc decides. None of it bears on safety: whatever is given, nothing that is held is freed."""

    min_age_seconds: float = DAY_SECONDS
    """Younger objects that nothing refers to are left alone: they are likely to belong to a save that is under way."""
    grace_seconds: float = 0.0
    """Objects are freed when they have been condemned for that long: what takes hold of them meanwhile needs no second write."""
    undo_window_seconds: float = DAY_SECONDS
    """What was forgotten longer ago is let go."""
    max_delete: float = 0.5
    """Refuse when a larger fraction of all bytes would go."""
    compact_below: float = 0.5
    """Packs of which a smaller fraction is live are rewritten; 0: none."""
    compact_bytes: int = 256 << 30
    """At most so many live bytes are rewritten in one run, those first that free most."""
    settle_seconds: float = 7 * DAY_SECONDS
    """Tombstones are kept for that long: a save that slept longer starts anew."""
    max_bytes_per_second: float | None = None
    """Reads no more than that, and writes no more than that, so that jobs keep their bandwidth; None: as fast as it goes."""

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` for what makes no sense."""
        for name in ("min_age_seconds", "grace_seconds", "undo_window_seconds", "settle_seconds", "compact_bytes"):
            if not getattr(self, name) >= 0:
                raise InvalidOptionError(f"{name} must not be negative", object_id=name)
        for name in ("max_delete", "compact_below"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidOptionError(f"{name} must be from 0 to 1", object_id=name)


@dataclass(frozen=True, slots=True)
class GoneSnapshot:
    """A snapshot that nothing holds any more, and whose record is deleted."""

    id: str
    root: str
    ref: str
    step: int | None


@dataclass(frozen=True, slots=True)
class RewrittenPack:
    """A pack that is mostly garbage."""

    name: str
    bytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was done; in a dry run, what would be."""

    dry_run: bool
    snapshots: tuple[GoneSnapshot, ...]
    """Those that go in this run; not those that wait for the grace period, or are too young."""
    deleted: dict[str, int]
    """Kind of object -> how many are deleted."""
    deleted_bytes: int
    rewritten: tuple[RewrittenPack, ...]
    written_bytes: int
    """In new packs and moved objects."""
    waiting: int
    """Objects that are condemned, and wait for the grace period."""
    young: int
    """Objects that nothing refers to, and that are too young to be judged."""
    total_bytes: int
    """In all objects that were listed, before."""
    requests: int
    """Requests to the backend after marking: lists, reads of what is rewritten, writes and deletes."""
    notes: tuple[str, ...]
    """What a user should know: packs that could not be rewritten, and the like."""
    refused: str | None
    """In a dry run: why a real one would refuse; None when it would not."""

    @property
    def freed_bytes(self) -> int:
        """What the store gets smaller by; the log grows by some hundred bytes."""
        return self.deleted_bytes - self.written_bytes


class Summed:
    """Adds up progress from several threads."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many more are done."""
        with self._lock:
            self._done += count
            self._progress(self._what, self._done, self._total)
