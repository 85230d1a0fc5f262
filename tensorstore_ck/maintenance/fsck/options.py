"""Options of fsck."""

from collections.abc import Callable
from dataclasses import dataclass

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@short_errors
@renamed_argument(max_bytes_per_second="rate_limit")
@dataclass(frozen=True, slots=True)
class FsckOptions:
    """How much data fsck reads. It always checks the whole structure: log, records, parts, extents, footers of packs."""

    read_data: bool = False
    """Read and hash every stored byte."""
    sample_fraction: float | None = None
    """Read this share of all packs' bytes: first the packs that were never verified, then those verified longest ago."""
    max_seconds: float | None = None
    """Read data in that order until this time is over; the next such run continues there."""
    progress: Progress | None = None
    rate_limit: float | None = None
    """Limit of reads, and of repair's writes, so that jobs keep their bandwidth; None: no limit."""

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` for an invalid value."""
        if self.sample_fraction is not None and not 0 < self.sample_fraction <= 1:
            raise InvalidOptionError(
                f"sample_fraction must be above 0 and at most 1, not {self.sample_fraction}", object_id="sample_fraction"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InvalidOptionError(f"max_seconds must be above 0, not {self.max_seconds}", object_id="max_seconds")

    @property
    def reads_data(self) -> bool:
        """Whether any block is read."""
        return self.read_data or self.sample_fraction is not None or self.max_seconds is not None
