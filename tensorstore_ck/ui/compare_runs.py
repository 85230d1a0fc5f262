"""The page of several runs: their metrics over each other, by step."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select
from starlette.requests import Request
from starlette.responses import Response

from tensorstore_ck.catalog.schema import jobs, stores
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.ref import read_metric_names, usual_metrics
from tensorstore_ck.ui.series import MAX_METRICS
from tensorstore_ck.ui.sources import StoreKey

MAX_RUNS: Final = 6
"""Lines of a chart: as many as there are colours."""


@dataclass(frozen=True, slots=True)
class Run:
    """A branch of one of the stores."""

    name: str
    """The branch; with the store, if several stores have one of that name."""
    store: StoreKey
    ref: str
    puts: int
    last_step: int | None
    last_time_ns: int


def page(pages: Pages, request: Request) -> Response:
    """The page. A run that does not exist is reported, and the others are drawn."""
    query = request.query_params
    pages.sources.refresh()
    with pages.sources.catalog.reading() as connection:
        known = read_runs(connection)
        names = [known[name].name if name in known else name for name in [*query.getlist("run"), query.get("add", "")] if name]
        chosen = [known[name] for name in dict.fromkeys(names) if name in known]
        runs = chosen[:MAX_RUNS]
        metrics = Counter[str]()
        for run in runs:
            metrics.update(read_metric_names(connection, run.store.store_id, run.ref))
    wanted = [metric for metric in dict.fromkeys([*query.getlist("metric"), query.get("add_metric", "")]) if metric][:MAX_METRICS]
    drawn = wanted or usual_metrics(metrics)
    lines = [
        {"name": run.name, "series": pages.link("ref/series", run.store, name=run.ref, metric=drawn), "colour": colour}
        for colour, run in enumerate(runs, 1)
    ]

    def at(**changed: object) -> str:
        return pages.link("runs", **{"run": [run.name for run in runs], "metric": wanted, **changed})

    return pages.render(
        "compare_runs.html",
        "runs",
        at=at,
        runs=runs,
        missing=[name for name in names if name not in known],
        too_many=len(chosen) > MAX_RUNS,
        most=MAX_RUNS,
        others=list(dict.fromkeys(run.name for run in known.values() if run not in chosen)),
        metrics=sorted(metrics),
        drawn=drawn,
        asked_metrics=wanted,
        overlay=json.dumps({"lines": lines, "marks": []}),
    )


def read_runs(connection: Connection) -> dict[str, Run]:
    """All branches by name, those that were saved to last first, and by ``REF of URL``."""
    columns = (stores.c.store_id, stores.c.uuid, stores.c.url, jobs.c.ref, jobs.c.puts, jobs.c.last_step, jobs.c.last_time_ns)
    query = (
        select(*columns).join(stores, stores.c.store_id == jobs.c.store_id).order_by(jobs.c.last_time_ns.desc(), stores.c.url, jobs.c.ref)
    )
    rows = connection.execute(query).all()
    count = Counter(row.ref for row in rows)
    runs = {}
    for row in rows:
        whole = f"{row.ref} of {row.url}"
        name = row.ref if count[row.ref] == 1 else whole
        store = StoreKey(row.store_id, row.uuid, row.url)
        run = Run(name, store, row.ref, puts=row.puts, last_step=row.last_step, last_time_ns=row.last_time_ns)
        runs[name] = runs[whole] = run
    return runs
