"""`find`: the snapshots for which a condition holds, in order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, Self

from sqlalchemy import Connection, Select, Table, and_, case, func, select, tuple_

from tensorstore_ck.catalog.condition_to_sql import FIELDS, Known, is_metric, names_of, to_sql
from tensorstore_ck.catalog.current_refs import STATES
from tensorstore_ck.catalog.results import FoundSnapshot
from tensorstore_ck.catalog.row_writer import batches
from tensorstore_ck.catalog.schema import attributes, metrics, pins, snapshots, stores, tags
from tensorstore_ck.common.condition_values import parse_search
from tensorstore_ck.common.conditions import Condition, Name, is_text
from tensorstore_ck.common.similar_names import similar_names
from tensorstore_ck.errors import InvalidOptionError, NotFoundError

MAX_RARE: Final = 5000
_MAX_LIMIT: Final = 1 << 53
_ORDERS: Final[dict[str, Any]] = {
    **{name: snapshots.c[name] for name in ("step", "job", "ref", "root", "logical_bytes", "new_bytes", "mark", "state", "actor")},
    "store": select(stores.c.url).where(stores.c.store_id == snapshots.c.store_id).scalar_subquery(),
    "time": snapshots.c.time_ns,
    "size": snapshots.c.logical_bytes,
}
"""Field -> what to order by. An age is ordered as a time, reversed."""
_COPIED: Final = ("ref", "job", "root", "step", "time_ns", "actor", "logical_bytes", "new_bytes", "mark", "reason", "state")
"""Fields of a `FoundSnapshot` that are columns of its row."""


@dataclass(frozen=True, slots=True)
class CheckedQuery:
    """A query whose options are valid; whether its metrics exist is not checked yet."""

    node: Condition | None
    """None: all snapshots."""
    state: str | None
    now_ns: int
    metrics: tuple[str, ...]
    """The metrics and attributes in the condition and the order."""
    order_by: Name | None
    descending: bool
    limit: int | None
    offset: int = 0

    @classmethod
    def of(
        cls,
        text: str,
        *,
        order_by: str | None = None,
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
        state: str | None = None,
        now_ns: int = 0,
    ) -> Self:
        """Checks the options of `Catalog.find`.

        Raises:
            InvalidOptionError: one of them is wrong.
        """
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InvalidOptionError(f"limit must be a whole number from 1 on, not {limit!r}", object_id="limit")
        if type(offset) is not int or not 0 <= offset <= _MAX_LIMIT:
            raise InvalidOptionError(f"offset must be a whole number from 0 on, not {offset!r}", object_id="offset")
        if state is not None and state not in STATES:
            raise InvalidOptionError(f"there is no state {state!r}: there are {', '.join(STATES)}", object_id="state")
        node = None if text == "" else parse_search(text)
        names = names_of(node) if node is not None else []
        if node is not None:
            to_sql(node, now_ns, Known())  # raises for comparisons that make no sense
        if Name("state", is_metric=False) in names:
            state = None
        order = _order_name(order_by) if order_by is not None else None
        query = [*names, *([order] if order is not None else [])]
        metrics = tuple(dict.fromkeys(name.text for name in query if is_metric(name)))
        limit = limit if limit is None else min(limit, _MAX_LIMIT)
        return cls(node, state, now_ns, metrics, order_by=order, descending=descending, limit=limit, offset=offset)


def find(connection: Connection, query: CheckedQuery) -> tuple[FoundSnapshot, ...]:
    """Runs a query."""
    tables = {name: _tables_with(connection, name) for name in query.metrics}
    ids = list(connection.execute(statement(query, Known(partial(_is_rare, connection), tables.__getitem__))).scalars())
    by_id = {row.id: row for row in _select(connection, snapshots.c.id, ids, snapshots)}
    rows = [by_id[at] for at in ids]
    urls = {row.store_id: row.url for row in connection.execute(select(stores.c.store_id, stores.c.url))}
    metrics_by_id: dict[int, dict[str, float]] = {}
    for at, name, value in _select(connection, metrics.c.snapshot, ids, metrics.c.snapshot, metrics.c.name, metrics.c.value):
        metrics_by_id.setdefault(at, {})[name] = math.nan if value is None else value
    attributes_by_id: dict[int, dict[str, float | str]] = {}
    for row in _select(connection, attributes.c.snapshot, ids, attributes):
        number = math.nan if row.value is None else row.value
        attributes_by_id.setdefault(row.snapshot, {})[row.name] = number if row.text is None else row.text
    by_ulid = [(row.store_id, row.ulid) for row in rows]
    tags_by_ulid: dict[tuple[int, str], list[str]] = {}
    for store_id, ulid, name in _select(
        connection, tuple_(tags.c.store_id, tags.c.ulid), by_ulid, tags.c.store_id, tags.c.ulid, tags.c.name
    ):
        tags_by_ulid.setdefault((store_id, ulid), []).append(name)
    pinned = {tuple(row) for row in _select(connection, tuple_(pins.c.store_id, pins.c.ulid), by_ulid, pins.c.store_id, pins.c.ulid)}
    return tuple(
        FoundSnapshot(
            **{name: row._mapping[name] for name in _COPIED},
            store=urls[row.store_id],
            id=row.ulid,
            metrics=dict(sorted(metrics_by_id.get(row.id, {}).items())),
            attributes=dict(sorted(attributes_by_id.get(row.id, {}).items())),
            tags=tuple(sorted(tags_by_ulid.get((row.store_id, row.ulid), ()))),
            pinned=(row.store_id, row.ulid) in pinned,
        )
        for row in rows
    )


def statement(query: CheckedQuery, known: Known) -> Select[Any]:
    """Selects ids in order: sorting ids is faster than sorting whole rows."""
    joined = select(snapshots.c.id)
    if query.node is not None:
        joined = joined.where(to_sql(query.node, query.now_ns, known))
    if query.state is not None:
        joined = joined.where(snapshots.c.state == query.state)
    newest_first = (snapshots.c.time_ns.desc(), snapshots.c.id.desc())
    if query.order_by is None:
        return joined.order_by(*newest_first).limit(query.limit).offset(query.offset or None)
    turned = query.descending
    if is_metric(query.order_by):
        tables = (*known.tables_of(query.order_by.text),)
        for table in tables:
            joined = joined.outerjoin(table, and_(table.c.snapshot == snapshots.c.id, table.c.name == query.order_by.text))
        column: Any = tables[0].c.value
        if len(tables) > 1:
            column = case((metrics.c.snapshot.is_not(None), metrics.c.value), else_=attributes.c.value)
    else:
        turned = turned != (query.order_by.text == "age")
        column = _ORDERS["time" if query.order_by.text == "age" else query.order_by.text]
    ordered = column.desc() if turned else column.asc()
    return joined.order_by(ordered.nulls_last(), *newest_first).limit(query.limit).offset(query.offset or None)


def _is_rare(connection: Connection, those: Select[Any]) -> bool:
    """Whether a metric is rare. Only SQLite needs this: PostgreSQL plans both forms alike, by its statistics."""
    if connection.dialect.name != "sqlite":
        return False
    some = those.limit(MAX_RARE + 1).subquery()
    return connection.execute(select(func.count()).select_from(some)).scalar_one() <= MAX_RARE


def _order_name(text: str) -> Name:
    if not is_text(text):
        raise InvalidOptionError(f"order_by must be the name of a field or a metric, not {text!r}", object_id="order_by")
    name = Name(text[1:-1], is_metric=True) if len(text) > 2 and text[0] == text[-1] == '"' else Name(text, is_metric=False)
    if not is_metric(name) and name.text != "age" and name.text not in _ORDERS:
        raise InvalidOptionError(f"cannot order by {name.text}: use one of {', '.join(_ORDERS)}, age, or a metric", object_id=name.text)
    return name


def _select(connection: Connection, column: Any, values: Sequence[Any], *columns: Any) -> list[Any]:
    rows: list[Any] = []
    for batch in batches(values):
        rows += connection.execute(select(*columns).where(column.in_(batch)))
    return rows


def _tables_with(connection: Connection, name: str) -> tuple[Table, ...]:
    """The tables that have the name of a metric or an attribute. Raises, with similar names, if no snapshot has it."""
    tables = (metrics, attributes)
    having = [select(table.c.name).where(table.c.name == name).limit(1) for table in tables]
    found = tuple(table for table, some in zip(tables, having, strict=True) if connection.execute(some).first() is not None)
    if found:
        return found
    names = (connection.execute(select(table.c.name).distinct().order_by(table.c.name)).scalars() for table in tables)
    known = list(dict.fromkeys(chain(*names)))
    close = similar_names(name, [*FIELDS, *known])
    if close:
        advice = f"did you mean {' or '.join(close)}?"
    elif known:
        advice = f"there are {', '.join(known[:8])}{' and more' if len(known) > 8 else ''}"
    else:
        advice = "it has none at all: its stores have none, or were last synced before these were saved"
    raise NotFoundError(f"no snapshot in the catalog has a metric or an attribute {name!r}: {advice}", object_id=name)


def metric_names(connection: Connection, limit: int) -> list[str]:
    """The names of metrics in the catalog, in order, up to `limit`. Steps through the index from name to name, past their values."""
    first = select(func.min(metrics.c.name).label("name")).cte("names", recursive=True)
    above = select(func.min(metrics.c.name)).where(metrics.c.name > first.c.name).scalar_subquery()
    names = first.union_all(select(above).where(first.c.name.is_not(None)))
    return list(connection.execute(select(names.c.name).where(names.c.name.is_not(None)).limit(limit)).scalars())
