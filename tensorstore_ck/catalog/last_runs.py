"""The last run of gc and of fsck in each store."""

from sqlalchemy import Connection, and_, func, select

from tensorstore_ck.catalog.schema import reports
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.log.maintenance_outcome import RunOutcome


def last_runs(connection: Connection) -> dict[int, dict[str, RunOutcome]]:
    """Number of a store -> ``gc``, ``fsck`` -> its last run."""
    newest = select(reports.c.store_id, reports.c.run, func.max(reports.c.n).label("n")).group_by(reports.c.store_id, reports.c.run)
    last = newest.subquery()
    is_last = and_(reports.c.store_id == last.c.store_id, reports.c.run == last.c.run, reports.c.n == last.c.n)
    runs: dict[int, dict[str, RunOutcome]] = {}
    for row in connection.execute(select(reports).join(last, is_last).order_by(reports.c.run, reports.c.position)):
        runs.setdefault(row.store_id, {})[row.run] = RunOutcome.of(row.run, row, parse_json(row.counts))
    return runs
