"""The page of two snapshots: facts and metrics at once, then what differs, and by how much tensors changed."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import select
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.schema import metrics
from tensorstore_ck.errors import StoreError
from tensorstore_ck.ui.background import Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot, find_snapshot
from tensorstore_ck.ui.differences import Changes, Differences, Pair, read_changes, read_differences
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.ref import usual_metrics
from tensorstore_ck.ui.snapshot_content import patience_of
from tensorstore_ck.ui.snapshot_tensors import key_of, number_of, value_text
from tensorstore_ck.ui.sources import StoreKey

MAX_SHOWN: Final = 50
"""Rows of a table at a time."""


@dataclass(frozen=True, slots=True)
class MetricPair:
    """A metric of two snapshots. None: NaN."""

    name: str
    old: float | None
    new: float | None
    has_old: bool
    has_new: bool

    @property
    def change(self) -> float | None:
        """New - old; None if one of them lacks it, or is not finite."""
        if self.old is None or self.new is None or not math.isfinite(self.old) or not math.isfinite(self.new):
            return None
        return self.new - self.old


@dataclass(frozen=True, slots=True)
class RowRange:
    """Some of the rows of a long table."""

    rows: Sequence[object]
    first: int
    count: int

    @property
    def before(self) -> int | None:
        """The first row of the previous page; None: there is none."""
        return max(0, self.first - MAX_SHOWN) if self.first else None

    @property
    def next(self) -> int | None:
        """The first row of the next page; None: there is none."""
        return self.first + len(self.rows) if self.first + len(self.rows) < self.count else None


def rows_from(rows: Sequence[object], first: int) -> RowRange:
    """At most `MAX_SHOWN` of the rows."""
    return RowRange(rows[first : first + MAX_SHOWN], first, len(rows))


def page(pages: Pages, request: Request) -> Response:
    """The page. If an address is missing or invalid, the form reports it, and the page shows the other snapshot's data."""
    store = pages.store_of(request)
    typed = {name: request.query_params.get(name, "").strip() for name in ("old", "new")}
    compared: dict[str, CatalogSnapshot] = {}
    errors: dict[str, str] = {}
    for name, address in typed.items():
        try:
            if address:
                compared[name] = find_snapshot(pages, store, address)
        except StoreError as exc:
            errors[name] = str(exc)
    pair = Pair(compared["old"], compared["new"]) if len(compared) == 2 else None
    gone = [item for item in compared.values() if item.state == "gone"]
    read = read_differences(pages, store, pair, patience_of(request)) if pair is not None and not gone else Read()
    measured = read_metrics(pages, pair) if pair is not None else []
    drawn = usual_metrics({item.name: item.has_old + item.has_new for item in measured})
    return pages.render(
        "compare_snapshots.html",
        "compare",
        404 if errors else 200,
        store=store,
        typed=typed,
        errors=errors,
        found=compared,
        pair=pair,
        gone=gone,
        measured=measured,
        drawn=drawn,
        overlay=json.dumps(_overlay(pages, store, pair, drawn)) if pair is not None else "",
        read=read,
        is_finite=lambda value: value is not None and math.isfinite(value),
        **_differences(read, "", 0, 0),
        url=pages.link("compare", store, **{name: item.ulid for name, item in compared.items()}),
    )


def _overlay(pages: Pages, store: StoreKey, pair: Pair, drawn: Sequence[str]) -> dict[str, Any]:
    """The data that overlays.js draws: the branches of both snapshots, the old one's in another colour, and the positions of the
    snapshots.
    """
    colours = {"old": (pair.old, 2), "new": (pair.new, 1)}
    sides = {snapshot.ref: (snapshot, colour) for snapshot, colour in colours.values()}
    series = partial(pages.link, "ref/series", store, metric=drawn)
    lines = [{"name": ref, "series": series(name=ref), "colour": colour} for ref, (_, colour) in sides.items()]
    marks = [{"step": snapshot.step, "colour": colour} for snapshot, colour in colours.values() if snapshot.step is not None]
    return {"lines": lines, "marks": marks}


def _differences(read: Read, text: str, first_tensor: int, first_value: int) -> dict[str, Any]:
    """The values that the templates of differences need."""
    differences = read.result if isinstance(read.result, Differences) else None
    return {
        "differences": differences,
        "tensors": rows_from(differences.tensors(text), first_tensor) if differences is not None else None,
        "values": rows_from(differences.diff.values, first_value) if differences is not None else None,
        "q": text,
        "value_text": value_text,
        "key_of": key_of,
    }


def read_metrics(pages: Pages, pair: Pair) -> list[MetricPair]:
    """All metrics that one of them has, by name."""
    with pages.sources.catalog.reading() as connection:
        old, new = (
            {row.name: row.value for row in connection.execute(select(metrics).where(metrics.c.snapshot == snapshot.id))}
            for snapshot in (pair.old, pair.new)
        )
    return [
        MetricPair(name=name, old=old.get(name), new=new.get(name), has_old=name in old, has_new=name in new)
        for name in sorted({*old, *new})
    ]


def _pair(pages: Pages, request: Request) -> tuple[StoreKey, Pair]:
    store = pages.store_of(request)
    pair = Pair(*(find_snapshot(pages, store, asked(request.query_params, name)) for name in ("old", "new")))
    if "gone" in (pair.old.state, pair.new.state):
        raise HTTPException(404, "One of these snapshots is gone: only its metrics can be compared.")
    return store, pair


def tensors_page(pages: Pages, request: Request) -> Response:
    """The tensors that differ and whose names contain ``q``, or the values that differ, from ``first`` or ``first_value`` on."""
    store, pair = _pair(pages, request)
    read = read_differences(pages, store, pair, patience_of(request))
    text, first, first_value = request.query_params.get("q", "").strip(), number_of(request, "first"), number_of(request, "first_value")
    query = {"old": pair.old.ulid, "new": pair.new.ulid, "q": text or None, "first": first or None, "first_value": first_value or None}
    url = pages.link("compare/tensors", store, **query)
    shown = _differences(read, text, first, first_value)
    return pages.render("compare_tensors.html", "compare", store=store, pair=pair, read=read, **shown, url=url)


def changes_page(pages: Pages, request: Request) -> Response:
    """By how much tensors changed: all, or those of ``group``."""
    store, pair = _pair(pages, request)
    group, first = request.query_params.get("group", ""), number_of(request, "first")
    read = read_changes(pages, store=store, pair=pair, group=group, patience_seconds=patience_of(request))
    changes = read.result if isinstance(read.result, Changes) else None
    query = {"old": pair.old.ulid, "new": pair.new.ulid, "group": group or None}
    return pages.render(
        "compare_changes.html",
        "compare",
        store=store,
        pair=pair,
        group=group,
        read=read,
        found=changes,
        changes=rows_from(changes.tensors, first) if changes is not None else None,
        key=key_of(f"changes {group}"),
        url=pages.link("compare/changes", store, **query, first=first or None),
        next_url=pages.link("compare/changes", store, **query, first=first + MAX_SHOWN),
    )
