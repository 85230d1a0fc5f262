"""One store of the exporter: whether it can be read, its space, and the catalog's facts on it and its branches.

Reads again only what has changed in the catalog since the last reading.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, and_, func, select

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.branch_health import finished_refs, last_runs, usual_interval
from tensorstore_ck.catalog.schema import gc_runs, jobs, pins, quotas, refs, snapshots, stores, tags
from tensorstore_ck.catalog.sync import OpenStore
from tensorstore_ck.catalog.synced_store import SyncedStore
from tensorstore_ck.common.ids import Clock
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc.space_forecast import SpaceForecast
from tensorstore_ck.log.maintenance_outcome import RunOutcome
from tensorstore_ck.log.quota import Quota
from tensorstore_ck.redaction import display_url, one_line, redacted


@dataclass(frozen=True, slots=True)
class RefState:
    """A branch that exists, and has been saved to."""

    ref: str
    head_step: int | None
    saves: int
    last_save_ns: int
    interval_ns: int | None
    """Usually between two saves; None: too few saves."""
    is_finished: bool
    """No save is expected: see `Store.finish`."""
    duration_ns: int | None
    """How long the newest save took; None: its log entry does not say so."""
    logical_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class StoreState:
    """A store in the catalog."""

    uuid: str
    url: str
    log: str
    head_n: int
    synced_ns: int
    branches: int
    tags: int
    pins: int
    snapshots: Mapping[str, int]
    """By state."""
    changed_by_gc_ns: int | None
    """When gc last changed something; runs of earlier versions did not note their outcome."""
    runs: Mapping[str, RunOutcome]
    """The last run of gc and of fsck."""
    quotas: tuple[Quota, ...]
    refs: Mapping[str, RefState]


def read_states(connection: Connection, before: Mapping[int, StoreState]) -> dict[int, StoreState]:
    """The state of each store, by its key in the catalog; `before`: what was read last."""
    states = {}
    runs: dict[int, dict[str, RunOutcome]] | None = None
    for row in connection.execute(select(stores).order_by(stores.c.synced_ns)).all():
        known = before.get(row.store_id)
        if known is not None and (known.log, known.head_n) == (row.log, row.head_n):
            states[row.store_id] = replace(known, url=row.url, synced_ns=row.synced_ns)
        else:
            runs = last_runs(connection) if runs is None else runs
            refs_before = known.refs if known is not None and known.log == row.log else {}
            states[row.store_id] = _read_store(connection, row, refs_before, runs.get(row.store_id, {}))
    return states


def _read_store(connection: Connection, row: "Row[Any]", before: Mapping[str, RefState], runs: Mapping[str, RunOutcome]) -> StoreState:
    of_store = snapshots.c.store_id == row.store_id
    by_state = connection.execute(select(snapshots.c.state, func.count()).where(of_store).group_by(snapshots.c.state))
    columns = (quotas.c.glob, quotas.c.warn_bytes, quotas.c.refuse_bytes, quotas.c.used_bytes)
    return StoreState(
        uuid=row.uuid,
        url=row.url,
        log=row.log,
        head_n=row.head_n,
        synced_ns=row.synced_ns,
        branches=_count(connection, refs, row.store_id),
        tags=_count(connection, tags, row.store_id),
        pins=_count(connection, pins, row.store_id),
        snapshots={state: count for state, count in by_state},  # noqa: C416 - rows are no pairs for mypy
        changed_by_gc_ns=connection.execute(select(func.max(gc_runs.c.time_ns)).where(gc_runs.c.store_id == row.store_id)).scalar(),
        runs=runs,
        quotas=tuple(Quota(*quota) for quota in connection.execute(select(*columns).where(quotas.c.store_id == row.store_id))),
        refs=_read_refs(connection, row.store_id, before),
    )


def _read_refs(connection: Connection, store_id: int, before: Mapping[str, RefState]) -> dict[str, RefState]:
    saved = and_(jobs.c.store_id == refs.c.store_id, jobs.c.ref == refs.c.name)
    states, finished = {}, finished_refs(connection)
    for row in connection.execute(select(jobs, refs.c.step.label("head_step")).join(refs, saved).where(refs.c.store_id == store_id)):
        known = before.get(row.ref)
        unchanged = known is not None and known.saves == row.puts
        states[row.ref] = RefState(
            ref=row.ref,
            head_step=row.head_step,
            saves=row.puts,
            last_save_ns=row.last_time_ns,
            interval_ns=known.interval_ns if known is not None and unchanged else usual_interval(connection, store_id, row.ref),
            is_finished=(store_id, row.ref) in finished,
            duration_ns=known.duration_ns if known is not None and unchanged else _newest_duration(connection, store_id, row.ref),
            logical_bytes=row.logical_bytes,
            new_bytes=row.new_bytes,
        )
    return states


def _newest_duration(connection: Connection, store_id: int, ref: str) -> int | None:
    newest = select(snapshots.c.duration_ns).where(snapshots.c.ref == ref, snapshots.c.store_id == store_id)
    return connection.execute(newest.order_by(snapshots.c.id.desc()).limit(1)).scalar()


def _count(connection: Connection, table: Table, store_id: int) -> int:
    return connection.execute(select(func.count()).select_from(table).where(table.c.store_id == store_id)).scalar_one()


OVERDUE: Final = 3
"""A store whose refresh takes longer than this many intervals counts as one that cannot be read."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement of a store's space: of `Usage`, which lists all packs, only the sums."""

    by_state: Mapping[str, int]
    unreferenced_bytes: int
    freeable_bytes: int
    time_ns: int
    seconds: float
    space: SpaceForecast


class WatchedStore:
    """A store that is read in the background. Its attributes may be read at any time, also while a refresh hangs."""

    def __init__(
        self, catalog: Catalog, url: str, open_store: OpenStore, *, interval_seconds: float, clock: Clock, monotonic: Callable[[], float]
    ) -> None:
        """Opens nothing yet."""
        self.url = display_url(url)
        self.synced = SyncedStore(catalog, url, open_store)
        self.read_ns: int | None = None
        """When the last refresh succeeded."""
        self.refresh_seconds: float | None = None
        self.refresh_errors = 0
        self.measured: Measured | None = None
        self.measure_errors = 0
        self._overdue_seconds = OVERDUE * interval_seconds
        self._clock = clock
        self._monotonic = monotonic
        self._is_read = False
        self._is_measuring = False
        self._running_since: float | None = None
        self._said: dict[str, str] = {}
        """Work -> the error that was reported last."""

    @property
    def is_up(self) -> bool:
        """Whether the last refresh succeeded, and none hangs."""
        since = self._running_since
        return self._is_read and (since is None or self._monotonic() - since <= self._overdue_seconds)

    def refresh(self) -> None:
        """Reads new log entries into the catalog. Counts an error, and reports it unless it is the same as before."""
        self._running_since = begun = self._monotonic()
        error: Exception | None
        try:
            if not self._is_measuring:
                self.synced.close_dropped()
            error = self.synced.refresh()
        except Exception as exc:  # noqa: BLE001 - whatever fails here, the exporter goes on and says that this store cannot be read
            error = exc
        self._is_read = error is None
        self.refresh_seconds = self._monotonic() - begun
        if error is None:
            self.read_ns = self._clock()
        else:
            self.refresh_errors += 1
        self._running_since = None
        self._report("be read", error)

    def measure(self) -> None:
        """Measures the store's space, if it can be read; errors as in `refresh`."""
        error: Exception | None = None
        self._is_measuring = True  # from here on, refreshes close no store that was opened
        try:
            store = self.synced.store
            if store is None or not self.is_up:
                return
            begun, time_ns = self._monotonic(), self._clock()
            usage = store.usage()
            sums = usage.by_state, usage.unreferenced_bytes, usage.freeable.now_bytes
            self.measured = Measured(*sums, time_ns, self._monotonic() - begun, usage.space)
        except Exception as exc:  # noqa: BLE001 - as above
            self.measure_errors += 1
            error = exc
        finally:
            self._is_measuring = False
        self._report("be measured", error)

    def _report(self, work: str, error: Exception | None) -> None:
        message = "" if error is None else f"{self.url} cannot {work} now: {error}"
        if message and message != self._said.get(work):
            _logger.warning("%s", one_line(redacted(message)), exc_info=None if isinstance(error, StoreError) else error)
        self._said[work] = message
