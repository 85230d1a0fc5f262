"""Fixtures for tests with real ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.pool import Pool, make_store


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight processes, for all tests."""
    with Pool() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a store in it, of small blocks."""
    folder = tmp_path_factory.mktemp("ranks")
    make_store(folder)
    return folder
