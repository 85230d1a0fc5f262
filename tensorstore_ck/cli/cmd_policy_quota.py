"""The commands policy and quota: what branches keep, and how much they may add to the store."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

import click

from tensorstore_ck.backend.cold.allowed_locations import can_allow, is_allowed
from tensorstore_ck.cli.allowed_locations import note_places, read_places
from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, byte_count, command, price_option, store_options
from tensorstore_ck.cli.output import counted, emit, fields_of, printable, red, say, short_root, shortened_table, step_text, table
from tensorstore_ck.common.prices import GB, NO_PRICES, Prices, usd_text
from tensorstore_ck.common.similar_names import similar_names
from tensorstore_ck.common.units import human_bytes, typed_bytes
from tensorstore_ck.log.quota import Quota
from tensorstore_ck.log.retention import Policy, parse_rule
from tensorstore_ck.maintenance.apply_policies import RetentionReport

RULES: Final = "keep_last=5 keep_every=1000 keep_best=3:val_loss:min keep_every_seconds=6h keep_steps=1000,5000 keep_first=yes"
ACTIONS: Final = ("show", "set", "test", "apply", "remove")
MAX_SHOWN: Final = 60
MAX_NAMED: Final = 8


@command(
    "Set retention rules for branches.",
    "tsck policy set 'runs/*' keep_last=5 keep_best=3:val_loss:min expire_after=30d",
    "tsck policy show",
    "tsck policy apply --dry-run",
    "tsck policy set 'runs/*' recode_after=7d move_after=30d:s3://cold/ckpt?storage_class=GLACIER_IR",
    "tsck policy test runs/gpt keep_last=2 keep_every=1000",
    "tsck policy remove 'runs/*'",
)
@click.argument("action", type=click.Choice(ACTIONS), default="show", metavar=f"[{'|'.join(ACTIONS)}]")
@click.argument("target", required=False, shell_complete=complete_ref, metavar="[GLOB|REF]")
@click.argument("rules", nargs=-1, metavar="[RULE=VALUE]...")
@click.option("--dry-run", is_flag=True, help="With apply: only print why each snapshot stays or goes.")
@price_option
@store_options(writes=True)
def policy(
    action: str, target: str | None, rules: tuple[str, ...], choice: StoreChoice, *, dry_run: bool, price: tuple[str, ...], as_json: bool
) -> None:
    """Set retention rules for branches; each save applies those of its branch, and `apply` those of all branches or of each REF.

    Rules: keep_last=5, keep_best=3:val_loss:min (more metrics, joined by ','), keep_every=1000 (steps), keep_every_seconds=6h,
    keep_steps=1000,5000, keep_first=yes, keep_younger=7d, keep_epochs=5, keep_triggers=every_epochs,last: a snapshot stays if any of them
    keeps it. What the triggers at_steps and at_fraction saved stays without keep_milestones=no. Limits on that: expire_after=30d,
    max_bytes=2TB. The newest, a second one as a fallback, and tagged or pinned snapshots always stay. `test REF` shows what the policies,
    or RULEs, would do. `tsck tier` applies the age rules: recode_after=7d, move_after=30d:s3://cold/ckpt (more stages, joined by ','). This
    user's commands on this host may then use that location; others may need --allow-place. All jobs that save to the branches share
    max_write_rate=2GB, bytes a second.
    """
    if dry_run and action != "apply":
        raise click.UsageError("--dry-run is for apply.")
    if price and not dry_run and action != "test":
        raise click.UsageError("--price is for test and for apply --dry-run.")
    prices = Prices.parse(price)
    if action == "apply":
        apply_policies(choice, rules if target is None else (target, *rules), dry_run=dry_run, prices=prices, as_json=as_json)
        return
    if (target is None) != (action == "show"):
        raise click.UsageError("`show` lists all policies; `set`, `test` and `remove` need a GLOB or REF.")
    if bool(rules) != (action == "set") and action != "test":
        raise click.UsageError("`set` needs at least one RULE=VALUE, such as keep_last=3; `test` takes some, and no other action does.")
    values = _rules(rules)
    stages = values.get("move_after")
    urls = [stage[1] for stage in stages if len(stage) == 2] if isinstance(stages, list) else []
    named = [url for url in urls if can_allow(url)] if action == "set" else []
    choice = replace(choice, places=(*choice.places, *named))  # setting a policy allows its locations
    with choice.open(read_only=action in ("show", "test")) as store:
        if action == "set":
            made = store.set_policy(str(target), **values)
            note_places([url for url in named if not is_allowed(url, store.url, read_places())])
            _note_unmatched(str(target), store.branches())
            emit({"glob": target, "policy": made.encode()}, [f"{printable(str(target))}: {made}"], as_json=as_json)
        elif action == "remove":
            store.remove_policy(str(target))
            emit({"removed": target}, [f"removed the policy for {printable(str(target))}"], as_json=as_json)
        elif action == "test":
            report = store.apply_policies(str(target), dry_run=True, rules=values or None)
            _emit_report(report, choice, prices.of(store.url), as_json=as_json)
        else:
            policies = store.policies()
            emit({glob: own.encode() for glob, own in policies.items()}, map(choice.complete, _policy_lines(policies)), as_json=as_json)


def _note_unmatched(glob: str, refs: Collection[str]) -> None:
    """Warns of a glob that may be mistyped."""
    if refs and not any(fnmatchcase(ref, glob) for ref in refs):
        nearest = list(dict.fromkeys((*similar_names(glob, refs), *refs)))
        known = ", ".join(nearest[:MAX_NAMED]) + (", ..." if len(nearest) > MAX_NAMED else "")
        say(f"tsck: warning: no branch matches {printable(glob)!r} yet (branches: {printable(known)})", err=True)


def apply_policies(choice: StoreChoice, refs: Sequence[str], *, dry_run: bool, as_json: bool, prices: Prices = NO_PRICES) -> None:
    """Forgets what the policies no longer keep, and prints the reasons."""
    with choice.open(read_only=dry_run) as store:
        report = store.apply_policies(*refs, dry_run=dry_run)
        _emit_report(report, choice, prices.of(store.url), as_json=as_json)


def _emit_report(report: RetentionReport, choice: StoreChoice, usd_per_gb: float | None, *, as_json: bool) -> None:
    """`usd_per_gb`: the price of the store's own location, at which what goes is counted."""
    saved = None if usd_per_gb is None or report.frees_bytes is None else report.frees_bytes / GB * usd_per_gb
    lines = [*map(choice.complete, _verdict_lines(report)), *([] if saved is None else [f"that saves {usd_text(saved)} a month"])]
    emit({**fields_of(report), "saves_usd_per_month": saved}, lines, as_json=as_json)


def _rules(words: tuple[str, ...]) -> dict[str, object]:
    rules: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise click.UsageError(f"{word!r} is not RULE=VALUE, such as: {RULES}")
        if name in rules:
            raise click.UsageError(f"{name} is given twice")
        rules[name] = parse_rule(name, value)
    return rules


def _policy_lines(policies: Mapping[str, Policy]) -> Iterator[str]:
    if not policies:
        yield f"no policies, so every snapshot stays: `tsck policy set 'runs/*' {RULES.partition(' keep_best')[0]}` makes one"
    yield from table(["REFS", "WHAT STAYS"], [[printable(glob), printable(str(own))] for glob, own in policies.items()]) if policies else ()


def _verdict_lines(report: RetentionReport) -> Iterator[str]:
    """Which snapshots stay or go, and why."""
    if not report.branches:
        yield "no policy matches these branches: every snapshot stays (see `tsck policy`)"
        return
    for branch in report.branches:
        yield f"{printable(branch.ref)}: {counted(len(branch.snapshots), 'snapshot')}, by {', '.join(map(printable, branch.policies))}"
        rows = [
            [
                short_root(verdict.snapshot.root),
                step_text(verdict.snapshot.step),
                "stays" if verdict.stays else "goes",
                printable(", ".join(verdict.why)),
                "" if verdict.frees_bytes is None else human_bytes(verdict.frees_bytes),
            ]
            for verdict in reversed(branch.snapshots)
        ]
        header = ["ROOT", "STEP", "", "WHY", "FREES"]
        going = [number for number, each in enumerate(reversed(branch.snapshots), 1) if not each.stays]
        yield from shortened_table(header, rows, right={"STEP", "FREES"}, limit=max(MAX_SHOWN, *going, 0), rest="older ones that stay")
    gone = counted(report.going, "snapshot")
    if report.frees_bytes is None:
        undo = "; `tsck undo` brings them back for a day, then `tsck gc` frees what nothing else holds" if report.going else ""
        yield f"{gone} went{undo}"
    else:
        yield f"{gone} would go; `tsck gc` then frees {human_bytes(report.frees_bytes)}"


@command(
    "Limit what branches add to the store.", "tsck quota set 'runs/*' --warn 1TB --refuse 2TB", "tsck quota", "tsck quota remove 'runs/*'"
)
@click.argument("action", type=click.Choice(["show", "set", "remove", "list"]), default="show", metavar="[show|set|remove]")
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
            _note_unmatched(str(glob), store.branches())
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
