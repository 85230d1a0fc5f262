"""Saves of many ranks, each of which checks its part at its own head: committed once or not at all, and all ranks get the same result."""

import pytest

from tests.gc.interleavings.ranks import rank
from tests.gc.interleavings.scenes import collector, writer
from tests.gc.interleavings.schedule import Case, explore, explore_random
from tests.gc.interleavings.test_gc import FALLIBLE, SCHEDULES, dying, sparse, with_faults

pytestmark = [pytest.mark.slow, pytest.mark.race]


def test_two_ranks() -> None:
    scene, host = dying()
    case = scene.case(rank("R0", 0, "x q", table=host), rank("R1", 1, "x r", table=host))
    assert explore(with_faults(case, 2)).states > 3000


def test_three_ranks() -> None:
    scene, host = dying()
    case = scene.case(*(rank(f"R{number}", number, f"x {number}", ranks=3, table=host) for number in range(3)))
    assert explore(with_faults(case)).states > 1000


def test_two_ranks_and_gc() -> None:
    scene, host = dying()
    ranks = (rank(f"R{number}", number, f"x {number}", table=host) for number in range(2))
    assert explore(scene.case(*ranks, collector("G", table=host, settle=True))._replace(max_switches=2)).states > 1000


def ranks_writer_and_compaction() -> Case:
    scene, host = sparse()
    ranks = (rank(f"R{number}", number, f"x y {number}", table=host) for number in range(2))
    others = writer("A", "job", "x y", table=host, may_raise=FALLIBLE), collector("G", table=host, compact=True, settle=True)
    return with_faults(scene.case(*ranks, *others), 2)


def test_random_schedules_of_ranks() -> None:
    explore_random(ranks_writer_and_compaction(), SCHEDULES // 10, seed=1)
