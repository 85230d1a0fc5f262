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
    emit(report, map(choice.complete, _lines(report)), as_json=as_json)


def _lines(report: TierReport) -> Iterator[str]:
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
        yield from indented(table(["PACK", "LIVE", "", "TO"], rows[:MAX_SHOWN], right={"LIVE"}))
        if len(rows) > MAX_SHOWN:
            yield f"  ... and {len(rows) - MAX_SHOWN:,} more"
        size = f"{human_bytes(report.before_bytes)}, {now}{human_bytes(report.written_bytes)}"
        yield f"blocks took {size}" + ("" if report.dry_run else "; `tsck gc` frees what was replaced")
