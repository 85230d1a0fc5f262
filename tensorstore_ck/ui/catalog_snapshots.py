"""A snapshot in the catalog by its address, and the catalog's data about it, even if it is gone.

Also the addresses that complete what was typed into a field.
"""

import math
import re
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, Row, select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.schema import metrics, pins, refs, snapshot_id, snapshots, stores, tags
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import AmbiguousAddressError, InvalidNameError, NotFoundError
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

MAX_RELATED: Final = 20
"""The most children, and other saves of the same root, that a page shows."""
_ROOT: Final = re.compile(r"[0-9a-f]{8,64}")
MAX_ADDRESS_CHARS: Final = 400


@dataclass(frozen=True, slots=True)
class CatalogSnapshot:
    """A row of the catalog's snapshots."""

    id: int
    ulid: str
    root: str
    parent: str | None
    ref: str
    step: int | None
    n: int
    time_ns: int
    actor: str
    logical_bytes: int
    new_bytes: int
    mark: str
    reason: str
    state: str
    freed_n: int | None
    """The log entry that freed its record."""

    @classmethod
    def of(cls, row: Row[tuple[object, ...]]) -> "CatalogSnapshot":
        """From all columns of a row."""
        values = row._mapping
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    @property
    def title(self) -> str:
        """Branch and step."""
        return self.ref if self.step is None else f"{self.ref}@{self.step}"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that was saved with a snapshot, or noted later."""

    name: str
    value: float | None
    """None: NaN."""
    is_noted: bool

    @property
    def is_finite(self) -> bool:
        """Neither NaN nor infinite."""
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """A snapshot with its branch, parents, children and holders."""

    snapshot: CatalogSnapshot
    parent: CatalogSnapshot | None
    children: tuple[CatalogSnapshot, ...]
    """The first ones."""
    same_root: tuple[CatalogSnapshot, ...]
    """Other saves of the same content, newest first."""
    branches: tuple[str, ...]
    """The branches at this snapshot now."""
    tags: tuple[str, ...]
    pins: tuple[Row[tuple[object, ...]], ...]
    """With `owner`, `reason`, `expires_ns` and `time_ns`."""
    metrics: tuple[Metric, ...]
    short_root: str
    """The shortest prefix that identifies the root."""


def find_snapshot(pages: Pages, store: StoreKey, address: str) -> CatalogSnapshot:
    """The snapshot at an address (see `log/address.py`), with a ULID, or with the root of a snapshot that is gone.

    Raises:
        NotFoundError: there is none.
        AmbiguousAddressError: the first digits of several roots.
        StoreError: the store is needed to find it, and cannot be read.
    """
    address = address.strip()
    if not address or len(address) > MAX_ADDRESS_CHARS or not address.isprintable():
        raise InvalidNameError("write an address: a ref, ref@step, ref~n, or a root (8 or more hex digits)", object_id="address")
    with pages.sources.catalog.reading() as connection:
        snapshot = _in_catalog(connection, store.store_id, address)
    if snapshot is not None:
        return snapshot
    if _ROOT.fullmatch(address):
        with pages.sources.catalog.reading() as connection:
            other = connection.execute(
                select(stores.c.url).join(snapshots, snapshots.c.store_id == stores.c.store_id).where(*_begins(address)).limit(1)
            ).scalar()
        if other is not None:
            raise NotFoundError(f"{address} is a snapshot of another store, {other}: a page has snapshots of one store", object_id=address)
        raise NotFoundError(f"no snapshot has a root that begins with {address}", object_id=address)
    resolved = pages.sources.open(store).resolve(address)
    with pages.sources.catalog.reading() as connection:
        snapshot = _by_ulid(connection, store.store_id, resolved.id)
    if snapshot is None:
        raise NotFoundError(
            f"{address} is a snapshot that the catalog does not have: it is staged, or newer than the last `tsck catalog sync`",
            object_id=address,
        )
    return snapshot


def _in_catalog(connection: Connection, store_id: int, address: str) -> CatalogSnapshot | None:
    """The snapshot with this ULID, root, branch or tag."""
    if parse_ulid(address.upper()) is not None:
        return _by_ulid(connection, store_id, address.upper())
    if _ROOT.fullmatch(address):
        rows = (
            connection.execute(select(snapshots.c.root).where(*_begins(address), snapshots.c.store_id == store_id).distinct().limit(2))
            .scalars()
            .all()
        )
        if len(rows) > 1:
            raise AmbiguousAddressError(f"several snapshots have a root that begins with {address}: give more digits", object_id=address)
        return _with_root(connection, store_id, rows[0])[0] if rows else None
    for table in (refs, tags):
        ulid = connection.execute(select(table.c.ulid).where(table.c.store_id == store_id, table.c.name == address)).scalar()
        if ulid is not None:
            return _by_ulid(connection, store_id, ulid)
    return None


def _begins(digits: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """The conditions for a root that begins with these digits; ``g`` sorts after all of them."""
    return snapshots.c.root >= digits, snapshots.c.root < digits + "g"


def _by_ulid(connection: Connection, store_id: int, ulid: str) -> CatalogSnapshot | None:
    query = select(snapshots).where(snapshots.c.store_id == store_id, snapshots.c.ulid == ulid)
    row = connection.execute(query).one_or_none()
    return CatalogSnapshot.of(row) if row is not None else None


def _with_root(connection: Connection, store_id: int, root: str, limit: int = MAX_RELATED) -> list[CatalogSnapshot]:
    """The snapshots with a root: live ones first, then newest first."""
    query = select(snapshots).where(snapshots.c.root == root, snapshots.c.store_id == store_id)
    order = (snapshots.c.state == "gone", snapshots.c.state == "forgotten", snapshots.c.id.desc())
    return [CatalogSnapshot.of(row) for row in connection.execute(query.order_by(*order).limit(limit))]


def read_facts(connection: Connection, store_id: int, snapshot: CatalogSnapshot) -> CatalogFacts:
    """The catalog's facts on a snapshot."""
    same_ulid = {"store_id": store_id, "ulid": snapshot.ulid}
    parents = _with_root(connection, store_id, snapshot.parent, 1) if snapshot.parent else []
    later = snapshots.c.id.between(snapshot_id(store_id, 0, 0), snapshot_id(store_id + 1, 0, 0) - 1)
    children = connection.execute(
        select(snapshots).where(snapshots.c.parent == snapshot.root, later).order_by(snapshots.c.id).limit(MAX_RELATED)
    )
    measured = select(metrics).where(metrics.c.snapshot == snapshot.id).order_by(metrics.c.name)
    return CatalogFacts(
        snapshot=snapshot,
        parent=parents[0] if parents else None,
        children=tuple(CatalogSnapshot.of(row) for row in children),
        same_root=tuple(other for other in _with_root(connection, store_id, snapshot.root) if other.id != snapshot.id),
        branches=tuple(connection.execute(select(refs.c.name).filter_by(**same_ulid).order_by(refs.c.name)).scalars()),
        tags=tuple(connection.execute(select(tags.c.name).filter_by(**same_ulid).order_by(tags.c.name)).scalars()),
        pins=tuple(connection.execute(select(pins).filter_by(**same_ulid).order_by(pins.c.owner))),
        metrics=tuple(Metric(row.name, row.value, bool(row.noted)) for row in connection.execute(measured)),
        short_root=_short_root(connection, store_id, snapshot.root),
    )


def _short_root(connection: Connection, store_id: int, root: str) -> str:
    """The shortest of some prefixes of a root that no other root of the store has."""
    for length in (12, 16, 24):
        others = *_begins(root[:length]), snapshots.c.root != root, snapshots.c.store_id == store_id
        if connection.execute(select(snapshots.c.id).where(*others).limit(1)).scalar() is None:
            return root[:length]
    return root


MAX_OFFERED: Final = 30
_HEX: Final = re.compile(r"[0-9a-f]{4,64}")


def addresses_page(pages: Pages, request: Request) -> Response:
    """The options for the field whose name is ``of`` in the query."""
    store = pages.store_of(request)
    typed = request.query_params.get(request.query_params.get("of", ""), "").strip()[:400]
    if not typed.isprintable():
        return pages.part("addresses.html", offered=[])
    with pages.sources.catalog.reading() as connection:
        return pages.part("addresses.html", offered=complete(connection, store.store_id, typed))


def complete(connection: Connection, store_id: int, typed: str) -> list[tuple[str, str]]:
    """Addresses and their kinds: branches and tags whose names contain the text, steps after an ``@``, roots that begin with the text."""
    name, at, step = typed.partition("@")
    if at:
        with_step = select(snapshots.c.step).where(snapshots.c.ref == name, snapshots.c.store_id == store_id, snapshots.c.step.is_not(None))
        rows = connection.execute(with_step.where(snapshots.c.state == "live").order_by(snapshots.c.id.desc()))
        steps = dict.fromkeys(row.step for row in rows if str(row.step).startswith(step))
        return [(f"{name}@{number}", "step") for number in list(steps)[:MAX_OFFERED]]
    offers: list[tuple[str, str]] = []
    for table, kind in ((refs, "branch"), (tags, "tag")):
        named = select(table.c.name).where(table.c.store_id == store_id, table.c.name.contains(typed, autoescape=True))
        offers += [(row.name, kind) for row in connection.execute(named.order_by(table.c.name).limit(MAX_OFFERED))]
    if _HEX.fullmatch(typed):
        begins = snapshots.c.root >= typed, snapshots.c.root < typed + "g", snapshots.c.store_id == store_id
        rows = connection.execute(select(snapshots.c.root, snapshots.c.ref, snapshots.c.step).where(*begins).limit(MAX_OFFERED))
        offers += [(row.root, row.ref if row.step is None else f"{row.ref} step {row.step}") for row in rows]
    if len(offers) == 1 and offers[0] == (typed, "branch"):
        offers.append((f"{typed}~1", "the one before"))
    return offers[:MAX_OFFERED]
