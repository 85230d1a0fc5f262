"""The commands watch and follow: what happens to each snapshot as it is published. `follow` loads torch when it runs."""

import time
from contextlib import closing

import click

from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, command, default_option, seconds, store_options
from tensorstore_ck.cli.output import emit_line, printable, say, snapshot_line, step_text
from tensorstore_ck.cli.run_user_program import program_words, run_program
from tensorstore_ck.errors import BackendUnavailableError
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
@default_option("--poll", "poll", "2s", "How often to look.")
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


@command(
    "Keep a folder of safetensors at the newest version of a branch.",
    "tsck follow runs/rl --to serving/",
    "tsck follow runs/rl --to serving/ --config-from meta-llama/Llama-3.2-1B",
)
@click.argument("ref", shell_complete=complete_ref)
@click.option("--to", "folder", metavar="DIR", type=click.Path(file_okay=False), required=True, help="DIR/current is the newest version.")
@click.option("--include", metavar="GLOB", multiple=True, help="Only names that match, e.g. 'model.*' (repeatable). Default: the weights.")
@click.option("--config-from", metavar="DIR|NAME", help="Configuration and tokenizer, instead of those in the snapshots.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N versions, with the one that is there at the start.")
@default_option("--poll", "poll", "2s", "How often to look, and the pause after each version.")
@store_options()
def follow(
    ref: str,
    choice: StoreChoice,
    *,
    folder: str,
    include: tuple[str, ...],
    config_from: str | None,
    count: int | None,
    poll: float,
    as_json: bool,
) -> None:
    """Keep DIR/current at the newest snapshot of the branch REF, under the names that from_pretrained wants. Runs until interrupted.

    DIR/current is a link to a folder, and is renamed to the next one when that is complete. Reads what changed from the store, and does not
    change the store. While the store does not answer, the folder stays as it is, with a warning; at the start that is an error. With --json
    a line for each version.
    """
    from tensorstore_ck.integrations.exporting import FollowedFolder  # noqa: PLC0415 - loads torch

    with (
        choice.open(read_only=True) as store,
        FollowedFolder(store, ref, folder, select=list(include) or None, config_from=config_from) as followed,
    ):
        versions, answers = 0, False
        while versions != count:
            snapshot = None
            try:
                snapshot = followed.update()
                if snapshot is None and not versions and followed.root:  # since an earlier run
                    snapshot = store.resolve(followed.root)
                answers = True
            except BackendUnavailableError as exc:
                if not versions:
                    raise
                if answers:
                    say(f"tsck: warning: {printable(folder)} stays as it is until the store answers: {printable(str(exc))}", err=True)
                answers = False
            if snapshot is not None:
                versions += 1
                emit_line(snapshot) if as_json else say(snapshot_line(f"{printable(folder)} is now", snapshot))
            if versions != count:
                time.sleep(poll)
