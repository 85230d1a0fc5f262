"""Several stores at a time, of which some cannot be read."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.effort import PATIENCE_SECONDS

STORES = 6


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Stores with a snapshot each."""
    found = []
    for number in range(STORES):
        with tsck.open(tmp_path / str(number), create=True, no_sync=True, cache_dir=tmp_path / "cache") as store:
            publish(store, "exp/a", number)
            found.append(store.url)
    return found


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[[str], Store]:
    return lambda url: tsck.open(url, cache_dir=tmp_path / "cache")


@pytest.mark.race
def test_several_at_a_time_but_not_more(url: str, urls: list[str], open_store: Callable[[str], Store]) -> None:
    meeting = threading.Barrier(3)
    under_way: set[str] = set()
    most = []

    def open_together(url: str) -> Store:
        under_way.add(url)
        most.append(len(under_way))
        meeting.wait(PATIENCE_SECONDS)  # which three must come to
        under_way.discard(url)
        return open_store(url)

    with Catalog(url, batch_entries=1) as catalog:
        outcomes = catalog.sync_all(urls, open_store=open_together, parallel=3)
    assert all(outcome.error is None for outcome in outcomes)
    assert max(most) == 3


def test_what_is_wrong_with_the_catalog_is_raised(urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_bytes(b"no database at all, but long enough to be one" * 50)
    with Catalog(tmp_path / "catalog.sqlite") as catalog:
        with pytest.raises(tsck.CorruptObjectError):
            catalog.sync_all(urls)
        with pytest.raises(tsck.InvalidOptionError, match="parallel"), Catalog(tmp_path / "other.sqlite") as other:
            other.sync_all(urls, parallel=0)


def test_a_store_that_is_forgotten_leaves_the_others(url: str, urls: list[str], open_store: Callable[[str], Store]) -> None:
    with Catalog(url) as catalog:
        catalog.sync_all(urls[:2], open_store=open_store)
        before = {each.url: each for each in catalog.stores()}
        catalog.forget_store(before[urls[0]].uuid)
        assert catalog.stores() == (before[urls[1]],)
        assert {found.store for found in catalog.find()} == {urls[1]}
        catalog.forget_store(before[urls[0]].uuid)
        catalog.sync_all([urls[0]], open_store=open_store)
        assert [each.url for each in catalog.stores()] == urls[:2]
        assert len(catalog.find()) == 2
