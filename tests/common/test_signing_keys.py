"""Files of keys: private, never overwritten, encrypted if asked."""

import os
import stat
from pathlib import Path

import pytest

from tensorstore_ck.common.signing_keys import PASSPHRASE_VARIABLE, SigningKey, is_encrypted, is_signed_by, parse_public, public_text
from tensorstore_ck.errors import AlreadyExistsError, InvalidOptionError, NotFoundError, PermissionDeniedError


@pytest.mark.parametrize("passphrase", [None, "correct horse"])
def test_a_key_comes_back_from_its_file(tmp_path: Path, passphrase: str | None) -> None:
    key, path = SigningKey.generate(), tmp_path / "mine.key"
    former = os.umask(0)
    try:
        key.save(path, passphrase)
    finally:
        os.umask(former)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert is_encrypted(path) == (passphrase is not None)
    again = SigningKey.load(path, passphrase)
    assert again.public == key.public == repr(key)[len("SigningKey(") : -1]
    assert is_signed_by(key.public_bytes, again.sign(b"text"), b"text")
    assert not is_signed_by(key.public_bytes, again.sign(b"text"), b"other")
    assert not is_signed_by(b"\xff" * 32, again.sign(b"text"), b"text")
    assert parse_public(public_text(key.public_bytes)) == key.public_bytes
    with pytest.raises(AlreadyExistsError, match="never overwritten"):
        SigningKey.generate().save(path)


def test_a_passphrase_that_is_missing_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.key"
    SigningKey.generate().save(path, "right")
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)
    with pytest.raises(InvalidOptionError, match=f"is encrypted: set {PASSPHRASE_VARIABLE}"):
        SigningKey.load(path)
    with pytest.raises(InvalidOptionError, match="the passphrase is wrong") as wrong:
        SigningKey.load(path, "never-to-be-shown")
    assert "never-to-be-shown" not in str(wrong.value)
    monkeypatch.setenv(PASSPHRASE_VARIABLE, "right")
    SigningKey.load(path)


def test_what_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "no.key"
    with pytest.raises(NotFoundError, match="cannot be read"):
        SigningKey.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(InvalidOptionError, match="no private key in PEM"):
        SigningKey.load(path)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(pem)
    with pytest.raises(InvalidOptionError, match="is no Ed25519 key"):
        SigningKey.load(path)


def test_a_key_is_not_written_where_everybody_can_replace_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionDeniedError, match="can be written by every user"):
        SigningKey.generate().save(tmp_path / "mine.key")
    with pytest.raises(PermissionDeniedError, match="cannot be written"):
        SigningKey.generate().save(tmp_path / "missing" / "mine.key")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:AAAA", "ed25519:!" + "A" * 43, "rsa:AAAA", 5, None])
def test_what_is_no_public_key(text: object) -> None:
    with pytest.raises(ValueError, match="public key"):
        parse_public(text)
