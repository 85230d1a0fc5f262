"""The usual time between the saves of a branch, and when its next save is late."""

import statistics
from itertools import pairwise
from typing import Final

from sqlalchemy import Connection, select

from tensorstore_ck.catalog.schema import snapshots

LATE: Final = 3
"""Usual intervals after which a branch's next save is late."""
RECENT: Final = 50
"""Saves whose intervals say what is usual."""


def usual_interval(connection: Connection, store_id: int, ref: str) -> int | None:
    """The median time between the branch's recent saves, in nanoseconds; None: it has fewer than three."""
    recent = select(snapshots.c.time_ns).where(snapshots.c.ref == ref, snapshots.c.store_id == store_id).order_by(snapshots.c.id.desc())
    times = sorted(connection.execute(recent.limit(RECENT)).scalars())
    intervals = [later - earlier for earlier, later in pairwise(times)]
    return int(statistics.median(intervals)) if len(intervals) >= 2 else None
