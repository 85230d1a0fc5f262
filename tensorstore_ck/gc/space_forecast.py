"""The space that is left at a store's location, the growth of the store, and when it will be full. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.log import SnapshotRow

WINDOW_DAYS: Final = 7.0
LEAST_DAYS: Final = 1 / 24
"""A shorter history says nothing of the growth per day."""
_DAY_NS: Final = 86_400 * 10**9


@dataclass(frozen=True, slots=True)
class SpaceForecast:
    """The space at a store's own location, which other programs may use, too."""

    free_bytes: int | None
    """None: the location does not report it, as object stores do not."""
    total_bytes: int | None
    free_inodes: int | None
    """None: it has no limit of files, or does not report it."""
    growth_bytes_per_day: int | None
    """The bytes per day that saves of the last 7 days added and that something still holds; None: the store is less than an hour old."""
    full_in_days: float | None
    """The days until bytes or inodes run out at that pace; None: unknown, or the store does not grow."""

    def describe(self) -> str:
        """One line; empty if nothing is known."""
        parts = []
        if self.free_bytes is not None:
            inodes = "" if self.free_inodes is None else f" and {self.free_inodes:,} inodes"
            parts.append(f"{human_bytes(self.free_bytes)} of {human_bytes(self.total_bytes or 0)}{inodes} free here")
        if self.growth_bytes_per_day is not None:
            parts.append(f"grows by {human_bytes(self.growth_bytes_per_day)} a day")
        line = "; ".join(parts)
        if (days := self.full_in_days) is None:
            return line
        until = f"{days * 24:.0f} hours" if days < 2 else f"{days:,.0f} days" if days < 3650 else "more than 10 years"
        return f"{line}: full in {until}"


def forecast(held: Iterable[SnapshotRow], *, space: Space | None, objects: int, objects_bytes: int, now_ns: int) -> SpaceForecast:
    """The forecast for a store with this number of `objects`; something holds the snapshots in `held`."""
    infos = list(held)
    start_ns = max(now_ns - int(WINDOW_DAYS * _DAY_NS), min((info.arrived_ns for info in infos), default=now_ns))
    days = (now_ns - start_ns) / _DAY_NS
    growth = sum(info.new_bytes for info in infos if info.arrived_ns >= start_ns) / days if days >= LEAST_DAYS else None
    ends = []
    if space is not None and growth:
        ends.append(space.free_bytes / growth)
        if space.free_inodes is not None and objects:
            ends.append(space.free_inodes / (growth * objects / max(1, objects_bytes)))
    return SpaceForecast(
        free_bytes=None if space is None else space.free_bytes,
        total_bytes=None if space is None else space.total_bytes,
        free_inodes=None if space is None else space.free_inodes,
        growth_bytes_per_day=None if growth is None else int(growth),
        full_in_days=min(ends, default=None),
    )
