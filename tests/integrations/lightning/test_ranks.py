"""Lightning on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.lightning import runs
from tests.integrations.lightning.conftest import QUIET
from tests.integrations.rank_runs import Said, ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(1800), *QUIET]


def _run(folder: Path, *arguments: str, kill: tuple[int, int] | None = None) -> list[Said]:
    return ends(run_ranks("tests.integrations.lightning.rank_job", folder, *arguments, kill=kill), "logged")


EVERY = [("ddp", 1, 5), ("ddp_steps", 1, 7), ("ddp_stateful", 0, 5), ("fsdp2", 1, 5), ("ddp", 0, 5), ("ddp_workers", 0, 5)]


@pytest.mark.parametrize(("strategy", "rank", "step"), effort(EVERY[:2], EVERY))
def test_a_killed_rank(tmp_path: Path, strategy: str, rank: int, step: int) -> None:
    """Within the second epoch, or at its end: the sampler of each epoch has another order."""
    expected = _run(tmp_path / "whole", strategy)
    assert len(expected) == 2
    _run(tmp_path / "cut", strategy, kill=(rank, step))
    for one, whole in zip(_run(tmp_path / "cut", strategy, "last"), expected, strict=True):
        assert (one["weights"], one["drawn"]) == (whole["weights"], whole["drawn"])
        for what in ("seen", "logged"):
            assert one[what] == whole[what][-len(one[what]) :]
    with tsck.open(tmp_path / "cut" / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert store.resolve(runs.REF).step == 8  # of 9


FABRIC = "tests.integrations.lightning.fabric_rank_job"


@pytest.mark.parametrize(("strategy", "form"), [("ddp", "file"), ("fsdp2", "address")])
def test_a_killed_rank_of_fabric(tmp_path: Path, strategy: str, form: str) -> None:
    """Losses, weights, each rank's buffers and generators."""
    expected = ends(run_ranks(FABRIC, tmp_path / "whole", strategy))
    assert len(expected) == 2
    assert expected[0]["losses"] != expected[1]["losses"]
    cut = tmp_path / "cut"
    run_ranks(FABRIC, cut, strategy, kill=(1, 5))
    resumed = ends(run_ranks(FABRIC, cut, strategy, str(cut / "step-4.ckpt") if form == "file" else runs.REF))
    assert resumed == expected
    with tsck.open(cut / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert [each.step for each in store.log(runs.REF)] == [8, 6, 4, 2]


def test_another_number_of_ranks_gets_the_weights(tmp_path: Path) -> None:
    """What two ranks with shards saved, one process loads."""
    _run(tmp_path / "whole", "fsdp2")
    with tsck.open(tmp_path / "whole" / "store", cache_dir=tmp_path / "cache") as store:
        module = runs.seeded()
        trainer = runs.trainer(tmp_path, runs.checkpoint(tmp_path, store))
        trainer.validate(module, ckpt_path=runs.REF, verbose=False)
        saved = sum(each.double().sum().item() for each in store.checkout(runs.REF)["model"].values())
    hashed = sum(each.double().sum().item() for each in module.state_dict().values())
    assert hashed == pytest.approx(saved)
