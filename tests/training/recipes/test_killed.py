"""Jobs of all recipes, killed again and again or with a store that fails: as in `tests.training.checkpointing`, none only looks healthy."""

import random
from pathlib import Path

import pytest

from tests.effort import SOAK, effort
from tests.session.group.pool import make_store
from tests.training.checkpointing.killed_side import DONE, ENDED, Fault
from tests.training.checkpointing.launcher import World, exit_codes, run_until_done, told
from tests.training.recipes import dense, experts, optimizers, own, pipelines  # noqa: F401 - they register their recipes
from tests.training.recipes.harness import RECIPES, Layout
from tests.training.recipes.killed_side import run

pytestmark = pytest.mark.slow

KILLS = effort(2, 4)
FORMS = {"state": 25, "training": 50}
"""Form -> how many calls of its backend each rank makes at least."""
USUAL = ("norm_outside_tp", "experts_on_a_submesh", "stages_of_unequal_numbers_of_ranks", "adamw_8bit", "unsynced_batch_norm_under_ddp")
"""Of different kinds: what each change runs."""

CASES = [(name, form) for name in (RECIPES if SOAK else USUAL) for form in FORMS]


def world_of(name: str, layout: Layout, form: str, steps: int) -> World:
    savers = layout.options.get("ranks", range(layout.ranks))
    return World(layout.ranks, savers, (name, layout, form, steps))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_recipe_that_is_killed_goes_on_from_what_was_safe(tmp_path: Path, name: str, form: str) -> None:
    """Every second time on another layout."""
    make_store(tmp_path)
    draw, this = random.Random(f"{name} {form}"), RECIPES[name]

    def world(number: int) -> World:
        layout = draw.choice(this.restored[1:]) if number % 2 else this.saved
        return world_of(name, layout, form, steps=1 if number == 0 else 2)

    assert run_until_done(run, tmp_path, world, draw, kills=KILLS, calls=FORMS[form])


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_recipe_whose_store_stays_away_on_one_rank_ends(tmp_path: Path, name: str, form: str) -> None:
    make_store(tmp_path)
    world = world_of(name, RECIPES[name].saved, form, steps=1)
    draw = random.Random(f"{name} {form}")
    faults = {draw.choice(world.savers): Fault("unavailable", draw.randrange(effort(5, 1), 20))}
    ended = exit_codes(run, tmp_path, world, faults)
    assert ended == [ENDED if rank in world.savers else DONE for rank in range(world.ranks)], told(tmp_path)
