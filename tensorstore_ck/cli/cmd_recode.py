"""The command that makes old snapshots smaller: recode."""

from collections.abc import Iterator

import click

from tensorstore_ck.cli.options import StoreChoice, command, rate_option, seconds, store_options
from tensorstore_ck.cli.output import counted, emit, indented, printable, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.gc.recode import RecodeReport

MAX_SHOWN = 40


@command(
    "Re-encode old snapshots so that they are smaller.", "tsck recode runs/gpt --older-than 7d", "tsck recode --all --codec small --dry-run"
)
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All snapshots that a ref, pin or undo window holds.")
@click.option("--codec", type=click.Choice(["small", "fast"]), default="small", show_default=True, help="The codec to encode with.")
@click.option("--older-than", type=seconds, metavar="AGE", help="Only snapshots older than this, e.g. 7d.")
@click.option("--dry-run", is_flag=True, help="Only estimate the savings, from some blocks of each pack.")
@rate_option
@store_options(writes=True)
def recode(
    addresses: tuple[str, ...],
    choice: StoreChoice,
    *,
    everything: bool,
    codec: str,
    older_than: float | None,
    dry_run: bool,
    rate_limit: float | None,
    as_json: bool,
) -> None:
    """Re-encode snapshots so that they are smaller: a branch with its history, single snapshots, or all. Jobs may run meanwhile.

    Roots and addresses do not change, and every block is verified. The next `tsck gc` frees the replaced packs; until then the store is
    larger. May be killed at any time and run again.
    """
    if everything == bool(addresses):
        raise click.UsageError("Give branches or snapshots, or --all.")
    with choice.open(read_only=dry_run) as store, Bar() as bar:
        report = store.recode(*addresses, codec=codec, older_than=older_than, dry_run=dry_run, rate_limit=rate_limit, progress=bar.phase)
    emit(report, map(choice.complete, _lines(report)), as_json=as_json)


def _lines(report: RecodeReport) -> Iterator[str]:
    would = "would be " if report.dry_run else ""
    yield f"looked at {counted(report.snapshots, 'snapshot')}: {counted(report.kept, 'pack')} would not become smaller"
    yield from (f"note: {printable(note)}" for note in report.notes)
    if report.rewritten:
        rows = [[pack.name, human_bytes(pack.bytes), human_bytes(pack.live_bytes)] for pack in report.rewritten]
        yield f"{counted(len(rows), 'pack')} {would}rewritten"
        yield from indented(table(["PACK", "SIZE", "LIVE"], rows[:MAX_SHOWN], right={"SIZE", "LIVE"}))
        if len(rows) > MAX_SHOWN:
            yield f"  ... and {len(rows) - MAX_SHOWN:,} more"
        about = "about " if report.dry_run else ""
        share = report.after_bytes / max(1, report.before_bytes)
        size = f"{human_bytes(report.before_bytes)}, {would}{about}{human_bytes(report.after_bytes)} ({share:.0%})"
        yield f"blocks took {size}" + ("" if report.dry_run else "; `tsck gc` frees what was replaced")
