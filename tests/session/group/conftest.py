"""Fixtures for tests with real ranks."""

from pathlib import Path

import pytest

from tests.session.group.pool import make_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a store in it, of small blocks."""
    folder = tmp_path_factory.mktemp("ranks")
    make_store(folder)
    return folder
