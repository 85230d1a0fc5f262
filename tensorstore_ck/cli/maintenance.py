"""Commands about the store itself: init, probe, salvage. They need no torch."""

from collections.abc import Callable
from contextlib import closing

import click

from tensorstore_ck.backend import ProbeResult
from tensorstore_ck.backend import probe as run_probe
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import counted, emit, facts, green, human_bytes, indented, printable, red, short_root, table
from tensorstore_ck.errors import UnsafeBackendError
from tensorstore_ck.opening import init_store
from tensorstore_ck.salvage import Salvaged, SalvageReport
from tensorstore_ck.salvage import salvage as run_salvage


@command("Make an empty store.", "tsck init ./ckpt", "tsck init s3://bucket/ckpt --storage-option endpoint_url=https://...")
@store_options(writes=True, url_argument=True)
def init(choice: StoreChoice, *, as_json: bool) -> None:
    """Make an empty store at URL: a folder, or s3://bucket/prefix."""
    with closing(choice.open_backend()) as backend:
        config = init_store(backend, single_writer_unsafe=choice.single_writer_unsafe, exist_ok=False)
    emit({"url": backend.url, "config": config}, [f"made a store at {printable(backend.url)}"], as_json=as_json)


@command("Try out a place: is it safe, how fast is it?", "tsck probe s3://bucket/ckpt")
@store_options(url_argument=True)
@click.pass_context
def probe(context: click.Context, choice: StoreChoice, *, as_json: bool) -> None:
    """Try out whether the place at URL can hold a store that several processes write to, and how fast it is.

    Writes 64 MiB under probe/ and removes them again; the store that may be there is not touched.
    """
    with closing(choice.open_backend()) as backend:
        result = run_probe(backend)
    emit({"url": backend.url, "result": result}, _probe_lines(result), as_json=as_json)
    if not result.exclusive_create:
        context.exit(UnsafeBackendError.exit_code)


def _probe_lines(result: ProbeResult) -> list[str]:
    def holds(guarantee: bool) -> str:
        return green("yes") if guarantee else red("NO")

    create_seconds = "" if result.create_seconds != result.create_seconds else f"{result.create_seconds * 1000:.1f} ms"
    lines = facts(
        [
            ("creates exclusively", holds(result.exclusive_create)),
            ("reads what was written", holds(result.read_after_write)),
            ("lists what was written", holds(result.list_after_write)),
            ("write", f"{human_bytes(int(result.write_bytes_per_second))}/s"),
            ("read", f"{human_bytes(int(result.read_bytes_per_second))}/s"),
            ("one commit waits", create_seconds),
        ]
    )
    lines += [red(printable(problem)) for problem in result.problems]
    if not result.exclusive_create:
        lines.append("several processes would lose each other's commits here: use another place, or --single-writer-unsafe with one writer")
    return lines


@command("Make a new log when the old one was destroyed.", "tsck salvage --dry-run -s ./ckpt", "tsck salvage -s ./ckpt")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@store_options()
def salvage(choice: StoreChoice, *, dry_run: bool, as_json: bool) -> None:
    """Make a new log of every intact snapshot, when log entries or store.json were destroyed (`tsck fsck` tells).

    No other process may write to the store meanwhile. Nothing is deleted; where all is well, nothing is done.
    """
    with closing(choice.open_backend()) as backend:
        report = run_salvage(backend, dry_run=dry_run)
    emit(report, _salvage_lines(report, dry_run=dry_run), as_json=as_json)


def _salvage_lines(report: SalvageReport, *, dry_run: bool) -> list[str]:
    lines = [f"problem: {printable(problem)}" for problem in report.problems]
    lines += _salvaged_lines("recovered: no log entry that is left names them", report.recovered, str)
    lines += _salvaged_lines("lost: damaged", report.lost, red)
    lines += _salvaged_lines("left out: never published", report.left_out, str)
    if not report.log:
        return [*lines, f"nothing to do: the log is intact, with {counted(report.kept, 'snapshot')}"]
    refs = f"{counted(len(report.branches), 'branch')} and {counted(len(report.tags), 'tag')}"
    would = "would make" if dry_run else "made"
    return [*lines, f"{would} a new log, {printable(report.log)}, of {counted(report.kept, 'snapshot')}, {refs}"]


def _salvaged_lines(title: str, snapshots: tuple[Salvaged, ...], style: Callable[[str], str]) -> list[str]:
    if not snapshots:
        return []
    rows = [
        [short_root(found.root), printable(found.ref), "" if found.step is None else str(found.step), found.id, printable(found.note)]
        for found in snapshots
    ]
    return [style(title), *indented(table(["ROOT", "REF", "STEP", "ID", "WHY"], rows, right={"STEP"})), ""]
