"""Intervals and ETTR, against a simulation of failures."""

import math
import random

import pytest

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.maintenance.optimal_interval import SaveCosts, best, daly, ettr, require_costs, young


def simulated(interval: float, costs: SaveCosts, training: float, seed: int) -> float:
    """The share of wall time that is training which counts, event by event: failures come at random times, also while the job restarts."""
    chance = random.Random(seed)
    wall = done = 0.0
    failure = chance.expovariate(1 / costs.mtbf)
    sound = 0.0
    """The training that could be restored now."""
    coming: list[tuple[float, float]] = []
    """(when it can be restored, how much training it has)."""

    def restorable(now: float) -> float:
        nonlocal sound
        while coming and coming[0][0] <= now:
            sound = coming.pop(0)[1]
        return sound

    while done < training:
        end = wall + interval + costs.stall
        if failure >= end:
            wall, done = end, done + interval
            coming.append((wall + costs.lag, done))
            continue
        done = restorable(failure)
        coming.clear()
        wall = failure
        failure = wall + chance.expovariate(1 / costs.mtbf)
        while failure < wall + costs.restart:  # a restart that fails starts over
            wall = failure
            failure = wall + chance.expovariate(1 / costs.mtbf)
        wall += costs.restart
    return done / wall


@pytest.mark.parametrize(
    "costs",
    [
        SaveCosts(30, 0, 0, 3600),
        SaveCosts(30, 0, 300, 3600),
        SaveCosts(5, 120, 300, 4 * 3600),
        SaveCosts(60, 60, 600, 3600),
        SaveCosts(0.5, 20, 60, 1800),
    ],
)
@pytest.mark.parametrize("share", [0.3, 1.0, 3.0])
def test_the_formula_is_what_a_simulation_finds(costs: SaveCosts, share: float) -> None:
    interval = max(share * young(costs), costs.lag)
    found = simulated(interval, costs, 3000 * costs.mtbf, seed=1)
    assert ettr(interval, costs) == pytest.approx(found, rel=0.03)


def test_the_best_interval_is_best_and_costs_that_make_no_sense_are_refused() -> None:
    for costs in (SaveCosts(30, 0, 300, 3600), SaveCosts(5, 20, 300, 4 * 3600), SaveCosts(600, 0, 0, 3600)):
        found = best(costs)
        assert all(ettr(found, costs) >= ettr(found * factor, costs) for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0))
    for costs in (SaveCosts(-1), SaveCosts(math.nan), SaveCosts(1, mtbf=0), SaveCosts(1, restart=math.inf), SaveCosts(1, -2)):
        with pytest.raises(InvalidOptionError):
            require_costs(costs)


def test_young_and_daly_are_near_where_saves_are_cheap_and_a_job_without_saves_gets_nowhere() -> None:
    costs = SaveCosts(1.0, 0, 0, 10 * 3600)
    assert young(costs) == pytest.approx(math.sqrt(72_000))
    assert daly(costs) == pytest.approx(young(costs), rel=0.01)
    assert best(costs) == pytest.approx(daly(costs), rel=0.02)
    assert daly(SaveCosts(7200, 0, 0, 3600)) == 3600
    assert ettr(1e9, SaveCosts(1.0, mtbf=60)) == 0.0
