"""A GPT with its DistributedOptimizer, saved by two ranks, is loaded on other numbers of ranks and other degrees of parallelism."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="Megatron-core is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.rank_runs import Said, ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.megatron.gpt_job"
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 1)]
"""Ranks, tensor-parallel and pipeline-parallel degree."""


def numbers(said: list[Said]) -> list[list[float]]:
    return [each["numbers"] for each in ends(said, "numbers")]


def tensors(folder: Path, ref: str) -> dict[str, torch.Tensor]:
    """Weights, masters and moments."""
    with tsck.open(folder / "store") as store, store.open_snapshot(ref) as found:
        return {name: found[name][...] for name in found if "/" not in name}


def saved(folder: Path, layout: str, saving: str = "sync") -> list[list[float]]:
    return numbers(run_ranks(JOB, folder, "save", "1", "1", layout, saving, "a"))


@pytest.mark.parametrize("layout", ["fully_reshardable", "dp_reshardable"])
@pytest.mark.parametrize("saving", ["sync", "async"])
def test_a_resume_is_exact(tmp_path: Path, layout: str, saving: str) -> None:
    whole = saved(tmp_path, layout, saving)
    assert len({tuple(each) for each in whole}) == 2
    assert numbers(run_ranks(JOB, tmp_path, "load", "1", "1", layout, saving, "a-again", "a")) == [each[2:] for each in whole]
    assert {path.name for path in (tmp_path / "a" / "iter_0000002").iterdir()} == {"metadata.json", "snapshot.json"}


def test_other_degrees_of_parallelism_load_the_same_tensors(tmp_path: Path) -> None:
    saved(tmp_path, "fully_reshardable")
    original = tensors(tmp_path, "a")
    assert original["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)  # both layers
    for ranks, tensor, pipeline in effort([(1, 1, 1), (4, 2, 2)], LAYOUTS):
        branch = f"{ranks}-{tensor}-{pipeline}"
        run_ranks(JOB, tmp_path, "load", str(tensor), str(pipeline), "fully_reshardable", "sync", branch, "a", ranks=ranks)
        found = tensors(tmp_path, branch)
        assert found.keys() == original.keys()
        assert [name for name in found if not torch.equal(found[name], original[name])] == []


def test_dp_reshardable_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    saved(tmp_path, "dp_reshardable")
    run_ranks(JOB, tmp_path, "load", "1", "1", "dp_reshardable", "sync", "one", "a", ranks=1)
    run_ranks(JOB, tmp_path, "load", "1", "1", "dp_reshardable", "sync", "two", "a")
    one, two = tensors(tmp_path, "one"), tensors(tmp_path, "two")
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
