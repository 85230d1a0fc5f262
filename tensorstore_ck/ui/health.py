"""The page of a store's health: last runs of gc and fsck, a check on request, marked snapshots, and where packs lie."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tensorstore_ck.catalog.branch_health import last_runs
from tensorstore_ck.catalog.schema import gc_runs, policies, snapshots
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.gc.usage import Usage
from tensorstore_ck.log.maintenance_outcome import RunOutcome
from tensorstore_ck.log.retention import Policy
from tensorstore_ck.maintenance.fsck import FsckOptions
from tensorstore_ck.maintenance.fsck.findings import Finding, FsckReport
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import log_of, require_location
from tensorstore_ck.ui import space
from tensorstore_ck.ui.background import Progress, Read
from tensorstore_ck.ui.pages import Pages
from tensorstore_ck.ui.sources import StoreKey

CHECK: Final = "fsck"
"""The kind of the background read."""
REACH: Final = "locations"
MAX_FINDINGS: Final = 200
MAX_MARKED: Final = 50
REACH_AGAIN_NS: Final = 60 * 10**9
_REPAIR: Final = re.compile(r"`(tsck fsck[^`]* --(?:repair|abort-uploads)\b[^`]*)`")


@dataclass(frozen=True, slots=True)
class RunRow:
    """The last run of gc or fsck."""

    run: str
    time_ns: int
    is_ok: bool
    outcome: str
    details: str
    actor: str


@dataclass(frozen=True, slots=True)
class MarkedRow:
    """A snapshot that is marked bad or damaged."""

    root: str
    ref: str
    step: int | None
    time_ns: int
    mark: str
    reason: str


@dataclass(frozen=True, slots=True)
class Location:
    """A location of packs."""

    url: str
    """Empty: the store's own location."""
    packs: int | None
    bytes: int | None
    """The bytes of the packs at the last measurement; None: there was none."""
    error: str | None
    """Why it cannot be used; empty: it can; None: not known yet."""


def page(pages: Pages, request: Request) -> Response:
    """The page; with ``check=yes`` in the query it checks the store first."""
    store = pages.store_of(request)
    background = pages.sources.background
    if "check" in request.query_params:
        background.start(store.uuid, CHECK, lambda progress: _check(pages.sources.open(store), progress))
        return RedirectResponse(pages.link("health", store), 303)
    opened, problem = _open(pages, store)
    cold = Counter(log_of(opened).view().locations().values()) if opened is not None else Counter[str]()
    reach = background.read(store.uuid, REACH)
    if opened is not None and cold and time.time_ns() - (reach.result_ns or 0) > REACH_AGAIN_NS:
        asked = opened
        background.start(store.uuid, REACH, lambda progress: _reach(asked, sorted(cold), progress))
    read = background.read(store.uuid, CHECK)
    report = read.result if isinstance(read.result, FsckReport) else None
    with pages.sources.catalog.reading() as connection:
        marked, count = read_marked(connection, store)
        runs, ageing = read_runs(connection, store), read_ageing(connection, store)
    return pages.render(
        "health.html",
        "health",
        store=store,
        problem=problem,
        is_changed=opened is not None and log_of(opened).is_changed,
        runs=runs,
        read=read,
        report=report,
        findings=report.findings[:MAX_FINDINGS] if report is not None else (),
        repairs=_repairs(pages, store, report.findings) if report is not None else [],
        marked=marked,
        more_marked=count - len(marked),
        ageing=ageing,
        reach=reach,
        locations=_locations(cold, reach, background.read(store.uuid, space.KIND)),
    )


def read_runs(connection: Connection, store: StoreKey) -> tuple[RunRow, ...]:
    """The last runs, as noted in the log; for a gc of an earlier version, the packs that it freed."""
    noted = last_runs(connection).get(store.store_id, {})
    runs = [
        RunRow(run=name, time_ns=run.time_ns, is_ok=run.ok, outcome=run.outcome, details=_details(run), actor=run.actor)
        for name, run in sorted(noted.items())
    ]
    newest = select(gc_runs).where(gc_runs.c.store_id == store.store_id).order_by(gc_runs.c.n.desc()).limit(1)
    row = connection.execute(newest).one_or_none()
    if row is not None and "gc" not in noted:
        runs.append(RunRow("gc", row.time_ns, True, "ok", details=f"packs freed: {row.swept_packs:,}", actor=row.actor))
    return tuple(runs)


def read_marked(connection: Connection, store: StoreKey) -> tuple[tuple[MarkedRow, ...], int]:
    """The newest marked snapshots that are not gone, and the number of all."""
    conditions = (snapshots.c.store_id == store.store_id, snapshots.c.mark != "", snapshots.c.state != "gone")
    columns = (snapshots.c.root, snapshots.c.ref, snapshots.c.step, snapshots.c.time_ns, snapshots.c.mark, snapshots.c.reason)
    rows = connection.execute(select(*columns).where(*conditions).order_by(snapshots.c.id.desc()).limit(MAX_MARKED))
    count = connection.execute(select(func.count()).select_from(snapshots).where(*conditions)).scalar_one()
    return tuple(MarkedRow(*row) for row in rows), count


def read_ageing(connection: Connection, store: StoreKey) -> tuple[tuple[str, str], ...]:
    """Glob and rules of the policies that move or re-encode packs as they age."""
    rows = connection.execute(select(policies.c.glob, policies.c.rules).where(policies.c.store_id == store.store_id).order_by("glob"))
    rules_by_glob = []
    for glob, rules in rows:
        try:
            policy = Policy.of(**parse_json(rules))
        except InvalidOptionError as exc:
            rules_by_glob.append((glob, str(exc)))
            continue
        if policy.ages:
            rules_by_glob.append((glob, str(policy)))
    return tuple(rules_by_glob)


def _details(run: RunOutcome) -> str:
    """The nonzero counts of a run."""
    counts = [
        f"{name.removesuffix('_bytes').replace('_', ' ')}: {human_bytes(count) if name.endswith('_bytes') else f'{count:,}'}"
        for name, count in run.counts.items()
        if count
    ]
    return ", ".join([*([run.message] if run.message else []), *counts, f"took {run.duration_seconds:,.1f} s"])


def _open(pages: Pages, store: StoreKey) -> tuple[ReadOnlyStore | None, str]:
    try:
        return pages.sources.open(store), ""
    except StoreError as exc:
        return None, str(exc)


def _check(store: ReadOnlyStore, progress: Progress) -> FsckReport:
    def note(done: int, total: int) -> None:
        progress("reading records, parts and the tables of packs", done, total)

    progress("reading the log", 0, 0)
    return store.fsck(FsckOptions(progress=note), record=False)


def _reach(store: ReadOnlyStore, urls: Iterable[str], progress: Progress) -> dict[str, str]:
    """Why each location cannot be used; empty if it can."""
    errors = {}
    for url in urls:
        progress(f"asking {url}", 0, 0)
        try:
            require_location(store, url)
            errors[url] = ""
        except StoreError as exc:
            errors[url] = str(exc)
    return errors


def _locations(cold: Counter[str], reach: Read, usage_read: Read) -> list[Location]:
    usage = usage_read.result if isinstance(usage_read.result, Usage) else None
    errors = reach.result if isinstance(reach.result, dict) else {}
    sizes = {cold_packs.url: cold_packs.bytes for cold_packs in usage.places} if usage is not None else {}
    own_bytes = sum(pack.bytes for pack in usage.packs) - sum(sizes.values()) if usage is not None else None
    own_packs = len(usage.packs) - sum(cold_packs.packs for cold_packs in usage.places) if usage is not None else None
    locations = [Location("", own_packs, own_bytes, "")]
    for url, packs in sorted(cold.items()):
        locations.append(Location(url, packs, sizes.get(url, 0) if usage is not None else None, errors.get(url)))
    return locations


def _repairs(pages: Pages, store: StoreKey, findings: Sequence[Finding]) -> list[str]:
    """The repair commands, each once: those in the findings; otherwise, if an error is repairable, one that reads all data."""
    commands = [command for finding in findings for command in _REPAIR.findall(pages.completed(store, finding.message))]
    if not commands and any(finding.repairable and finding.severity == "error" for finding in findings):
        commands = [pages.command(store, "fsck", "--read-data", "--repair")]
    return list(dict.fromkeys(commands))
