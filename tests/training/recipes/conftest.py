"""Worlds of real ranks for all recipes, and a store that they share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.session.group.pool import make_store
from tests.training.recipes.harness import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with Worlds() as started:
        yield started


@pytest.fixture(scope="session")
def recipes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a store in it: each recipe saves to a ref of its own."""
    folder = tmp_path_factory.mktemp("recipes")
    make_store(folder)
    return folder
