"""The command follow: a folder whose `current` is the newest version of a branch. Loads torch when it runs."""

import time

import click

from tensorstore_ck.cli.complete_names import complete_ref
from tensorstore_ck.cli.options import StoreChoice, command, seconds, store_options
from tensorstore_ck.cli.output import emit_line, printable, say, snapshot_line
from tensorstore_ck.errors import BackendUnavailableError


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
@click.option("--poll", type=seconds, default="2s", show_default=True, metavar="TIME", help="How often to look.")
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
            else:
                time.sleep(poll)
