"""The command that brings checkpoints of other libraries into the store: import. Loads torch when it runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tensorstore_ck.cli.options import StoreChoice, codec_option, command, named_number, named_value, store_options
from tensorstore_ck.cli.output import counted, emit, printable, snapshot_line
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.codec import CodecName
from tensorstore_ck.sizes import human_bytes

if TYPE_CHECKING:
    from tensorstore_ck.importing import Contents


@command(
    "Bring a checkpoint of another library into the store.",
    "tsck import checkpoint.ckpt --ref runs/old",
    "tsck import ./llama/ --ref models/llama --metadata license=llama3",
    "tsck import ./dcp-step-5000/ --ref runs/old --step 5000",
    "tsck import checkpoint.ckpt --ref runs/old --leave-out 'hyper_parameters.*' --dry-run",
)
@click.argument("path", type=click.Path())
@click.option("--ref", required=True, metavar="NAME", help="The branch to put it on; made if it does not exist.")
@click.option("--step", type=int, metavar="N", help="The training step, instead of the one that the checkpoint says it has.")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME=NUMBER",
    type=named_number,
    multiple=True,
    help="A number to rank by, e.g. val_loss=2.3 (repeatable).",
)
@click.option("--metadata", metavar="NAME=VALUE", type=named_value, multiple=True, help="What the run knows, JSON or text (repeatable).")
@click.option("--leave-out", metavar="GLOB", multiple=True, help="What not to import, e.g. 'hyper_parameters.*' (repeatable).")
@click.option("--dry-run", is_flag=True, help="Say what would be imported, and write nothing.")
@codec_option
@store_options(writes=True)
def import_(
    path: str,
    choice: StoreChoice,
    *,
    ref: str,
    step: int | None,
    metrics: tuple[tuple[str, float], ...],
    metadata: tuple[tuple[str, object], ...],
    leave_out: tuple[str, ...],
    dry_run: bool,
    codec: CodecName,
    as_json: bool,
) -> None:
    """Import the checkpoint at PATH as the next snapshot on a branch, all of it or nothing.

    PATH is a file of torch.save, Lightning or safetensors; an index or folder of such files, as on Hugging Face; or a folder of
    torch.distributed.checkpoint, also as FSDP1, accelerate and Lightning write it. Nothing in it is ever run.
    """
    from tensorstore_ck.importing import import_checkpoint, inspect_checkpoint  # noqa: PLC0415 - loads torch

    if dry_run:
        contents = inspect_checkpoint(path, leave_out=leave_out)
        emit({"snapshot": None, "contents": contents}, [*_lines(contents), "nothing was written (--dry-run)"], as_json=as_json)
        return
    with Bar("importing") as bar, choice.open(bar, codec) as store:
        head = store.branches().get(ref)
        snapshot, contents = import_checkpoint(
            store,
            path,
            ref=ref,
            step=step,
            metrics=dict(metrics),
            metadata=dict(metadata),
            leave_out=leave_out,
            expect=head,
            started=lambda contents: bar.expect(contents.tensor_bytes),
        )
    sizes = f"  ({human_bytes(snapshot.logical_bytes)}, of which {human_bytes(snapshot.new_bytes)} new)"
    lines = [*_lines(contents), snapshot_line(f"{printable(ref)} is now at", snapshot) + sizes]
    emit({"snapshot": snapshot, "contents": contents}, lines, as_json=as_json)


import_.name = "import"


def _lines(contents: "Contents") -> Iterator[str]:
    tensors = f"{counted(contents.tensors, 'tensor')} ({human_bytes(contents.tensor_bytes)})"
    yield f"found a {contents.format}: {tensors}, {counted(contents.values, 'other value')}"
    for what, count in contents.converted.items():
        yield f"converted: {printable(what)}" + (f" ({count} times)" if count > 1 else "")
    if contents.left_out:
        some = ", ".join(map(printable, contents.left_out[:5])) + (", ..." if len(contents.left_out) > 5 else "")
        yield f"left out: {some}"
    for name, why in contents.skipped.items():
        yield f"skipped: {printable(name)} ({why})"
