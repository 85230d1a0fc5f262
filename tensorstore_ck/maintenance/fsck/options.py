"""How much fsck looks at."""

from collections.abc import Callable
from dataclasses import dataclass

from tensorstore_ck.common.deprecation import renamed_argument
from tensorstore_ck.errors import InvalidOptionError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@renamed_argument(max_bytes_per_second="rate_limit")
@dataclass(frozen=True, slots=True)
class FsckOptions:
    """The structure is always checked whole: log, records, parts, extents, packs' footers. The rest says how much data is read, too."""

    read_data: bool = False
    """Read and hash every stored byte."""
    sample_fraction: float | None = None
    """Only so much of all packs' bytes, those first that were never verified, or longest ago."""
    max_seconds: float | None = None
    """Only as much, in that order, as fits into this time; the next such run goes on from there."""
    progress: Progress | None = None
    rate_limit: float | str | None = None
    """Reads no more than this a second, and repair writes no more: ``"100MB"``, or bytes; None: no limit."""

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` for what makes no sense."""
        if self.sample_fraction is not None and not 0 < self.sample_fraction <= 1:
            raise InvalidOptionError(
                f"sample_fraction must be above 0 and at the most 1, not {self.sample_fraction}", object_id="sample_fraction"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InvalidOptionError(f"max_seconds must be above 0, not {self.max_seconds}", object_id="max_seconds")

    @property
    def reads_data(self) -> bool:
        """Whether any block is read."""
        return self.read_data or self.sample_fraction is not None or self.max_seconds is not None
