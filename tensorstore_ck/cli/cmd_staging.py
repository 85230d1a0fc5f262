"""The command staging: lists, resumes and drops snapshots that are durable on a host's disk and not published yet."""

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import click

from tensorstore_ck.backend.staging import Staging, StagingFolder
from tensorstore_ck.backend.staging.take_over import taken_over
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import counted, emit, green, indented, printable, red, say, short_root, snapshot_line, step_text, table
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.events import LEVELS, Event, event_text
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.fsck.check_snapshot import require_intact
from tensorstore_ck.session.group.process_groups import ProcessGroups
from tensorstore_ck.session.ref_fence import RefFence
from tensorstore_ck.session.save.context import SaveContext
from tensorstore_ck.session.save.resume_staged import resume_here, sweep
from tensorstore_ck.session.save.save_status import SaveStatus
from tensorstore_ck.session.staging.listing import StagedSaveInfo, list_disk, list_staged
from tensorstore_ck.session.staging.manifest import Manifest
from tensorstore_ck.session.staging.staged_entries import drop
from tensorstore_ck.session.staging.store_contact import StoreContact
from tensorstore_ck.session.staging.verify import verify_staged


@command(
    "List what is staged on this host and not published.",
    "tsck staging --staging /nvme/stage -s s3://bucket/ckpt",
    "tsck staging resume --staging /nvme/stage",
    "tsck staging drop 01K6AZ8Q9S3M6V7J0T2N5R8W1X --staging /nvme/stage",
)
@click.argument("action", type=click.Choice(["list", "resume", "drop"]), default="list", metavar="[list|resume|drop]")
@click.argument("txns", metavar="[TXN]...", nargs=-1)
@click.option(
    "--staging", "path", metavar="FOLDER", help="The staging disk, as in tsck.open(..., staging=FOLDER). Default: only what the log lists."
)
@click.option("--all", "everything", is_flag=True, help="With drop: every snapshot of which that disk holds a part.")
@click.option("--yes", is_flag=True, help="With drop: do not ask.")
@click.option(
    "--accept-owner",
    type=click.IntRange(min=0),
    metavar="UID",
    help="For root: the folder belongs to that user. Staged data is verified before it is published.",
)
@store_options(writes=True)
@click.pass_context
def staging(
    context: click.Context,
    action: str,
    txns: tuple[str, ...],
    path: str | None,
    choice: StoreChoice,
    *,
    accept_owner: int | None,
    everything: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """List what is staged and not published: on the disk FOLDER of this host, and in the log.

    The list has the host and the folder of each, if they are known. If the store does not answer, it lists the disk alone.

    `resume` uploads and publishes complete snapshots of any job; it waits until the store answers. `drop` deletes the files of the staged
    snapshots TXN, or --all, which are then never published. A job that opens the store with that disk resumes by itself.

    A staging folder belongs to one user, and is refused to others. With --accept-owner UID root takes over the folder of another user.
    """
    if action != "drop" and (everything or yes or txns):
        raise click.UsageError("TXN, --all and --yes are for drop.")
    if action == "drop" and bool(txns) == everything:
        raise click.UsageError("Drop what? Give TXN, as `tsck staging` lists it, or --all.")
    if path is None and (action == "resume" or everything or accept_owner is not None):
        raise click.UsageError("Which disk? Give --staging FOLDER.")
    if action == "list":
        _list(context, choice, path, accept_owner, as_json=as_json)
        return
    with _taken_over(choice, path, accept_owner), closing(_open(choice, path, writes=True)) as engine:
        if action == "resume":
            _resume(context, engine, as_json=as_json, verify=accept_owner is not None)
        else:
            _drop(engine, engine.tier.folder if engine.tier is not None else None, txns, yes=yes, as_json=as_json)


def _open(choice: StoreChoice, path: str | None, *, writes: bool) -> Engine:
    if path is not None and not os.path.isdir(path):
        raise InvalidOptionError(f"there is no folder {path}: name the staging disk that the job was given", object_id="staging")
    return choice.open_engine(read_only=not writes, staging=Staging(path) if path is not None and writes else None)


def _list(context: click.Context, choice: StoreChoice, path: str | None, owner: int | None, *, as_json: bool) -> None:
    """Lists by the log and the disk; if the store does not answer, by the disk alone."""
    with _taken_over(choice, path, owner):
        opened = partial(_open, choice, path, writes=False)
        try:
            with closing(opened() if path is None else StoreContact().ask(opened)) as engine:
                found = list_staged(engine, StagingFolder(path, engine.config.uuid, 1) if path is not None else None)
        except BackendUnavailableError as exc:
            if path is None:
                raise
            names = [name for name in sorted(os.listdir(path)) if os.path.isdir(os.path.join(path, name, "staged"))]
            found = [put for folder in [StagingFolder(path, name, 1) for name in names] for put in list_disk(folder)]
            say(f"tsck: warning: the list has what is on the disk, without what the store knows: {printable(exc)}", err=True)
            emit(found, _lines(found, path), as_json=as_json)
            context.exit(exc.exit_code)
    emit(found, _lines(found, path), as_json=as_json)


@contextmanager
def _taken_over(choice: StoreChoice, path: str | None, owner: int | None) -> Iterator[None]:
    if path is None or owner is None:
        yield
        return
    with closing(_open(choice, None, writes=False)) as engine:
        folder = StagingFolder(path, engine.config.uuid, 1)
    with taken_over(folder.path, owner):
        yield


def _resume(context: click.Context, engine: Engine, *, as_json: bool, verify: bool) -> None:
    tier = engine.tier
    assert tier is not None
    engine.observers.subscribe(_echo)
    handle = SaveContext(engine, RefFence(), ProcessGroups(engine), wait_for_upload=lambda: False)
    published: list[SnapshotRow] = []
    failed: list[tuple[str, StoreError]] = []

    def is_verified(manifests: Sequence[Manifest]) -> bool:
        course = SaveStatus(manifests[0].ref, manifests[0].step)
        try:
            verify_staged(engine, tier, manifests, require_intact)
        except StoreError as exc:
            failed.append((str(course), exc))
            return False
        return True

    engine.log.sync()
    for job in resume_here(handle, tier, is_verified if verify else lambda _: True):
        course = SaveStatus(job.ref, job.step)
        try:
            published.append(job.publish(course))
        except StoreError as exc:
            failed.append((str(course), exc))
    left = list_staged(engine, tier.folder)
    snapshots = [Snapshot.from_info(info) for info in published]
    lines = [snapshot_line(f"published {printable(each.ref)} at", each) for each in snapshots]
    lines += [red(f"{printable(what)}: {printable(error)}") for what, error in failed]
    lines += _lines(left, tier.folder.path) if left else [] if lines else ["nothing is staged"]
    failures = [{"put": what, "kind": error.kind, "message": str(error)} for what, error in failed]
    emit({"published": snapshots, "failed": failures, "left": left}, lines, as_json=as_json)
    if failed:
        context.exit(failed[0][1].exit_code)


def _echo(event: Event) -> None:
    """Prints events that are no warnings; those are printed for every command."""
    if LEVELS[event.kind] < logging.WARNING:
        say(f"tsck: {event_text(event)}", err=True)


def _drop(engine: Engine, folder: StagingFolder | None, txns: Sequence[str], *, yes: bool, as_json: bool) -> None:
    known = {put.txn: put for put in list_staged(engine, folder)}
    unknown = next((txn for txn in txns if txn not in known), None)
    if unknown is not None:
        raise NotFoundError(f"nothing is staged as {unknown}: see `tsck staging`", object_id=unknown)
    chosen = [known[txn] for txn in dict.fromkeys(txns)] if txns else [put for put in known.values() if put.is_here]
    if chosen and not yes:
        _confirm(chosen)
    dropped: list[StagedSaveInfo] = []
    kept: list[StagedSaveInfo] = []
    for put in chosen:
        (dropped if drop(engine, engine.tier, _txn(put)) is None else kept).append(put)
    if engine.tier is not None:
        tier = engine.tier
        tier.folder.enter(lambda: sweep(tier))  # files that no manifest names, if no job uses the disk
    lines = [f"dropped {_name(put)} ({put.txn})" for put in dropped]
    lines += [f"{_name(put)} ({put.txn}) was published already: deleted its files" for put in kept]
    emit({"dropped": dropped, "published": kept}, lines or ["nothing is staged"], as_json=as_json)


def _confirm(puts: Sequence[StagedSaveInfo]) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("This cannot be undone: add --yes to drop without being asked.")
    for put in puts:
        say(f"{_name(put)} ({put.txn}): {human_bytes(put.size_bytes)}, {put.state}", err=True)
    click.confirm(f"Give up {counted(len(puts), 'staged snapshot')} permanently?", abort=True, err=True)


def _txn(put: StagedSaveInfo) -> Ulid:
    found = parse_ulid(put.txn)
    assert found is not None
    return found


def _name(put: StagedSaveInfo) -> str:
    if put.ref is None:
        return "a snapshot whose manifest is damaged"
    return printable(put.ref if put.step is None else f"{put.ref}@{put.step}")


def _lines(found: Sequence[StagedSaveInfo], path: str | None) -> list[str]:
    if not found:
        return ["nothing is staged" + ("" if path is not None else ", by the log; --staging FOLDER also looks at this host's disk")]
    return [*_table(found), *_why(found)]


def _table(found: Sequence[StagedSaveInfo]) -> list[str]:
    now_ns = time.time_ns()
    rows = [
        [
            put.txn,
            "?" if put.ref is None else printable(put.ref),
            step_text(put.step),
            short_root(put.root),
            "-" if put.ranks is None else f"{len(put.here)}/{put.ranks}",
            human_bytes(put.size_bytes),
            f"{put.sent_bytes / put.size_bytes:.0%}" if put.size_bytes else "-",
            _age((now_ns - put.time_ns) / 1e9) if put.time_ns else "-",
            put.state,
            printable(put.host),
            printable(put.folder),
        ]
        for put in found
    ]
    styles = [red if put.problems else green for put in found]
    header = ["TXN", "REF", "STEP", "ROOT", "RANKS HERE", "SIZE", "SENT", "AGE", "LOG SAYS", "HOST", "FOLDER"]
    return table(header, rows, right={"STEP", "RANKS HERE", "SIZE", "SENT", "AGE"}, styles=styles)


def _why(found: Sequence[StagedSaveInfo]) -> Iterator[str]:
    """The problems, below the table."""
    for put in found:
        if put.problems:
            yield f"{_name(put)} ({put.txn}) cannot be published from here:"
            yield from indented(printable(problem) for problem in put.problems)


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
