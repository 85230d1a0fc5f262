"""The page of a store's space: what holds its bytes, how it grew, and what a policy would free."""

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tensorstore_ck.catalog.schema import policies, snapshots
from tensorstore_ck.common.prices import GB
from tensorstore_ck.gc.usage import Usage
from tensorstore_ck.gc.usage_costs import usage_costs
from tensorstore_ck.ui.background import Progress
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey
from tensorstore_ck.ui.what_if import Trial, try_rules

KIND: Final = "usage"
"""The kind of the background read."""
MAX_REFS: Final = 100
POINTS: Final = 400
"""The most points of the chart of growth."""
DAY_NS: Final = 86_400 * 10**9
WIDTH: Final = 1000.0
"""The bar's width, in its own units."""
LEAST: Final = 3.0
"""The minimum width of a state that has bytes."""

SHOWN: Final = {
    "live": ("Live", "A branch or a tag holds it, perhaps together with other holders."),
    "pinned": ("Pinned", "Pins hold it, and no branch or tag."),
    "undo_window": ("Undo window", "It was forgotten. Only undo windows hold it, until gc ends them."),
    "young": ("Young", "Nothing holds it, and it is less than a day old: it may belong to a save that is running. gc keeps it."),
    "garbage": ("Garbage", "Nothing holds it. gc frees it, or later where it lies in a pack that is in use."),
    "log_and_tables": ("Log and tables", "The log, and the headers and tables of packs that are in use."),
}
"""State of `Usage.by_state` -> its name and meaning."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of the store in one state."""

    name: str
    bytes: int
    meaning: str
    left: float
    """The start of its piece of the bar."""
    width: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes that saves added to a store over time."""

    seconds: tuple[float, ...]
    """Since 1970, strictly ascending."""
    total_bytes: tuple[int, ...]
    """Put until then, in all."""
    recent: tuple[tuple[str, int], ...]
    """The last day, week and month, and the bytes put in it."""

    @property
    def data(self) -> list[list[float]]:
        """For the chart."""
        return [[*self.seconds], [*self.total_bytes]]


def page(pages: Pages, request: Request) -> Response:
    """The page; with ``measure=yes`` in the query it measures first."""
    store = pages.store_of(request)
    if "measure" in request.query_params:

        def measure(progress: Progress) -> Usage:
            return pages.sources.open(store).usage(progress=progress)

        pages.sources.background.start(store.uuid, KIND, measure)
        return RedirectResponse(pages.link("space", store), 303)
    read = pages.sources.background.read(store.uuid, KIND)
    usage = read.result if isinstance(read.result, Usage) else None
    with pages.sources.catalog.reading() as connection:
        growth, globs = read_growth(connection, store), read_globs(connection, store)
    trial = try_rules(pages, store, request.query_params)
    refs = sorted(usage.refs, key=lambda ref: -ref.stored_bytes) if usage is not None else []
    return pages.render(
        "space.html",
        "space",
        store=store,
        read=read,
        usage=usage,
        age_ns=time.time_ns() - (read.result_ns or 0),
        states=states_of(usage) if usage is not None else (),
        refs=refs[:MAX_REFS],
        more_refs=len(refs[MAX_REFS:]),
        growth=growth,
        globs=globs,
        costs=usage_costs(usage, pages.prices) if usage is not None else None,
        saves_usd=_saved(pages, store, trial),
        trial=trial,
    )


def _saved(pages: Pages, store: StoreKey, trial: Trial) -> float | None:
    """What the policy that is tried saves a month, at the price of the store's own location."""
    price, freed = pages.prices.of(store.url), trial.report.frees_bytes if trial.report is not None else None
    return None if price is None or freed is None else freed / GB * price


def states_of(usage: Usage) -> tuple[State, ...]:
    """The states of all bytes of the store. A block counts once, for the first state that applies."""
    states = [(*SHOWN[state], size) for state, size in usage.by_state.items()]
    shown = sum(size for _, _, size in states) or 1
    widths = [max(WIDTH * size / shown, LEAST) if size else 0.0 for _, _, size in states]
    scale = WIDTH / (sum(widths) or 1)
    lefts = accumulate((width * scale for width in widths), initial=0.0)
    return tuple(
        State(name=name, bytes=size, meaning=meaning, left=left, width=width * scale)
        for (name, meaning, size), left, width in zip(states, lefts, widths, strict=False)
    )


def read_growth(connection: Connection, store: StoreKey, now_ns: int | None = None) -> Growth:
    """The growth by the catalog, in at most about `POINTS` points."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    of_store = snapshots.c.store_id == store.store_id
    first, last = connection.execute(select(func.min(snapshots.c.time_ns), func.max(snapshots.c.time_ns)).where(of_store)).one()
    if first is None:
        return Growth((), (), ())
    width_ns = max((last - first) // POINTS, 10**6)
    bucket = (snapshots.c.time_ns - first) // width_ns
    grouped = select(func.max(snapshots.c.time_ns), func.sum(snapshots.c.new_bytes * 1.0)).where(of_store).group_by(bucket).order_by(bucket)
    times, sizes = zip(*connection.execute(grouped), strict=True)
    recent = [
        (name, select(func.sum(snapshots.c.new_bytes * 1.0)).where(of_store, snapshots.c.time_ns > now_ns - days * DAY_NS))
        for name, days in (("Last day", 1), ("Last 7 days", 7), ("Last 30 days", 30))
    ]
    return Growth(
        tuple(int(item) / 1e9 for item in times),
        tuple(accumulate(int(item) for item in sizes)),
        tuple((name, int(connection.execute(item).scalar() or 0)) for name, item in recent),
    )


def read_globs(connection: Connection, store: StoreKey) -> tuple[str, ...]:
    """The policies that are set."""
    return tuple(connection.execute(select(policies.c.glob).where(policies.c.store_id == store.store_id).order_by("glob")).scalars())
