"""The commands log, show and diff. They change nothing; without --stats they read no tensor data and need no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from tensorstore_ck.cli.complete_names import complete_address, complete_metric
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import (
    MAX_SHOWN,
    counted,
    facts,
    fields_of,
    first_names,
    indented,
    mark_text,
    metrics_text,
    none_text,
    printable,
    red,
    short_number,
    snapshot_table,
    table,
)
from tensorstore_ck.cli.pager import emit_paged, no_pager_option
from tensorstore_ck.cli.plot import draw_png, draw_text
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.log.snapshot import GroupCost, PinnedSnapshot, SnapshotDetails
from tensorstore_ck.log.snapshot_condition import names_in
from tensorstore_ck.maintenance.describe import SnapshotDiff
from tensorstore_ck.maintenance.metric_plot import metric_points

if TYPE_CHECKING:
    from tensorstore_ck.state.statistics import ChangeStatistics, TensorStatistics

_CHANGES: Final = ("NAME", "CHANGE", "OLD", "NEW")


@command(
    "Show the history of a branch or tag.",
    "tsck log runs/gpt -n 10",
    "tsck log runs/gpt --where 'lr < 1e-4 and config.dropout = 0.1' --sort val_loss",
    "tsck log runs/gpt --plot val_loss",
)
@click.argument("ref", required=False, shell_complete=complete_address)
@click.option("-n", "--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@click.option("--where", metavar="CONDITION", help="Only those that satisfy it, as in `tsck find`: metrics, attributes, step, age ...")
@click.option("--sort", metavar="NAME", help="By a metric, an attribute, step, size or age, lowest first; default: newest first.")
@click.option("--desc", is_flag=True, help="With --sort: highest first.")
@click.option("--plot", "metric", metavar="METRIC", shell_complete=complete_metric, help="Draw a metric over the snapshots instead.")
@click.option("--output", metavar="FILE", type=click.Path(), help="With --plot: into a PNG.")
@no_pager_option
@store_options()
def log(
    ref: str | None,
    limit: int | None,
    choice: StoreChoice,
    *,
    where: str | None,
    sort: str | None,
    desc: bool,
    metric: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Show the history of a branch or tag, newest first; of all branches together without REF.

    KEPT BY lists the tags, pins and policy rules that keep a snapshot (see `tsck policy`).

    --where and --sort name metrics; what TrainingState notes (lr, samples_seen, code_version ...); scalars of the metadata by their path;
    epoch, triggers and save_seconds. `tsck find` asks the same of all stores of a catalog.
    """
    if desc and sort is None:
        raise click.UsageError("--desc is for --sort.")
    if output is not None and metric is None:
        raise click.UsageError("--output is for --plot.")
    with choice.look() as store:
        snapshots = store.log(ref, limit=None if where or sort else limit)
        kept_by = store.explain_retention(ref) if ref else {}
        forgotten = () if snapshots else store.forgotten()
    if where is not None:
        snapshots = snapshots.where(where)
    if sort is not None:
        snapshots = snapshots.sorted_by(sort, descending=desc)
    snapshots = snapshots[:limit]
    if metric is not None:
        points = metric_points(snapshots, metric)
        if output is not None:
            draw_png(points, metric, output)
        emit_paged(points, draw_text(points, metric), as_json=as_json)
        return
    names = None if ref else [snapshot.ref for snapshot in snapshots]
    none = choice.complete(none_text("snapshots", "`tsck put FILE --ref NAME`", forgotten, "branch"))
    nothing = "no snapshot matches" if where is not None else none
    lines = snapshot_table(snapshots, names, kept_by=kept_by, asked=names_in(where, sort)) if snapshots else [nothing]
    emit_paged(snapshots, lines, as_json=as_json)


@command("Show what is in a snapshot.", "tsck show runs/gpt@1000", "tsck show runs/gpt --stats")
@click.argument("address", shell_complete=complete_address)
@click.option("--stats", is_flag=True, help="Also minimum, mean, norm, NaN and so on of each tensor: reads all of them.")
@click.option("--all", "everything", is_flag=True, help=f"All tensors and values, not only the first {MAX_SHOWN}.")
@no_pager_option
@store_options()
def show(address: str, choice: StoreChoice, *, stats: bool, everything: bool, as_json: bool) -> None:
    """Show what is in the snapshot at ADDRESS: its metrics and metadata, tensors and values.

    With --stats also what the elements of each tensor are: see `Store.statistics`.
    """
    limit = None if everything else MAX_SHOWN
    with choice.look() as store:
        details = store.show(address)
        statistics = store.statistics(details.snapshot.root) if stats else []
        pins = [pin for pin in store.pins() if pin.snapshot.id == details.snapshot.id]
    lines = _details_lines(details, pins, limit)
    if stats:
        lines += _statistics_lines(statistics, limit)
    emit_paged({**fields_of(details), "pins": pins, **({"statistics": statistics} if stats else {})}, lines, as_json=as_json)


def _statistics_lines(statistics: "Sequence[TensorStatistics]", limit: int | None) -> list[str]:
    lost = [tensor.name for tensor in statistics if tensor.nan or tensor.inf]
    invalid = red(f"; {counted(len(lost), 'tensor')} with NaN or infinity: {first_names(lost)}") if lost else ""
    head = ["NAME", "NAN", "INF", "ZEROS", "MIN", "MAX", "MEAN", "STD", "NORM"]
    rows = [
        [
            printable(tensor.name),
            *(_count(count) for count in (tensor.nan, tensor.inf, tensor.zeros)),
            *(_number(number) for number in (tensor.min, tensor.max, tensor.mean, tensor.std, tensor.norm)),
        ]
        for tensor in statistics[:limit]
    ]
    styles = [red if tensor.nan or tensor.inf else str for tensor in statistics[:limit]]
    shown = indented(table(head, rows, right={*head[1:]}, styles=styles))
    return ["", f"statistics of {counted(len(statistics), 'tensor')}{invalid}", *shown, *_rest(len(statistics) - len(rows))]


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _number(number: float | None) -> str:
    return "-" if number is None else short_number(number)


def _details_lines(details: SnapshotDetails, pins: Sequence[PinnedSnapshot], limit: int | None) -> list[str]:
    snapshot = details.snapshot
    logical, stored, new = map(human_bytes, (snapshot.logical_bytes, details.stored_bytes, snapshot.new_bytes))
    holders = [printable(pin.owner) + ("" if pin.expires_ns is None else f" until {iso_time(pin.expires_ns)}") for pin in pins]
    lines = facts(
        [
            ("root", snapshot.root),
            ("ref", printable(snapshot.ref)),
            ("step", "" if snapshot.step is None else str(snapshot.step)),
            ("time", iso_time(snapshot.time_ns)),
            ("parent", snapshot.parent or "none"),
            ("metrics", metrics_text(snapshot.metrics)),
            ("attributes", metrics_text(snapshot.attributes)),
            ("epoch", "" if snapshot.epoch is None else f"{snapshot.epoch:g}"),
            ("saved by", printable(", ".join(snapshot.triggers))),
            ("took", "" if snapshot.duration_ns is None else f"{snapshot.duration_ns / 1e9:.2f} s"),
            ("mark", red(mark_text(snapshot)) if snapshot.mark else ""),
            ("pinned by", ", ".join(holders)),
            ("size", f"{logical}, stored as {stored}; the save made the store grow by {new}"),
            ("ranks", str(details.ranks) if details.ranks > 1 else ""),
            ("id", snapshot.id),
        ]
    )
    if details.metadata:
        lines += ["", "metadata", *indented(facts((printable(key), printable(value)) for key, value in details.metadata.items()))]
    if details.values:
        shown = list(details.values.items())[:limit]
        lines += ["", counted(len(details.values), "value"), *indented(facts((printable(path), printable(value)) for path, value in shown))]
        lines += _rest(len(details.values) - len(shown))
    if details.groups:
        costs = [[printable(it.name), *_cost(it)] for it in details.groups[:limit]]
        lines += [
            "",
            "space used",
            *indented(table(["GROUP", "SIZE", "STORED", "RATIO", "CODECS"], costs, right={"SIZE", "STORED", "RATIO"})),
        ]
        lines += _rest(len(details.groups) - len(costs))
    if details.tensors:
        rows = [[printable(name), dtype, _shape(shape), human_bytes(size)] for name, dtype, shape, size in details.tensors[:limit]]
        head = ["NAME", "DTYPE", "SHAPE", "SIZE"]
        if details.placements:
            head.append("PLACEMENT")
            rows = [[*row, details.placements.get(name, "")] for row, (name, *_) in zip(rows, details.tensors, strict=False)]
        lines += ["", counted(len(details.tensors), "tensor"), *indented(table(head, rows, right={"SIZE"}))]
        lines += _rest(len(details.tensors) - len(rows))
    return lines


def _cost(group: GroupCost) -> list[str]:
    total = sum(group.codecs.values())
    codecs = ", ".join(f"{name} {size / total:.0%}" for name, size in sorted(group.codecs.items(), key=lambda item: -item[1]))
    ratio = f"{group.stored_bytes / group.raw_bytes:.0%}" if group.raw_bytes else "-"
    return [human_bytes(group.raw_bytes), human_bytes(group.stored_bytes), ratio, codecs]


def _rest(count: int) -> list[str]:
    return [f"  ... and {count:,} more (--all shows them)"] if count > 0 else []


@command("Show what differs between two snapshots.", "tsck diff runs/gpt~1 runs/gpt", "tsck diff runs/gpt exp/lr2 --stats")
@click.argument("old", shell_complete=complete_address)
@click.argument("new", shell_complete=complete_address)
@click.option("--stats", is_flag=True, help="Also by how much the numbers changed: reads the tensors that differ.")
@no_pager_option
@store_options()
def diff(old: str, new: str, choice: StoreChoice, *, stats: bool, as_json: bool) -> None:
    """Show which tensors and values differ between two snapshots, and by how many bytes.

    With --stats also by how much the numbers in these tensors changed: see `Store.change_statistics`.
    """
    with choice.look() as store:
        difference = store.diff(old, new)
        statistics = store.change_statistics(difference.old.root, difference.new.root) if stats else []
    lines = _diff_lines(difference)
    if statistics:
        lines += ["", "by how much the numbers changed", *_changes_lines(statistics)]
    emit_paged({**fields_of(difference), "statistics": statistics} if stats else difference, lines, as_json=as_json)


def _changes_lines(statistics: "Sequence[ChangeStatistics]") -> list[str]:
    head = ["NAME", "CHANGE", "RELATIVE", "MAX", "NAN", "INF"]
    rows = [
        [
            printable(change.name),
            change.kind,
            *map(_number, (change.relative_change, change.max_change)),
            *map(_count, (change.nan, change.inf)),
        ]
        for change in statistics
    ]
    styles = [red if change.nan or change.inf else str for change in statistics]
    return indented(table(head, rows, right={*head[2:]}, styles=styles))


def _diff_lines(difference: SnapshotDiff) -> list[str]:
    lines = snapshot_table([difference.old, difference.new], ["old", "new"], "")
    lines += ["", _summary(difference)]
    if difference.tensors:
        rows = [[printable(it.name), it.change, _form(it.old), _form(it.new), human_bytes(it.changed_bytes)] for it in difference.tensors]
        lines += [
            "",
            counted(len(difference.tensors), "tensor"),
            *indented(table(["NAME", "CHANGE", "OLD", "NEW", "BYTES"], rows, right={"BYTES"})),
        ]
    if difference.values:
        values = [[printable(change.path), change.change, _value(change.old), _value(change.new)] for change in difference.values]
        lines += ["", counted(len(difference.values), "value"), *indented(table(_CHANGES, values))]
    return lines


def _summary(difference: SnapshotDiff) -> str:
    if not difference.tensors and not difference.values and not difference.layout_changed:
        return "the same tensors and values"
    alike = f"{counted(difference.unchanged_tensors, 'tensor')} and {counted(difference.unchanged_values, 'value')} are the same"
    layout = "; the layout differs" if difference.layout_changed else ""
    return f"{human_bytes(difference.changed_bytes)} of {human_bytes(difference.tensor_bytes)} differ; {alike}{layout}"


def _form(form: tuple[str, tuple[int, ...], int] | None) -> str:
    return "-" if form is None else f"{form[0]} {_shape(form[1])}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _value(value: object) -> str:
    return "-" if value is None else printable(value)
