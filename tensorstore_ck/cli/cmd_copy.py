"""The command that copies refs between stores: copy. It needs no torch."""

from contextlib import ExitStack, closing
from dataclasses import replace

import click

from tensorstore_ck.cli.options import (
    StoreChoice,
    allow_place_option,
    command,
    for_workers,
    host_options,
    json_option,
    named_value,
    rate_option,
    write_options,
)
from tensorstore_ck.cli.output import counted, emit, fields_of, green, printable, red, short_root, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import RetryableError
from tensorstore_ck.log import Rollback
from tensorstore_ck.maintenance.copy_store import CopyReport, Pace, copy_refs


@command(
    "Copy refs to another store.",
    "tsck copy ./ckpt s3://bucket/ckpt",
    "tsck copy s3://bucket/ckpt ./ckpt --ref 'runs/gpt-*' --rate-limit 100MB",
)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--ref", "refs", metavar="GLOB", multiple=True, help="Only branches and tags that match, e.g. 'runs/*' (repeatable).")
@rate_option
@click.option("--src-storage-option", metavar="KEY=VALUE", type=named_value, multiple=True, help="For SRC's storage service (repeatable).")
@click.option("--dst-storage-option", metavar="KEY=VALUE", type=named_value, multiple=True, help="For DST's storage service (repeatable).")
@host_options
@allow_place_option
@write_options
@click.option("--dask", metavar="ADDRESS", help="Copy the data on the workers of a Dask cluster.")
@json_option
@click.pass_context
def copy(
    context: click.Context,
    source: str,
    target: str,
    *,
    refs: tuple[str, ...],
    rate_limit: float | None,
    src_storage_option: tuple[tuple[str, object], ...],
    dst_storage_option: tuple[tuple[str, object], ...],
    cache_dir: str | None,
    allow_place: tuple[str, ...],
    state_dir: str | None,
    rollback: Rollback,
    trust: str | None,
    sign: str | None,
    single_writer_unsafe: bool,
    no_sync: bool,
    dask: str | None,
    as_json: bool,
) -> None:
    """Copy branches with their histories, marks and metrics, and tags, from the store SRC to the store DST, which `tsck init` makes.

    Only blocks that DST lacks are copied, each verified. May be killed at any time and run again. A ref that has other snapshots in DST is
    not changed. Pins, policies and quotas are not copied. A ref of SRC that the trust file names is copied only if its signature is valid.
    A signature counts in one store: --sign signs the refs of DST with a key of your own.
    """
    from_choice = StoreChoice(
        source, dict(src_storage_option), cache_dir, places=allow_place, state_dir=state_dir, rollback=rollback, trust=trust
    )
    to_choice = replace(
        from_choice,
        url=target,
        storage_options=dict(dst_storage_option),
        single_writer_unsafe=single_writer_unsafe,
        no_sync=no_sync,
        sign=sign,
    )
    pace = Pace.limited(rate_limit)
    with ExitStack() as stack:
        from_engine = stack.enter_context(closing(from_choice.open_engine(read_only=True)))
        to_engine = stack.enter_context(closing(to_choice.open_engine()))
        if dask is not None:
            from_engine = from_choice.portable(from_engine)
            stack.enter_context(closing(from_engine.backend))
        to_engine, executor = for_workers(stack, dask, to_choice, to_engine)
        bar = stack.enter_context(Bar("copying"))
        report = copy_refs(from_engine, to_engine, refs=refs, pace=pace, progress=bar, executor=executor)
    emit({"ok": report.ok, **fields_of(report)}, _lines(report), as_json=as_json)
    if not report.ok:
        error = next((ref.error for ref in report.refs if ref.error is not None), None)
        context.exit(RetryableError.exit_code if error is None else error.exit_code)


def _lines(report: CopyReport) -> list[str]:
    lines = [red(f"{printable(ref.name)}: {printable(ref.error)}") for ref in report.refs if ref.error is not None]
    lines += [f"warning: {printable(warning)}" for warning in report.warnings]
    rows = [[printable(ref.name), ref.kind, ref.outcome, short_root(ref.root), str(ref.snapshots)] for ref in report.refs]
    styles = [red if ref.error is not None or ref.outcome == "behind" else str for ref in report.refs]
    lines += table(["REF", "KIND", "OUTCOME", "NOW AT", "SNAPSHOTS"], rows, right={"SNAPSHOTS"}, styles=styles)
    if not report.refs:
        lines = ["the source has no refs yet: nothing to copy"]
    copied = f"copied {counted(report.snapshots, 'snapshot')}, {counted(report.blocks, 'block')}"
    sizes = f"read {human_bytes(report.read_bytes)}, wrote {human_bytes(report.written_bytes)}"
    there = f"{counted(report.snapshots_there, 'snapshot')} and {counted(report.blocks_there, 'block')} were there"
    return [*lines, (green if report.ok else str)(f"{copied}; {sizes}; {there}")]
