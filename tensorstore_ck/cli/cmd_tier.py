"""The command tier: old snapshots go to colder places and get smaller, as policies say."""

from collections.abc import Iterator

import click

from tensorstore_ck.cli.options import StoreChoice, command, rate_option, store_options
from tensorstore_ck.cli.output import counted, emit, indented, printable, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.gc.tiering import TierReport

MAX_SHOWN = 40


@command("Move and encode old snapshots, as policies say.", "tsck tier --dry-run", "tsck tier --rate-limit 200MB")
@click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
@click.option("--claim-locations", is_flag=True, help="This store was moved, and no copy of it is in use: its moved packs are its own.")
@rate_option
@store_options(writes=True)
def tier(choice: StoreChoice, *, dry_run: bool, claim_locations: bool, rate_limit: float | None, as_json: bool) -> None:
    """Do what policies say of age (recode_after=7d move_after=30d:URL): encode packs smaller, move them to colder places, or back.

    A pack goes where the youngest snapshot that needs it lets it go; what is pinned comes back. All is read through this store as before,
    wherever it lies. What was replaced goes with the next `tsck gc`. From any host, beside jobs; may be killed and run again.
    """
    with choice.open(read_only=dry_run) as store, Bar() as bar:
        report = store.tier(dry_run=dry_run, take_places=claim_locations, max_bytes_per_second=rate_limit, progress=bar.phase)
    emit(report, map(choice.complete, _lines(report)), as_json=as_json)


def _lines(report: TierReport) -> Iterator[str]:
    if not report.snapshots:
        yield "no policy says anything of age: `tsck policy set 'runs/*' recode_after=7d move_after=30d:s3://cold/ckpt` makes one"
        return
    would, now = ("would be ", "would be about ") if report.dry_run else ("", "now ")
    yield f"looked at {counted(report.snapshots, 'snapshot')}: {counted(len(report.packs), 'pack')} {would}moved or encoded anew"
    yield from (f"note: {printable(note)}" for note in report.notes)
    if report.packs:
        rows = [
            [pack.name, human_bytes(pack.live_bytes), "moved" if pack.is_moved else "encoded", printable(pack.place or "the store")]
            for pack in report.packs
        ]
        yield from indented(table(["PACK", "LIVE", "", "TO"], rows[:MAX_SHOWN], right={"LIVE"}))
        if len(rows) > MAX_SHOWN:
            yield f"  ... and {len(rows) - MAX_SHOWN:,} more"
        size = f"{human_bytes(report.before_bytes)}, {now}{human_bytes(report.written_bytes)}"
        yield f"blocks took {size}" + ("" if report.dry_run else "; `tsck gc` frees what was replaced")
