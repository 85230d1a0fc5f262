"""A rank that is not heard of is given up long before the deadline; one that is slow, or was suspended with all others, is not."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from tensorstore_ck.errors import SnapshotAbortedError
from tensorstore_ck.events import KINDS, Event, event_text
from tensorstore_ck.session.group import Channel
from tensorstore_ck.session.group.channel import LateError
from tensorstore_ck.session.group.liveness import LivenessWatch
from tests.gc.stores import open_store
from tests.group_of_one import group_of_one
from tests.session.group.clock import Clock
from tests.session.group.simulation import FakeStore, Fault, Rank, Simulation, group_of, random_simulation, require_one_outcome, simulate

RANKS = 3
LEADER_AND_FOLLOWER = (0, RANKS - 1)
"""All but rank 0 do the same."""
TIMEOUT = 60.0
GRACE = 1.0
DEAD_AFTER = 6.0
EVERY = 1.0
SLACK = 2.0
NOTICED = DEAD_AFTER + EVERY + GRACE + SLACK
"""Within that all know: the last sign of life may come just after a look."""
MAX_STEPS = 80
UNHEARD = "not been heard of for 6 s"


def reasons(group: list[Rank], attempt: int) -> set[str]:
    return {str(rank.endings[attempt].error) for rank in group if len(rank.endings) > attempt}


@pytest.mark.race
@pytest.mark.parametrize("kind", ["die", "stall"])
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_rank_that_dies_or_is_suspended_at_any_step_is_given_up_and_named(rank: int, kind: str) -> None:
    """Also one that goes on later: it learns what the others know, and takes part in the next save."""
    given_up = 0
    for step in range(MAX_STEPS):
        simulation = Simulation(step, faults=(Fault(rank, step, kind),), stall=25.0)
        group = group_of(simulation, RANKS, attempts=3, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
        for each in group:
            each.starts = {2: 40.0}
        simulation.run()
        require_one_outcome(simulation, group)
        others = [each for each in group if each.actor.rank != rank]
        when, beats = group[rank].actor.struck or (0.0, 0)
        if beats:  # else it had not used the group yet
            assert all(ending.seconds < NOTICED for each in others for ending in each.endings)
            aborted = [str(ending.error) for each in others for ending in each.endings if ending.put is None]
            assert all(f"rank {rank} has {UNHEARD}" in reason for reason in aborted)
            given_up += bool(aborted)
        if kind == "stall" and when < 40.0:
            assert all(each.endings[2].put is not None for each in group)
        if group[rank].actor.steps <= step:
            assert given_up
            return
    pytest.fail("there are more steps than were tried")


@pytest.mark.race
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_rank_that_is_slow_at_any_step_is_waited_for(rank: int) -> None:
    for step in range(MAX_STEPS):
        simulation = Simulation(step, faults=(Fault(rank, step, "slow"),), stall=TIMEOUT / 2)
        group = simulate(simulation, RANKS, attempts=2, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
        assert all(ending.put is not None for each in group for ending in each.endings)
        if group[rank].actor.steps <= step:
            return
    pytest.fail("there are more steps than were tried")


def test_a_rank_that_has_not_used_the_group_yet_is_waited_for() -> None:
    simulation = Simulation()
    group = group_of(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    group[2].start = TIMEOUT / 2
    simulation.run()
    assert all(rank.endings[0].put is not None for rank in group)


@pytest.mark.race
@pytest.mark.parametrize("start", range(12))
def test_a_job_that_is_suspended_with_all_its_ranks_goes_on(start: int) -> None:
    """Though they go on one after the other; each was suspended for longer than the others' patience."""
    simulation = Simulation(start)
    group = group_of(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    for rank in group:
        rank.work_seconds = [0.0, 0.0, 12.0][rank.actor.rank]  # all others wait
        rank.actor.suspend(start, 30.0 + 1.5 * ((rank.actor.rank + start) % RANKS))
    simulation.run()
    assert all(rank.endings[0].put is not None for rank in group)


@pytest.mark.race
@pytest.mark.parametrize("start", range(13))
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_one_that_is_suspended_for_less_than_that_is_waited_for(rank: int, start: int) -> None:
    simulation = Simulation(start)
    group = group_of(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    for each in group:
        each.work_seconds = 10.0
    group[rank].actor.suspend(start, DEAD_AFTER - 2 * EVERY)
    simulation.run()
    assert all(each.endings[0].put is not None for each in group)


def test_a_rank_that_dies_when_it_has_done_its_part_does_not_cost_the_save() -> None:
    """Rank 2 is slow; rank 1 is gone meanwhile."""
    simulation = Simulation()
    group = group_of(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    group[2].work_seconds = 50.0
    simulation.at(0.5, lambda: setattr(group[1].actor, "dead", True))
    simulation.run()
    assert group[0].endings[0].put is not None
    assert group[2].endings[0].put is not None


def test_ranks_that_are_not_heard_of_are_named_together() -> None:
    simulation = Simulation()
    group = group_of(simulation, 16, attempts=2, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
    for rank in group:
        rank.starts = {1: 10.0 if rank.actor.rank < 12 else 200.0}  # late ones live
    for dead in (3, 4, 5, 9):
        simulation.at(5.0, lambda dead=dead: setattr(group[dead].actor, "dead", True))  # type: ignore[misc]
    simulation.run()
    (reason,) = reasons(group, 1)
    assert f"ranks 3-5, 9 have {UNHEARD}: they ended, closed their store, were killed or suspended, or their hosts are gone" in reason
    assert all(rank.endings[1].seconds < NOTICED for rank in group[:3])


def test_each_rank_that_is_given_up_is_reported_once_with_its_host() -> None:
    simulation = Simulation()
    group = group_of(simulation, RANKS, attempts=4, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
    for each in group:
        each.starts = {1: 10.0, 2: 40.0, 3: 70.0}
    simulation.at(5.0, lambda: setattr(group[2].actor, "dead", True))
    simulation.run()
    assert len([ending for ending in group[0].endings if ending.put is None]) == 3
    assert group[0].dead_ranks == [(2, "host-2", DEAD_AFTER)], "it waited for it in three saves"
    assert group[1].dead_ranks == [], "rank 0 informs it"


def test_a_silent_rank_0_is_reported_by_another_one() -> None:
    simulation = Simulation()
    group = group_of(simulation, RANKS, attempts=2, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
    for each in group:
        each.starts = {1: 10.0}
    simulation.at(5.0, lambda: setattr(group[0].actor, "dead", True))
    simulation.run()
    reported = [(rank, host) for each in group for rank, host, _ in each.dead_ranks]
    assert set(reported) == {(0, "host-0")}


def test_a_store_emits_an_event_of_a_dead_rank() -> None:
    seen: list[Event] = []
    with open_store() as store, group_of_one():
        store.on_event(seen.append)
        everyone = dist.group.WORLD
        assert everyone is not None
        group, _ = store.session.groups.of(everyone)
        group._note_dead(0, b"7 node-1", 5.0)
    (event,) = seen
    assert (event.kind, event.rank, dict(event.fields)) == ("rank_dead", 0, {"dead_rank": 0, "host": "node-1", "silent_seconds": 5.0})
    assert event_text(event) == "rank 0 on node-1 is dead: not heard of for 5.0 s"
    assert event.fields.keys() == KINDS[event.kind].keys()


def test_who_gives_up_on_rank_0_does_so_one_after_the_other() -> None:
    simulation = Simulation()
    group = group_of(simulation, 16, attempts=2, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER)
    for rank in group:
        rank.starts = {1: 10.0}
    simulation.at(5.0, lambda: setattr(group[0].actor, "dead", True))
    simulation.run()
    (reason,) = reasons(group[1:], 1)
    assert f"rank 1 gave up on rank 0: rank 0 has {UNHEARD}" in reason


def test_a_group_that_is_made_again_in_the_same_store_does_not_hear_the_old_one() -> None:
    """Rank 1 of the old group has died; the new one uses the group late."""
    simulation = Simulation()
    group = simulate(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    assert group[1].actor.beats
    simulation.now += 100.0
    group = group_of(simulation, RANKS, timeout=TIMEOUT, dead_after=DEAD_AFTER)
    group[1].start = TIMEOUT / 2
    simulation.run()
    assert all(rank.endings[0].put is not None for rank in group)


def test_what_rank_0_says_of_the_patience_counts_for_all() -> None:
    simulation = Simulation()
    group = [
        Rank(simulation, rank, RANKS, attempts=2, timeout=TIMEOUT, grace=GRACE, dead_after=DEAD_AFTER if rank == 0 else 60.0)
        for rank in range(RANKS)
    ]
    group[2].work_seconds = 30.0  # its signs of life come often enough for rank 0
    group[0].actor.suspend(35.0, 200.0)
    simulation.run()
    assert all(rank.endings[0].put is not None for rank in group)
    assert all(isinstance(rank.endings[1].error, SnapshotAbortedError) for rank in group)
    assert all(rank.endings[1].seconds < 30.0 + NOTICED for rank in group[1:])
    assert f"rank 1 gave up on rank 0: rank 0 has {UNHEARD}" in str(group[2].endings[1].error)


@pytest.mark.race
@pytest.mark.parametrize("seed", range(8))
def test_random_faults_delays_and_duplicates_in_32_ranks(seed: int) -> None:
    simulation = random_simulation(seed, 32, faults=seed % 4, stall=seed * 2.0)
    group = simulate(simulation, 32, timeout=TIMEOUT, grace=GRACE, attempts=3, dead_after=DEAD_AFTER)
    require_one_outcome(simulation, group)
    if seed % 4 == 0:
        assert all(ending.put is not None for rank in group for ending in rank.endings)


def questions(ranks: int, missing: Sequence[int], seconds: float, watch: LivenessWatch | None) -> tuple[int, int]:
    """What rank 0 asks of a store while it waits for missing ranks in vain, and what another rank asks while it waits for rank 0."""
    fake, clock = FakeStore(), Clock()
    for rank in set(range(ranks)) - set(missing):
        fake.set(f"p/proposal/{rank}", b"")

    counters = [f"alive/{rank}" for rank in range(ranks)]

    def beat() -> None:
        fake.values |= dict.fromkeys(counters, str(clock.now).encode())

    beat()
    clock.on_sleep = beat
    channel = Channel(lambda action, _: action(fake), "p/", ranks=ranks, watch=watch, clock=clock, sleep=clock.sleep)
    fake.calls = 0
    channel.collect({f"proposal/{rank}": rank for rank in range(ranks)}, seconds, alarm="failed")
    of_rank_0, fake.calls = fake.calls, 0
    with pytest.raises(LateError):
        channel.wait(["go"], clock.now + seconds, writer=0)
    return of_rank_0, fake.calls


@pytest.mark.parametrize(("missing", "batches"), [([1023], 1), ([1, 1000], 4), (range(1024), 4)])
def test_looking_at_thousands_of_ranks_costs_two_questions_for_each_batch(missing: Sequence[int], batches: int) -> None:
    """In addition to the regular polls; and a rank that waits for rank 0 asks about that one."""
    seconds = 100.0
    without = questions(1024, missing, seconds, None)
    with_looks = questions(1024, missing, seconds, LivenessWatch("alive/", every=10.0, limit=60.0))
    looks = seconds / 10.0 + 1
    assert 0 < with_looks[0] - without[0] <= 2 * batches * looks
    assert 0 < with_looks[1] - without[1] <= 2 * looks
