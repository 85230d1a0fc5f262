"""The catalog's facts on each store and branch. Reads again only what has changed since the last reading."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, Table, and_, func, select

from tensorstore_ck.catalog.branch_health import finished_refs, last_runs, usual_interval
from tensorstore_ck.catalog.schema import gc_runs, jobs, pins, quotas, refs, snapshots, stores, tags
from tensorstore_ck.log.maintenance_outcome import RunOutcome
from tensorstore_ck.log.quota import Quota


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
        quotas=_read_quotas(connection, row.store_id),
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


def _read_quotas(connection: Connection, store_id: int) -> tuple[Quota, ...]:
    columns = (quotas.c.glob, quotas.c.warn_bytes, quotas.c.refuse_bytes, quotas.c.used_bytes)
    return tuple(Quota(*row) for row in connection.execute(select(*columns).where(quotas.c.store_id == store_id)))


def _count(connection: Connection, table: Table, store_id: int) -> int:
    return connection.execute(select(func.count()).select_from(table).where(table.c.store_id == store_id)).scalar_one()
