"""The commands advise and plan: how often a job should save, and what its snapshots will take before it begins."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.save_duration import SaveEstimate, estimate_save
from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, byte_count, byte_rate, command, json_option, seconds, store_options
from tensorstore_ck.cli.output import emit, facts, fields_of, indented, printable, table
from tensorstore_ck.cli.plot import save_png
from tensorstore_ck.common.units import human_bytes, human_seconds
from tensorstore_ck.maintenance.advise import Advice
from tensorstore_ck.maintenance.count_parameters import count_parameters
from tensorstore_ck.maintenance.metric_plot import new_figure
from tensorstore_ck.maintenance.plan_training import DTYPES, OPTIMIZERS, PlannedSaves, TrainingPlan, bytes_of_parameter, plan_training

_COUNT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}


def parameter_count(text: str) -> int:
    """``70B``, ``7.5B``, ``350M`` parameters."""
    match = _COUNT.fullmatch(text.strip())
    count = float(match[1]) * 10 ** _POWERS[match[2].lower()] if match is not None else 0
    if not 1 <= count < 1e18:
        raise click.BadParameter(f"{text!r} is no number of parameters such as 70B or 350M")
    return int(count)


@command(
    "How much space, time and money will snapshots take?",
    "tsck plan --params 70B --ranks 512 --every 30m --days 14 --gbps 40",
    "tsck plan ./llama/config.json --ranks 64 --keep 5 --keep-every 1d --gbps 10 --price 0.023",
    "tsck plan ./llama/model.safetensors.index.json --ranks 8 --at s3://bucket/ckpt",
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--params", type=parameter_count, metavar="COUNT", help="Parameters, such as 70B; instead of MODEL.")
@click.option(
    "--dtype", type=click.Choice([*DTYPES]), default="bf16", show_default=True, help="Of the weights that the model computes with."
)
@click.option("--optimizer", type=click.Choice([*OPTIMIZERS]), default="adamw", show_default=True, help="What it keeps of each parameter.")
@click.option("--master/--no-master", default=True, show_default=True, help="Whether it also keeps the weights in fp32.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, metavar="COUNT", help="Processes that save together.")
@click.option("--days", type=click.FloatRange(0, min_open=True), default=14.0, show_default=True, help="How long the training runs.")
@click.option("--every", type=seconds, metavar="TIME", help="Training between two saves; default: the best interval.")
@click.option("--keep", type=click.IntRange(1), default=5, show_default=True, metavar="COUNT", help="The policy keep_last.")
@click.option("--keep-every", type=seconds, metavar="TIME", help="The policy keep_every_seconds: also one snapshot of each such period.")
@click.option("--gbps", type=click.FloatRange(0, min_open=True), metavar="GB", help="Gigabytes a second that all ranks write together.")
@click.option("--read", "read", type=byte_rate, metavar="RATE", help="Bytes a second that all ranks read; default: as they write.")
@click.option("--at", metavar="URL", help="Measure this location instead, with a tenth of the snapshot, at most 1 GiB: see `tsck probe`.")
@click.option("--mtbf", type=seconds, metavar="TIME", help="Mean time between failures of the job; default: 50,000 h divided by the ranks.")
@click.option(
    "--stall", type=seconds, metavar="TIME", help="How long a save holds up the training; default: a copy of a rank's share at 10 GB/s."
)
@click.option("--price", type=click.FloatRange(0), metavar="USD", help="What a gigabyte costs a month there.")
@json_option
def plan(model: Path | None, *, params: int | None, at: str | None, gbps: float | None, as_json: bool, **given: Any) -> None:
    """Compute what the snapshots of a training will take: bytes a parameter, files, times, the best interval, space and money.

    MODEL is a config.json (an estimate of the parameters of a decoder), a safetensors index, or a folder with one; or give --params.
    """
    if (model is None) == (params is None):
        raise click.UsageError("Give MODEL or --params.")
    if (at is None) == (gbps is None):
        raise click.UsageError("Give --gbps or --at.")
    counted, how = (params, "given") if params is not None else count_parameters(model or Path())
    assert counted is not None
    wanted = TrainingPlan(
        parameters=counted,
        dtype=given["dtype"],
        optimizer=given["optimizer"],
        master=given["master"],
        ranks=given["ranks"],
        days=given["days"],
        every_seconds=given["every"],
        keep_last=given["keep"],
        keep_every_seconds=given["keep_every"] or 0.0,
        mtbf_seconds=given["mtbf"],
        stall_seconds=given["stall"],
        usd_per_gb_month=given["price"],
        **_speeds(at, gbps, given, counted),
    )
    planned = plan_training(wanted)
    emit({**fields_of(planned), "parameters_from": how}, _lines(planned, how, wanted), as_json=as_json)


def _speeds(at: str | None, gbps: float | None, given: dict[str, Any], parameters: int) -> dict[str, float]:
    if at is None:
        written = (gbps or 0) * 1e9
        return {"write_bytes_per_second": written, "read_bytes_per_second": given["read"] or written}
    shape = TrainingPlan(parameters=parameters, dtype=given["dtype"], optimizer=given["optimizer"], master=given["master"])
    size = int(parameters * sum(bytes_of_parameter(shape).values()))
    with closing(open_backend(at)) as backend:
        measured: SaveEstimate = estimate_save(backend, size, given["ranks"])
    return {
        "write_bytes_per_second": measured.write_bytes_per_second,
        "read_bytes_per_second": given["read"] or measured.read_bytes_per_second,
        "commit_seconds": measured.commit_seconds,
    }


def _lines(planned: PlannedSaves, how: str, wanted: TrainingPlan) -> Iterator[str]:
    yield f"{planned.parameters:,} parameters ({printable(how)}), {planned.bytes_per_parameter:g} bytes each:"
    yield from indented(facts((name, f"{size:g}") for name, size in planned.parts.items()))
    costs, interval = planned.costs, planned.interval

    def cost(name: str, seconds_: float) -> str:
        return human_seconds(seconds_) + (" (assumed)" if name in planned.assumed else "")

    yield ""
    yield from facts(
        [
            ("a snapshot", f"{human_bytes(planned.bytes_per_snapshot)}, in about {planned.files_per_snapshot:,} files"),
            ("save, in the background", human_seconds(planned.save_seconds)),
            ("restore", human_seconds(planned.restore_seconds)),
            ("stall of a save", cost("stall", costs.stall)),
            ("restart after a failure", cost("restart", costs.restart)),
            ("time between failures", cost("mtbf", costs.mtbf)),
        ]
    )
    yield ""
    rows = [
        ["planned", human_seconds(interval), f"{planned.training_share:.2%}"],
        ["best", human_seconds(planned.best_interval), f"{planned.best_training_share:.2%}"],
    ]
    rows += [["Young", human_seconds(planned.young_interval), ""], ["Daly", human_seconds(planned.daly_interval), ""]]
    yield from table(["", "INTERVAL", "TRAINING"], rows, right={"INTERVAL", "TRAINING"})
    yield f"TRAINING is the share of wall time that trains, failures included; saves alone hold up {planned.stall_share:.2%}"
    yield ""
    small = human_bytes(planned.kept_bytes_small)
    written = human_bytes(planned.written_bytes)
    yield f"in {wanted.days:g} days: {planned.saves:,} saves, {written} written; {planned.kept:,} snapshots kept at the end"
    yield f'they use {human_bytes(planned.kept_bytes)}, with codec="small" and deltas about {small}'
    if planned.usd_per_month is not None:
        yield f'they cost {planned.usd_per_month:,.2f} USD a month, with codec="small" about {planned.usd_per_month_small:,.2f}'
    if planned.too_slow:
        yield f"a save takes longer than the {human_seconds(interval)} until the next one: save less often, or use a faster location"


FORMULA = "ETTR = t / (M e^((r + l t/(t+s)) / M) (e^((t+s)/M) - 1)); t: interval, s: stall, l: lag, r: restart, M: MTBF (Daly 2006, eq. 20)"


@command(
    "How often should a job save?",
    "tsck advise runs/gpt",
    "tsck advise runs/gpt --stall 2s --lag 90s --restart 5m --mtbf 6h",
    "tsck advise runs/gpt --stall 2s --bandwidth 500MB --plot advice.png",
)
@click.argument("ref", shell_complete=complete_ref)
@click.option("--stall", type=seconds, metavar="TIME", help="How long a save holds up the training; default: as Checkpointer measured.")
@click.option("--lag", type=seconds, metavar="TIME", help="From then until the snapshot is published; default: as measured, or 0s.")
@click.option("--restart", type=seconds, metavar="TIME", help="From a failure until training goes on; default: the restore time, or 5m.")
@click.option("--mtbf", type=seconds, metavar="TIME", help="Mean time between failures; default: by how often the run was resumed, or 4h.")
@click.option("--bandwidth", type=byte_rate, metavar="RATE", help="How many bytes per second can be written to the store, e.g. 500MB.")
@click.option("--growth-per-day", type=byte_count, metavar="SIZE", help="How much the store may grow in a day, e.g. 2TB.")
@click.option("--plot", type=click.Path(), metavar="FILE", help="Draw the curve into a PNG.")
@store_options()
def advise(
    ref: str,
    choice: StoreChoice,
    *,
    stall: float | None,
    lag: float | None,
    restart: float | None,
    mtbf: float | None,
    bandwidth: float | None,
    growth_per_day: float | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Compute how often the job of the branch REF should save to lose least time to saves, failures and restarts."""
    with choice.look() as store:
        advice = store.advise(
            ref,
            stall_seconds=stall,
            lag_seconds=lag,
            restart_seconds=restart,
            mtbf_seconds=mtbf,
            bandwidth=bandwidth,
            bytes_per_day=growth_per_day,
        )
    if plot is not None:
        draw(advice, plot)
    emit(advice, _advice_lines(advice), as_json=as_json)


def _advice_lines(advice: Advice) -> Iterator[str]:
    yield f"{printable(advice.ref)}, by {advice.snapshots} snapshots"
    costs = [(name, f"{value:g} s ({advice.sources[name]})") for name, value in advice.costs._asdict().items()]
    yield from indented(facts([*costs, ("a snapshot adds", human_bytes(advice.bytes_per_snapshot))]))
    yield ""
    now = ("-", "-") if advice.interval is None else (human_seconds(advice.interval), f"{advice.ettr_now:.2%}")
    rows = [
        ["now", *now],
        ["best", human_seconds(advice.best_interval), f"{advice.best_ettr:.2%}"],
        ["Young", human_seconds(advice.young_interval), ""],
        ["Daly", human_seconds(advice.daly_interval), ""],
    ]
    rows += [["", human_seconds(interval), f"{share:.2%}"] for interval, share in advice.curve[::5]]
    yield from table(["", "INTERVAL", "ETTR"], rows, right={"INTERVAL", "ETTR"})
    yield ""
    bandwidth = "" if advice.bandwidth_share is None else f", {advice.bandwidth_share:.0%} of the bandwidth"
    yield f"at the best interval the store grows by {human_bytes(advice.bytes_per_day)} a day before gc{bandwidth}"
    yield from (f"{number}. {text}" for number, text in enumerate(advice.advice, start=1))
    yield FORMULA


def draw(advice: Advice, path: str) -> None:
    """The curve as a PNG."""
    figure, axes = new_figure()
    axes.plot([interval for interval, _ in advice.curve], [100 * share for _, share in advice.curve])
    marks = {"best": advice.best_interval, "Young": advice.young_interval, "now": advice.interval}
    for (name, at), style in zip(marks.items(), ("-", ":", "--"), strict=True):
        if at is not None:
            axes.axvline(at, linestyle=style, color="grey", label=f"{name}: {human_seconds(at)}")
    axes.set_xscale("log")
    axes.set(xlabel="training between two saves, seconds", ylabel="effective training time, % of wall time", title=advice.ref)
    axes.legend()
    save_png(figure, path)
