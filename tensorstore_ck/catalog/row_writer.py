"""Writes a batch of changes into the tables, inside the caller's transaction, with a bounded number of statements.

As in the fold, metrics and marks added to a root apply to all its snapshots that are not freed, and to later ones while one of these is
left.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Table, and_, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tensorstore_ck.catalog import current_refs
from tensorstore_ck.catalog.read_entries import AnnotatedEvent, EntryEvents, FreedEvent, PutEvent, Row
from tensorstore_ck.catalog.schema import attributes, events, gc_runs, jobs, metadata, metrics, reports, snapshots
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.format.attributes import Attributes
from tensorstore_ck.log import RefTable
from tensorstore_ck.log.field_checks import MAX_METRICS

T = TypeVar("T")

VALUES_A_STATEMENT: Final = 10_000
"""Values in one ``IN (...)``, each of up to two parts: SQLite accepts 32,766 parts."""
ROWS_A_STATEMENT: Final = 20_000
MAX_BIGINT: Final = (1 << 63) - 1


@dataclass(slots=True)
class _Snapshot:
    """A row of `snapshots` after the batch."""

    id: int
    ulid: str
    root: str
    mark: str
    reason: str
    freed_n: int | None
    new: Row | None = None
    """The whole row, if the table does not have it yet."""
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Metrics to write: value, and 1 if it was added after the save."""
    attributes: Attributes = field(default_factory=dict)
    """Attributes to write; they never change."""
    changed: bool = False


@dataclass(slots=True)
class _Root:
    """The snapshots of a root that are not freed, and what was added to it."""

    members: list[_Snapshot] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    mark: str = ""
    reason: str = ""


class RowWriter:
    """One store's rows, in one transaction that holds the store's lock."""

    def __init__(self, connection: Connection, store_id: int) -> None:
        self._connection = connection
        self._store_id = store_id
        self._by_ulid: dict[str, _Snapshot] = {}
        self._by_root: dict[str, _Root] = {}
        self._replaced: list[int] = []

    def write(self, read: EntryEvents, view: RefTable) -> int:
        """Writes a batch; returns the number of its snapshots."""
        self._load(read.changes)
        for change in read.changes:
            self._apply(change)
        new = [snapshot for snapshot in self._by_ulid.values() if snapshot.new is not None]
        self._write_snapshots(new, read, view)
        self._write_metrics()
        self._insert(events, read.events)
        self._insert(gc_runs, read.gc_runs)
        self._insert(reports, read.reports)
        self._write_jobs({str(snapshot.new["ref"]) for snapshot in new if snapshot.new is not None})
        for name in sorted(read.tables):
            self._replace(metadata.tables[name], current_refs.TABLES[name](view))
        return len(new)

    def _load(self, changes: Iterable[PutEvent | AnnotatedEvent | FreedEvent]) -> None:
        """Reads the snapshots that change, and all others of their roots."""
        ulids = {
            change.row["ulid"] if isinstance(change, PutEvent) else change.ulid
            for change in changes
            if not isinstance(change, AnnotatedEvent)
        }
        roots = {
            change.row["root"] if isinstance(change, PutEvent) else change.root for change in changes if not isinstance(change, FreedEvent)
        }
        columns = (snapshots.c.id, snapshots.c.ulid, snapshots.c.root, snapshots.c.mark, snapshots.c.reason, snapshots.c.freed_n)
        rows = self._select(columns, snapshots.c.ulid, ulids)
        rows += self._select(columns, snapshots.c.root, roots | {row.root for row in rows})
        for row in sorted(set(rows), key=lambda row: int(row.id)):
            snapshot = _Snapshot(*row)
            self._by_ulid[snapshot.ulid] = snapshot
            if snapshot.freed_n is None:
                root = self._by_root.setdefault(snapshot.root, _Root())
                root.members.append(snapshot)
                root.mark, root.reason = snapshot.mark, snapshot.reason
        first = {root.members[0].id: root for root in self._by_root.values()}
        for ids in batches(sorted(first)):
            added = select(metrics.c.snapshot, metrics.c.name, metrics.c.value).where(metrics.c.snapshot.in_(ids), metrics.c.noted == 1)
            for at, name, value in self._connection.execute(added):
                first[at].metrics[name] = math.nan if value is None else value

    def _select(self, columns: Sequence[Any], column: Any, values: Iterable[object]) -> list[Any]:
        rows: list[Any] = []
        for batch in batches(sorted(values, key=str)):
            rows += self._connection.execute(select(*columns).where(snapshots.c.store_id == self._store_id, column.in_(batch)))
        return rows

    def _apply(self, change: PutEvent | AnnotatedEvent | FreedEvent) -> None:
        match change:
            case PutEvent():
                self._put(change)
            case AnnotatedEvent():
                self._annotate(change)
            case FreedEvent():
                self._free(change)

    def _put(self, put: PutEvent) -> None:
        row = put.row
        before = self._by_ulid.get(row["ulid"])
        if before is not None:  # no writer draws a ULID twice; if a log repeats one, the later counts, as in the fold
            self._detach(before)
            if before.new is None:
                self._replaced.append(before.id)
        root = self._by_root.setdefault(row["root"], _Root())
        snapshot = _Snapshot(row["id"], ulid=row["ulid"], root=row["root"], mark=root.mark, reason=root.reason, freed_n=None, new=row)
        snapshot.attributes = put.attributes
        snapshot.metrics = {name: (value, 0) for name, value in put.metrics.items()}
        snapshot.metrics |= {name: (value, 1) for name, value in root.metrics.items()}
        root.members.append(snapshot)
        self._by_ulid[snapshot.ulid] = snapshot

    def _annotate(self, noted: AnnotatedEvent) -> None:
        root = self._by_root.get(noted.root)
        if root is None or not root.members:
            return
        merged = {**root.metrics, **noted.metrics}
        if len(merged) <= MAX_METRICS:
            root.metrics = merged
            for snapshot in root.members:
                snapshot.metrics |= {name: (value, 1) for name, value in noted.metrics.items()}
        if noted.mark is not None:
            root.mark, root.reason = noted.mark
            for snapshot in root.members:
                snapshot.mark, snapshot.reason, snapshot.changed = root.mark, root.reason, True

    def _free(self, freed: FreedEvent) -> None:
        snapshot = self._by_ulid.get(freed.ulid)
        if snapshot is not None and snapshot.freed_n is None:
            snapshot.freed_n, snapshot.changed = freed.n, True
            self._detach(snapshot)

    def _detach(self, snapshot: _Snapshot) -> None:
        """Removes a snapshot from its root; with the last one, also the metrics and marks added to the root."""
        root = self._by_root.get(snapshot.root)
        if root is not None and snapshot in root.members:
            root.members.remove(snapshot)
            if not root.members:
                del self._by_root[snapshot.root]

    def _write_snapshots(self, new: Sequence[_Snapshot], read: EntryEvents, view: RefTable) -> None:
        mine = snapshots.c.store_id == self._store_id
        for ids in batches(self._replaced):
            for table in (metrics, attributes):
                self._connection.execute(delete(table).where(table.c.snapshot.in_(ids)))
            self._connection.execute(delete(snapshots).where(snapshots.c.id.in_(ids)))
        columns = (snapshots.c.ulid, snapshots.c.state)
        if read.all_affected:
            old = {row.ulid: row.state for row in self._connection.execute(select(*columns).where(mine))}
        else:
            rows = self._select(columns, snapshots.c.ulid, read.affected_ulids)
            old = {row.ulid: row.state for row in rows + self._select(columns, snapshots.c.root, read.affected_roots)}
        states = current_refs.states(view, _ulids({*old, *(snapshot.ulid for snapshot in new)}))
        self._insert(
            snapshots,
            [
                {**row, "mark": it.mark, "reason": it.reason, "freed_n": it.freed_n, "state": states[it.ulid]}
                for it in new
                if (row := it.new) is not None
            ],
        )
        changed = [snapshot for snapshot in self._by_ulid.values() if snapshot.changed and snapshot.new is None]
        self._update(("mark", "reason", "freed_n"), [(it.ulid, it.mark, it.reason, it.freed_n) for it in changed])
        self._update(("state",), [(ulid, states[ulid]) for ulid, state in old.items() if states[ulid] != state])

    def _update(self, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Sets columns of snapshots. Each row begins with its ULID."""
        if rows:
            which = and_(snapshots.c.store_id == self._store_id, snapshots.c.ulid == bindparam("of_ulid"))
            statement = update(snapshots).where(which).values({name: bindparam(f"to_{name}") for name in names})
            keys = ["of_ulid", *(f"to_{name}" for name in names)]
            self._connection.execute(statement, [dict(zip(keys, row, strict=True)) for row in rows])

    def _write_metrics(self) -> None:
        measured = (
            {"snapshot": it.id, "name": name, "value": None if math.isnan(value) else value, "noted": noted}
            for it in self._by_ulid.values()
            for name, (value, noted) in it.metrics.items()
        )
        described = (
            {"snapshot": it.id, "name": name, "value": None, "text": value}
            if isinstance(value, str)
            else {"snapshot": it.id, "name": name, "value": None if math.isnan(value) else value, "text": None}
            for it in self._by_ulid.values()
            for name, value in it.attributes.items()
        )
        for table, rows in ((metrics, measured), (attributes, described)):
            while some := list(islice(rows, ROWS_A_STATEMENT)):  # as dicts, all rows of a batch would take half a GiB
                self._upsert(table, some)

    def _write_jobs(self, refs: set[str]) -> None:
        """Counts jobs with new puts again. Sums are floats, so that false sizes in a log cannot overflow."""
        rows: list[Row] = []
        for batch in batches(sorted(refs)):
            of_batch = and_(snapshots.c.store_id == self._store_id, snapshots.c.ref.in_(batch))
            summed = select(
                snapshots.c.ref,
                snapshots.c.job,
                func.count().label("puts"),
                func.count(snapshots.c.actor.distinct()).label("processes"),
                func.min(snapshots.c.step).label("first_step"),
                func.max(snapshots.c.step).label("last_step"),
                func.min(snapshots.c.time_ns).label("first_time_ns"),
                func.max(snapshots.c.time_ns).label("last_time_ns"),
                func.sum(snapshots.c.new_bytes * 1.0).label("new_bytes"),
                func.max(snapshots.c.id).label("newest"),
            )
            counted = [row._asdict() for row in self._connection.execute(summed.where(of_batch).group_by(snapshots.c.ref, snapshots.c.job))]
            newest = select(snapshots.c.id, snapshots.c.logical_bytes).where(snapshots.c.id.in_([row["newest"] for row in counted]))
            logical = {row.id: row.logical_bytes for row in self._connection.execute(newest)}
            for row in counted:
                row |= {"logical_bytes": logical[row.pop("newest")], "new_bytes": min(int(row["new_bytes"]), MAX_BIGINT)}
            rows += counted
        self._upsert(jobs, [{"store_id": self._store_id, **row} for row in rows])

    def _replace(self, table: Table, rows: Iterable[Row]) -> None:
        """Replaces a table's rows of this store; equal rows are not written."""
        key = [column.name for column in table.primary_key if column.name != "store_id"]
        old = {}
        for row in self._connection.execute(select(table).where(table.c.store_id == self._store_id)):
            values = row._asdict()
            values.pop("store_id")
            old[tuple(values[name] for name in key)] = values
        wanted = {tuple(row[name] for name in key): row for row in rows}
        gone = [at for at in old if at not in wanted]
        if gone:
            match: ColumnElement[bool] = and_(
                table.c.store_id == self._store_id, *(table.c[name] == bindparam(f"of_{name}") for name in key)
            )
            self._connection.execute(
                delete(table).where(match), [{f"of_{name}": part for name, part in zip(key, at, strict=True)} for at in gone]
            )
        self._upsert(table, [{"store_id": self._store_id, **row} for at, row in wanted.items() if old.get(at) != row])

    def _insert(self, table: Table, rows: Sequence[Row]) -> None:
        if rows:
            self._connection.execute(insert(table), [{"store_id": self._store_id, **row} for row in rows])

    def _upsert(self, table: Table, rows: Sequence[Row]) -> None:
        if rows:
            make: Callable[..., Any] = sqlite.insert if self._connection.dialect.name == "sqlite" else postgresql.insert
            statement = make(table)
            key = [column.name for column in table.primary_key]
            others = {column.name: statement.excluded[column.name] for column in table.columns if not column.primary_key}
            self._connection.execute(statement.on_conflict_do_update(index_elements=key, set_=others), list(rows))


def _ulids(texts: Iterable[str]) -> Iterable[Ulid]:
    return (ulid for text in texts if (ulid := parse_ulid(text)) is not None)


def batches(values: Sequence[T]) -> Iterable[Sequence[T]]:
    """The values in batches, each for one ``IN (...)``."""
    return (values[at : at + VALUES_A_STATEMENT] for at in range(0, len(values), VALUES_A_STATEMENT))
