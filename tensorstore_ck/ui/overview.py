"""The page of all stores and branches: when each was saved last, and whether that is late."""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.save_intervals import LATE, usual_interval
from tensorstore_ck.catalog.schema import gc_runs, jobs, stores
from tensorstore_ck.ui.pages import Pages


@dataclass(frozen=True, slots=True)
class RefRow:
    """A branch."""

    ref: str
    puts: int
    first_step: int | None
    last_step: int | None
    last_time_ns: int
    age_ns: int
    interval_ns: int | None
    """The median time between its recent saves; None: too few."""
    logical_bytes: int
    new_bytes: int

    @property
    def is_late(self) -> bool:
        """Whether the last save is older than `LATE` usual intervals."""
        return self.interval_ns is not None and self.age_ns > LATE * self.interval_ns


@dataclass(frozen=True, slots=True)
class StoreRow:
    """A store and its branches."""

    uuid: str
    url: str
    head_n: int
    synced_ns: int
    last_gc_ns: int | None
    refs: tuple[RefRow, ...]

    @property
    def late(self) -> int:
        """Number of branches whose last save is late."""
        return sum(row.is_late for row in self.refs)

    @property
    def new_bytes(self) -> int:
        """Of all saves, when they were put."""
        return sum(row.new_bytes for row in self.refs)


def page(pages: Pages, _: Request) -> Response:
    """The page."""
    troubles = pages.sources.refresh()
    with pages.sources.catalog.reading() as connection:
        found = read_overview(connection)
    is_reading = any(each.is_reading for each in troubles.values())
    return pages.render("overview.html", "overview", stores=found, troubles=troubles, is_reading=is_reading)


def read_overview(connection: Connection, now_ns: int | None = None) -> tuple[StoreRow, ...]:
    """All stores of the catalog, with branches that were saved last first."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    last_gc = {
        row[0]: row[1] for row in connection.execute(select(gc_runs.c.store_id, func.max(gc_runs.c.time_ns)).group_by(gc_runs.c.store_id))
    }
    rows: dict[int, list[RefRow]] = {}
    for job in connection.execute(select(jobs).order_by(jobs.c.last_time_ns.desc(), jobs.c.ref)):
        rows.setdefault(job.store_id, []).append(
            RefRow(
                job.ref,
                job.puts,
                job.first_step,
                job.last_step,
                job.last_time_ns,
                now_ns - job.last_time_ns,
                usual_interval(connection, job.store_id, job.ref),
                job.logical_bytes,
                job.new_bytes,
            )
        )
    found = connection.execute(select(stores).order_by(stores.c.url, stores.c.uuid))
    return tuple(
        StoreRow(row.uuid, row.url, row.head_n, row.synced_ns, last_gc.get(row.store_id), tuple(rows.get(row.store_id, ())))
        for row in found
    )
