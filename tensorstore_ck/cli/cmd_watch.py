"""The command watch: prints each snapshot as it is published, or runs a program on it."""

from contextlib import closing

import click

from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, command, seconds, store_options
from tensorstore_ck.cli.output import emit_line, printable, say, snapshot_line, step_text
from tensorstore_ck.cli.run_program import program_words, run_program
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance.watch import PIN_SECONDS


@command(
    "Act on snapshots as they are published.",
    "tsck watch runs/gpt",
    "tsck watch runs/gpt --exec 'python eval.py --root {root} --step {step}' --newest-only",
)
@click.argument("ref", shell_complete=complete_ref)
@click.option("--exec", "program", metavar="CMD", help="Run CMD for each, with {root}, {step}, {ref} and {store} filled in; no shell.")
@click.option("--since-step", type=int, metavar="N", help="Also existing snapshots, from step N on.")
@click.option("--newest-only", is_flag=True, help="Skip all but the newest of the snapshots that came while CMD ran.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N snapshots.")
@click.option("--pin-for", type=seconds, metavar="TIME", help="How long a pin lasts at most. Default: 1d with --exec; else no pins.")
@click.option("--poll", type=seconds, default="2s", show_default=True, metavar="TIME", help="How often to look.")
@store_options(writes=True)
def watch(
    ref: str,
    choice: StoreChoice,
    *,
    program: str | None,
    since_step: int | None,
    newest_only: bool,
    count: int | None,
    pin_for: float | None,
    poll: float,
    as_json: bool,
) -> None:
    """Watch a branch: print each new snapshot, or run CMD on it; it stays pinned meanwhile. Runs until interrupted.

    A CMD that fails is reported, and does not end the watch. With --json a line for each snapshot. Without --exec the store is not changed.
    """
    words = program_words(program) if program is not None else None
    held = PIN_SECONDS if pin_for is None and words is not None else pin_for
    with (
        choice.open(read_only=held is None) as store,
        closing(store.watch(ref, since_step=since_step, newest_only=newest_only, pin_for=held, poll_seconds=poll)) as watched,
    ):
        for number, snapshot in enumerate(watched, start=1):
            emit_line(snapshot) if as_json else say(snapshot_line("published", snapshot))
            if words is not None:
                _run(words, snapshot, choice.require_url())
            if number == count:
                break


def _run(words: list[str], snapshot: Snapshot, url: str) -> None:
    try:
        code = run_program(words, snapshot, url)
        problem = f"ended with {code}" if code else ""
    except OSError as exc:
        problem = f"could not be run: {exc}"
    if problem:
        say(f"tsck: {printable(words[0])} for step {step_text(snapshot.step)} {problem}", err=True)
