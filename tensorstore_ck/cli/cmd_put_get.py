"""The commands put and get: a model file into the store, and out of it. They load torch when they run."""

import click

from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import (
    StoreChoice,
    allow_marked_option,
    codec_option,
    command,
    metadata_option,
    named_number,
    ref_option,
    store_options,
)
from tensorstore_ck.cli.output import counted, emit, first_names, printable, put_sizes, snapshot_line
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.format.codec import CodecName
from tensorstore_ck.format.record import STORE_KEY
from tensorstore_ck.log.snapshot import refuse_marked


@command(
    "Store a model file as the next snapshot on a branch.",
    "tsck put model.safetensors --ref models/base",
    "tsck put model.pt --ref models/base --step 3 --metric val_loss=2.3 --metadata lr=3e-4",
)
@click.argument("file", type=click.Path())
@ref_option
@click.option("--step", type=int, metavar="N", help="The training step, so that NAME@N finds it.")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME=NUMBER",
    type=named_number,
    multiple=True,
    help="A number to rank by, e.g. val_loss=2.3 (repeatable).",
)
@metadata_option
@codec_option
@store_options(writes=True)
def put(
    file: str,
    choice: StoreChoice,
    *,
    ref: str,
    step: int | None,
    metrics: tuple[tuple[str, float], ...],
    metadata: tuple[tuple[str, object], ...],
    codec: CodecName,
    as_json: bool,
) -> None:
    """Store a model FILE (.safetensors, .pt, .pth, .bin, .ckpt) as the next snapshot on a branch.

    Bytes that the store has are not stored again. Torch files are only loaded with weights_only=True.
    """
    from tensorstore_ck.cli.model_files import load_file  # noqa: PLC0415 - only put and get need torch

    with Bar("putting") as bar, choice.open(bar, codec) as store:
        head = store.branches().get(ref)
        loaded = load_file(file)
        bar.expect(loaded.tensor_bytes)
        stored = {key: value for key, value in loaded.metadata.items() if key != STORE_KEY}
        snapshot = store.put_snapshot(
            loaded.state, ref=ref, step=step, metrics=dict(metrics), metadata={**stored, **dict(metadata)}, expect=head, unchanged="ok"
        )
    emit(snapshot, [snapshot_line(f"{printable(ref)} is now at", snapshot) + put_sizes(snapshot)], as_json=as_json)


@command(
    "Write a snapshot to a model file.", "tsck get runs/gpt out.safetensors --include 'model.*'", "tsck get runs/gpt@1000 step-1000.pt"
)
@click.argument("address", shell_complete=complete_address)
@click.argument("file", type=click.Path())
@click.option("--include", metavar="GLOB", multiple=True, help="Only tensors whose names match, e.g. 'model.*' (repeatable).")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@allow_marked_option
@store_options()
def get(address: str, file: str, include: tuple[str, ...], choice: StoreChoice, *, force: bool, allow_marked: bool, as_json: bool) -> None:
    """Write the snapshot at ADDRESS to FILE, every byte verified: .safetensors holds its tensors, .pt or .pth the whole state."""
    from tensorstore_ck.cli.model_files import check_target, save_file  # noqa: PLC0415 - only put and get need torch

    check_target(file, overwrite=force)
    with Bar("getting") as bar, choice.look(bar) as store:
        snapshot = store.resolve(address)
        if not allow_marked:
            refuse_marked(snapshot, address, "give --allow-marked")
        metadata = store.metadata(snapshot.root)
        bar.expect(snapshot.logical_bytes)
        # by its root: the branch may have moved meanwhile
        state = store.checkout(snapshot.root, select=list(include) or None, allow_marked=allow_marked)
    left_out = save_file(state, file, metadata, overwrite=force)
    lines = [snapshot_line(f"wrote {printable(file)} from", snapshot)]
    if left_out:
        what = f"{counted(len(left_out), 'value')} that .safetensors cannot hold: {first_names(left_out)}"
        lines.append(f"left out {what} (a .pt file holds them)")
    emit({"file": file, "snapshot": snapshot, "left_out": left_out}, lines, as_json=as_json)
