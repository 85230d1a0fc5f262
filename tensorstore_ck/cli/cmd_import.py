"""The command import: checkpoints of other libraries as snapshots. Loads torch when it runs."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tensorstore_ck.cli.options import (
    STORE_VARIABLE,
    StoreChoice,
    codec_option,
    command,
    metadata_option,
    named_number,
    ref_option,
    store_options,
)
from tensorstore_ck.cli.output import counted, emit, first_names, metrics_text, printable, put_sizes, snapshot_line, table
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.format.codec import CodecName

if TYPE_CHECKING:
    from tensorstore_ck.integrations.importing import CheckpointContents, ImportedStep, PlannedImport

KEY = "key:"


def named_metric(text: str) -> tuple[str, float | str]:
    """``NAME=NUMBER``, or ``NAME=key:PATH``: the number at a path inside a checkpoint."""
    name, _, value = text.partition("=")
    return (name, value) if name and value.startswith(KEY) and value != KEY else named_number(text)


@command(
    "Import checkpoints of other libraries.",
    "tsck import checkpoint.ckpt --ref runs/old",
    "tsck import ./llama/ --ref models/llama --metadata license=llama3",
    "tsck import ./dcp-step-5000/ --ref runs/old --step 5000",
    "tsck import ./megatron/iter_0001000/ --ref runs/old",
    "tsck import ./deepspeed-out/ --ref runs/old",
    "tsck import --history 'old/*.pt' --step-from name --metric val_loss=key:val_loss --ref runs/old",
    "tsck import --history 'lightning/*.ckpt' --step-from key:global_step --ref runs/old",
    "tsck import checkpoint.ckpt --ref runs/old --exclude 'hyper_parameters.*' --dry-run",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@ref_option
@click.option("--history", is_flag=True, help="Each file or folder that matches PATH is one snapshot. Goes on when run again.")
@click.option(
    "--step-from", metavar="name|key:PATH", help="With --history: where the step is: in the file's name, or at PATH inside the file."
)
@click.option("--as-one", is_flag=True, help="One snapshot of a folder, even if its files are of several steps.")
@click.option("--partial", is_flag=True, help="Import a checkpoint of which files are missing; the snapshot's metadata says so.")
@click.option("--step", type=int, metavar="N", help="The training step, instead of the one in the checkpoint.")
@click.option(
    "--metric",
    "metrics",
    metavar="NAME=NUMBER",
    type=named_metric,
    multiple=True,
    help="A number to rank by, e.g. val_loss=2.3; with --history also val_loss=key:PATH, read from each file (repeatable).",
)
@metadata_option
@click.option("--exclude", metavar="GLOB", multiple=True, help="Do not import matching paths, e.g. 'hyper_parameters.*' (repeatable).")
@click.option("--names", metavar="FILE", type=click.Path(), help="Weights of Hugging Face under Megatron's names, or back, by FILE (TOML).")
@click.option("--dry-run", is_flag=True, help="Only print what would be imported.")
@codec_option
@store_options(writes=True)
def import_(
    paths: tuple[str, ...],
    choice: StoreChoice,
    *,
    ref: str,
    history: bool,
    step_from: str | None,
    as_one: bool,
    partial: bool,
    step: int | None,
    metrics: tuple[tuple[str, float | str], ...],
    metadata: tuple[tuple[str, object], ...],
    exclude: tuple[str, ...],
    names: str | None,
    dry_run: bool,
    codec: CodecName,
    as_json: bool,
) -> None:
    """Import the checkpoint at PATH as the next snapshot on a branch, as a whole; or, with --history, each of many as a snapshot.

    PATH is a file of torch.save, Lightning or safetensors; an index or folder of such files, as on Hugging Face; a folder of
    torch.distributed.checkpoint, also as FSDP1, accelerate, Lightning and Megatron-core write it; or one of DeepSpeed, of any ZeRO
    stage, whose `latest` is followed. No code in it is run.

    With --history, PATH is a glob in quotes, or several paths. Checkpoints are imported in the order of their steps. Killed and
    run again, it skips files whose snapshots are on the branch and still the same.
    """
    if history:
        if step is not None or as_one or partial or names is not None:
            option = "--as-one" if as_one else "--partial" if partial else "--step" if step is not None else "--names"
            raise click.UsageError(f"{option} is for a single snapshot, and --history makes several.")
        if step_from is None:
            raise click.UsageError("--history needs --step-from name, or --step-from key:PATH such as key:global_step.")
        source = {"step_from": step_from, "metrics": dict(metrics), "exclude": exclude}
        _import_history(paths, source, choice, codec, ref=ref, metadata=dict(metadata), dry_run=dry_run, as_json=as_json)
        return
    if step_from is not None:
        raise click.UsageError("--step-from is for --history; --step gives the step of a single checkpoint.")
    if len(paths) > 1:
        raise click.UsageError(f"{len(paths)} PATHs are given: --history imports each as a snapshot of its own.")
    numbers = {name: value for name, value in metrics if not isinstance(value, str)}
    if len(numbers) < len(dict(metrics)):
        raise click.UsageError("--metric NAME=key:PATH is for --history; for a single checkpoint give the number.")
    from tensorstore_ck.integrations.importing import import_checkpoint, inspect_checkpoint  # noqa: PLC0415 - loads torch

    (path,) = paths
    how: dict[str, Any] = {"exclude": exclude, "as_one": as_one, "partial": partial, "names": names}
    with _hinting(choice, path, ref, exclude):
        if dry_run:
            contents = inspect_checkpoint(path, **how)
            emit({"snapshot": None, "contents": contents}, [*_lines(contents), "nothing was written (--dry-run)"], as_json=as_json)
            return
        with Bar("importing") as bar, choice.open(bar, codec) as store:
            head = store.branches().get(ref)
            snapshot, contents = import_checkpoint(
                store,
                path,
                ref=ref,
                step=step,
                metrics=numbers,
                metadata=dict(metadata),
                expect=head,
                started=lambda contents: bar.expect(contents.tensor_bytes),
                **how,
            )
    lines = [*_lines(contents), snapshot_line(f"{printable(ref)} is now at", snapshot) + put_sizes(snapshot)]
    emit({"snapshot": snapshot, "contents": contents}, lines, as_json=as_json)


import_.name = "import"


def _lines(contents: "CheckpointContents") -> Iterator[str]:
    tensors = f"{counted(contents.tensors, 'tensor')} ({human_bytes(contents.tensor_bytes)})"
    article = "" if contents.format[0].isdigit() else "a "  # such as "7 files with an index"
    yield f"found {article}{contents.format}: {tensors}, {counted(contents.values, 'other value')}"
    for what, count in contents.converted.items():
        yield f"converted: {printable(what)}" + (f" ({count} times)" if count > 1 else "")
    if contents.left_out:
        yield f"left out: {first_names(contents.left_out)}"
    if contents.missing:
        yield f"missing: {first_names(contents.missing)}"
    for name, why in contents.skipped.items():
        yield f"skipped: {printable(name)} ({why})"


def _import_history(
    paths: Sequence[str],
    source: Mapping[str, Any],
    choice: StoreChoice,
    codec: CodecName,
    *,
    ref: str,
    metadata: Mapping[str, object],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Imports the checkpoints, and prints the outcome of each at once. `source`: what `inspect_history` takes, too."""
    from tensorstore_ck.integrations.importing import import_history, inspect_history  # noqa: PLC0415 - loads torch

    if dry_run:
        plan = inspect_history(paths, **source)
        document = {"plan": plan, "steps": []}
        emit(document, [*_plan_lines(plan), f"{counted(len(plan), 'snapshot')}; nothing was written (--dry-run)"], as_json=as_json)
        return
    sizes: dict[str, int] = {}
    with Bar("importing") as bar, choice.open(bar, codec) as store:
        numbers = iter(range(1, 1 << 62))

        def planned(plan: "Sequence[PlannedImport]") -> None:
            sizes.update((checkpoint.path, checkpoint.contents.tensor_bytes) for checkpoint in plan)
            bar.expect(sum(sizes.values()))

        def imported(step: "ImportedStep") -> None:
            number = next(numbers)
            bar(sum(list(sizes.values())[:number]), sum(sizes.values()))
            if not as_json:
                bar.say(f"{number}/{len(sizes)} {_step_line(step)}")

        steps = import_history(store, paths, ref=ref, metadata=metadata, planned=planned, imported=imported, **source)
    present = sum(step.was_there for step in steps)
    were = f", {counted(present, 'snapshot')} {'was' if present == 1 else 'were'} there already" if present else ""
    done = f": {counted(len(steps) - present, 'snapshot')} imported{were}"
    emit({"plan": [], "steps": steps}, [snapshot_line(f"{printable(ref)} has", steps[-1].snapshot) + done], as_json=as_json)


@contextmanager
def _hinting(choice: StoreChoice, path: str, ref: str, exclude: Sequence[str]) -> Iterator[None]:
    """Adds the command that imports a folder to the error that refuses it because it holds several steps."""
    from tensorstore_ck.integrations.importing import SeveralStepsError  # noqa: PLC0415 - loads torch

    try:
        yield
    except SeveralStepsError as exc:
        store = ["-s", choice.url] if choice.url and choice.url != os.environ.get(STORE_VARIABLE) else []
        left_out = [word for glob in exclude for word in ("--exclude", glob)]
        words = ["tsck", "import", "--history", *exc.paths(path), "--step-from", exc.step_from, "--ref", ref, *left_out, *store]
        exc.args = (exc.message(shlex.join(words)),)
        raise


def _plan_lines(plan: "Sequence[PlannedImport]") -> list[str]:
    rows = [
        [str(save.step), printable(os.path.basename(save.path)), human_bytes(save.contents.tensor_bytes), metrics_text(save.metrics)]
        for save in plan
    ]
    return table(["STEP", "FILE", "SIZE", "METRICS"], rows, right={"STEP", "SIZE"})


def _step_line(step: "ImportedStep") -> str:
    name = printable(os.path.basename(step.path))
    return snapshot_line(f"{name} {'is there already:' if step.was_there else 'is now'}", step.snapshot) + (
        "" if step.was_there else put_sizes(step.snapshot)
    )
