"""The command quota: limits of what branches add to the store."""

from typing import Final

import click

from tensorstore_ck.cli.options import StoreChoice, byte_count, command, store_options
from tensorstore_ck.cli.output import emit, fields_of, printable, red, table
from tensorstore_ck.common.units import human_bytes, typed_bytes
from tensorstore_ck.log.quota import Quota

ACTIONS: Final = ("show", "set", "remove")


@command(
    "Limit what branches add to the store.",
    "tsck quota set 'runs/*' --warn 1TB --refuse 2TB",
    "tsck quota",
    "tsck quota remove 'runs/*'",
)
@click.argument("action", type=click.Choice((*ACTIONS, "list")), default="show", metavar=f"[{'|'.join(ACTIONS)}]")
@click.argument("glob", required=False)
@click.option("--warn", type=byte_count, metavar="SIZE", help="With set: saves warn from here on.")
@click.option("--refuse", type=byte_count, metavar="SIZE", help="With set: saves are refused from here on.")
@store_options(writes=True)
def quota(action: str, glob: str | None, warn: int | None, refuse: int | None, choice: StoreChoice, *, as_json: bool) -> None:
    """Limit what the snapshots of the branches that match GLOB add to the store, all together.

    A snapshot counts with the bytes by which the store grew at its save, for the branch that it was saved to, until no branch, tag, pin or
    undo window holds it. A save that finds the quota used up is refused. Builds without quotas ignore them.
    """
    if (glob is None) != (action in ("show", "list")):
        raise click.UsageError("`show` lists all quotas; `set` and `remove` need a GLOB.")
    if (warn is not None or refuse is not None) != (action == "set"):
        raise click.UsageError("--warn and --refuse are for set, which needs at least one of them.")
    with choice.open(read_only=glob is None) as store:
        if action == "set":
            made = store.set_quota(str(glob), warn=warn, refuse=refuse)
            emit(_document(made), _quota_lines({made.glob: made}), as_json=as_json)
        elif action == "remove":
            store.remove_quota(str(glob))
            emit({"removed": glob}, [f"removed the quota for {printable(str(glob))}"], as_json=as_json)
        else:
            quotas = store.quotas()
            emit({name: _document(own) for name, own in quotas.items()}, map(choice.complete, _quota_lines(quotas)), as_json=as_json)


def _document(quota: Quota) -> dict[str, object]:
    return {**fields_of(quota), "share": quota.share, "state": quota.state}


def _quota_lines(quotas: dict[str, Quota]) -> list[str]:
    if not quotas:
        return ["no quotas: `tsck quota set GLOB --warn SIZE --refuse SIZE` sets one"]
    rows = [
        [
            printable(own.glob),
            human_bytes(own.used_bytes),
            "-" if own.warn_bytes is None else typed_bytes(own.warn_bytes),
            "-" if own.refuse_bytes is None else typed_bytes(own.refuse_bytes),
            f"{own.share:.0%}",
            own.state,
        ]
        for own in quotas.values()
    ]
    styles = [red if own.state != "ok" else str for own in quotas.values()]
    return table(["GLOB", "USED", "WARN", "REFUSE", "SHARE", "STATE"], rows, right={"USED", "WARN", "REFUSE", "SHARE"}, styles=styles)
