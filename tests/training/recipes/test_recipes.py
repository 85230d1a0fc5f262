"""Each recipe, saved on one layout of ranks, comes back bit by bit on the same one, on others, and in one process."""

from pathlib import Path

import pytest

from tests.training.recipes import dense, experts, optimizers, own, pipelines  # noqa: F401 - they register their recipes
from tests.training.recipes.harness import RECIPES, Worlds, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(worlds: Worlds, recipes_folder: Path, name: str) -> None:
    run(worlds, recipes_folder, RECIPES[name])
