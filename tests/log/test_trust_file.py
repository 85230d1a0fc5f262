"""The trust file: what it may say, and who may have written it."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.errors import InvalidOptionError, PermissionDeniedError
from tensorstore_ck.log.trust_file import read_trust

ONE, TWO, THREE = (SigningKey.generate() for _ in range(3))


def test_the_first_table_that_matches_counts(tmp_path: Path) -> None:
    path = tmp_path / "trust.toml"
    path.write_text(
        f'revoked = ["{THREE.public}"]\n'
        f'[[trust]]\nrefs = ["models/base", "v*"]\nkeys = ["{ONE.public}"]\n'
        f'[[trust]]\nrefs = ["models/*"]\nkeys = ["{ONE.public}", "{TWO.public}"]\n'
    )
    trust = read_trust(path)
    assert trust is not None
    assert trust.keys_of("models/base") == trust.keys_of("v1") == frozenset({ONE.public_bytes})
    assert trust.keys_of("models/other") == frozenset({ONE.public_bytes, TWO.public_bytes})
    assert (trust.keys_of("runs/x"), trust.revoked) == (None, frozenset({THREE.public_bytes}))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[trust", "is no trust file"),
        ("[trust]\nrefs = 1", "write [[trust]]"),
        ("trust = [1]", "write [[trust]]"),
        ("[[truts]]", "an unknown name 'truts'"),
        ('[[trust]]\nrefs = ["a"]\nkeys = []\nkey = 1', "an unknown name 'key'"),
        ("[[trust]]\nkeys = []", "`refs` is a list of globs"),
        ('[[trust]]\nrefs = [""]\nkeys = []', "`refs` is a list of globs"),
        ('[[trust]]\nrefs = ["a"]', "`keys` is a list of public keys"),
        ('[[trust]]\nrefs = ["a"]\nkeys = ["x"]', "a public key begins with ed25519:"),
        ("revoked = 5", "`revoked` is a list of public keys"),
        ("\xff", "is no trust file"),
    ],
)
def test_what_is_no_trust_file_is_an_error_that_says_why(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "trust.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidOptionError) as refused:
        read_trust(path)
    assert why in str(refused.value)


def test_one_that_others_can_change_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trust.toml"
    with pytest.raises(InvalidOptionError, match="there is no trust file"):
        tsck.open(tmp_path / "ck", create=True, trust=path)
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(PermissionDeniedError, match="can be changed by other users"):
        read_trust(path)
    path.chmod(0o444)
    assert read_trust(path) is not None


def test_the_users_own_file_counts_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_trust(None) is None
    (tmp_path / "tensorstore_ck").mkdir()
    (tmp_path / "tensorstore_ck" / "trust.toml").write_text('[[trust]]\nrefs = ["r"]\nkeys = []\n')
    with tsck.open(tmp_path / "ck", create=True) as store:
        store.put_snapshot({"a": 1}, ref="r")
        with pytest.raises(tsck.UntrustedError, match=r"tensorstore_ck/trust\.toml"):
            store.checkout("r")


def make_folder(at: Path, mode: int = 0o755) -> Path:
    at.mkdir()
    at.chmod(mode)
    return at


def in_a_folder_of_all(at: Path) -> Path:
    path = make_folder(at / "open", 0o777) / "trust.toml"
    path.write_text("")
    return path


def through_a_link_in_a_folder_of_all(at: Path) -> Path:
    (at / "file").write_text("")
    path = make_folder(at / "open", 0o777) / "trust.toml"
    path.symlink_to("../file")
    return path


def through_a_link_to_one(at: Path) -> Path:
    (at / "trust.toml").symlink_to(in_a_folder_of_all(at))
    return at / "trust.toml"


def through_a_link_of_another_user(at: Path) -> Path:
    (at / "file").write_text("")
    (at / "trust.toml").symlink_to("file")
    os.chown(at / "trust.toml", 65534, 65534, follow_symlinks=False)
    return at / "trust.toml"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (in_a_folder_of_all, "can be written by every user"),
        (through_a_link_in_a_folder_of_all, "can be written by every user"),
        (through_a_link_to_one, "can be written by every user"),
        pytest.param(
            through_a_link_of_another_user,
            "is a link that user 65534 made",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link to another user"),
        ),
    ],
)
def test_one_that_others_can_replace_is_refused(tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    path = make(tmp_path)
    with pytest.raises(PermissionDeniedError, match=why):
        read_trust(path)


def test_links_of_the_user_lead_to_it(tmp_path: Path) -> None:
    """As in the volume of a ConfigMap."""
    (make_folder(tmp_path / "..2026") / "trust.toml").write_text("")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "trust.toml").symlink_to("..data/trust.toml")
    assert read_trust(tmp_path / "trust.toml") is not None
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PermissionDeniedError, match="cannot be read"):
        read_trust(tmp_path / "loop")


def test_a_folder_that_is_mounted_read_only_may_have_any_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_a_folder_of_all(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert read_trust(path) is not None


def test_one_that_is_too_long_is_not_cut_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "trust.toml"
    path.write_text(f'[[trust]]\nrefs = ["a"]\nkeys = ["{ONE.public}"]\n' + "#\n" * (1 << 19))
    os.mkfifo(tmp_path / "fifo")
    for each in (path, tmp_path / "fifo"):
        with pytest.raises(InvalidOptionError, match="not a regular file of at most 131,072 bytes"):
            read_trust(each)
