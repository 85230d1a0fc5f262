"""The page of a branch: charts of metrics, the graph of what it follows and left behind, and all its saves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tensorstore_ck.catalog.current_refs import STATES
from tensorstore_ck.catalog.schema import jobs, metrics, pins, refs, snapshots, tags
from tensorstore_ck.errors import NotFoundError, StoreError
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot
from tensorstore_ck.ui.graph import ROW, Label, read_graph
from tensorstore_ck.ui.lineage import Lineage, read_lineage
from tensorstore_ck.ui.pages import Pages, asked, page_number
from tensorstore_ck.ui.series import MAX_METRICS, read_notes
from tensorstore_ck.ui.sources import StoreKey

SAMPLED: Final = 200
"""The number of newest saves whose metrics are offered, and of further saves spread over all."""
SHOWN_METRICS: Final = 3
"""Columns of the table."""
SHOWN_NOTES: Final = 100
USUAL: Final = ("loss", "train_loss", "train/loss", "val_loss", "eval_loss", "val/loss", "eval/loss", "validation_loss")
"""Metrics that are drawn first."""
DRAWN: Final = 2
"""Metrics that are drawn if none is asked for."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A branch as the catalog has it."""

    exists: bool
    """False: it was removed, or never was."""
    step: int | None
    root: str
    time_ns: int | None
    puts: int
    processes: int
    new_bytes: int


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


def page(pages: Pages, request: Request) -> Response:
    """The page. For a tag, redirects to its snapshot."""
    key, query = pages.store_of(request), request.query_params
    name, state, number = asked(query, "name"), query.get("state", ""), page_number(query)
    if state not in ("", *STATES):
        state = ""
    with pages.sources.catalog.reading() as connection:
        facts = read_facts(connection, key.store_id, name)
        if not facts.exists and facts.puts == 0:
            if is_tag(connection, key.store_id, name):
                return RedirectResponse(pages.link("snapshot", key, at=name), 303)
            raise NotFoundError(f"there is no ref {name!r} in this store: see the overview", object_id=name)
        known = read_metric_names(connection, key.store_id, name)
        wanted = [metric for metric in dict.fromkeys([*query.getlist("metric"), query.get("add", "")]) if metric][:MAX_METRICS]
        drawn = wanted or usual_metrics(known)
        lineage = read_lineage(connection, key.store_id, name)
        labels = read_labels(connection, key.store_id)
        graph = read_graph(connection, key.store_id, lineage, labels)
        notes = read_notes(connection, key.store_id, lineage)
        saves = read_saves(
            connection, lineage=lineage, labels=labels, columns=drawn[:SHOWN_METRICS], wanted=Wanted(key.store_id, state, number)
        )

    def at(**changed: object) -> str:
        return pages.link("ref", key, **{"name": name, "metric": wanted, "state": state or None, **changed})

    kept, kept_error = explained(pages, key, name) if "kept" in query else (None, "")
    return pages.render(
        "ref.html",
        "ref",
        store=key,
        name=name,
        at=at,
        facts=facts,
        known=sorted(known),
        drawn=drawn,
        asked_metrics=wanted,
        lineage=lineage,
        graph=graph,
        graph_row=ROW,
        notes=notes[-SHOWN_NOTES:][::-1],
        more_notes=len(notes) > SHOWN_NOTES,
        infinity=math.inf,
        saves=saves,
        columns=drawn[:SHOWN_METRICS],
        state=state,
        states=STATES,
        number=number,
        kept=kept,
        kept_error=kept_error,
    )


def explained(pages: Pages, key: StoreKey, name: str) -> tuple[Mapping[str, Sequence[str]] | None, str]:
    """The holders of each snapshot, or the error. Takes seconds for thousands of snapshots with many metrics."""
    try:
        return pages.sources.open(key).explain_retention(name), ""
    except StoreError as exc:
        return None, str(exc)


def is_tag(connection: Connection, store_id: int, name: str) -> bool:
    """Whether it is a tag."""
    query = select(tags.c.name).where(tags.c.store_id == store_id, tags.c.name == name)
    return connection.execute(query).first() is not None


def read_facts(connection: Connection, store_id: int, name: str) -> Facts:
    """The head and the sums of a branch."""
    head = connection.execute(select(refs).where(refs.c.store_id == store_id, refs.c.name == name)).first()
    job = connection.execute(select(jobs).where(jobs.c.store_id == store_id, jobs.c.ref == name)).first()
    return Facts(
        exists=head is not None,
        step=head.step if head is not None else job.last_step if job is not None else None,
        root=head.root if head is not None else "",
        time_ns=job.last_time_ns if job is not None else None,
        puts=job.puts if job is not None else 0,
        processes=job.processes if job is not None else 0,
        new_bytes=job.new_bytes if job is not None else 0,
    )


def read_metric_names(connection: Connection, store_id: int, name: str) -> dict[str, int]:
    """Metrics of some of a branch's saves, and how many of these have them."""
    conditions = (snapshots.c.ref == name, snapshots.c.store_id == store_id)
    ids = list(connection.execute(select(snapshots.c.id).where(*conditions).order_by(snapshots.c.id)).scalars())
    some = sorted({*ids[-SAMPLED // 2 :], *ids[:: max(1, len(ids) // (SAMPLED // 2))][: SAMPLED // 2]})
    counted = select(metrics.c.name, func.count()).where(metrics.c.snapshot.in_(some)).group_by(metrics.c.name)
    return {metric: count for metric, count in connection.execute(counted)}  # noqa: C416 - rows are no pairs for mypy


def usual_metrics(known: Mapping[str, int]) -> list[str]:
    """The metrics that a page draws first: losses, else those that most saves have."""

    def rank(metric: str) -> tuple[int, bool, int, str]:
        return USUAL.index(metric) if metric in USUAL else len(USUAL), "loss" not in metric, -known[metric], metric

    ranked = sorted(known, key=rank)
    losses = [metric for metric in ranked if "loss" in metric]
    return (losses or ranked)[:DRAWN]


def read_labels(connection: Connection, store_id: int) -> dict[str, list[Label]]:
    """ULID -> tags, pins and the mark of a snapshot, of all in the store that have any."""
    labels: dict[str, list[Label]] = {}
    for name, ulid in connection.execute(select(tags.c.name, tags.c.ulid).where(tags.c.store_id == store_id).order_by(tags.c.name)):
        labels.setdefault(ulid, []).append(Label("tag", name))
    query = select(pins.c.ulid, pins.c.owner, pins.c.reason).where(pins.c.store_id == store_id).order_by(pins.c.owner)
    for ulid, owner, reason in connection.execute(query):
        labels.setdefault(ulid, []).append(Label("pin", f"{owner}: {reason}" if reason else owner))
    marked = select(snapshots.c.ulid, snapshots.c.mark).where(snapshots.c.mark != "", snapshots.c.store_id == store_id)
    for ulid, mark in connection.execute(marked):
        labels.setdefault(ulid, []).append(Label("mark", mark))
    return labels
