"""Who signed a ref, on the page of its snapshot."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.common.signing_keys import SigningKey
from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.ui.conftest import Client, enter


def test_a_page_says_who_signed_and_warns(client: Client, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SigningKey.generate()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "tensorstore_ck").mkdir()
    (tmp_path / "tensorstore_ck" / "trust.toml").write_text(f'[[trust]]\nrefs = ["runs/*"]\nkeys = ["{key.public}"]\n')
    publish(store, "runs/gpt", 1)
    publish(store, "other", 1)
    page = f"/stores/{store.engine.config.uuid}/snapshot/kept"
    assert "&#39;runs/gpt&#39; (root" in (text := enter(client()).get(page, params={"at": store.log("runs/gpt")[0].root}).text)
    assert "tsck sign runs/gpt --sign KEY" in text
    with tsck.open(store.url, sign=key, cache_dir=tmp_path / "signer") as signer:
        signer.sign("runs/gpt")
    assert f"runs/gpt is signed by {key.public}" in enter(client()).get(page, params={"at": store.log("runs/gpt")[0].root}).text
    assert "is signed by" not in enter(client()).get(page, params={"at": store.log("other")[0].root}).text
