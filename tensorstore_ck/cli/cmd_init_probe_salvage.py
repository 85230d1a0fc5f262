"""Commands on a whole store: init, probe, accept-log, adopt, salvage. They need no torch."""

import shlex
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace

import click

from tensorstore_ck.backend import ProbeResult
from tensorstore_ck.backend import probe as run_probe
from tensorstore_ck.backend.local_modes import share_with_group
from tensorstore_ck.backend.save_duration import SaveEstimate, estimate_save
from tensorstore_ck.cli.options import StoreChoice, byte_count, command, store_options
from tensorstore_ck.cli.output import counted, emit, facts, fields_of, green, indented, printable, red, short_root, table
from tensorstore_ck.common.free_space import writing_to
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, StoreError, UnsafeBackendError
from tensorstore_ck.log import Head, LogChangedWarning
from tensorstore_ck.log.trust_file import read_trust
from tensorstore_ck.maintenance.salvage import Salvaged, SalvageReport
from tensorstore_ck.maintenance.salvage import adopt as run_adopt
from tensorstore_ck.maintenance.salvage import salvage as run_salvage
from tensorstore_ck.maintenance.salvage.signed_refs import RefToSign, refs_to_sign


@command(
    "Make an empty store.",
    "tsck init ./ckpt",
    "tsck init /data/team/ckpt --shared group",
    "tsck init s3://bucket/ckpt --storage-option endpoint_url=https://...",
)
@click.option("--shared", type=click.Choice(["group"]), help="All users of the folder's group may save, read and free space there.")
@store_options(writes=True, url_argument=True)
def init(choice: StoreChoice, *, shared: str | None, as_json: bool) -> None:
    """Make an empty store at URL: a folder, or s3://bucket/prefix.

    Everything in a folder gets the mode, the group and the default ACL of that folder, whoever writes it.
    """
    with closing(choice.open_backend()) as backend:
        if shared is not None:
            if "://" in backend.url:
                raise InvalidOptionError(
                    f"--shared is for folders; access to {backend.url} is a matter of its service", object_id="--shared"
                )
            with writing_to(backend.url, "the folder"):
                share_with_group(backend.url)
        config = init_store(backend, single_writer_unsafe=choice.single_writer_unsafe, exist_ok=False)
    emit({"url": backend.url, "config": config}, [f"made a store at {printable(backend.url)}"], as_json=as_json)


@command(
    "Test whether a location is safe for a store, and how fast.",
    "tsck probe s3://bucket/ckpt",
    "tsck probe s3://bucket/ckpt --size 10GB --ranks 8",
)
@click.option("--size", type=byte_count, metavar="SIZE", help="Estimate how long a snapshot of this size takes, and whether it fits.")
@click.option("--ranks", type=click.IntRange(1), metavar="COUNT", help="With --size: how many processes write it; default: 1.")
@store_options(url_argument=True)
@click.pass_context
def probe(context: click.Context, choice: StoreChoice, *, size: int | None, ranks: int | None, as_json: bool) -> None:
    """Test whether the location URL can hold a store that several processes write to, and how fast it is.

    Writes 64 MiB under probe/ and removes them again; a store at URL is not touched. With --size it also writes a tenth of SIZE, up to
    1 GiB, and exits with 34 if the snapshot does not fit.
    """
    if ranks is not None and size is None:
        raise click.UsageError("--ranks is for --size.")
    forecast: SaveEstimate | None = None
    with closing(choice.open_backend()) as backend:
        result = run_probe(backend)
        if size is not None and result.exclusive_create:
            forecast = estimate_save(backend, size, ranks or 1)
    lines = _probe_lines(result) + (["", *_forecast_lines(forecast)] if forecast is not None else [])
    emit({"url": backend.url, "result": result, **({} if size is None else {"forecast": forecast})}, lines, as_json=as_json)
    if not result.exclusive_create:
        context.exit(UnsafeBackendError.exit_code)
    if forecast is not None and forecast.fits is False:
        context.exit(NoSpaceError.exit_code)


def _probe_lines(result: ProbeResult) -> list[str]:
    def holds(guarantee: bool) -> str:
        return green("yes") if guarantee else red("NO")

    create_seconds = "" if result.create_seconds != result.create_seconds else f"{result.create_seconds * 1000:.1f} ms"
    lines = facts(
        [
            ("creates exclusively", holds(result.exclusive_create)),
            ("reads what was written", holds(result.read_after_write)),
            ("lists what was written", holds(result.list_after_write)),
            ("refuses to overwrite", holds(result.refuses_second_put)),
            ("... sent in pieces", holds(result.refuses_second_upload)),
            ("write", f"{human_bytes(int(result.write_bytes_per_second))}/s"),
            ("read", f"{human_bytes(int(result.read_bytes_per_second))}/s"),
            ("one commit waits", create_seconds),
        ]
    )
    lines += [red(printable(problem)) for problem in result.problems]
    if result.exclusive_create and not (result.refuses_second_put and result.refuses_second_upload):
        which = "any object" if not result.refuses_second_put else "packs of more than 15 MiB"
        lines.append(f"another writer can overwrite {which} here: give credentials only to people whom you trust with the whole store")
    if not result.exclusive_create:
        lines.append(
            "several processes would lose each other's commits here: use another location, or --single-writer-unsafe with one writer"
        )
    return lines


def _forecast_lines(forecast: SaveEstimate) -> list[str]:
    def speed(count: float) -> str:
        return f"{human_bytes(int(count))}/s"

    def bandwidth(together: float, alone: float) -> str:
        of_several = f" by {forecast.measured_ranks} ranks on this host, {speed(alone)} by one alone"
        return speed(together) + (of_several if forecast.measured_ranks > 1 else "")

    def lasts(here: float, elsewhere: float) -> str:
        at_best = f" with all ranks on this host; {_seconds(elsewhere)} at best, on hosts of their own" if forecast.ranks > 1 else ""
        return f"{_seconds(here)}{at_best}"

    space = "this location cannot report its free space"
    if forecast.free_bytes is not None:
        space = f"{human_bytes(forecast.free_bytes)} are free: it {green('fits') if forecast.fits else red('does NOT fit')}"
    return [
        f"A snapshot of {human_bytes(forecast.size_bytes)} by {counted(forecast.ranks, 'rank')}, with no block in the store yet:",
        *facts(
            [
                ("save", lasts(forecast.save_seconds, forecast.save_seconds_elsewhere)),
                ("of that, commit", _seconds(forecast.commit_seconds)),
                ("restore", lasts(forecast.restore_seconds, forecast.restore_seconds_elsewhere)),
                ("space", space),
                ("writes", bandwidth(forecast.write_bytes_per_second, forecast.rank_write_bytes_per_second)),
                ("reads", bandwidth(forecast.read_bytes_per_second, forecast.rank_read_bytes_per_second)),
            ]
        ),
        f"Measured from this host alone, with {human_bytes(forecast.sample_bytes)} that were also hashed, and read back at once, perhaps",
        "from a cache. One host cannot measure how much ranks on several hosts get together.",
    ]


def _seconds(count: float) -> str:
    """``1.3 ms``, ``4.2 s``, ``12.5 min``."""
    if count < 1:
        return f"{count * 1000:.1f} ms"
    return f"{count:.1f} s" if count < 120 else f"{count / 60:.1f} min"


@command("Accept a log that went back or forked.", "tsck accept-log -s ./ckpt")
@store_options()
def accept_log(choice: StoreChoice, *, as_json: bool) -> None:
    """Accept the log as it is, although entries that you have seen are gone or have changed (every command warns of that).

    Look at the store first: a restore from a copy and `tsck salvage` change the log like this. Nothing in the store is changed.
    """
    url, head, gone = _accept(choice)
    line = f"the log of {url} ends at entry {head.n}, and holds all entries that you have seen: there is nothing to accept"
    if gone is not None:
        line = f"accepted the log of {url}, which ends at entry {head.n}; entry {gone.n}, which you had seen, is no longer expected"
    emit({"accepted": gone is not None, "head": head.n, "gone": gone and gone.n}, [line], as_json=as_json)


def _accept(choice: StoreChoice) -> tuple[str, Head, Head | None]:
    """(the store's URL, its head, the entry that is no longer expected)."""
    with closing(replace(choice, rollback="warn").open_engine(read_only=True)) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", LogChangedWarning)  # which accepting answers
        return printable(engine.backend.url), *engine.log.accept()


@command("Give a copy of a store's files an identity of its own.", "tsck adopt -s ./copy")
@store_options()
def adopt(choice: StoreChoice, *, as_json: bool) -> None:
    """Give a store that is a copy of another one's files (cp, rsync, a snapshot of a disk) an identity of its own.

    Otherwise the two count as one store whose log went back or forked, and share the host's cache. It gets a new UUID, and a new log of all
    its snapshots. No other process may use the copy meanwhile. Nothing is deleted; the other store is not touched.
    """
    with closing(choice.open_backend()) as backend:
        report = run_adopt(backend)
    line = f"{printable(backend.url)} is a store of its own now, with {counted(report.kept, 'snapshot')} and the new log {report.log}"
    emit({"url": backend.url, "log": report.log, "kept": report.kept}, [line], as_json=as_json)


@command("Make a new log after the old one was destroyed.", "tsck salvage --dry-run -s ./ckpt", "tsck salvage -s ./ckpt")
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option("--leave-out-unknown", is_flag=True, help="Leave out entries and operations that this build does not know.")
@store_options()
def salvage(choice: StoreChoice, *, dry_run: bool, leave_out_unknown: bool, as_json: bool) -> None:
    """Make a new log of every intact snapshot after log entries or store.json were destroyed, as `tsck fsck` reports.

    No other process may write to the store meanwhile. Nothing is deleted; an intact log is not changed.
    """
    with closing(choice.open_backend()) as backend:
        opener = choice.place_opener(backend.url)
        report = run_salvage(backend, dry_run=dry_run, leave_out_unknown=leave_out_unknown, open_place=opener)
    to_sign: list[RefToSign] = []
    if report.log and not dry_run:
        with suppress(StoreError):  # else the next command warns of the new log
            _accept(choice)
        trust = read_trust(choice.trust)
        if trust is not None:
            with closing(choice.open_engine(read_only=True)) as engine:
                to_sign = refs_to_sign(engine, trust)
    lines = [*_salvage_lines(report, dry_run=dry_run), *map(_to_sign_line, to_sign)]
    if report.log and not dry_run:
        lines += [_to_copy_line(short_root(lost.root), backend.url) for lost in report.lost if lost.root]
    emit({**fields_of(report), "to_sign": to_sign}, map(choice.complete, lines), as_json=as_json)


def _to_sign_line(needed: RefToSign) -> str:
    ref, root = shlex.quote(needed.ref), needed.root[:16]
    command = f"`tsck sign {ref} {root} --sign KEY`"
    if needed.was_signed:
        return f"{printable(needed.ref)} was signed in the old log; a signature counts in one log: {command}"
    return red(f"{printable(needed.ref)} has no valid signature in the old log: look at what it is (`tsck log {ref}`) before {command}")


def _to_copy_line(root: str, url: str) -> str:
    ref = f"lost/{root}"  # a copy of its branch adds nothing in the middle of a history
    return (
        f"if another store has {root}: `tsck branch {ref} {root} -s OTHER_STORE`, then "
        f"`tsck copy OTHER_STORE {shlex.quote(printable(url))} --ref {ref}`"
    )


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
        [short_root(entry.root), printable(entry.ref), "" if entry.step is None else str(entry.step), entry.id, printable(entry.note)]
        for entry in snapshots
    ]
    return [style(title), *indented(table(["ROOT", "REF", "STEP", "ID", "WHY"], rows, right={"STEP"})), ""]
