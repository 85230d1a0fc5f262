"""The page of a store's space: what holds its bytes, how it grew, and what a policy would free."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tensorstore_ck.catalog.schema import policies, snapshots
from tensorstore_ck.common.prices import GB
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc.usage import Usage, usage_costs
from tensorstore_ck.log.field_checks import is_ref_glob
from tensorstore_ck.log.retention import parse_rule
from tensorstore_ck.maintenance.apply_policies import BranchVerdicts, RetentionReport, SnapshotVerdict
from tensorstore_ck.maintenance.forget import Forgotten
from tensorstore_ck.ui.background import Progress
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

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
    """The bytes put up to each of these times."""
    recent: tuple[tuple[str, int], ...]
    """For the last day, week and month: its name, and the bytes put in it."""

    @property
    def data(self) -> list[list[float]]:
        """For the chart."""
        return [[*self.seconds], [*self.total_bytes]]


RULES: Final = (
    ("keep_last", "Newest", "5"),
    ("keep_every", "Each multiple of steps", "1000"),
    ("keep_every_seconds", "One in each period", "6h"),
    ("keep_best", "Best of a metric", "3:val_loss:min"),
    ("keep_steps", "These steps", "1000,5000"),
    ("keep_epochs", "Each multiple of epochs", "5"),
    ("keep_triggers", "What triggers saved", "every_epochs"),
    ("keep_milestones", "Milestones", "no"),
    ("keep_first", "The first", "yes"),
    ("keep_younger", "Younger than", "7d"),
    ("expire_after", "Limit: age", "30d"),
    ("max_bytes", "Limit: bytes", "2TB"),
)
"""Name, what it keeps, and an example."""
MAX_CHARS: Final = 4000
"""The most characters of a rule."""
MAX_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class Trial:
    """Rules, and what they would do."""

    glob: str
    rules: Mapping[str, str]
    """The rules as the user typed them."""
    error: str = ""
    report: RetentionReport | None = None
    command: str = ""
    """The command that sets these rules as a policy."""

    @property
    def fields(self) -> list[tuple[str, str, str, str]]:
        """The form: name, label, example, value."""
        return [(name, label, example, self.rules.get(name, "")) for name, label, example in RULES]

    @property
    def branches(self) -> tuple[BranchVerdicts, ...]:
        """The branches, those that would lose the most snapshots first."""
        branches = self.report.branches if self.report is not None else ()
        return tuple(sorted(branches, key=lambda branch: -sum(not snapshot.stays for snapshot in branch.snapshots)))

    def verdicts(self, *, stays: bool) -> list[tuple[str, SnapshotVerdict]]:
        """The branch and the verdict of each snapshot that stays, or that goes; the newest of a branch first."""
        return [(branch.ref, verdict) for branch in self.branches for verdict in reversed(branch.snapshots) if verdict.stays is stays]


def try_rules(pages: Pages, store: StoreKey, query: Mapping[str, str]) -> Trial:
    """The effect that the rules in a query would have; the empty form if it has none."""
    glob = query.get("branches", "").strip()
    rules = {name: text for name, _, _ in RULES if (text := query.get(name, "").strip())}
    if "branches" not in query:
        return Trial("*", {})
    if not is_ref_glob(glob):
        return Trial(glob, rules, f"{glob!r} matches no branch: write a name, with * for any characters, such as runs/*")
    too_long = next((name for name, text in rules.items() if len(text) > MAX_CHARS), None)
    if too_long is not None:
        return Trial(glob, {}, f"{too_long} is longer than {MAX_CHARS:,} characters")
    try:
        parsed = {name: parse_rule(name, text) for name, text in rules.items()}
        report = pages.sources.open(store).apply_policies(dry_run=True, rules=parsed, glob=glob)
    except StoreError as exc:
        return Trial(glob, rules, str(exc))
    words = [f"{name}={text}" for name, text in rules.items()]
    return Trial(glob=glob, rules=rules, error="", report=report, command=pages.command(store, "policy", "set", glob, *words))


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
        growth = read_growth(connection, store)
        globs = connection.execute(select(policies.c.glob).where(policies.c.store_id == store.store_id).order_by("glob")).scalars().all()
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
    """The money that the tried policy saves a month, at the price of the store's own location."""
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


def read_growth(connection: Connection, store: StoreKey) -> Growth:
    """The growth by the catalog, in at most about `POINTS` points."""
    now_ns = time.time_ns()
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


MAX_WINDOWS: Final = 100
MAX_NAMED: Final = 5
"""Snapshots of an undo window that are shown."""


@dataclass(frozen=True, slots=True)
class Window:
    """The snapshots that one log entry removed from one branch or tag."""

    what: Forgotten
    is_next: bool
    """Whether the next undo of this branch or tag restores it; older windows follow."""


def forgotten_page(pages: Pages, request: Request) -> Response:
    """The page; with ``name`` in the query, of one branch or tag."""
    store = pages.store_of(request)
    name = request.query_params.get("name", "")
    removals = [removal for removal in pages.sources.open(store).forgotten() if name in ("", removal.ref)]
    newest: dict[str, int] = {}
    for removal in removals:
        newest.setdefault(removal.ref, removal.entry)
    windows = [Window(removal, newest[removal.ref] == removal.entry) for removal in removals]
    return pages.render(
        "forgotten.html",
        "space",
        store=store,
        name=name,
        back="ref" if request.query_params.get("back") == "ref" else "forgotten",
        windows=windows[:MAX_WINDOWS],
        more=len(windows[MAX_WINDOWS:]),
    )
