"""Thousands of ranks: they agree whichever rank dies, stalls or is slow, and rank 0's work for each of them is the same for any number."""

import pytest

from tensorstore_ck.errors import SnapshotAbortedError
from tests.effort import effort
from tests.session.group.simulation import Fault, Rank, Simulation, group_of, random_simulation, require_one_outcome, simulate

TIMEOUT, GRACE = 0.4, 0.1
"""Short, since every poll of every rank is a change of greenlets; the clock is simulated."""

pytestmark = pytest.mark.slow


def outcomes(group: list[Rank], attempt: int) -> set[bool]:
    """Whether it was saved, in the words of all who know."""
    known = [rank.endings[attempt] for rank in group if len(rank.endings) > attempt]
    return {ending.put is not None for ending in known if ending.put is not None or isinstance(ending.error, SnapshotAbortedError)}


@pytest.mark.race
@pytest.mark.parametrize(("ranks", "faults", "seed"), [(1024, 0, 0), *effort([], [(1024, 1, 1)]), (4096, 4, 9)])
def test_random_deaths_stalls_errors_delays_and_duplicates(ranks: int, faults: int, seed: int) -> None:
    simulation = random_simulation(seed, ranks, faults=faults, stall=0.3 * (1 + seed % 3), max_delay=0.005)
    group = simulate(simulation, ranks, timeout=TIMEOUT, grace=GRACE, attempts=2 if ranks == 1024 else 1)
    require_one_outcome(simulation, group)
    assert outcomes(group, 0) == {not faults}
    assert len(outcomes(group, 1)) <= 1
    dead = {rank.actor.rank for rank in group if rank.actor.dead}
    assert len(dead) <= faults + 1
    assert all(rank.endings for rank in group if rank.actor.rank not in dead)


@pytest.mark.race
@pytest.mark.parametrize("step", effort([18], [14, 18, 21]))
def test_rank_0_dies_late_and_1023_others_find_out(step: int) -> None:
    simulation = Simulation(step, faults=(Fault(0, step, "die"),), max_delay=0.002)
    group = simulate(simulation, 1024, timeout=TIMEOUT, grace=GRACE)
    require_one_outcome(simulation, group)
    assert not group[0].endings
    assert outcomes(group, 0) == {any(simulation.log.values())}
    assert all(rank.endings for rank in group[1:])


def test_the_work_of_rank_0_is_linear() -> None:
    """Few round trips, and a few hundred bytes for each rank."""
    calls, sizes = [], []
    for ranks in (512, 1024, 4096):
        simulation = Simulation()
        group = group_of(simulation, ranks)
        group[0].start = 0.01  # all others are there
        simulation.run()
        assert all(rank.endings[0].put is not None for rank in group)
        actor = group[0].actor
        assert actor.steps <= 60
        calls.append(actor.calls)
        sizes.append(actor.bytes / ranks)
    assert calls[2] < 200
    assert max(sizes) < 200
    assert max(sizes) < 1.1 * min(sizes)
