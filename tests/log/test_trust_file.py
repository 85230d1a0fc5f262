"""The trust file: what it may say, and who may have written it."""

from pathlib import Path

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
