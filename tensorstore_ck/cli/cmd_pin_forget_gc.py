"""Commands that keep and free snapshots: pin, unpin, forget, undo, gc."""

import shlex
from contextlib import ExitStack, closing

import click

from tensorstore_ck.cli.cmd_policy_quota import apply_policies
from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import StoreChoice, command, default_option, for_workers, rate_option, seconds, store_options
from tensorstore_ck.cli.output import counted, emit, printable, say, short_root, shortened_table, snapshot_line, step_text, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.gc import GcOptions, GcReport
from tensorstore_ck.log.snapshot import PinnedSnapshot
from tensorstore_ck.maintenance.forget import Forgotten
from tensorstore_ck.maintenance.recorded_runs import recorded_gc


@command("Pin a snapshot, or list the pins.", "tsck pin", 'tsck pin runs/gpt@1000 --reason "mmlu running" --expires 7d')
@click.argument("address", required=False, shell_complete=complete_address)
@click.option("--reason", default="", metavar="TEXT", help="Why; shown by `tsck pin`.")
@click.option("--owner", metavar="NAME", help="Who pins it; default: this user.")
@click.option("--expires", type=seconds, metavar="TIME", help="For how long, e.g. 12h or 30d; default: until unpinned.")
@store_options(writes=True)
def pin(address: str | None, reason: str, owner: str | None, expires: float | None, choice: StoreChoice, *, as_json: bool) -> None:
    """Keep the snapshot ADDRESS until it is unpinned; without ADDRESS list all pins."""
    with choice.open(read_only=address is None) as store:
        if address is None:
            pins = store.pins()
            emit(pins, map(choice.complete, _pin_lines(pins)), as_json=as_json)
            return
        snapshot = store.pin(address, reason=reason, owner=owner, expires=expires)
    emit(snapshot, [snapshot_line("pinned", snapshot)], as_json=as_json)


def _pin_lines(pins: tuple[PinnedSnapshot, ...]) -> list[str]:
    if not pins:
        return ["no pins: `tsck pin ADDRESS` makes one"]
    rows = [
        [
            short_root(pinned.snapshot.root),
            printable(pinned.snapshot.ref),
            step_text(pinned.snapshot.step),
            printable(pinned.owner),
            iso_time(pinned.time_ns),
            "-" if pinned.expires_ns is None else iso_time(pinned.expires_ns),
            printable(pinned.reason),
        ]
        for pinned in pins
    ]
    return table(["ROOT", "REF", "STEP", "OWNER", "SINCE", "EXPIRES", "REASON"], rows, right={"STEP"})


@command("Remove a pin.", "tsck unpin runs/gpt@1000")
@click.argument("address", shell_complete=complete_address)
@click.option("--owner", metavar="NAME", help="Whose pin; default: this user's.")
@store_options(writes=True)
def unpin(address: str, owner: str | None, choice: StoreChoice, *, as_json: bool) -> None:
    """Remove a pin from the snapshot ADDRESS."""
    with choice.open() as store:
        store.unpin(address, owner=owner)
    emit({"unpinned": address}, [f"unpinned {printable(address)}"], as_json=as_json)


@command("Remove snapshots from the history.", "tsck forget runs/gpt@900 runs/gpt@1000", "tsck forget")
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1, shell_complete=complete_address)
@click.option("--by-policy", is_flag=True, hidden=True)
@click.option("--dry-run", is_flag=True, hidden=True)
@store_options(writes=True)
def forget(addresses: tuple[str, ...], choice: StoreChoice, *, by_policy: bool, dry_run: bool, as_json: bool) -> None:
    """Remove snapshots (REF@STEP, REF~N, a root) from the histories of branches, or whole branches and tags.

    `tsck undo` brings them back for a day; then `tsck gc` frees their space. Without ADDRESS list what can be undone.
    """
    if by_policy or dry_run:
        say(f"tsck: {'--by-policy' if by_policy else '--dry-run'} is deprecated: use `tsck policy apply`", err=True)
        apply_policies(choice, addresses, dry_run=dry_run, as_json=as_json)
        return
    with choice.open(read_only=not addresses) as store:
        snapshots = store.forget(*addresses) if addresses else store.forgotten()
    if not snapshots:
        lines = ["nothing was forgotten that can be undone"]
    elif addresses:
        is_branch = len(snapshots) == 1 and snapshots[0].kind == "branch"
        undo = f"tsck undo {shlex.quote(printable(snapshots[0].ref))}" if is_branch else "tsck undo"
        lines = [
            *_forgotten_lines(snapshots, "forgot"),
            f"`{undo}` brings this back for a day, then `tsck gc` frees what nothing else holds",
        ]
    else:
        lines = _forgotten_lines(snapshots, "")
    emit(snapshots, map(choice.complete, lines), as_json=as_json)


@command("Bring back what was forgotten.", "tsck undo", "tsck undo runs/gpt@900")
@click.argument("address", required=False, shell_complete=complete_address)
@store_options(writes=True)
def undo(address: str | None, choice: StoreChoice, *, as_json: bool) -> None:
    """Bring back what was forgotten last, of all refs or of one; or the snapshot REF@STEP."""
    with choice.open() as store:
        snapshots = store.undo(address)
    emit(snapshots, _forgotten_lines(snapshots, "brought back"), as_json=as_json)


def _forgotten_lines(snapshots: tuple[Forgotten, ...], verb: str) -> list[str]:
    lines = []
    for snapshot in snapshots:
        what = {"branch": "branch", "tag": "tag", "snapshots": "of branch"}[snapshot.kind]
        lead = f"{verb} " if verb else f"{iso_time(snapshot.time_ns)}  "
        lines.append(f"{lead}{what} {printable(snapshot.ref)}: {counted(len(snapshot.snapshots), 'snapshot')}")
        rows = [
            [short_root(it.root), step_text(it.step), human_bytes(it.logical_bytes), ", ".join(map(printable, snapshot.held_by[it.id]))]
            for it in snapshot.snapshots
        ]
        lines += shortened_table(["ROOT", "STEP", "SIZE", "STILL HELD BY"], rows, right={"STEP", "SIZE"})
    return lines


@command("Free the space of forgotten snapshots.", "tsck gc --dry-run", "tsck gc", "tsck gc --rate-limit 100MB")
@click.option("--dry-run", is_flag=True, help="Only print what would be freed.")
@default_option("--grace", "grace", "0s", "Free only objects condemned this long ago.")
@default_option("--max-delete", "max_delete", "50%", "Abort if more than this share of the stored bytes would be deleted.")
@default_option("--min-age", "min_age", "1d", "Keep younger leftovers of saves, unless their process is known to have ended.")
@default_option(
    "--undo-window",
    "undo_window",
    "1d",
    "Free what was forgotten longer ago; 0s: all of it, which no undo brings back then.",
)
@default_option("--compact-below", "compact_below", "50%", "Rewrite packs with a smaller share of live bytes.")
@rate_option
@click.option("--dask", metavar="ADDRESS", help="Rewrite packs on the workers of a Dask cluster.")
@store_options(writes=True)
def gc(
    choice: StoreChoice,
    *,
    dry_run: bool,
    grace: float,
    max_delete: float,
    min_age: float,
    undo_window: float,
    compact_below: float,
    rate_limit: float | None,
    dask: str | None,
    as_json: bool,
) -> None:
    """Free what no branch, tag, pin or undo window holds. Jobs and other hosts' gc may run meanwhile.

    May be killed at any time and run again. --max-delete, --compact-below: a percentage, or a fraction.
    """
    options = GcOptions(
        min_age_seconds=min_age,
        grace_seconds=grace,
        undo_window_seconds=undo_window,
        max_delete=max_delete,
        compact_below=compact_below,
        rate_limit=rate_limit,
    )
    with ExitStack() as stack:
        opened = stack.enter_context(closing(choice.open_engine(read_only=dry_run)))
        engine, executor = for_workers(stack, dask, choice, opened)
        bar = stack.enter_context(Bar())
        report = recorded_gc(engine, options, dry_run=dry_run, progress=bar.phase, executor=executor)
    document = {"report": report, "freed_bytes": report.freed_bytes}
    emit(document, [*map(choice.complete, _gc_lines(report)), *choice.advice_lines(_advice(report))], as_json=as_json)


def _gc_lines(report: GcReport) -> list[str]:
    lines = []
    if report.snapshots:
        rows = [[short_root(gone.root), printable(gone.ref), step_text(gone.step)] for gone in report.snapshots]
        lines += [f"{counted(len(rows), 'snapshot')} that nothing holds", *shortened_table(["ROOT", "REF", "STEP"], rows, right={"STEP"})]
    if report.rewritten:
        rows = [[pack.name, human_bytes(pack.bytes), f"{pack.live_bytes / pack.bytes:.0%}"] for pack in report.rewritten]
        lines += [f"{counted(len(rows), 'pack')} rewritten: {human_bytes(report.written_bytes)}"]
        lines += shortened_table(["PACK", "SIZE", "LIVE"], rows, right={"SIZE", "LIVE"})
    lines += [f"note: {printable(note)}" for note in report.notes]
    deleted = ", ".join(
        counted(count, {"moved": "moved object", "snapshot": "record"}.get(kind, kind)) for kind, count in report.deleted.items() if count
    )
    would = "would be " if report.dry_run else ""
    size = f"{human_bytes(report.freed_bytes)} of {human_bytes(report.total_bytes)}"
    lines.append(
        f"{would}freed: {size}" + (f" ({deleted} deleted)" if deleted else "") + f", in about {counted(report.requests, 'request')}"
    )
    if report.not_recorded:
        lines.append(f"note: this run is not noted in the log: {printable(report.not_recorded)}")
    if report.refused is not None:
        lines.append(f"would be refused: {printable(report.refused)}")
    return lines


def _advice(report: GcReport) -> list[str]:
    now = [f"`{report.command}` frees it"] if report.dry_run and report.freed_bytes > 0 and report.command else []
    return [*now, *(later.describe() for later in report.later)]
