"""The command export: a snapshot as files of other programs. Loads torch when it runs."""

from typing import TYPE_CHECKING, Any, Final

import click

from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import StoreChoice, allow_marked_option, byte_count, command, store_options
from tensorstore_ck.cli.output import counted, emit, printable, snapshot_line
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes

if TYPE_CHECKING:
    from tensorstore_ck.integrations.exporting import ExportReport

_FORMATS: Final = ("dcp", "deepspeed-universal", "hf", "megatron", "safetensors", "torch")
_SHOWN: Final = 5


def file_size(text: str) -> int:
    """As `byte_count`, but at least one byte."""
    size = byte_count(text)
    if size == 0:
        raise click.BadParameter(f"{text!r} is not a size: write 500MB, 5GB or 4GiB.")
    return size


@command(
    "Write a snapshot as files that other programs read.",
    "tsck export runs/gpt --to safetensors gpt/ --include 'model.*'",
    "tsck export runs/gpt@1000 --to torch step-1000.pt",
    "tsck export runs/gpt --to dcp checkpoint/",
    "tsck export runs/bert --to hf bert/ --sign release.pem",
    "tsck export runs/gpt --to deepspeed-universal out/",
    "tsck export runs/gpt --to megatron iter_0001000/",
    "tsck export runs/llama --to hf llama/ --names llama.toml --exclude 'optimizer.*' --config-from meta-llama/Llama-3.2-1B",
)
@click.argument("address", shell_complete=complete_address)
@click.argument("path", metavar="DIR", type=click.Path())
@click.option(
    "--to",
    "format_",
    type=click.Choice(_FORMATS),
    required=True,
    help="safetensors: tensors by name. torch, dcp: the whole state. hf: the model, for from_pretrained. megatron: for Megatron-core. "
    "deepspeed-universal: for DeepSpeed with load_universal.",
)
@click.option("--include", metavar="GLOB", multiple=True, help="Only names that match, e.g. 'model.*' (repeatable).")
@click.option("--exclude", metavar="GLOB", multiple=True, help="No names that match, e.g. 'optimizer.*' (repeatable).")
@click.option("--strip-prefix", metavar="PREFIX", help="Remove PREFIX from all names, e.g. 'model.'; automatic with --to hf.")
@click.option(
    "--names", metavar="FILE", type=click.Path(), help="Weights of Megatron under the names of Hugging Face, or back, by FILE (TOML)."
)
@click.option("--config-from", metavar="DIR|NAME", help="With --to hf: configuration and tokenizer, instead of those in the snapshot.")
@click.option("--max-file-size", metavar="SIZE", type=file_size, default="5GB", show_default=True, help="Split larger files of a folder.")
@click.option("--sign", "key", metavar="FILE", help="Sign the files with this EC key, as model-signing 1.x verifies it: writes DIR.sig.")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@allow_marked_option
@store_options()
def export(
    address: str,
    path: str,
    choice: StoreChoice,
    *,
    format_: Any,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    strip_prefix: str | None,
    names: str | None,
    config_from: str | None,
    max_file_size: int,
    key: str | None,
    force: bool,
    allow_marked: bool,
    as_json: bool,
) -> None:
    """Write the snapshot at ADDRESS to DIR. Every byte is verified, and read back from the files.

    DIR becomes a folder, or one file if its name ends in .safetensors or .pt. It is complete, or does not exist.

    --to hf also writes configuration and tokenizer, which the Trainer of tensorstore_ck.hf saves with each snapshot, and tries whether
    transformers loads the folder (or peft, if the snapshot is of an adapter).
    """
    from tensorstore_ck.integrations.exporting import export_snapshot  # noqa: PLC0415 - loads torch

    with Bar("exporting") as bar, choice.look(bar) as store:
        bar.expect(store.resolve(address).logical_bytes)
        report = export_snapshot(
            store,
            address,
            path,
            format=format_,
            select=list(include) or None,
            exclude=exclude,
            strip_prefix=strip_prefix,
            names=names,
            config_from=config_from,
            max_file_bytes=max_file_size,
            overwrite=force,
            allow_marked=allow_marked,
            sign=key,
        )
    emit(_document(report), _lines(report), as_json=as_json)


def _document(report: "ExportReport") -> dict[str, object]:
    return {
        "format": report.format,
        "path": report.path,
        "snapshot": report.snapshot,
        "files": report.files,
        "bytes": report.size_bytes,
        "tensors": report.tensors,
        "tensor_bytes": report.tensor_bytes,
        "left_out": report.left_out,
        "notes": report.notes,
        "signature": report.signature,
    }


def _lines(report: "ExportReport") -> list[str]:
    sizes = f"  ({counted(len(report.files), 'file')}, {counted(report.tensors, 'tensor')}, {human_bytes(report.size_bytes)})"
    lines = [snapshot_line(f"wrote {printable(report.path)} from", report.snapshot) + sizes]
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        by_reason.setdefault(reason, []).append(printable(name))
    for reason, names in by_reason.items():
        lines.append(f"left out ({reason}): {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)))
    lines += [f"signed: {printable(report.signature)}"] if report.signature else []
    return [*lines, *(f"note: {printable(note)}" for note in report.notes)]
