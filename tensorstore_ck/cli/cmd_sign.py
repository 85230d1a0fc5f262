"""The commands keygen, sign, verify and verify-files: keys, and signatures of refs and exports. They need no torch."""

import os
import time

import click

from tensorstore_ck.cli.complete_names import complete_address, complete_ref
from tensorstore_ck.cli.options import StoreChoice, command, json_option, store_options
from tensorstore_ck.cli.output import counted, emit, facts, green, printable, short_root, snapshot_line
from tensorstore_ck.common.replace_file import replace_file
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import AlreadyExistsError, PermissionDeniedError, UntrustedError
from tensorstore_ck.integrations.model_signature import SUFFIX, verify_folder
from tensorstore_ck.log.trust_file import trust_path


@command("Make a key that signs refs.", "tsck keygen release", "tsck keygen release --passphrase")
@click.argument("name")
@click.option("--passphrase", "asks", is_flag=True, help="Ask for a passphrase, and encrypt the private key with it.")
@json_option
def keygen(name: str, *, asks: bool, as_json: bool) -> None:
    """Make an Ed25519 key: NAME.key is private and readable by you alone, NAME.pub goes to those who check signatures."""
    private, public = f"{name}.key", f"{name}.pub"
    if os.path.lexists(public):
        raise AlreadyExistsError(f"{public} exists, and a key is never overwritten: take another name", object_id=public)
    passphrase = click.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True) if asks else None
    key = SigningKey.generate()
    key.save(private, passphrase)
    try:
        replace_file(public, f"{key.public}\n".encode())
    except OSError as exc:
        raise PermissionDeniedError(f"{public} cannot be written: {exc.strerror}; the key is {key.public}", object_id=public) from exc
    made = f"made {printable(private)}, which is private, and {printable(public)}"
    lines = [
        f"{made}; those who check its signatures add this key to `keys` of a table [[trust]] in {printable(trust_path())}:",
        key.public,
    ]
    emit({"private": private, "public": public, "key": key.public}, lines, as_json=as_json)


@command("Sign a branch or tag.", "tsck sign models/base --sign release.key", "tsck sign models/base 9f86d081 --sign release.key")
@click.argument("ref", shell_complete=complete_ref)
@click.argument("root", default="")
@store_options(writes=True)
def sign(ref: str, root: str, choice: StoreChoice, *, as_json: bool) -> None:
    """Sign where the branch or tag REF is, with the key of --sign; only if it is at ROOT, if that is given."""
    with choice.open() as store:
        snapshot = store.sign(ref, root)
        emit(snapshot, [snapshot_line(f"signed {printable(ref)} at", snapshot)], as_json=as_json)


@command("Check the signature of a ref.", "tsck verify models/base", "tsck verify models/base --trust trust.toml")
@click.argument("address", shell_complete=complete_address)
@store_options()
def verify(address: str, choice: StoreChoice, *, as_json: bool) -> None:
    """Check that the snapshot ADDRESS is signed as the trust file demands, and print who signed it and when."""
    with choice.look() as store:
        signature = store.signature(address)
    if signature is None:
        path = choice.trust or trust_path()
        raise UntrustedError(
            f"no signature of {address!r} was checked: {path} names no branch or tag of this address; write a table [[trust]] for it",
            object_id=address,
        )
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(signature.time_ns / 1e9))
    lines = [green(f"{printable(signature.ref)} is signed")]
    step = "" if signature.step is None else str(signature.step)
    lines += facts([("root", short_root(signature.root)), ("step", step), ("key", signature.key), ("signed", when)])
    emit(signature, lines, as_json=as_json)


@command(
    "Check the signature of exported files.",
    "tsck verify-files bert/ --key release.pub.pem",
    "tsck verify-files llama/ --key vendor.pem --signature model.sig",
)
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option("--key", metavar="FILE", required=True, help="The public EC key of the signer, in PEM.")
@click.option("--signature", metavar="FILE", help="The signature; default: DIR.sig.")
@json_option
def verify_files(folder: str, *, key: str, signature: str | None, as_json: bool) -> None:
    """Check that a signature of model-signing 1.x, as `tsck export --sign` writes it, signs exactly the files of DIR.

    Files that the signature leaves out, such as .git and .gitignore, are not checked.
    """
    files = verify_folder(folder, signature or os.path.abspath(folder) + SUFFIX, key)
    lines = [green(f"{printable(folder)}: {counted(len(files), 'file')} as signed with {printable(key)}")]
    emit({"folder": folder, "files": files}, lines, as_json=as_json)
