"""The commands catalog and find: a database of all snapshots of all jobs, and queries on it. They load SQLAlchemy when they run."""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click
import platformdirs
from click.core import ParameterSource

from tensorstore_ck.cli.options import StoreChoice, command, json_option, store_options
from tensorstore_ck.cli.output import (
    counted,
    emit,
    error_document,
    indented,
    mark_text,
    printable,
    red,
    say,
    short_number,
    short_root,
    step_text,
    table,
)
from tensorstore_ck.cli.pager import emit_paged, no_pager_option
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.errors import FormatVersionError, StoreError

if TYPE_CHECKING:
    from tensorstore_ck.catalog import Catalog, CatalogJob, CatalogStore, FoundSnapshot, SyncOutcome, SyncReport
    from tensorstore_ck.store import ReadOnlyStore

CATALOG_VARIABLE: Final = "TSCK_CATALOG"
MAX_FOUND: Final = 50
PARALLEL: Final = 8

_db_option = click.option(
    "--db",
    metavar="URL",
    envvar=CATALOG_VARIABLE,
    help=f"postgresql://..., or an SQLite file (or ${CATALOG_VARIABLE}). Default: one in this user's data directory.",
)


@command(
    "A database of all snapshots of all jobs.",
    "tsck catalog sync s3://bucket/ckpt /data/ckpt --db postgresql://tsck@db/tsck",
    "tsck catalog sync --db postgresql://tsck@db/tsck",
    "tsck catalog show",
)
@click.argument("action", type=click.Choice(["show", "sync", "rebuild"]), default="show", metavar="[show|sync|rebuild]")
@click.argument("urls", nargs=-1, metavar="[STORE]...")
@click.option("--parallel", type=click.IntRange(1, 64), default=PARALLEL, show_default=True, metavar="N", help="Sync N stores at a time.")
@_db_option
@store_options()
def catalog(action: str, urls: tuple[str, ...], choice: StoreChoice, *, parallel: int, db: str | None, as_json: bool) -> None:
    """Fill a database from the logs of stores, for `tsck find`, SQL and dashboards; or show its content.

    `sync` reads new entries; it may run from cron, on several hosts at once, and be killed at any time. Without STORE or -s it syncs all
    stores of the catalog, and the one of $TSCK_STORE or the current folder. When a store cannot be read the others are still synced, and
    the exit code is that of the error, the highest of several. `rebuild` reads all entries again. The stores are only read, and never
    need the database: it can be deleted at any time.
    """
    if action == "show" and urls:
        raise click.UsageError("`show` is for the whole catalog; STORE is for sync and rebuild.")
    with _open(db) as opened:
        if action == "show":
            stores = opened.stores()
            emit({"catalog": opened.url, "stores": stores}, _show_lines(opened.url, stores), as_json=as_json)
            return
        code = _sync(opened, urls, choice, parallel=parallel, rebuild=action == "rebuild", as_json=as_json)
    raise click.exceptions.Exit(code)


def _sync(opened: "Catalog", urls: Sequence[str], choice: StoreChoice, *, parallel: int, rebuild: bool, as_json: bool) -> int:
    """Syncs the stores, prints the outcome of each, and returns the exit code."""
    named = [*urls, *([choice.url] if choice.url else [])]
    wanted = list(dict.fromkeys(urls)) or _wanted(opened, choice, rebuild=rebuild)

    def open_store(url: str) -> "ReadOnlyStore":
        is_local = "://" not in url or url.startswith("file://")  # where options for a storage service mean nothing
        options = {} if is_local and len(wanted) > 1 else choice.storage_options
        return replace(choice, storage_options=options).at(url, named).look()

    def tell(outcome: "SyncOutcome") -> None:
        if outcome.report is not None and not as_json:
            say(_report_line(outcome.report))
        elif outcome.error is not None and not as_json and len(wanted) > 1:
            say(f"tsck: {printable(outcome.url)}: {printable(outcome.error)}", err=True)

    outcomes = opened.sync_all(wanted, open_store=open_store, parallel=parallel, rebuild=rebuild, synced=tell)
    if len(outcomes) == 1 and outcomes[0].error is not None:
        raise outcomes[0].error
    failed = {outcome.url: outcome.error for outcome in outcomes if outcome.error is not None}
    document = {
        "catalog": opened.url,
        "stores": [outcome.report for outcome in outcomes if outcome.report is not None],
        "failed": [{"store": url, **error_document(error)} for url, error in failed.items()],
    }
    code = max((error.exit_code for error in failed.values()), default=0)
    emit(document, _summary_lines(opened.url, len(outcomes), failed, code), as_json=as_json)
    return code


def _wanted(opened: "Catalog", choice: StoreChoice, *, rebuild: bool) -> list[str]:
    """The store of -s; else all of the catalog, and the one of the environment or the current folder."""
    if click.get_current_context().get_parameter_source("store") is ParameterSource.COMMANDLINE:
        return [choice.require_url()]
    known: list[str] = []
    with suppress(FormatVersionError) if rebuild else nullcontext():  # rebuild drops a catalog of another version
        known = opened.known()
    if known and not choice.url and not choice.is_here():
        return known
    with closing(choice.open_backend()) as backend:
        return list(dict.fromkeys([*known, backend.url]))


@command(
    "Find snapshots of all jobs by their metrics.",
    "tsck find \"val_loss < 2.1 and step > 5000 and job like 'gpt%'\"",
    "tsck find 'acc >= 0.7 and not tag is null' --sort acc --desc -n 10",
    "tsck find \"lr < 1e-4 and config.dropout = 0.1 and code_version like '3f2a%'\"",
    "tsck find \"age < 7d and size > 10GB and mark = 'bad'\" --all",
)
@click.argument("condition", default="")
@_db_option
@click.option("--sort", metavar="NAME", help="By a metric, an attribute or a field, lowest first; default: newest first.")
@click.option("--desc", is_flag=True, help="With --sort: highest first.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=MAX_FOUND, show_default=True, metavar="N", help="At most N.")
@click.option("--all", "everything", is_flag=True, help="Also forgotten and freed snapshots.")
@no_pager_option
@json_option
def find(condition: str, *, db: str | None, sort: str | None, desc: bool, limit: int, everything: bool, as_json: bool) -> None:
    """Find snapshots that satisfy CONDITION in all stores of the catalog, as of their last sync.

    Metrics and attributes (lr, config.dropout; see `tsck log`) by name ("val/acc" in double quotes if it is no word); step, job (a
    branch's name without its first folder), ref, store, root, actor, mark, state, tag, pinned; time < '2026-01-31', age < 7d, size > 10GB,
    new_bytes. With = != < <= > >=, in (...), between ... and ..., like 'a%', is null, is nan; and, or, not, parentheses. A missing value or
    NaN satisfies no comparison.
    """
    if desc and sort is None:
        raise click.UsageError("--desc is for --sort.")
    with _open(db) as opened:
        matching = opened.find(condition, order_by=sort, descending=desc, limit=limit + 1, state=None if everything else "live")
        synced = opened.synced()
        names = opened.metrics_in(condition, sort)
    shown = matching[:limit]
    document = {
        "catalog": opened.url,
        "synced": {url: iso_time(at) for url, at in synced.items()},
        "found": shown,
        "more": len(matching) > limit,
    }
    lines = _found_lines(shown, names, synced, _same_catalog("catalog sync", opened.url), more=len(matching) > limit)
    emit_paged(document, lines, as_json=as_json)


def _open(db: str | None) -> "Catalog":
    from tensorstore_ck.catalog import Catalog  # noqa: PLC0415 - may not be installed

    return Catalog(db or os.path.join(platformdirs.user_data_dir("tensorstore_ck"), "catalog.sqlite"))


def _report_line(report: "SyncReport") -> str:
    why = f"; read from the start: {report.anew}" if report.anew else ""
    read = f"{counted(report.entries, 'entry')} read, {counted(report.snapshots, 'snapshot')}"
    return f"{printable(report.url)}: {read}, up to entry {report.head_n}{why}"


def _summary_lines(url: str, count: int, failed: Mapping[str, StoreError], code: int) -> Iterable[str]:
    if failed:
        kinds = sorted({error.kind for error in failed.values() if error.exit_code == code})
        yield f"{count - len(failed)} of {counted(count, 'store')} synced; failed: {', '.join(map(printable, failed))}"
        yield f"exit code {code}: {', '.join(kinds)}"
    elif count > 1:
        yield f"{counted(count, 'store')} synced"
    yield f"in {printable(url)}; {_same_catalog('find', url)} queries it"


def _same_catalog(command: str, url: str) -> str:
    """A command to print, with the catalog that this one was given."""
    is_given = click.get_current_context().get_parameter_source("db") is ParameterSource.COMMANDLINE
    return printable(f"`tsck {command}{f' --db {shlex.quote(url)}' if is_given else ''}`")


def _show_lines(url: str, stores: Sequence["CatalogStore"]) -> Iterable[str]:
    yield f"catalog {printable(url)}: {counted(len(stores), 'store')}"
    for store in stores:
        yield ""
        at = f"synced {iso_time(store.synced_ns)} up to entry {store.head_n}"
        yield f"{printable(store.url)}: {counted(store.snapshots, 'snapshot')} in {counted(len(store.jobs), 'job')}, {at}"
        if store.jobs:
            header = ["REF", "PUTS", "LIVE", "STEPS", "PROCESSES", "LAST PUT (UTC)", "SIZE", "PUT IN ALL"]
            yield from indented(table(header, [_job_cells(job) for job in store.jobs], right={*header} - {"REF"}))


def _job_cells(job: "CatalogJob") -> list[str]:
    return [
        printable(job.ref),
        f"{job.puts:,}",
        f"{job.live:,}",
        "" if job.first_step is None else f"{job.first_step} to {job.last_step}",
        str(job.processes),
        iso_time(job.last_time_ns),
        human_bytes(job.logical_bytes),
        human_bytes(job.new_bytes),
    ]


def _found_lines(
    snapshots: Sequence["FoundSnapshot"], names: Sequence[str], synced: Mapping[str, int], sync: str, *, more: bool
) -> Iterable[str]:
    if snapshots:
        header = ["REF", "STEP", "TIME (UTC)", "SIZE", "NEW", *map(printable, names), "ROOT", "TAGS", "PINNED", "STATE", "MARK"]
        rows = [_cells(snapshot, names) for snapshot in snapshots]
        if len(synced) > 1:
            header, rows = ["STORE", *header], [[printable(snapshot.store), *row] for snapshot, row in zip(snapshots, rows, strict=True)]
        styles = [red if snapshot.mark else str for snapshot in snapshots]
        yield from table(header, rows, right={"STEP", "SIZE", "NEW", *map(printable, names)}, styles=styles)
        yield f"... and more: -n {2 * len(snapshots)} shows them" if more else counted(len(snapshots), "snapshot")
    else:
        yield "no snapshot matches"
    oldest = min(synced.values(), default=None)
    as_of = "no store is in it yet" if oldest is None else f"as of {iso_time(oldest)}"
    yield f"{as_of}; {sync} adds newer ones"


def _cells(snapshot: "FoundSnapshot", names: Sequence[str]) -> list[str]:
    values = {**snapshot.attributes, **snapshot.metrics}
    return [
        printable(snapshot.ref),
        step_text(snapshot.step),
        iso_time(snapshot.time_ns),
        human_bytes(snapshot.logical_bytes),
        human_bytes(snapshot.new_bytes),
        *(short_number(values[name]) if name in values else "-" for name in names),
        short_root(snapshot.root),
        printable(", ".join(snapshot.tags)),
        "yes" if snapshot.pinned else "",
        "" if snapshot.state == "live" else snapshot.state,
        mark_text(snapshot),
    ]
