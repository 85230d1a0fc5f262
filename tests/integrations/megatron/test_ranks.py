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


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return sorted(one.keys() ^ other.keys()) + [name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("layout", "saving", "others"),
    [
        ("fully_reshardable", "sync", effort([(1, 1, 1), (4, 2, 2)], LAYOUTS)),
        ("dp_reshardable", "async", effort([(1, 1, 1)], [(1, 1, 1), (4, 1, 1)])),
    ],
)
def test_a_resume_is_exact_and_other_ranks_load_the_same_tensors(
    tmp_path: Path, layout: str, saving: str, others: list[tuple[int, int, int]]
) -> None:
    whole = numbers(run_ranks(JOB, tmp_path, "save", "1", "1", layout, saving, "a"))
    assert len({tuple(each) for each in whole}) == 2
    assert numbers(run_ranks(JOB, tmp_path, "load", "1", "1", layout, saving, "a-again", "a")) == [each[2:] for each in whole]
    assert {path.name for path in (tmp_path / "a" / "iter_0000002").iterdir()} == {"metadata.json", "snapshot.json"}

    again = tensors(tmp_path, "a-again")
    assert again["optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"].shape == (2, 64, 16)  # both layers
    if layout == "fully_reshardable":
        assert differing(tensors(tmp_path, "a"), again) == []
    for ranks, tensor, pipeline in others:
        branch = f"{ranks}-{tensor}-{pipeline}"
        run_ranks(JOB, tmp_path, "load", str(tensor), str(pipeline), layout, "sync", branch, "a", ranks=ranks)
        assert differing(tensors(tmp_path, branch), again) == []


@pytest.mark.parametrize("saving", effort(["async"], ["sync", "async"]))
def test_wrappers_of_megatron_share_the_work_among_the_ranks(tmp_path: Path, saving: str) -> None:
    said = ends(run_ranks("tests.integrations.megatron.parallel_job", tmp_path, saving), "numbers")
    assert [each["again"] for each in said] == [each["numbers"][2:] for each in said]
    (first, shared), (none, other) = (each["stored"] for each in said)
    assert none == 0  # replicas are stored by one rank, without the wrapper
    assert min(shared, other) > 0
    assert shared + other == first
    assert differing(tensors(tmp_path, "plain"), tensors(tmp_path, "shared")) == []
