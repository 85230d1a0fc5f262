"""The saves of a branch as a table, a page at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, func, select

from tensorstore_ck.catalog.schema import metrics, snapshots
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot
from tensorstore_ck.ui.graph import Label
from tensorstore_ck.ui.lineage import Lineage

PAGE_ROWS: Final = 50


@dataclass(frozen=True, slots=True)
class Wanted:
    """The requested page of saves."""

    store_id: int
    state: str
    """``live``, ``forgotten`` or ``gone``; empty: all."""
    number: int
    """From 1 on."""


@dataclass(frozen=True, slots=True)
class SaveRow:
    """A snapshot that was saved to the branch."""

    snapshot: CatalogSnapshot
    is_abandoned: bool
    metrics: Mapping[str, float]
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class SavesPage:
    """Saves, newest first."""

    rows: tuple[SaveRow, ...]
    count: int
    """Saves on all pages."""

    @property
    def pages(self) -> int:
        """Number of pages; one at least."""
        return max(1, math.ceil(self.count / PAGE_ROWS))


def read_saves(
    connection: Connection, lineage: Lineage, labels: Mapping[str, list[Label]], columns: Sequence[str], wanted: Wanted
) -> SavesPage:
    """A page of saves, with the metrics in `columns`. `labels`: ULID -> tags and pins."""
    abandoned = {save.id for run in lineage.abandoned for save in run}
    conditions: list[Any] = [snapshots.c.ref == lineage.ref, snapshots.c.store_id == wanted.store_id]
    if wanted.state:
        conditions.append(snapshots.c.state == wanted.state)
    count = connection.execute(select(func.count()).select_from(snapshots).where(*conditions)).scalar_one()
    order = select(snapshots.c.id).where(*conditions).order_by(snapshots.c.id.desc())
    ids = list(connection.execute(order.offset((wanted.number - 1) * PAGE_ROWS).limit(PAGE_ROWS)).scalars())
    values: dict[int, dict[str, float]] = {}
    asked_values = select(metrics.c.snapshot, metrics.c.name, metrics.c.value).where(
        metrics.c.snapshot.in_(ids), metrics.c.name.in_(columns)
    )
    for at, metric, value in connection.execute(asked_values):
        values.setdefault(at, {})[metric] = math.nan if value is None else value
    rows = connection.execute(select(snapshots).where(snapshots.c.id.in_(ids)).order_by(snapshots.c.id.desc()))
    save_rows = tuple(
        SaveRow(
            snapshot=CatalogSnapshot.of(row),
            is_abandoned=row.id in abandoned,
            metrics=values.get(row.id, {}),
            labels=tuple(label for label in labels.get(row.ulid, ()) if label.kind != "mark"),
        )
        for row in rows
    )
    return SavesPage(save_rows, count)
