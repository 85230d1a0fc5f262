"""Fixtures for tests with real ranks, and for those of trainers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.session.group.conftest import folder

__all__ = ["folder", "has_finished", "store"]


def has_finished(store: tsck.ReadOnlyStore) -> bool:
    """Whether a run noted its end in the log, as its last operation."""
    *_, newest = store.engine.log.entries(1)
    return newest.ops[-1].name == "finished"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    """In a folder, as trainers have it."""
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as opened:
        yield opened
