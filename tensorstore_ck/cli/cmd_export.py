"""The command that leaves the store again: export. Loads torch when it runs, and only then."""

import re
from typing import TYPE_CHECKING, Any, Final

import click

from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import counted, emit, printable, snapshot_line
from tensorstore_ck.cli.progress import Bar
from tensorstore_ck.common.units import human_bytes

if TYPE_CHECKING:
    from tensorstore_ck.integrations.exporting import ExportReport

_FORMATS: Final = ("dcp", "safetensors", "torch")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_SHOWN: Final = 5


def byte_size(text: str) -> int:
    """``500MB``, ``4GiB``: bytes."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** (" kmgt".index((match[2] or " ").lower()))) if match else 0
    if size <= 0:
        raise click.BadParameter(f"{text!r} is no size: write 500MB, 5GB or 4GiB.")
    return size


@command(
    "Write a snapshot as files that other programs read.",
    "tsck export runs/gpt --to safetensors gpt/ --select 'model.*'",
    "tsck export runs/gpt@1000 --to torch step-1000.pt",
    "tsck export runs/gpt --to dcp checkpoint/",
)
@click.argument("address")
@click.argument("path", metavar="DIR", type=click.Path())
@click.option("--to", "format_", type=click.Choice(_FORMATS), required=True, help="safetensors: tensors by name. torch, dcp: all of it.")
@click.option("--select", metavar="GLOB", multiple=True, help="Only what fits, e.g. 'model.*' (repeatable).")
@click.option("--skip", metavar="GLOB", multiple=True, help="All but what fits, e.g. 'optimizer.*' (repeatable).")
@click.option("--max-file-size", metavar="SIZE", type=byte_size, default="5GB", show_default=True, help="Split larger files of a folder.")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@click.option("--allow-bad", is_flag=True, help="Also a snapshot that is marked bad or damaged.")
@store_options()
def export(
    address: str,
    path: str,
    choice: StoreChoice,
    *,
    format_: Any,
    select: tuple[str, ...],
    skip: tuple[str, ...],
    max_file_size: int,
    force: bool,
    allow_bad: bool,
    as_json: bool,
) -> None:
    """Write the snapshot at ADDRESS to DIR, every byte verified, and read back from the files.

    DIR becomes a folder; with a name that ends in .safetensors or .pt it is that one file. It is whole, or not there.
    """
    from tensorstore_ck.integrations.exporting import export_snapshot  # noqa: PLC0415 - loads torch

    with Bar("exporting") as bar, choice.look(bar) as store:
        bar.expect(store.resolve(address).logical_bytes)
        report = export_snapshot(
            store,
            address,
            path,
            format=format_,
            select=list(select) or None,
            skip=skip,
            max_file_bytes=max_file_size,
            overwrite=force,
            allow_bad=allow_bad,
        )
    emit({**_document(report)}, _lines(report), as_json=as_json)


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
    }


def _lines(report: "ExportReport") -> list[str]:
    sizes = f"  ({counted(len(report.files), 'file')}, {counted(report.tensors, 'tensor')}, {human_bytes(report.size_bytes)})"
    lines = [snapshot_line(f"wrote {printable(report.path)} from", report.snapshot) + sizes]
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left_out.items():
        by_reason.setdefault(reason, []).append(printable(name))
    for reason, names in by_reason.items():
        lines.append(f"left out ({reason}): {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)))
    return [*lines, *(f"note: {printable(note)}" for note in report.notes)]
