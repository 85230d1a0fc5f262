"""The command fsck: check, and repair. It needs no torch."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from tempfile import TemporaryDirectory

import click

from tensorstore_ck.cli.options import StoreChoice, command, for_workers, fraction, named_value, rate_option, seconds, store_options
from tensorstore_ck.cli.output import counted, emit, green, printable, red
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, DamageError, FormatVersionError, NotAStoreError, UnreadableError
from tensorstore_ck.format.store_config import CONFIG_NAME
from tensorstore_ck.maintenance.fsck import FsckOptions, RepairReport, abort_stale_uploads, run_fsck
from tensorstore_ck.maintenance.fsck.check_config import find_config, is_of_log
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, Finding, FsckReport
from tensorstore_ck.maintenance.recorded_runs import recorded_fsck, recorded_repair
from tensorstore_ck.redaction import display_url


@command(
    "Check that everything is there and unaltered, and repair it.",
    "tsck fsck",
    "tsck fsck --read-data",
    "tsck fsck --max-time 10m",
    "tsck fsck --read-data --repair --from s3://bucket/copy",
)
@click.option("--read-data", is_flag=True, help="Also read and hash every stored byte.")
@click.option("--sample", type=fraction, metavar="PART", help="Read this share of it, e.g. 5%: packs verified longest ago first.")
@click.option("--max-time", type=seconds, metavar="TIME", help="Read for this long, in that order; the next run goes on.")
@click.option("--repair", is_flag=True, help="Repair damage, and mark snapshots that cannot be repaired; deletes nothing.")
@click.option("--from", "other", metavar="URL", help="With --repair: another store to take lost data from.")
@click.option("--from-storage-option", metavar="KEY=VALUE", type=named_value, multiple=True, help="For its storage service (repeatable).")
@click.option("--abort-uploads", is_flag=True, help="Also delete unfinished uploads that are older than a day.")
@click.option("--no-record", is_flag=True, help="Leave no entry in the log: nothing in the store changes.")
@rate_option
@click.option("--dask", metavar="ADDRESS", help="Read the data on the workers of a Dask cluster.")
@store_options(writes=True)
@click.pass_context
def fsck(
    context: click.Context,
    choice: StoreChoice,
    *,
    read_data: bool,
    sample: float | None,
    max_time: float | None,
    repair: bool,
    other: str | None,
    from_storage_option: tuple[tuple[str, object], ...],
    abort_uploads: bool,
    no_record: bool,
    rate_limit: float | None,
    dask: str | None,
    as_json: bool,
) -> None:
    """Check that everything that branches, tags and pins hold is complete and unaltered. Exits with 40 if it is not.

    Jobs and gc may run meanwhile. Without options it reads the log, records, parts and the packs' tables, and the data of packs in which
    this host found damage before; --repair also reads the data of snapshots that are marked as damaged. --read-data finds damage in all
    other data, with and without --repair. An entry in the log notes what was found (`tsck usage` shows it), unless this user may
    not write, the log is damaged, or --no-record is given: for a copy of a store's files that still follows its original.
    """
    if other is not None and not repair:
        raise click.UsageError("--from is for --repair.")
    if dask is not None and repair:
        raise click.UsageError("--dask checks; --repair runs here.")
    if no_record and (repair or abort_uploads):
        raise click.UsageError("--no-record is for a check that changes nothing.")
    with ExitStack() as stack:
        source: Engine | None = None
        if other is not None:  # a copy of this store's files has the same uuid, and must not share this host's cache
            folder = stack.enter_context(TemporaryDirectory(prefix="tsck-"))
            from_choice = StoreChoice(other, dict(from_storage_option), folder, places=choice.places, state_dir=folder)
            try:
                source = stack.enter_context(closing(from_choice.open_engine(read_only=True)))
            except NotAStoreError as exc:  # a new one would have nothing to take
                raise NotAStoreError(f"there is no store at {display_url(other)}, which --from names: correct it", object_id=other) from exc
        engine, is_sure = _open(choice, stack, source, changes=repair or abort_uploads, records=not no_record)
        aborted = abort_stale_uploads(engine) if abort_uploads else []
        engine, executor = for_workers(stack, dask, choice, engine)
        bar = stack.enter_context(Bar("checking"))
        options = FsckOptions(read_data, sample, max_time, rate_limit=rate_limit)
        if options.reads_data:
            options = replace(options, progress=bar)
        repaired: RepairReport | None = None
        if repair:
            if is_sure:
                repaired = recorded_repair(engine, options, other=source)
            else:  # the log may be another store's: write nothing
                checked = run_fsck(engine, options)
                repaired = RepairReport(before=checked, mended=(), marked=(), unmarked=(), after=checked)
            repaired = replace(repaired, before=_completed(repaired.before, choice), after=_completed(repaired.after, choice))
            report = repaired.after
        else:
            check = recorded_fsck if is_sure and not no_record else run_fsck
            report = _completed(check(engine, options, executor=executor), choice)
    lines = [f"freed {printable(name)}" for name in aborted] + (_repair_lines(repaired) if repaired else [])
    lines += _fsck_lines(report, repaired.before if repaired else report, options)
    lines += [f"note: this check is not noted in the log: {printable(report.not_recorded)}"] if report.not_recorded else []
    lines += choice.advice_lines(report.freeable.describe() if report.freeable is not None else ())
    document = {"ok": report.ok, "report": report, "aborted_uploads": aborted, **({"repair": repaired} if repaired else {})}
    emit(document, lines, as_json=as_json)
    if not report.ok:
        errors = (finding for finding in report.findings if finding.severity == "error")
        is_unreadable = all(finding.kind == UNREADABLE for finding in errors)
        context.exit(UnreadableError.exit_code if is_unreadable else DamageError.exit_code)


def _open(choice: StoreChoice, stack: ExitStack, other: Engine | None, *, changes: bool, records: bool) -> tuple[Engine, bool]:
    """The store, even if its store.json is damaged; and whether the log is certainly that of this store."""
    try:
        engine = choice.open_engine(read_only=not changes and not records)
        if is_of_log(engine.backend, engine.config) is not False:
            return stack.enter_context(closing(engine)), True
        engine.close()
    except (CorruptObjectError, FormatVersionError) as exc:
        if exc.object_id != CONFIG_NAME:
            raise
    with closing(choice.open_backend()) as backend:
        stored = find_config(backend, other.config if other is not None else None, is_writable=changes)
    if not stored.is_sure:  # this host's cache may be another store's
        choice = replace(choice, cache_dir=stack.enter_context(TemporaryDirectory(prefix="tsck-")))
    return stack.enter_context(closing(choice.open_engine(read_only=not changes, config=stored.config))), stored.is_sure


def _completed(report: FsckReport, choice: StoreChoice) -> FsckReport:
    return replace(report, findings=tuple(replace(finding, message=choice.complete(finding.message)) for finding in report.findings))


def _repair_lines(report: RepairReport) -> list[str]:
    lines = [f"{green('repaired')}  {printable(repaired.object)}: {printable(repaired.how)}" for repaired in report.mended]
    lines += [f"{red('marked damaged')}  {root}" for root in report.marked]
    lines += [f"{green('no longer damaged')}  {root}" for root in report.unmarked]
    if lines:
        return [*lines, ""]
    return ["nothing was repaired" if not report.ok else "nothing to repair in what was checked", ""]


def _fsck_lines(report: FsckReport, looked_at: FsckReport, options: FsckOptions) -> list[str]:
    """`report` lists the damage that is left; `looked_at` what was read to find it."""
    lines = [line for finding in report.findings for line in _finding_lines(finding)]
    errors = sum(finding.severity == "error" for finding in report.findings)
    looked = ", ".join(
        (
            counted(report.log_entries, "log entry"),
            counted(report.snapshots, "snapshot"),
            counted(report.packs, "pack"),
            counted(report.blocks, "block"),
        )
    )
    data = _data_parts(looked_at) if options.reads_data else _suspects_part(looked_at)
    lines += [f"checked {looked}; {'; '.join(data)}"]
    if not report.ok:
        return [*lines, red(counted(errors, "error"))]
    is_all_read = options.read_data and not looked_at.out_of_time
    return [*lines, green("no errors" if is_all_read else "no errors in what was checked")]


def _suspects_part(report: FsckReport) -> Iterator[str]:
    if not report.read_packs:
        yield "data not read (--read-data does)"
    else:
        yield f"read only the data of {counted(report.read_packs, 'pack')} known or suspected to be damaged (--read-data reads all)"


def _data_parts(report: FsckReport) -> Iterator[str]:
    yield f"{human_bytes(report.data_bytes)} read and verified"
    if report.out_of_time:
        yield f"out of time after {counted(report.read_packs, 'pack')}: the next run goes on"
    if report.never_verified:
        yield f"{counted(report.never_verified, 'pack')} never verified by this host"
    elif report.oldest_verified_ns is not None:
        yield f"all verified since {iso_time(report.oldest_verified_ns)}"


def _finding_lines(finding: Finding) -> list[str]:
    colour = red if finding.severity == "error" else str
    lines = [f"{colour(finding.severity)}  {printable(finding.object)}  ({finding.kind}{', repairable' if finding.repairable else ''})"]
    lines += [f"  {printable(finding.message)}", *(f"  hits {printable(hit)}" for hit in finding.hits), ""]
    return lines
