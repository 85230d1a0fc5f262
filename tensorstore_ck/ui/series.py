"""The data of the charts of a branch, as JSON: metrics by step, and what happened at which step.

As in plots of the terminal and of matplotlib, a snapshot without a step is at its number in the log, and a line has a gap where a value is
NaN or infinite; these are in a list of their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tensorstore_ck.catalog.schema import metrics, pins, snapshots, tags
from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.ui.lineage import Lineage, Move, Save, read_lineage
from tensorstore_ck.ui.pages import Pages, asked, time_text

MAX_METRICS: Final = 8
"""Charts on a page."""
MAX_ABANDONED: Final = 20
"""Abandoned runs that a chart draws: the newest."""
MAX_NOTES: Final = 200
"""The most notes of a kind: the newest."""

Json = dict[str, Any]


def answer(pages: Pages, request: Request) -> Response:
    """The series of the asked metrics of a branch."""
    key, ref = pages.store_of(request), asked(request.query_params, "name")
    wanted = list(dict.fromkeys(request.query_params.getlist("metric")))[:MAX_METRICS]
    with pages.sources.catalog.reading() as connection:
        return JSONResponse(read_series(connection, key.store_id, ref, wanted))


def read_series(connection: Connection, store_id: int, ref: str, wanted: Sequence[str]) -> Json:
    """``charts``: one for each metric. ``notes``: tags, pins, marks, restarts, and where the branch went back, by step."""
    lineage = read_lineage(connection, store_id, ref)
    numbers = {save.id: number for number, save in enumerate(_in_order(lineage))}
    values = _values(connection, store_id, lineage, wanted)
    charts = [{"metric": metric, **_chart(lineage, values[metric], numbers)} for metric in wanted]
    return {"ref": ref, "charts": charts, "notes": read_notes(connection, store_id, lineage)}


def _in_order(lineage: Lineage) -> list[Save]:
    return sorted({save.id: save for save in (*lineage.line, *lineage.own)}.values(), key=lambda save: save.id)


def _values(connection: Connection, store_id: int, lineage: Lineage, wanted: Sequence[str]) -> dict[str, dict[int, float]]:
    """Metric -> id of a save -> value."""
    values: dict[str, dict[int, float]] = {metric: {} for metric in wanted}
    refs = sorted({lineage.ref, *(save.ref for save in lineage.line)})
    joined = select(metrics.c.name, metrics.c.snapshot, metrics.c.value).join(snapshots, snapshots.c.id == metrics.c.snapshot)
    query = joined.where(snapshots.c.store_id == store_id, snapshots.c.ref.in_(refs), metrics.c.name.in_(wanted))
    for name, at, value in connection.execute(query):
        values[name][at] = math.nan if value is None else value
    return values


def _chart(lineage: Lineage, values: Mapping[int, float], numbers: Mapping[int, int]) -> Json:
    abandoned = [run for run in lineage.abandoned if any(save.id in values for save in run)]
    on_line = {save.id for save in lineage.line}
    return {
        "line": _points(lineage.line, values, numbers),
        "abandoned": [_points(run, values, numbers) for run in abandoned[-MAX_ABANDONED:]],
        "abandoned_runs": len(abandoned),
        "not_finite": [
            {
                "step": _at(save, numbers),
                "value": str(values[save.id]),
                "root": save.root[:SHOWN_ROOT_DIGITS],
                "abandoned": save.id not in on_line,
            }
            for save in _in_order(lineage)
            if not math.isfinite(values.get(save.id, 0.0))
        ],
    }


def _points(saves: Iterable[Save], values: Mapping[int, float], numbers: Mapping[int, int]) -> Json:
    points = [(_at(save, numbers), values[save.id], save.root[:SHOWN_ROOT_DIGITS]) for save in saves if save.id in values]
    return {
        "steps": [step for step, _, _ in points],
        "values": [value if math.isfinite(value) else None for _, value, _ in points],
        "roots": [root for _, _, root in points],
    }


def _at(save: Save, numbers: Mapping[int, int]) -> int:
    return numbers[save.id] if save.step is None else save.step


def read_notes(connection: Connection, store_id: int, lineage: Lineage) -> list[Json]:
    """The notes on a chart's axis, of saves with a step."""
    saves = _in_order(lineage)
    by_ulid = {save.ulid: save for save in saves}
    marks = (_note("mark", save, f"marked {save.mark}{': ' if save.reason else ''}{save.reason}") for save in saves if save.mark)
    notes = [*marks, *_restarts(lineage), *_went_back(lineage)]
    for name, ulid in connection.execute(select(tags.c.name, tags.c.ulid).where(tags.c.store_id == store_id).order_by(tags.c.n)):
        if ulid in by_ulid:
            notes.append(_note("tag", by_ulid[ulid], f"tag {name}"))
    query = select(pins.c.ulid, pins.c.owner, pins.c.reason).where(pins.c.store_id == store_id).order_by(pins.c.n)
    for ulid, owner, reason in connection.execute(query):
        if ulid in by_ulid:
            notes.append(_note("pin", by_ulid[ulid], f"pinned by {owner}{': ' if reason else ''}{reason}"))
    kinds = dict.fromkeys(note["kind"] for note in notes)
    stepped = [note for note in notes if note["step"] is not None]
    newest = [note for kind in kinds for note in [each for each in stepped if each["kind"] == kind][-MAX_NOTES:]]
    return sorted(newest, key=lambda note: note["step"])


def _note(kind: str, save: Save, text: str) -> Json:
    return {"kind": kind, "step": save.step, "text": text, "root": save.root[:SHOWN_ROOT_DIGITS]}


def _restarts(lineage: Lineage) -> list[Json]:
    """Where another process continued: a note at the snapshot that it continued from."""
    return [
        _note("restart", lineage.parents.get(save.id) or save, f"{save.actor} went on, {time_text(save.time_ns)} UTC")
        for before, save in zip(lineage.own, lineage.own[1:], strict=False)
        if before.actor != save.actor
    ]


def _went_back(lineage: Lineage) -> list[Json]:
    """Notes at resets of the branch, and at saves whose step is not higher than the branch had reached."""
    by_root = {save.root: save for save in _in_order(lineage)}
    notes: list[Json] = []
    at: Save | None = None
    moves: list[Save | Move] = [*lineage.own, *lineage.moves]
    for event in sorted(moves, key=lambda event: event.n):
        if isinstance(event, Save):
            if at is not None and at.step is not None and event.step is not None and event.step <= at.step:
                notes.append(
                    _note("back", lineage.parents.get(event.id) or event, f"went back from step {at.step:,} to save step {event.step:,}")
                )
            at = event
            continue
        to = by_root.get(event.root)
        if to is not None:
            if event.op == "reset":
                away = f" from step {at.step:,}" if at is not None and at.step is not None else ""
                notes.append(_note("back", to, f"reset{away} by {event.actor}, {time_text(event.time_ns)} UTC"))
            else:
                notes.append(_note("branch", to, f"branched from {to.ref}"))
            at = to
    return notes
