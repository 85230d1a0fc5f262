"""The command prove: a tensor belongs to a snapshot, a fine-tune has the tensors of its base. To check a proof needs no store."""

import re
from typing import TYPE_CHECKING, Final

import click

from tensorstore_ck.cli.complete_names import complete_address
from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import counted, emit, facts, green, printable, short_root, shortened_table, snapshot_line, step_text
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.common.units import human_bytes, iso_time

if TYPE_CHECKING:
    from tensorstore_ck.maintenance.describe.contained import Containment
    from tensorstore_ck.maintenance.prove import CheckedProof

SUFFIX: Final = ".proof"
MODES: Final = "give ADDRESS and TENSOR, or ADDRESS and --contains BASE, or --check FILE alone"
_UNSAFE: Final = re.compile(r"[^\w.-]+|^\.+", re.ASCII)
"""The characters of a tensor's name that a file's name does not get."""


@command(
    "Prove that a tensor belongs to a snapshot.",
    "tsck prove models/base model.embed.weight --out embed.proof",
    "tsck prove --check embed.proof --data embed.safetensors --trust trust.toml",
    "tsck prove runs/ft --contains models/base",
)
@click.argument("address", required=False, shell_complete=complete_address)
@click.argument("tensor", required=False)
@click.option("--out", metavar="FILE", help=f"The proof; default: TENSOR{SUFFIX} in the current folder.")
@click.option("--force", is_flag=True, help="Overwrite the proof.")
@click.option("--contains", metavar="BASE", shell_complete=complete_address, help="Print which part of the snapshot is this one.")
@click.option("--check", metavar="FILE", help="Check a proof; needs no store.")
@click.option("--data", metavar="FILE", help="With --check: the tensor, in a model file or as its bytes alone, must be the proven one.")
@click.option("--root", metavar="ROOT", help="With --check: the root that you trust, 64 digits; no signature is needed then.")
@store_options()
def prove(
    address: str | None,
    tensor: str | None,
    choice: StoreChoice,
    *,
    out: str | None,
    force: bool,
    contains: str | None,
    check: str | None,
    data: str | None,
    root: str | None,
    as_json: bool,
) -> None:
    """Write a small file that proves that TENSOR belongs to the snapshot ADDRESS, without the other tensors.

    Its reader passes it to --check, without the store: the root must be that of --root, or signed as the trust file demands. With
    --contains, print which part of a fine-tune is its base, by block ids, and who signed the base.
    """
    of_proof, of_check = (out, force or None), (data, root)
    if check is not None and not any((address, tensor, contains, *of_proof)):
        _check(check, data, root, choice, as_json=as_json)
    elif address and contains and not any((tensor, *of_proof, *of_check)):
        with choice.look() as store:
            found = store.contains(address, contains)
        emit(found, _contained_lines(found), as_json=as_json)
    elif address and tensor and check is None and not any((contains, *of_check)):
        _write(address, tensor, out or _UNSAFE.sub("_", tensor)[:200] + SUFFIX, choice, force=force, as_json=as_json)
    else:
        raise click.UsageError(f"These arguments do not go together: {MODES}.")


def _write(address: str, tensor: str, path: str, choice: StoreChoice, *, force: bool, as_json: bool) -> None:
    from tensorstore_ck.backend.os_errors import os_errors  # noqa: PLC0415 - help needs none of them
    from tensorstore_ck.cli.model_files import check_new_file  # noqa: PLC0415
    from tensorstore_ck.common.local_path import local_path  # noqa: PLC0415
    from tensorstore_ck.format.proof import decode_proof  # noqa: PLC0415

    path = local_path(path, "a proof")
    check_new_file(path, overwrite=force)
    with choice.look() as store:
        proof = store.prove(address, tensor)
    with os_errors("write", path):
        replace_file(path, proof)
    made = decode_proof(proof)  # by its root: the branch may have moved meanwhile
    root, step = made.root().hex(), made.step()
    belongs = f"{printable(tensor)} belongs to {short_root(root)}" + ("" if step is None else f", step {step}")
    document = {"file": path, "bytes": len(proof), "tensor": tensor, "root": root, "step": step}
    emit(document, [f"wrote {printable(path)} ({human_bytes(len(proof))}): {belongs}"], as_json=as_json)


def _check(path: str, data: str | None, root: str | None, choice: StoreChoice, *, as_json: bool) -> None:
    from tensorstore_ck.maintenance.prove import check_proof  # noqa: PLC0415 - as above

    found = check_proof(path, root=root, trust=choice.trust)
    if data is not None:
        from tensorstore_ck.cli.model_files import tensor_bytes  # noqa: PLC0415 - only a tensor's file needs torch

        found = check_proof(path, data=tensor_bytes(data, found.name, found.dtype, found.shape), root=root, trust=choice.trust)
    emit(found, _checked_lines(found, data), as_json=as_json)


def _checked_lines(found: "CheckedProof", data: str | None) -> list[str]:
    signature = found.signature
    signed = (
        []
        if signature is None
        else [
            ("ref", printable(signature.ref)),
            ("store", f"{found.store}, log {printable(found.log or '')}"),
            ("key", signature.key),
            ("signed", iso_time(signature.time_ns)),
        ]
    )
    shape = "x".join(map(str, found.shape)) or "scalar"
    return [
        green(f"{printable(found.name)} belongs to the snapshot"),
        *facts([
            ("root", found.root),
            ("step", step_text(found.step)),
            *signed,
            ("tensor", f"{printable(found.dtype)} {shape}, {human_bytes(found.size_bytes)}, {counted(found.blocks, 'block')}"),
            ("data", f"{printable(data)} is this tensor" if data else "not compared (--data FILE)"),
        ]),
    ]  # fmt: skip


def _contained_lines(found: "Containment") -> list[str]:
    signed = "not signed" if found.signed_by is None else f"signed by {found.signed_by}"
    if found.signed_by is not None:
        signed += ", which your trust file names" if found.is_trusted else ", which no trust file names for it"
    rows = [
        [printable(it.name), it.share, human_bytes(it.equal_bytes), _percent(it.equal_bytes, it.size_bytes), printable(it.base or "-")]
        for it in found.tensors
    ]
    equal, whole, base = (human_bytes(size) for size in (found.equal_bytes, found.tensor_bytes, found.base_bytes))
    return [
        snapshot_line("the base is", found.base) + f", {signed}",
        f"{equal} of the {whole} are the base's ({_percent(found.equal_bytes, found.tensor_bytes)}); the base has {base}",
        "",
        *shortened_table(["NAME", "SHARE", "EQUAL", "PERCENT", "OF THE BASE"], rows, right={"EQUAL", "PERCENT"}),
    ]


def _percent(part: int, whole: int) -> str:
    """Rounded down: 100 % is all of it."""
    return "-" if not whole else f"{part * 1000 // whole / 10:.1f} %"
