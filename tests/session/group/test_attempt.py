"""All ranks learn one outcome, the one in the log, by the deadline: whichever rank dies, stalls or fails, and wherever."""

from itertools import product
from typing import Any

import pytest

from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.errors import (
    BackendUnavailableError,
    ConflictError,
    CorruptObjectError,
    MismatchError,
    MissingObjectError,
    NoSpaceError,
    NotFoundError,
    SnapshotAbortedError,
    SnapshotDroppedError,
    SnapshotExpiredError,
    StoreError,
    UndecidedError,
    UnsupportedValueError,
)
from tensorstore_ck.session.group import Group, Participant, mismatches, named_ranks
from tensorstore_ck.session.group.channel import decode_record, encode_record
from tests.effort import in_turns
from tests.session.group.simulation import (
    GRACE,
    TIMEOUT,
    FakeStore,
    Fault,
    Rank,
    Simulation,
    group_of,
    random_simulation,
    require_one_outcome,
    simulate,
)

SLACK = 5.0
RANKS = 3
LEADER_AND_FOLLOWER = (0, RANKS - 1)
"""All but rank 0 do the same."""
MAX_STEPS = 70


def check_time(group: list[Rank], *, late: frozenset[int] = frozenset()) -> None:
    """By the deadline, apart from the grace, which is doubled to give up one after the other."""
    for rank in group:
        if rank.actor.rank not in late:
            assert all(ending.seconds <= TIMEOUT + 2 * GRACE + SLACK for ending in rank.endings)


def reasons(group: list[Rank], attempt: int = 0) -> set[str]:
    return {str(rank.endings[attempt].error) for rank in group}


@pytest.mark.parametrize("ranks", [1, 4])
def test_all_ranks_return_the_same_outcome(ranks: int) -> None:
    simulation = Simulation()
    group = simulate(simulation, ranks, attempts=3)
    for attempt in range(3):
        assert len({rank.endings[attempt].txn for rank in group}) == 1
        assert all(rank.endings[attempt].put == {"root": rank.endings[attempt].txn} for rank in group)
    assert len(simulation.log) == 3
    require_one_outcome(simulation, group)


@pytest.mark.race
@pytest.mark.parametrize("kind", ["die", "stall", "error"])
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_fault_of_each_rank_at_each_step(rank: int, kind: str) -> None:
    for step in range(MAX_STEPS):
        simulation = Simulation(step, faults=(Fault(rank, step, kind),))
        group = simulate(simulation, RANKS, attempts=3)
        require_one_outcome(simulation, group)
        check_time(group, late=frozenset({rank} if kind == "stall" else ()))
        assert all(len(other.endings) == 3 for other in group if other.actor.rank != rank)
        if kind == "error" and step < 20:  # in the first attempt: by the third all are together again
            assert all(other.endings[2].put is not None for other in group)
        if group[rank].actor.steps <= step:
            return
    pytest.fail("there are more steps than were tried")


@pytest.mark.race
@pytest.mark.parametrize("kinds", [("die", "die"), ("die", "stall"), ("error", "stall"), ("error", "error")])
def test_two_faults(kinds: tuple[str, str]) -> None:
    steps = list(product(range(0, 30, 3), range(0, 30, 4)))
    for number, ranks in in_turns(range(len(steps)), [(0, 0), (0, 1), (1, 2)]):
        first, second = steps[number]
        simulation = Simulation(first, faults=(Fault(ranks[0], first, kinds[0]), Fault(ranks[1], second, kinds[1])))
        group = simulate(simulation, RANKS)
        require_one_outcome(simulation, group)
        check_time(group, late=frozenset(ranks))


@pytest.mark.race
@pytest.mark.parametrize("kind", ["die", "stall"])
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_without_a_log_the_first_outcome_in_the_channel_counts(rank: int, kind: str) -> None:
    for step in range(30):
        simulation = Simulation(step, faults=(Fault(rank, step, kind),))
        group = simulate(simulation, RANKS, with_log=False)
        check_time(group, late=frozenset({rank}))
        ended = [other.endings[0] for other in group if other.endings]
        assert len({ending.put is None for ending in ended}) == 1
        assert all(isinstance(ending.error, SnapshotAbortedError) for ending in ended if ending.put is None)


@pytest.mark.race
@pytest.mark.parametrize("seed", range(12))
def test_random_faults_delays_and_duplicates_in_64_ranks(seed: int) -> None:
    simulation = random_simulation(seed, 64, faults=seed % 4, stall=seed * 2.0, max_delay=0.2)
    group = simulate(simulation, 64, attempts=3)
    require_one_outcome(simulation, group)
    if seed % 4 == 0:
        assert all(ending.put is not None for rank in group for ending in rank.endings)


@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_of_one_rank_ends_the_attempt_at_once_and_is_its_cause(failing: int) -> None:
    simulation = Simulation()
    group = group_of(simulation, 4, attempts=2)
    group[failing].work_error = NoSpaceError("the disk is full")
    simulation.run()
    (reason,) = reasons(group)
    assert f"rank {failing}: NoSpaceError: the disk is full" in reason
    for rank in group:
        error = rank.endings[0].error
        assert type(error) is NoSpaceError
        assert error.__cause__ is rank.work_error
        assert rank.endings[0].seconds < 1


def test_an_error_ends_the_attempt_though_others_still_work() -> None:
    simulation = Simulation()
    group = group_of(simulation, 4)
    group[1].work_seconds = TIMEOUT / 2
    group[2].work_error = NoSpaceError("the disk is full")
    simulation.run()
    assert [rank.endings[0].seconds < 1 for rank in group] == [True, False, True, True]
    assert len(reasons(group)) == 1


def test_an_error_of_its_own_is_the_cause_though_rank_0_is_gone() -> None:
    simulation = Simulation()
    group = group_of(simulation, 3)
    group[0].work_seconds = 1000.0
    group[2].work_error = NoSpaceError("the disk is full")
    simulation.run()
    error = group[2].endings[0].error
    assert error is not None
    assert error.__cause__ is group[2].work_error


@pytest.mark.parametrize("gone", [OSError("the log is gone"), BackendUnavailableError("gone")], ids=["any", "ours"])
def test_rank_0_cannot_reach_the_log_and_the_others_ask_it_at_once(gone: Exception) -> None:
    """It does not say that nothing happened: its save may have been published, and others may know."""
    simulation = Simulation()
    group = group_of(simulation, 4)
    group[0].log_error = gone
    simulation.run()
    error = group[0].endings[0].error
    assert type(error) is (UndecidedError if isinstance(gone, StoreError) else OSError)
    assert getattr(error, "txn", group[1].endings[0].txn) == group[1].endings[0].txn
    for rank in group[1:]:
        assert isinstance(rank.endings[0].error, SnapshotAbortedError)
        assert rank.endings[0].seconds < GRACE
    require_one_outcome(simulation, group[1:])


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_asked_to_stop_stops_and_the_others_learn_it_at_once(stopped: int) -> None:
    simulation = Simulation()
    group = group_of(simulation, 4)
    group[stopped].work_error = KeyboardInterrupt()
    simulation.run()
    for rank in group:
        error = rank.endings[0].error
        assert isinstance(error, KeyboardInterrupt if rank.actor.rank == stopped else SnapshotAbortedError)
        assert rank.endings[0].seconds < 1


def test_silent_ranks_are_named() -> None:
    simulation = Simulation()
    group = group_of(simulation, 8)
    for late in (2, 3, 5):
        group[late].start = 10 * TIMEOUT
    simulation.run()
    (reason,) = reasons(group)  # those who came late learn it too
    assert f"ranks 2-3, 5 of 8 did not come to it within {TIMEOUT:g} s" in reason


def test_a_rank_0_that_never_begins() -> None:
    simulation = Simulation(faults=(Fault(0, 0, "die"),))
    group = simulate(simulation, 3)
    assert all("waited for rank 0" in str(rank.endings[0].error) for rank in group[1:])
    check_time(group)


def test_rank_0_dies_after_the_log_entry_and_the_others_succeed() -> None:
    puts = 0
    for step in range(MAX_STEPS):
        simulation = Simulation(faults=(Fault(0, step, "die"),))
        group = simulate(simulation, RANKS)
        if not group[0].endings and any(simulation.log.values()):
            puts += 1
            assert all(rank.endings[0].put == simulation.log[rank.endings[0].txn] for rank in group[1:])
    assert puts


def test_one_rank_asks_the_log_for_all() -> None:
    """Those who give up on rank 0 do so one after the other."""
    simulation = Simulation(faults=(Fault(0, 10, "die"),))
    group = simulate(simulation, 16)
    (reason,) = reasons(group[1:])
    assert "rank 1 gave up on rank 0" in reason


def test_ranks_begin_at_different_times() -> None:
    simulation = Simulation()
    group = group_of(simulation, 4, attempts=2)
    for rank in group:
        rank.start = (TIMEOUT + GRACE) * [0.95, 0, 0.3, 0.8][rank.actor.rank]
    simulation.run()
    assert all(ending.put is not None for rank in group for ending in rank.endings)


def test_keys_of_ended_attempts_are_deleted() -> None:
    sizes = []
    for attempts in (1, 2, 10):
        simulation = Simulation()
        simulate(simulation, 4, attempts=attempts)
        sizes.append(len(simulation.store.values))
    assert sizes[0] == sizes[1] == sizes[2]


def test_keys_of_an_attempt_stay_while_a_rank_is_in_it() -> None:
    """Rank 1, played by hand, comes to attempt 2 while another of its threads still is in attempt 1."""
    store = FakeStore()
    group = Group(lambda action, seconds: action(store), rank=0, ranks=2, scope="s")
    kept = []
    for n, oldest in ((1, 1), (2, 1), (3, 3)):
        attempt = group.begin("the put", object_id="main", timeout=1.0)
        (nonce_key,) = (key for key in store.values if "/nonce/" in key)
        prefix = f"tsck/s/{ulid_text(decode_record(store.values[nonce_key], 'nonce')['nonce'])}/"
        store.set(f"{prefix}{n}/proposal/1", encode_record({"record": {}, "oldest": oldest, "call": "the put"}, "proposal"))
        store.set(f"{prefix}{n}/result/1", encode_record({"record": {}}, "result"))
        attempt.run(Participant(dict, lambda go: {}, lambda: None, lambda proposals: {}, lambda results: {}))
        kept.append([attempt for attempt in (1, 2, 3) if f"{prefix}{attempt}/outcome" in store.values])
    assert kept == [[1], [1, 2], [3]]


def test_a_group_that_is_made_again_in_the_same_store() -> None:
    txns: set[Ulid] = set()
    simulation = Simulation()
    for round_ in range(3):
        group = simulate(simulation, 3)
        assert all(rank.endings[0].put is not None for rank in group)
        txns |= {rank.endings[0].txn for rank in group}
        assert len(txns) == round_ + 1


def test_names_of_ranks_stay_short() -> None:
    assert named_ranks([4]) == "rank 4"
    assert named_ranks([0, 1, 2, 7, 9, 10]) == "ranks 0-2, 7, 9-10"
    assert named_ranks(range(0, 4096, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (2048 in all)"
    everyone = [{"step": rank} for rank in range(4096)]
    assert len(mismatches(everyone, ["step"])) < 400
    assert mismatches(everyone, ["ref"]) == ""


# --- classes of errors --------------------------------------------------------------------------------------------------


def with_errors(errors: dict[int, Exception], **options: Any) -> list[Rank]:
    """Four ranks, of which some fail in their work while rank 0 has not ended its own."""
    simulation = Simulation()
    group = group_of(simulation, 4, **options)
    group[0].work_seconds = 5.0
    for rank, error in errors.items():
        group[rank].work_error = error
    simulation.run()
    return group


@pytest.mark.parametrize("with_log", [True, False])
@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({3: UnsupportedValueError("no")}, UnsupportedValueError),
        ({3: ConflictError("no")}, ConflictError),
        ({3: CorruptObjectError("no")}, CorruptObjectError),
        ({3: BackendUnavailableError("no")}, SnapshotAbortedError),
        ({3: UndecidedError("no")}, SnapshotAbortedError),
        ({3: SnapshotDroppedError("no")}, SnapshotAbortedError),
        ({3: ZeroDivisionError("no")}, SnapshotAbortedError),
        ({1: BackendUnavailableError("no"), 2: CorruptObjectError("no"), 3: MismatchError("no")}, MismatchError),
        ({1: CorruptObjectError("no"), 3: NoSpaceError("no")}, NoSpaceError),
        ({1: ConflictError("no"), 3: MissingObjectError("no")}, MissingObjectError),
        ({1: BackendUnavailableError("no"), 3: ConflictError("no")}, ConflictError),
        ({2: MismatchError("no"), 3: NotFoundError("no")}, MismatchError),
        ({0: BackendUnavailableError("no")}, SnapshotAbortedError),
        ({0: MismatchError("no", object_id="model.w")}, MismatchError),
        ({2: MismatchError("no", object_id="model.w")}, MismatchError),
    ],
    ids=str,
)
def test_all_ranks_raise_the_same_class(errors: dict[int, Exception], expected: type[StoreError], with_log: bool) -> None:
    group = with_errors(errors, with_log=with_log)
    assert {type(rank.endings[0].error) for rank in group} == {expected}
    (reason,) = reasons(group)
    for rank, error in errors.items():
        assert f"rank {rank}: {type(error).__name__}: no" in reason
    assert ("try again" in reason) == (expected is SnapshotAbortedError)
    if "model.w" in {getattr(error, "object_id", "") for error in errors.values()}:
        assert {rank.endings[0].error.object_id for rank in group} == {"model.w"}  # type: ignore[union-attr]
    assert all(rank.endings[0].error.__cause__ is rank.work_error for rank in group)  # type: ignore[union-attr]


def test_what_a_save_relied_on_and_gc_freed_is_no_damage() -> None:
    """The next save relies on something else; a restore finds nothing where that was."""
    for with_log, expected in ((True, SnapshotAbortedError), (False, SnapshotExpiredError)):
        group = with_errors({2: SnapshotExpiredError("gone")}, with_log=with_log)
        assert {type(rank.endings[0].error) for rank in group} == {expected}


def test_long_texts_keep_their_beginning_and_end_and_the_whole_stays_short() -> None:
    simulation = Simulation()
    group = group_of(simulation, 64)
    for rank in group:
        rank.work_error = MismatchError(f"rank {rank.actor.rank} begins; {'x' * 100_000}; it ends")
        rank.work_seconds = 1.0
    group[0].work_seconds, group[0].work_error = 5.0, None
    simulation.run()
    (reason,) = reasons(group)
    assert "MismatchError: rank 1 begins; xxx" in reason
    assert reason.count("; it ends") == 4
    assert "ranks 5-63: something else" in reason
    assert len(reason) < 9000
    assert max(map(len, simulation.store.values.values())) < 10_000
