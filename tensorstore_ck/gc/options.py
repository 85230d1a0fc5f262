"""Options of a gc run."""

from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError

DAY_SECONDS: Final = 86_400.0


@short_errors
@renamed_argument(max_bytes_per_second="rate_limit", settle_seconds="tombstone_seconds")
@dataclass(frozen=True, slots=True)
class GcOptions:
    """No option affects safety: gc never frees what something holds."""

    min_age_seconds: float = DAY_SECONDS
    """Unreferenced objects younger than this are kept, unless their process is known to have ended: a save may be running."""
    grace_seconds: float = 0.0
    """An object is freed when it has been condemned for this time. A save that needs it meanwhile need not write it again."""
    undo_window_seconds: float = DAY_SECONDS
    """Snapshots that were forgotten longer ago are released."""
    max_delete: float = 0.5
    """Abort if more than this share of the stored bytes would be deleted."""
    compact_below: float = 0.5
    """Packs with a smaller live share are rewritten; 0: none."""
    compact_bytes: int = 256 << 30
    """Live bytes that one run rewrites at most, in the order of what they free."""
    tombstone_seconds: float = 7 * DAY_SECONDS
    """Tombstones are kept for this time. A save that slept longer starts again."""
    rate_limit: float | str | None = None
    """Limit of reads, and of writes, so that jobs keep their bandwidth: ``"100MB"``, or bytes per second; None: no limit."""

    def __post_init__(self) -> None:
        for name in ("min_age_seconds", "grace_seconds", "undo_window_seconds", "tombstone_seconds", "compact_bytes"):
            if not getattr(self, name) >= 0:
                raise InvalidOptionError(f"{name} must not be negative", object_id=name)
        for name in ("max_delete", "compact_below"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidOptionError(f"{name} must be from 0 to 1", object_id=name)
