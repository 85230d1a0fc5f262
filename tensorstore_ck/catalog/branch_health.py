"""Whether stores are looked after: late saves and finished branches, and the last runs of gc and fsck."""

import statistics
from itertools import pairwise
from typing import Final

from sqlalchemy import Connection, and_, bindparam, func, select

from tensorstore_ck.catalog.schema import events, refs, reports, snapshots
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.log.maintenance_outcome import RunOutcome

LATE: Final = 3
"""Usual intervals after which a branch's next save is late."""
RECENT: Final = 50
"""The number of recent saves whose intervals count."""
_RECENT_TIMES: Final = (  # built once: building takes longer than the query, and a page runs it for hundreds of branches
    select(snapshots.c.time_ns)
    .where(snapshots.c.ref == bindparam("of_ref"), snapshots.c.store_id == bindparam("of_store"))
    .order_by(snapshots.c.id.desc())
    .limit(RECENT)
)


def usual_interval(connection: Connection, store_id: int, ref: str) -> int | None:
    """The median time between the branch's recent saves, in nanoseconds; None: it has fewer than three."""
    times = sorted(connection.execute(_RECENT_TIMES, {"of_ref": ref, "of_store": store_id}).scalars())
    intervals = [later - earlier for earlier, later in pairwise(times)]
    return int(statistics.median(intervals)) if len(intervals) >= 2 else None


def finished_refs(connection: Connection) -> set[tuple[int, str]]:
    """(store, branch) of each branch whose training has ended with its newest snapshot: it expects no save."""
    is_head = and_(refs.c.store_id == events.c.store_id, refs.c.name == events.c.ref, refs.c.root == events.c.root)
    query = select(refs.c.store_id, refs.c.name).join(events, is_head).where(events.c.op == "finished")
    return {(store_id, name) for store_id, name in connection.execute(query)}


def last_runs(connection: Connection) -> dict[int, dict[str, RunOutcome]]:
    """Number of a store -> ``gc``, ``fsck`` -> its last run."""
    newest = select(reports.c.store_id, reports.c.run, func.max(reports.c.n).label("n")).group_by(reports.c.store_id, reports.c.run)
    last = newest.subquery()
    is_last = and_(reports.c.store_id == last.c.store_id, reports.c.run == last.c.run, reports.c.n == last.c.n)
    runs: dict[int, dict[str, RunOutcome]] = {}
    for row in connection.execute(select(reports).join(last, is_last).order_by(reports.c.run, reports.c.position)):
        runs.setdefault(row.store_id, {})[row.run] = RunOutcome.of(row.run, row, parse_json(row.counts))
    return runs
