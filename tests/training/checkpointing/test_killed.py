"""A job that is killed again and again, or whose store fails: it goes on from what was safe, or ends; it never only looks healthy."""

import random
from pathlib import Path

import pytest

from tests.effort import effort
from tests.session.group.pool import make_store
from tests.training.checkpointing.killed_side import ENDED, Fault
from tests.training.checkpointing.launcher import exit_codes, run_until_done, told

pytestmark = [pytest.mark.slow, pytest.mark.race]


@pytest.mark.parametrize(("form", "worlds"), [("training", [2, 3] * effort(3, 10)), ("state", [3, 2] * effort(2, 10))])
def test_a_job_that_is_killed_goes_on_from_what_was_safe(tmp_path: Path, form: str, worlds: list[int]) -> None:
    """Also on another number of ranks."""
    make_store(tmp_path)
    assert run_until_done(tmp_path, form, worlds, random.Random(18), calls=25)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_job_whose_store_stays_away_on_one_rank_ends(tmp_path: Path, broken: int) -> None:
    """Each rank ends by itself, and says why, long before the last step."""
    make_store(tmp_path)
    ended = exit_codes(tmp_path, "training", 2, {broken: Fault("unavailable", 20)})
    assert ended == [ENDED] * 2, told(tmp_path)
