"""What a rank reads for its pieces does not grow with the number of ranks."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_each_rank_reads_the_first_part_and_its_own(tmp_path: Path) -> None:
    said = ends(run_ranks("tests.integrations.megatron.pieces_job", tmp_path, ranks=4), "rank")
    assert [(each["parts"], each["is_right"]) for each in said] == [(1, True), (2, True), (2, True), (2, True)]
