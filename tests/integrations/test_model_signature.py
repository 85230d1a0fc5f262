"""Signatures of exports. `model_signing` has a folder that model-signing 1.1.1 signed: ``model_signing sign key folder ...``."""

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import tensorstore_ck as tsck
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, UntrustedError
from tensorstore_ck.integrations.model_signature import FolderSigner, verify_folder

THEIRS = Path(__file__).parent / "model_signing"


def make_key(folder: Path, curve: ec.EllipticCurve) -> tuple[Path, Path]:
    """A private and a public key."""
    key = ec.generate_private_key(curve)
    private, public = folder / "key.pem", folder / "key.pub.pem"
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A copy of what model-signing signed, which a test may change."""
    return Path(shutil.copytree(THEIRS, tmp_path / "theirs"))


def check(at: Path) -> tuple[str, ...]:
    return verify_folder(str(at / "folder"), str(at / "folder.sig"), str(at / "key.pub.pem"))


def test_what_model_signing_signed_is_verified(theirs: Path) -> None:
    assert check(theirs) == ("model.safetensors", "sub/config.json")
    (theirs / "folder" / ".gitignore").write_text("it does not count")
    assert len(check(theirs)) == 2


def test_a_key_from_a_pipe(theirs: Path) -> None:
    """As `--key <(...)` makes one."""
    reading, writing = os.pipe()
    os.write(writing, (theirs / "key.pub.pem").read_bytes())
    os.close(writing)
    try:
        assert len(verify_folder(str(theirs / "folder"), str(theirs / "folder.sig"), f"/dev/fd/{reading}")) == 2
    finally:
        os.close(reading)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another byte": (lambda at: (at / "folder" / "model.safetensors").write_bytes(b"weightz"), "model.safetensors is not what was signed"),
    "a file less": (lambda at: (at / "folder" / "sub" / "config.json").unlink(), "sub/config.json is missing"),
    "a file more": (lambda at: (at / "folder" / "sub" / "code.py").write_text(""), "sub/code.py is not signed"),
    "a FIFO": (lambda at: os.mkfifo(at / "folder" / "sub" / "more"), "sub/more is a FIFO"),
    "a link": (lambda at: (at / "folder" / "more").symlink_to("sub"), "is a link"),
    "another key": (lambda at: make_key(at, ec.SECP256R1()), "forged, or another key signed it"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_what_was_signed_is_refused(theirs: Path, change: str) -> None:
    act, why = CHANGES[change]
    act(theirs)
    with pytest.raises(UntrustedError, match=why):
        check(theirs)


def test_an_edited_statement_is_refused(theirs: Path) -> None:
    (theirs / "folder" / "model.safetensors").write_bytes(b"other")
    private, _ = make_key(theirs / "folder", ec.SECP256R1())
    forged = json.loads(FolderSigner(private).sign(str(theirs / "folder"), "folder"))
    true = json.loads((theirs / "folder.sig").read_text())
    true["dsseEnvelope"]["payload"] = forged["dsseEnvelope"]["payload"]
    (theirs / "folder.sig").write_text(json.dumps(true))
    with pytest.raises(UntrustedError, match="forged"):
        check(theirs)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "1", '{"dsseEnvelope": 5}', '{"mediaType": "x", "dsseEnvelope": {"payloadType": "y", "signatures": []}}']
)
def test_what_is_no_signature(theirs: Path, text: str) -> None:
    (theirs / "folder.sig").write_text(text)
    with pytest.raises(InvalidOptionError, match=r"is no signature of model-signing 1\.x"):
        check(theirs)
    (theirs / "folder.sig").unlink()
    with pytest.raises(NotFoundError):
        check(theirs)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_an_export_is_signed(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = make_key(tmp_path, curve)
    with tsck.open(tmp_path / "ck", create=True, no_sync=True) as store:
        store.put_snapshot({"w": torch.zeros(4)}, ref="r")
        report = tsck.export_snapshot(store, "r", tmp_path / "out", format="safetensors", sign=private)
        assert verify_folder(str(tmp_path / "out"), report.signature, str(public)) == tuple(file.name for file in report.files)
        bundle = json.loads((tmp_path / "out.sig").read_text())
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        assert statement["subject"][0]["name"] == "out"
        with pytest.raises(InvalidOptionError, match="is for folders"):
            tsck.export_snapshot(store, "r", tmp_path / "out.safetensors", format="safetensors", sign=private)
        SigningKey.generate().save(tmp_path / "ed.key")
        with pytest.raises(InvalidOptionError, match="is no EC key"):
            tsck.export_snapshot(store, "r", tmp_path / "two", format="safetensors", sign=tmp_path / "ed.key")
    assert not (tmp_path / "two").exists()
