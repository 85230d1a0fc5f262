"""The page of all stores and branches: when each was saved last, and whether that is late."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.branch_health import LATE, finished_refs, last_runs, usual_interval
from tensorstore_ck.catalog.schema import gc_runs, jobs, snapshots, stores
from tensorstore_ck.log.maintenance_outcome import RunOutcome
from tensorstore_ck.ui.pages import Pages, page_number

PAGE_ROWS: Final = 50
"""Branches of a store on one page."""
DAYS: Final = 60
"""Days in the chart, up to the day of the last save."""
DAY_NS: Final = 86_400 * 10**9
OVER_NS: Final = 7 * DAY_NS


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
    is_finished: bool
    """Its training ended with the newest snapshot."""
    logical_bytes: int
    new_bytes: int

    @property
    def is_late(self) -> bool:
        """Whether the last save of an unfinished run is older than `LATE` usual intervals. After `OVER_NS` the run is taken to be over."""
        return not self.is_finished and self.interval_ns is not None and LATE * self.interval_ns < self.age_ns < OVER_NS


ORDERS: Final[Mapping[str, Callable[[RefRow], Any]]] = {
    "last save": lambda row: (row.age_ns, row.ref),
    "longest ago": lambda row: (-row.age_ns, row.ref),
    "late first": lambda row: (not row.is_late, row.age_ns, row.ref),
    "name": lambda row: row.ref,
    "most put": lambda row: (-row.new_bytes, row.ref),
}
"""Name of an order -> key."""


@dataclass(frozen=True, slots=True)
class Day:
    """Bytes that saves added on one day, in UTC."""

    time_ns: int
    """When it began."""
    bytes: int
    height: float
    """0 to 100; 100 is the largest day."""


@dataclass(frozen=True, slots=True)
class StoreRow:
    """A store and its branches."""

    uuid: str
    url: str
    head_n: int
    synced_ns: int
    last_gc_ns: int | None
    """When gc last changed something."""
    runs: Mapping[str, RunOutcome]
    """``gc``, ``fsck`` -> the last run that left its outcome."""
    days: tuple[Day, ...]
    refs: tuple[RefRow, ...]

    @property
    def late(self) -> int:
        """Number of branches whose last save is late."""
        return sum(row.is_late for row in self.refs)

    @property
    def new_bytes(self) -> int:
        """Bytes that all saves added when they were published."""
        return sum(row.new_bytes for row in self.refs)


def page(pages: Pages, request: Request) -> Response:
    """The page. Branches can be filtered by a part of their name, and ordered."""
    query = request.query_params
    part, order, number = query.get("q", "").strip(), query.get("order", ""), page_number(query)
    order = order if order in ORDERS else next(iter(ORDERS))
    troubles = pages.sources.refresh()
    with pages.sources.catalog.reading() as connection:
        stores_shown = read_overview(connection)
    is_reading = any(trouble.is_reading for trouble in troubles.values())
    shown = {row.uuid: sorted((ref for ref in row.refs if part in ref.ref), key=ORDERS[order]) for row in stores_shown}
    most = max((len(refs) for refs in shown.values()), default=0)
    return pages.render(
        "overview.html",
        "overview",
        stores=stores_shown,
        shown=shown,
        rows=slice((number - 1) * PAGE_ROWS, number * PAGE_ROWS),
        pages_count=max(1, -(-most // PAGE_ROWS)),
        number=number,
        part=part,
        order=order,
        orders=tuple(ORDERS),
        has_many=any(len(row.refs) > PAGE_ROWS // 5 for row in stores_shown),
        troubles=troubles,
        is_reading=is_reading,
    )


def read_overview(connection: Connection) -> tuple[StoreRow, ...]:
    """All stores of the catalog, with branches that were saved last first."""
    now_ns = time.time_ns()
    last_gc = {
        row[0]: row[1] for row in connection.execute(select(gc_runs.c.store_id, func.max(gc_runs.c.time_ns)).group_by(gc_runs.c.store_id))
    }
    finished = finished_refs(connection)
    rows: dict[int, list[RefRow]] = {}
    for job in connection.execute(select(jobs).order_by(jobs.c.last_time_ns.desc(), jobs.c.ref)):
        rows.setdefault(job.store_id, []).append(
            RefRow(
                ref=job.ref,
                puts=job.puts,
                first_step=job.first_step,
                last_step=job.last_step,
                last_time_ns=job.last_time_ns,
                age_ns=now_ns - job.last_time_ns,
                interval_ns=usual_interval(connection, job.store_id, job.ref),
                is_finished=(job.store_id, job.ref) in finished,
                logical_bytes=job.logical_bytes,
                new_bytes=job.new_bytes,
            )
        )
    runs = last_runs(connection)
    return tuple(
        StoreRow(
            uuid=row.uuid,
            url=row.url,
            head_n=row.head_n,
            synced_ns=row.synced_ns,
            last_gc_ns=last_gc.get(row.store_id),
            runs=runs.get(row.store_id, {}),
            days=read_days(connection, row.store_id, rows.get(row.store_id, ())),
            refs=tuple(rows.get(row.store_id, ())),
        )
        for row in connection.execute(select(stores).order_by(stores.c.url, stores.c.uuid)).all()
    )


def read_days(connection: Connection, store_id: int, refs: Iterable[RefRow]) -> tuple[Day, ...]:
    """The bytes of each of the last `DAYS` days until the last save; empty without saves."""
    last = max((row.last_time_ns for row in refs), default=None)
    if last is None:
        return ()
    newest = last // DAY_NS
    day = snapshots.c.time_ns // DAY_NS
    conditions = (snapshots.c.store_id == store_id, snapshots.c.time_ns >= (newest - DAYS + 1) * DAY_NS)
    summed = select(day, func.sum(snapshots.c.new_bytes * 1.0)).where(*conditions).group_by(day)
    put = {number: int(size) for number, size in connection.execute(summed)}
    most = max(put.values(), default=0) or 1
    return tuple(Day(at * DAY_NS, put.get(at, 0), 100 * put.get(at, 0) / most) for at in range(newest - DAYS + 1, newest + 1))
