"""A rank is killed with -9 at calls of the backend in a save: the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import check_kills

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(3600)]

JOB = "tests.integrations.megatron.kills_job"


@pytest.mark.parametrize("saving", effort(["sync"], ["sync", "async"]))
def test_a_rank_dies_in_a_save(tmp_path: Path, saving: str) -> None:
    check_kills(JOB, tmp_path, saving, "numbers", {3, 5})
