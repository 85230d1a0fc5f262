"""The command advise: how often a job should save."""

from collections.abc import Iterator

import click

from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, byte_count, byte_rate, command, seconds, store_options
from tensorstore_ck.cli.output import emit, facts, indented, printable, table
from tensorstore_ck.cli.plot import save_png
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.maintenance.advise import Advice
from tensorstore_ck.maintenance.metric_plot import new_figure

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
    emit(advice, _lines(advice), as_json=as_json)


def _lines(advice: Advice) -> Iterator[str]:
    yield f"{printable(advice.ref)}, by {advice.snapshots} snapshots"
    costs = [(name, f"{value:g} s ({advice.sources[name]})") for name, value in advice.costs._asdict().items()]
    yield from indented(facts([*costs, ("a snapshot adds", human_bytes(advice.bytes_per_snapshot))]))
    yield ""
    rows = [
        [
            "now",
            "-" if advice.interval is None else f"{advice.interval:.0f} s",
            "-" if advice.ettr_now is None else f"{advice.ettr_now:.2%}",
        ],
        ["best", f"{advice.best_interval:.0f} s", f"{advice.best_ettr:.2%}"],
        ["Young", f"{advice.young_interval:.0f} s", ""],
        ["Daly", f"{advice.daly_interval:.0f} s", ""],
    ]
    rows += [["", f"{interval:.0f} s", f"{share:.2%}"] for interval, share in advice.curve[::5]]
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
            axes.axvline(at, linestyle=style, color="grey", label=f"{name}: {at:.0f} s")
    axes.set_xscale("log")
    axes.set(xlabel="training between two saves, seconds", ylabel="effective training time, % of wall time", title=advice.ref)
    axes.legend()
    save_png(figure, path)
