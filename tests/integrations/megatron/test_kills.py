"""A rank is killed with -9 at calls of the backend in a save: the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import Said, ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

JOB = "tests.integrations.megatron.kills_job"


def rest_of(numbers: dict[str, float], first: int) -> dict[str, float]:
    return {step: number for step, number in numbers.items() if int(step) >= first}


@pytest.mark.parametrize("saving", effort(["sync"], ["sync", "async"]))
def test_a_rank_dies_in_a_save(tmp_path: Path, saving: str) -> None:
    whole = ends(run_ranks(JOB, tmp_path / "whole", saving), "numbers")
    calls = [each["calls"] for each in whole]
    assert min(calls) > 3
    every = [(rank, at, torn) for rank in (0, 1) for at in range(1, calls[rank] + 1) for torn in (0, 1)]
    seen = set()
    for rank, at, torn in effort([(0, 1, 0), (1, calls[1] - 1, 1), (0, calls[0], 1)], every):
        folder = tmp_path / f"killed-{rank}-{at}-{torn}"
        run_ranks(JOB, folder, saving, str(rank), str(at), str(torn), fails=True)
        resumed: list[Said] = ends(run_ranks(JOB, folder, saving), "numbers")
        first = min(int(step) for step in resumed[0]["numbers"])
        assert [each["numbers"] for each in resumed] == [rest_of(each["numbers"], first) for each in whole], (rank, at, torn)
        seen.add(first)
    assert 3 in seen
    assert seen <= {3, 5}
