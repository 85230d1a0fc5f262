"""Signatures of exports beside the package model-signing itself, which `make test-apart` installs: each verifies what the other signed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

import tensorstore_ck as tsck
from tensorstore_ck.errors import UntrustedError
from tensorstore_ck.integrations.model_signature import verify_folder
from tests.integrations.test_model_signature import make_key

model_signing = pytest.importorskip("model_signing", reason="make test-apart installs model-signing")

CURVES = [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()]
on_each_curve = pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
Sign = Callable[[Path, Path], Path]
"""Makes a folder and its signature with a private key; returns the folder, beside which `.sig` is."""


def ours(folder: Path, private: Path) -> Path:
    with tsck.open(folder.parent / "ck", create=True, no_sync=True) as store:
        store.put_snapshot({"model": {"w": torch.arange(4000.0), "b": torch.ones(3)}}, ref="r", metadata={"note": "é"})
        tsck.export_snapshot(store, "r", folder, format="safetensors", max_file_bytes=16_000, sign=private)
    assert len(list(folder.iterdir())) == 3
    return folder


def theirs(folder: Path, private: Path) -> Path:
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (folder / "sub" / "a name, with é.json").write_text("{}")
    (folder / "sub" / ".hidden").write_bytes(b"")
    (folder / ".gitignore").write_text("*")
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=True)
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(hashing)
    signer.sign(folder, folder.with_name(folder.name + ".sig"))
    return folder


def verified_by_both(folder: Path, public: Path) -> tuple[bool, bool]:
    """Whether this package, and whether model-signing takes the folder for what was signed."""
    signature = folder.with_name(folder.name + ".sig")
    try:
        verify_folder(str(folder), str(signature), str(public))
        by_us = True
    except UntrustedError:
        by_us = False
    try:
        model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public).verify(folder, signature)
        by_them = True
    except (ValueError, InvalidSignature):
        by_them = False
    return by_us, by_them


@on_each_curve
@pytest.mark.parametrize("sign", [ours, theirs], ids=["ours", "theirs"])
def test_each_verifies_what_the_other_signed(tmp_path: Path, sign: Sign, curve: ec.EllipticCurve) -> None:
    private, public = make_key(tmp_path, curve)
    assert verified_by_both(sign(tmp_path / "out", private), public) == (True, True)


def weights_of(folder: Path) -> Path:
    return min(folder.rglob("*.safetensors"))


def edit_the_payload(folder: Path) -> None:
    signature = folder.with_name(folder.name + ".sig")
    text = signature.read_text(encoding="utf-8")
    at = text.index('"payload"') + 200
    signature.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :], encoding="utf-8")


CHANGES: dict[str, Callable[[Path], object]] = {
    "another byte": lambda folder: weights_of(folder).write_bytes(weights_of(folder).read_bytes()[:-1] + b"\x7f"),
    "a byte more": lambda folder: weights_of(folder).write_bytes(weights_of(folder).read_bytes() + b"\0"),
    "a file less": lambda folder: weights_of(folder).unlink(),
    "a file more": lambda folder: (folder / "more.py").write_text(""),
    "another name": lambda folder: weights_of(folder).rename(folder / "z.safetensors"),
    "another key": lambda folder: make_key(folder.parent, ec.SECP256R1()),
    "another payload": edit_the_payload,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("sign", [ours, theirs], ids=["ours", "theirs"])
def test_both_refuse_what_was_changed(tmp_path: Path, sign: Sign, change: str) -> None:
    private, public = make_key(tmp_path, ec.SECP256R1())
    folder = sign(tmp_path / "out", private)
    CHANGES[change](folder)
    assert verified_by_both(folder, public) == (False, False)
