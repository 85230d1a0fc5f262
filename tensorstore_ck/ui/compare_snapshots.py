"""The page of two snapshots: facts and metrics at once; in the background what differs in their tables, and how much tensors changed."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.schema import metrics
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import NotFoundError, StoreError
from tensorstore_ck.maintenance.describe import SnapshotDiff, TensorChange
from tensorstore_ck.store.internals import diff_snapshots, open_content
from tensorstore_ck.ui.background import Progress, Read
from tensorstore_ck.ui.catalog_snapshots import CatalogSnapshot, find_snapshot
from tensorstore_ck.ui.pages import Pages, asked
from tensorstore_ck.ui.ref import usual_metrics
from tensorstore_ck.ui.snapshot_content import info_of, patience_of
from tensorstore_ck.ui.snapshot_tensors import key_of, number_of, value_text
from tensorstore_ck.ui.sources import StoreKey
from tensorstore_ck.ui.tensor_statistics import STEP_BYTES, TensorNumbers, size_of

if TYPE_CHECKING:
    from tensorstore_ck.state.statistics import ChangeStatistics

KINDS: Final = ("changed", "reshaped", "added", "removed")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two snapshots of a store."""

    old: CatalogSnapshot
    new: CatalogSnapshot

    @property
    def kind(self) -> str:
        """Identifies the pair in the kind of a background read."""
        return f"{self.old.ulid} {self.new.ulid}"


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Tensors that differ and whose names share the part before the first dot."""

    name: str
    counts: dict[str, int]
    """Change -> number of tensors."""
    changed_bytes: int


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences by the tables."""

    diff: SnapshotDiff
    groups: tuple[GroupChange, ...]
    """By bytes that differ, most first."""

    def tensors(self, text: str) -> list[TensorChange]:
        """The tensors whose names contain `text`, those with the most differing bytes first."""
        tensors = [tensor for tensor in self.diff.tensors if text.lower() in tensor.name.lower()]
        return sorted(tensors, key=lambda tensor: -tensor.changed_bytes)


@dataclass(frozen=True, slots=True)
class Changes(TensorNumbers):
    """By how much tensors changed: those with NaN or infinity first, then by relative change."""


def read_differences(pages: Pages, store: StoreKey, pair: Pair, patience_seconds: float) -> Read:
    """The read of `Differences`; it begins now unless it was made before."""

    def work(progress: Progress) -> Differences:
        progress("comparing the tables", 0, 0)
        return _differences(_diff(pages, store, pair))

    return pages.sources.looks.read_once(store.uuid, f"differences {pair.kind}", work, patience_seconds)


def _diff(pages: Pages, store: StoreKey, pair: Pair) -> SnapshotDiff:
    return diff_snapshots(pages.sources.open(store), info_of(pages, store, pair.old), info_of(pages, store, pair.new))


def _differences(diff: SnapshotDiff) -> Differences:
    counts: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    for tensor in diff.tensors:
        group = tensor.name.split(".", 1)[0]
        counts.setdefault(group, Counter())[tensor.change] += 1
        sizes[group] += tensor.changed_bytes
    groups = [GroupChange(name, dict(by_kind), sizes[name]) for name, by_kind in counts.items()]
    return Differences(diff, tuple(sorted(groups, key=lambda group: -group.changed_bytes)))


def read_changes(pages: Pages, store: StoreKey, pair: Pair, group: str, patience_seconds: float) -> Read:
    """The read of the `Changes` of all tensors, or of those in a group; it begins now unless it was made before."""
    looks = pages.sources.looks

    def is_wanted(name: str) -> bool:
        return not group or name == group or name.startswith(f"{group}.")

    def work(progress: Progress) -> Changes:
        from tensorstore_ck.state.read_pieces import stored_tensors  # noqa: PLC0415 - loads torch
        from tensorstore_ck.state.statistics import changes_of  # noqa: PLC0415

        with looks.alone(progress):
            progress("comparing the tables", 0, 0)
            known = looks.read(store.uuid, f"differences {pair.kind}").result
            diff = known.diff if isinstance(known, Differences) else _diff(pages, store, pair)
            changed = {item.name for item in diff.tensors}
            opened = pages.sources.open(store)
            before, after = (stored_tensors(open_content(opened, info_of(pages, store, side))) for side in (pair.old, pair.new))
            names = [name for name in dict.fromkeys([*after, *before]) if is_wanted(name)]
            if not names:
                raise NotFoundError(f"neither has a tensor in {group!r}; states of single ranks have no statistics", object_id=group)

            def read_bytes(name: str) -> int:
                both = before.get(name), after.get(name)
                return sum(size_of(item) for item in both if item is not None) if None not in both and name in changed else 0

            total = sum(map(read_bytes, names))
            changes: list[ChangeStatistics] = []
            done = 0
            for batch in batches(names, read_bytes, STEP_BYTES):
                progress(f"reading tensors: {human_bytes(done)} of {human_bytes(total)}", done, total)
                old, new = ({name: side[name] for name in batch if name in side} for side in (before, after))
                changes += changes_of(old, new, changed)
                done += sum(map(read_bytes, batch))
        changes.sort(key=lambda change: (not (change.nan or change.inf), KINDS.index(change.kind), -(change.relative_change or 0.0)))
        return Changes(tuple(changes))

    return looks.read_once(store.uuid, f"changes {pair.kind} {group}", work, patience_seconds)


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
        **_tables(read, "", 0, 0),
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


def _tables(read: Read, text: str, first_tensor: int, first_value: int) -> dict[str, Any]:
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
    shown = _tables(read, text, first, first_value)
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
