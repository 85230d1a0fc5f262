"""The commands that write the packs of old snapshots again: recode and tier."""

from collections.abc import Iterator
from contextlib import ExitStack, closing

import click

from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import StoreChoice, command, for_workers, rate_option, seconds, store_options
from tensorstore_ck.cli.output import counted, emit, printable, shortened_table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.executor import require_no_rate
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.gc.recode import RecodeReport, recode_snapshots
from tensorstore_ck.gc.tiering import TierReport


@command(
    "Re-encode old snapshots so that they are smaller.", "tsck recode runs/gpt --older-than 7d", "tsck recode --all --codec small --dry-run"
)
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1, shell_complete=complete_address)
@click.option("--all", "everything", is_flag=True, help="All snapshots that a ref, pin or undo window holds.")
@click.option("--codec", type=click.Choice(["small", "fast"]), default="small", show_default=True, help="The codec to encode with.")
@click.option("--older-than", type=seconds, metavar="AGE", help="Only snapshots older than this, e.g. 7d.")
@click.option("--dry-run", is_flag=True, help="Only estimate the savings, from some blocks of each pack.")
@rate_option
@click.option("--dask", metavar="ADDRESS", help="Re-encode on the workers of a Dask cluster.")
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
    dask: str | None,
    as_json: bool,
) -> None:
    """Re-encode snapshots so that they are smaller: a branch with its history, single snapshots, or all. Jobs may run meanwhile.

    Roots and addresses do not change, and every block is verified. The next `tsck gc` frees the replaced packs; until then the store is
    larger. May be killed at any time and run again.
    """
    if everything == bool(addresses):
        raise click.UsageError("Give branches or snapshots, or --all.")
    with ExitStack() as stack:
        opened = stack.enter_context(closing(choice.open_engine(read_only=dry_run)))
        engine, executor = for_workers(stack, dask, choice, opened)
        require_no_rate(rate_limit, executor)
        bar = stack.enter_context(Bar())
        report = recode_snapshots(
            engine.limited_to(rate_limit),
            addresses,
            codec=codec,
            older_than=older_than,
            dry_run=dry_run,
            progress=bar.phase,
            executor=executor,
        )
    emit(report, map(choice.complete, _recode_lines(report)), as_json=as_json)


def _recode_lines(report: RecodeReport) -> Iterator[str]:
    would = "would be " if report.dry_run else ""
    yield f"looked at {counted(report.snapshots, 'snapshot')}: {counted(report.kept, 'pack')} would not become smaller"
    yield from (f"note: {printable(note)}" for note in report.notes)
    if report.rewritten:
        rows = [[pack.name, human_bytes(pack.bytes), human_bytes(pack.live_bytes)] for pack in report.rewritten]
        yield f"{counted(len(rows), 'pack')} {would}rewritten"
        yield from shortened_table(["PACK", "SIZE", "LIVE"], rows, right={"SIZE", "LIVE"})
        about = "about " if report.dry_run else ""
        share = report.after_bytes / max(1, report.before_bytes)
        size = f"{human_bytes(report.before_bytes)}, {would}{about}{human_bytes(report.after_bytes)} ({share:.0%})"
        yield f"blocks took {size}" + ("" if report.dry_run else "; `tsck gc` frees what was replaced")


@command("Move and encode old snapshots, as policies say.", "tsck tier --dry-run", "tsck tier --rate-limit 200MB")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("--claim-locations", is_flag=True, help="This store was moved, and no copy of it is in use: its moved packs are its own.")
@rate_option
@store_options(writes=True)
def tier(choice: StoreChoice, *, dry_run: bool, claim_locations: bool, rate_limit: float | None, as_json: bool) -> None:
    """Re-encode and move old packs as policies say (recode_after=7d move_after=30d:URL), to colder locations or back.

    A pack moves only when every snapshot that uses it is old enough; packs of pinned snapshots move back. The store reads moved packs as
    before. The next `tsck gc` frees the replaced packs. Jobs may run meanwhile; may be killed at any time and run again.
    """
    with choice.open(read_only=dry_run) as store, Bar() as bar:
        report = store.migrate_tiers(dry_run=dry_run, claim_locations=claim_locations, rate_limit=rate_limit, progress=bar.phase)
    emit(report, map(choice.complete, _tier_lines(report)), as_json=as_json)


def _tier_lines(report: TierReport) -> Iterator[str]:
    if not report.snapshots:
        yield "no policy has an age rule: `tsck policy set 'runs/*' recode_after=7d move_after=30d:s3://cold/ckpt` makes one"
        return
    would, now = ("would be ", "would be about ") if report.dry_run else ("", "now ")
    yield f"looked at {counted(report.snapshots, 'snapshot')}: {counted(len(report.packs), 'pack')} {would}moved or re-encoded"
    yield from (f"note: {printable(note)}" for note in report.notes)
    if report.packs:
        rows = [
            [pack.name, human_bytes(pack.live_bytes), "moved" if pack.is_moved else "encoded", printable(pack.place or "the store")]
            for pack in report.packs
        ]
        yield from shortened_table(["PACK", "LIVE", "", "TO"], rows, right={"LIVE"})
        size = f"{human_bytes(report.before_bytes)}, {now}{human_bytes(report.written_bytes)}"
        yield f"blocks took {size}" + ("" if report.dry_run else "; `tsck gc` frees what was replaced")
