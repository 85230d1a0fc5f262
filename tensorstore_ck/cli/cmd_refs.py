"""Commands on refs and marks: branch, reset, tag, untag, annotate, mark. Each writes one log entry."""

import shlex

import click

from tensorstore_ck.cli.complete_names import complete_address, complete_ref, complete_tag
from tensorstore_ck.cli.options import StoreChoice, command, named_number, store_options
from tensorstore_ck.cli.output import emit, none_text, printable, snapshot_line, snapshot_table
from tensorstore_ck.log.snapshot import Snapshot


@command("List the branches, or make one.", "tsck branch", "tsck branch exp/lr2 runs/gpt@1000")
@click.argument("name", required=False)
@click.argument("address", required=False, shell_complete=complete_address)
@store_options(writes=True)
def branch(name: str | None, address: str | None, choice: StoreChoice, *, as_json: bool) -> None:
    """List the branches, or make branch NAME at the snapshot ADDRESS."""
    _list_or_make("branch", name, address, choice, made_by="`tsck put FILE --ref NAME`", as_json=as_json)


@command("Move a branch to any snapshot.", "tsck reset runs/gpt runs/gpt~3")
@click.argument("name", shell_complete=complete_ref)
@click.argument("address", shell_complete=complete_address)
@store_options(writes=True)
def reset(name: str, address: str, choice: StoreChoice, *, as_json: bool) -> None:
    """Move branch NAME to the snapshot ADDRESS, for example back to before a bad step; its history keeps the old position."""
    with choice.open() as store:
        _done(f"branch {printable(name)} is now at", store.reset(name, address), as_json=as_json)


@command("List the tags, or make one.", "tsck tag", "tsck tag paper-v1 runs/gpt@9000")
@click.argument("name", required=False)
@click.argument("address", required=False, shell_complete=complete_address)
@store_options(writes=True)
def tag(name: str | None, address: str | None, choice: StoreChoice, *, as_json: bool) -> None:
    """List the tags, or give the snapshot ADDRESS the tag NAME, which never moves."""
    _list_or_make("tag", name, address, choice, made_by="`tsck tag NAME ADDRESS`", as_json=as_json)


@command("Remove a tag.", "tsck untag paper-v1")
@click.argument("name", shell_complete=complete_tag)
@store_options(writes=True)
def untag(name: str, choice: StoreChoice, *, as_json: bool) -> None:
    """Remove the tag NAME; `tsck undo` brings it back. The snapshot stays while another ref or pin holds it."""
    with choice.open() as store:
        store.untag(name)
    undo = choice.complete(f"`tsck undo {shlex.quote(name)}`")
    emit({"untagged": name}, [f"removed tag {printable(name)}; {undo} brings it back for a day"], as_json=as_json)


@command("Add metrics to a snapshot.", "tsck annotate runs/gpt@9000 mmlu=0.61 val_loss=2.21")
@click.argument("address", shell_complete=complete_address)
@click.argument("metrics", metavar="NAME=NUMBER...", type=named_number, nargs=-1, required=True)
@store_options(writes=True)
def annotate(address: str, metrics: tuple[tuple[str, float], ...], choice: StoreChoice, *, as_json: bool) -> None:
    """Add metrics to the snapshot ADDRESS that were measured after it was put."""
    with choice.open() as store:
        _done("annotated", store.annotate(address, dict(metrics)), as_json=as_json)


@command("Mark a snapshot as bad.", 'tsck mark runs/gpt@900 bad --reason "loss spike"', "tsck mark runs/gpt@900 --clear")
@click.argument("address", shell_complete=complete_address)
@click.argument("mark", metavar="[bad]", type=click.Choice(["bad"]), default="bad")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown by `tsck log`.")
@click.option("--clear", is_flag=True, help="Remove the mark.")
@store_options(writes=True)
def mark(address: str, mark: str, reason: str, choice: StoreChoice, *, clear: bool, as_json: bool) -> None:
    """Mark the snapshot ADDRESS as bad, so that restoring it needs --allow-marked."""
    if clear and reason:
        raise click.UsageError("--clear takes no --reason.")
    with choice.open() as store:
        snapshot = store.mark(address, "" if clear else mark, reason=reason)
        _done("cleared the mark of" if clear else "marked", snapshot, as_json=as_json)


def _list_or_make(kind: str, name: str | None, address: str | None, choice: StoreChoice, *, made_by: str, as_json: bool) -> None:
    is_branch = kind == "branch"
    with choice.open(read_only=name is None) as store:
        if name is None:
            refs = dict(sorted((store.branches() if is_branch else store.tags()).items()))
            none = none_text("branches" if is_branch else "tags", made_by, () if refs else store.forgotten(), kind)
            lines = snapshot_table([*refs.values()], [*refs], kind.upper()) if refs else [choice.complete(none)]
            emit(refs, lines, as_json=as_json)
            return
        if address is None:
            raise click.UsageError(f"{kind} {name!r} needs a snapshot: give an ADDRESS, as in `tsck {kind} {name} runs/gpt~1`.")
        made = store.branch(name, address) if is_branch else store.tag(name, address)
        _done(f"{kind} {printable(name)} is at", made, as_json=as_json)


def _done(what: str, snapshot: Snapshot, *, as_json: bool) -> None:
    emit(snapshot, [snapshot_line(what, snapshot)], as_json=as_json)
