"""The command usage: how many bytes refs, jobs and snapshots use."""

from collections.abc import Iterable, Sequence
from typing import Final

import click

from tensorstore_ck.cli.options import StoreChoice, command, price_option, store_options
from tensorstore_ck.cli.output import counted, emit, fields_of, printable, short_root, step_text, table
from tensorstore_ck.common.prices import Prices, usd_text
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.gc.usage import CodecUsage, SnapshotUsage, Usage, usage_costs
from tensorstore_ck.log.maintenance_outcome import FINDINGS, RunOutcome

SIZES: Final = ("LOGICAL", "UNIQUE", "STORED", "SHARED", "EXCLUSIVE")
MAX_PACKS: Final = 40
MAX_PRICED: Final = 10


@command(
    "Show how many bytes refs use.", "tsck usage", "tsck usage --snapshots", "tsck usage --jobs --price s3=0.023", "tsck usage --codecs"
)
@click.option("--snapshots", is_flag=True, help="Each snapshot, and what forgetting it would free.")
@click.option("--jobs", is_flag=True, help="Each job: the refs whose names are equal up to the last '/'.")
@click.option("--packs", is_flag=True, help=f"The {MAX_PACKS} packs with the smallest live share.")
@click.option("--codecs", is_flag=True, help="How the blocks are encoded.")
@price_option
@store_options()
def usage(choice: StoreChoice, *, snapshots: bool, jobs: bool, packs: bool, codecs: bool, price: tuple[str, ...], as_json: bool) -> None:
    """Show how many bytes each branch and tag uses.

    LOGICAL counts all bytes that were saved, UNIQUE each block once, STORED the bytes on disk, SHARED those that another ref holds too,
    and EXCLUSIVE those that forgetting it frees when the undo window has ended. The last lines say when gc and fsck ran last.
    """
    prices = Prices.parse(price)
    with choice.look() as store:
        usage, runs = store.usage(per_snapshot=snapshots), store.last_runs()
    if snapshots:
        lines = _snapshot_lines(usage.by_snapshot or ())
    elif packs:
        smallest = usage.packs[:MAX_PACKS]
        rows = [[pack.name, human_bytes(pack.bytes), human_bytes(pack.live_bytes), f"{pack.live_ratio:.0%}"] for pack in smallest]
        lines = _table(["PACK", "SIZE", "LIVE", "RATIO"], rows)
    elif codecs:
        lines = _codec_lines(usage.codecs)
    elif jobs:
        header = ["JOB", "REFS", "SNAPSHOTS", *SIZES]
        lines = _table(
            header,
            ([printable(job.job), str(job.refs), str(job.snapshots), *_sizes(job), human_bytes(job.exclusive_bytes)] for job in usage.jobs),
        )
    else:
        header = ["REF", "SNAPSHOTS", *SIZES]
        rows = [[printable(ref.ref), str(ref.snapshots), *_sizes(ref), human_bytes(ref.exclusive_bytes)] for ref in usage.refs]
        lines = _table(header, [*rows, ["all refs", str(usage.snapshots), *_sizes(usage), ""]])
    lines = [
        _headline(usage),
        "",
        *lines,
        "",
        *map(choice.complete, _store_lines(usage)),
        *filter(None, [usage.space.describe()]),
        *_price_lines(usage, prices, of_jobs=jobs),
        *choice.advice_lines(usage.freeable.describe(is_full=usage.is_full)),
        *map(_run_line, runs.values()),
    ]
    emit({**fields_of(usage), "last_runs": runs, "usd_per_month": usage_costs(usage, prices)}, lines, as_json=as_json)


def _sizes(held: object) -> list[str]:
    return [human_bytes(getattr(held, f"{name}_bytes")) for name in ("logical", "unique", "stored", "shared")]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return table(header, list(rows), right=frozenset(header[1:]))


def _snapshot_lines(snapshots: Sequence[SnapshotUsage]) -> list[str]:
    rows = [
        [
            short_root(it.root),
            printable(it.ref),
            step_text(it.step),
            *map(human_bytes, (it.logical_bytes, it.stored_bytes, it.shared_bytes, it.exclusive_bytes)),
            ", ".join(map(printable, it.held_by)),
        ]
        for it in snapshots
    ]
    numbers = {"STEP", "LOGICAL", "STORED", "SHARED", "EXCLUSIVE"}
    return table(["ROOT", "REF", "STEP", "LOGICAL", "STORED", "SHARED", "EXCLUSIVE", "HELD BY"], rows, right=numbers)


def _codec_lines(codecs: Sequence[CodecUsage]) -> list[str]:
    rows = [
        [
            it.codec,
            f"{it.blocks:,}",
            human_bytes(it.raw_bytes),
            human_bytes(it.stored_bytes),
            f"{it.stored_bytes / max(1, it.raw_bytes):.0%}",
        ]
        for it in codecs
    ]
    return _table(["CODEC", "BLOCKS", "UNIQUE", "STORED", "RATIO"], rows)


def _headline(usage: Usage) -> str:
    """Stored bytes, and bytes that gc would free."""
    later_bytes = sum(item.bytes for item in usage.freeable.later)
    later = f", {human_bytes(later_bytes)} later" if later_bytes else ""
    return f"{human_bytes(usage.objects_bytes)} stored; gc would free {human_bytes(usage.freeable.now_bytes)} now{later}"


def _store_lines(usage: Usage) -> list[str]:
    parts = []
    for size, what in (
        (usage.pinned_bytes, "held by pins alone"),
        (usage.undo_bytes, "by undo windows alone (`tsck forget` lists them)"),
        (usage.unreferenced_bytes, "held by nothing"),
    ):
        parts += [f"{human_bytes(size)} {what}"] if size else []
    parts += [f"{human_bytes(place.bytes)} at {printable(place.url)}" for place in usage.places]
    return [", ".join(parts)] if parts else []


def _price_lines(usage: Usage, prices: Prices, *, of_jobs: bool) -> Iterable[str]:
    if not prices.by_name:
        return
    costs = usage_costs(usage, prices)
    if costs is None:
        unpriced = [url for url, size in usage.by_location.items() if size and prices.of(url) is None]
        yield f"no price was given for {', '.join(map(printable, unpriced))}: add --price '{printable(unpriced[0])}=USD'"
        return
    where = ", ".join(f"{usd_text(usd)} at {printable(url)}" for url, usd in costs.locations.items())
    yield f"{usd_text(costs.total)} a month: {where}"
    dearest = sorted((costs.jobs if of_jobs else costs.refs).items(), key=lambda item: -item[1])[:MAX_PRICED]
    yield from (f"  {printable(name)}: {usd_text(usd)}" for name, usd in dearest)


def _run_line(run: RunOutcome) -> str:
    counts = run.counts
    what = [counted(counts.get("errors", 0), "error") if run.outcome == FINDINGS else printable(run.outcome)]
    if run.run == "gc" and "deleted_bytes" in counts:
        what.append(f"freed {human_bytes(max(0, counts['deleted_bytes'] - counts.get('written_bytes', 0)))}")
    if run.run == "fsck" and "read_bytes" in counts:
        what.append(f"{human_bytes(counts['read_bytes'])} of data read")
    reason = f": {printable(run.message)}" if run.message else ""
    return f"last {printable(run.run)}: {iso_time(run.time_ns)} by {printable(run.actor)}: {', '.join(what)}{reason}"
