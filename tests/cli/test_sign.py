"""keygen, sign, verify, and the options --sign and --trust of the other commands."""

import contextlib
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from tests.cli.conftest import Tsck
from tests.integrations.test_model_signature import make_key


def trust(tmp_path: Path, key: str, path: str = "trust.toml") -> str:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(f'[[trust]]\nrefs = ["models/*"]\nkeys = ["{key}"]\n')
    return path


def test_keygen_sign_verify(tsck: Tsck, tmp_path: Path, model: dict[str, Tensor]) -> None:
    key = tsck("keygen", "release", "--json").json["key"]
    assert stat.S_IMODE((tmp_path / "release.key").stat().st_mode) == 0o600
    assert (tmp_path / "release.pub").read_text() == f"{key}\n"
    again = tsck("keygen", "release")
    assert (again.code, "never overwritten" in again.err) == (28, True)
    assert key.encode() not in (tmp_path / "release.key").read_bytes()
    tsck("init", "ck")
    put = tsck("put", "model.safetensors", "--ref", "models/base")
    assert put.code == 0
    nobody = tsck("verify", "models/base")
    assert (nobody.code, "names no branch or tag of this address" in nobody.err) == (48, True)
    file = trust(tmp_path, key)
    unsigned = tsck("get", "models/base", "out.safetensors", "--trust", file)
    assert (unsigned.code, (tmp_path / "out.safetensors").exists()) == (48, False)
    assert "`tsck sign models/base --sign KEY" in unsigned.err
    no_key = tsck("sign", "models/base")
    assert (no_key.code, "give --sign FILE" in no_key.err) == (22, True)
    assert "signed models/base at" in tsck("sign", "models/base", "--sign", "release.key").out
    assert tsck("get", "models/base", "out.safetensors", "--trust", file).code == 0
    found = tsck("verify", "models/base", "--trust", file, "--json").json
    assert (found["ref"], found["key"], found["number"]) == ("models/base", key, 2)
    assert f"key     {key}" in tsck("verify", "models/base", "--trust", file).out


def test_a_put_with_a_key_is_signed_and_the_users_own_file_counts(tsck: Tsck, tmp_path: Path, model: dict[str, Tensor]) -> None:
    key = tsck("keygen", "mine", "--json").json["key"]
    trust(tmp_path, key, "config/tensorstore_ck/trust.toml")
    tsck("init", "ck")
    assert tsck("put", "model.safetensors", "--ref", "models/base", "--sign", "mine.key").code == 0
    assert tsck("verify", "models/base").code == 0
    assert tsck("put", "model.safetensors", "--ref", "models/two").code == 0
    tsck("init", "mirror")
    copied = tsck("copy", "ck", "mirror", "--sign", "mine.key")
    assert (copied.code, "'models/two'" in copied.out) == (48, True)
    assert tsck("verify", "models/base", store="mirror").code == 0
    assert tsck("show", "models/two").code == 48
    assert tsck("log", "models/two").code == 0


def test_an_encrypted_key_asks_for_its_passphrase(
    tsck: Tsck, tmp_path: Path, model: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def prompt(text: str, **_: object) -> str:
        asked.append(text)
        return "secret words"

    monkeypatch.setattr("click.prompt", prompt)
    made = tsck("keygen", "mine", "--passphrase", "--json")
    assert made.code == 0
    assert b"ENCRYPTED" in (tmp_path / "mine.key").read_bytes()
    tsck("init", "ck")
    tsck("put", "model.safetensors", "--ref", "r", "--sign", "mine.key")
    assert asked == ["Passphrase", "Passphrase of mine.key"]
    monkeypatch.setenv("TSCK_SIGN_PASSPHRASE", "wrong words")
    wrong = tsck("branch", "x", "r", "--sign", "mine.key")
    assert (wrong.code, "the passphrase is wrong" in wrong.err, "words" in wrong.err) == (22, True, False)


def test_salvage_says_what_was_signed(tsck: Tsck, tmp_path: Path, model: dict[str, Tensor]) -> None:
    key = tsck("keygen", "mine", "--json").json["key"]
    file = trust(tmp_path, key)
    tsck("init", "ck")
    for ref, signs in (("models/lost", False), ("models/a", True), ("models/b", True), ("models/b", False), ("runs/x", False)):
        again = ["--step", "2"] if ref == "models/b" and not signs else []
        assert tsck("put", "model.safetensors", "--ref", ref, *again, *(["--sign", "mine.key"] if signs else [])).code == 0
    min(path for path in (tmp_path / "ck/log").rglob("*") if path.is_file()).unlink()
    done = tsck("salvage", "--trust", file, "--json")
    found = {row["ref"]: row["was_signed"] for row in done.json["to_sign"]}
    assert found == {"models/a": True, "models/b": False, "models/lost": False}
    assert tsck("verify", "models/a", "--trust", file).code == 48
    root = next(row["root"] for row in done.json["to_sign"] if row["ref"] == "models/a")
    assert tsck("sign", "models/a", root[:16], "--sign", "mine.key").code == 0
    assert tsck("verify", "models/a", "--trust", file).code == 0


def test_an_export_is_signed_and_verified(tsck: Tsck, tmp_path: Path, model: dict[str, Tensor]) -> None:
    private, public = make_key(tmp_path, ec.SECP256R1())
    tsck("init", "ck")
    tsck("put", "model.safetensors", "--ref", "r")
    done = tsck("export", "r", "--to", "safetensors", "out", "--sign", private.name)
    assert (done.code, "signed: " in done.out) == (0, True)
    assert tsck("verify-files", "out/", "--key", public.name, "--json").json == {
        "folder": "out/",
        "files": ["model.safetensors"],
    }
    with contextlib.chdir(tmp_path / "out"):
        assert tsck("verify-files", ".", "--key", f"../{public.name}").code == 0
    (tmp_path / "out" / "more").write_text("")
    refused = tsck("verify-files", "out", "--key", public.name)
    assert (refused.code, "more is not signed" in refused.err) == (48, True)
