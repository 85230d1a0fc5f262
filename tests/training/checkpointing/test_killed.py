"""A job that is killed again and again, or whose store fails: it goes on from what was safe, or ends; it never only looks healthy.

`tests.training.recipes.test_killed` has the same of models as large jobs lay them out.
"""

import random
from pathlib import Path

import pytest

from tests.session.group.pool import make_store
from tests.training.checkpointing.killed_side import ENDED, Fault, run
from tests.training.checkpointing.launcher import World, exit_codes, run_until_done, told

RANKS = 2
WORLD = World(RANKS, range(RANKS))


@pytest.mark.slow
def test_a_job_that_is_killed_goes_on_from_what_was_safe(tmp_path: Path) -> None:
    make_store(tmp_path)
    assert run_until_done(run, tmp_path, lambda _: WORLD, random.Random(18), kills=5, calls=50)


@pytest.mark.slow
@pytest.mark.parametrize("broken", range(RANKS))
def test_a_job_whose_store_stays_away_on_one_rank_ends(tmp_path: Path, broken: int) -> None:
    """Each rank ends by itself, and says why, long before the last step."""
    make_store(tmp_path)
    ended = exit_codes(run, tmp_path, WORLD, {broken: Fault("unavailable", 20)})
    assert ended == [ENDED] * RANKS, told(tmp_path)
