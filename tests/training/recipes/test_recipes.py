"""Each recipe, natively and through DCP's own files, side by side: what DCP takes we take, and what it restores we restore bit by bit."""

from pathlib import Path

import pytest

from tests.training.recipes import dense, experts, optimizers, own, pipelines  # noqa: F401 - they register their recipes
from tests.training.recipes.harness import RECIPES, Worlds, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(worlds: Worlds, recipes_folder: Path, name: str) -> None:
    run(worlds, recipes_folder, RECIPES[name])
