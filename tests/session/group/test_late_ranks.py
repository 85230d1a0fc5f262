"""A call of all ranks that some have not made is logged long before it fails, with the call and the missing ranks, and once for all."""

import threading

import pytest

from tensorstore_ck.session.group.late_rank_warning import ASK_SECONDS, LATE_SECONDS, Wait
from tests.session.group.simulation import Simulation, group_of

RANKS = 4
TIMEOUT = 60.0
LATE: dict[str, tuple[dict[int, float], list[str]]] = {
    "nobody": ({}, []),
    "a little": ({3: LATE_SECONDS - 2}, []),
    "one": ({3: 30.0}, ["rank 0 has waited 10 s for rank 3 in"]),
    "two": ({1: 30.0, 3: 20.0}, ["rank 0 has waited 10 s for ranks 1, 3 in"]),
    "rank 0": ({0: 30.0}, [f"rank {rank} has waited 12 s for rank 0 in" for rank in (1, 2, 3)]),
    "all but rank 0": ({1: 90.0, 2: 90.0, 3: 90.0}, ["rank 0 has waited 10 s for ranks 1-3 in"]),
}
"""Rank -> when it comes; what is logged."""


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("name", LATE)
def test_missing_ranks_are_named(caplog: pytest.LogCaptureFixture, name: str, attempt: int) -> None:
    """At the first use of a group, and later; ranks that work long are not missing."""
    late, expected = LATE[name]
    simulation = Simulation()
    group = group_of(simulation, RANKS, attempts=2, timeout=TIMEOUT)
    for each in group:
        each.starts = {attempt: late.get(each.actor.rank, 0.0)}
        each.work_seconds = 0.0 if late else 3 * ASK_SECONDS
    simulation.run()
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    first = said[: len(expected)]  # who does not come to one round is late for the next one
    assert sorted(text.partition(" in ")[0] + " in" for text in first) == expected
    assert all(
        "() at simulation.py:" in text and "(the save to 'main'), which all 4 ranks must call; it fails after 60 s" in text
        for text in first
    )
    assert len(said) == len(expected) or name == "all but rank 0"


def test_on_a_thread_of_the_package_there_is_no_call_to_name(caplog: pytest.LogCaptureFixture) -> None:
    wait = Wait("the save to 'main'", 0, 2, TIMEOUT, None)
    thread = threading.Thread(target=wait.report, args=([1], LATE_SECONDS))
    thread.start()
    thread.join()
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 0 has waited 10 s for rank 1 in the save to 'main', which all 2 ranks")
