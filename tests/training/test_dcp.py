"""As a Stateful of torch.distributed.checkpoint, with its own writer and reader."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training import EnvironmentChangedWarning, TrainingState
from tests.session.group.pool import RANKS, Pool
from tests.training.job import make, run
from tests.training.test_ranks import Job

STEPS = 4
dcp: Any = torch.distributed.checkpoint
"""Its annotations lack what we use."""


def save(training: TrainingState, folder: Path) -> None:
    dcp.save({"app": training}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def load(training: TrainingState, folder: Path) -> None:
    dcp.load({"app": training}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("before", "stepped"), [(0, 1), (7, 0)])
def test_a_job_goes_on_bit_for_bit(tmp_path: Path, before: int, stepped: int) -> None:
    """Also from before the first step, and into a job that has not stepped."""
    job = make()
    run(job, before)
    save(job.training, tmp_path / "dcp")
    expected = run(job, STEPS)
    other = make(99)
    run(other, stepped)
    load(other.training, tmp_path / "dcp")
    assert bool(other.optimizer.state) == bool(before)
    assert run(other, STEPS) == expected


@pytest.mark.filterwarnings("ignore")
def test_a_save_changes_nothing(tmp_path: Path) -> None:
    expected = run(make(), STEPS)
    job = make()
    save(job.training, tmp_path / "dcp")
    assert not job.optimizer.state
    assert all(each.grad is None for each in job.model.parameters())
    assert run(job, STEPS) == expected


def test_another_number_of_ranks() -> None:
    """Generators start over, the same way each time."""
    state = TrainingState(extra={"n": 3, "g": torch.Generator()}).state_dict()
    state["ranks"] = 4
    drawn = []
    for _ in range(2):
        extra: dict[str, Any] = {"n": 0, "g": torch.Generator()}
        with pytest.warns(EnvironmentChangedWarning, match=r"ranks 4 -> 1 .*seeded again"):
            TrainingState(extra=extra).load_state_dict(state)
        assert extra["n"] == 3
        drawn.append((float(torch.rand(())), float(torch.rand((), generator=extra["g"]))))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def on_ranks(folder: str) -> Any:
    """Saves on all ranks, and loads into a job that has not stepped."""
    job = Job("fsdp2 over tp", RANKS, 1, loader="own")
    for _ in range(3):
        job.step()
    dcp.save({"app": job.training}, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))
    other = Job("fsdp2 over tp", RANKS, 2, loader="own")
    dcp.load({"app": other.training}, storage_reader=dcp.FileSystemReader(folder))
    same = job.gathered() == other.gathered() and job.cursor.position == other.cursor.position == 72
    state = torch.get_rng_state()
    dist.barrier()
    return same, job.loader.state_dict()["shuffle"].equal(other.loader.state_dict()["shuffle"]), state.sum().item()


@pytest.mark.slow
def test_on_ranks(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(on_ranks, str(tmp_path / "dcp"))
    assert all(each[:2] == (True, True) for each in found)
    assert len({each[2] for each in found}) > 1


class Growing:
    """A loader that has no position before its first batch."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_fresh_object_has_no_names_for_comes_back(tmp_path: Path) -> None:
    """DCP fills the names that are there already."""

    def made() -> tuple[Growing, dict[str, Any], TrainingState]:
        loader, extra = Growing(), dict[str, Any]({"seen": {}, "best": None, "ema": {"w": torch.zeros(3)}})
        return loader, extra, TrainingState(model=nn.Linear(2, 2), dataloader=loader, extra=extra)

    loader, extra, training = made()
    loader.state = {"pos": 7, "inner": {"worker": [1, 2]}}
    extra.update(seen={"a": 1}, best=0.5, ema={"w": torch.ones(3)})
    torch.distributed.checkpoint.save({"app": training}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loader, extra, training = made()
    torch.distributed.checkpoint.load({"app": training}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert loader.state == {"pos": 7, "inner": {"worker": [1, 2]}}
    assert (extra["seen"], extra["best"], extra["ema"]["w"].tolist()) == ({"a": 1}, 0.5, [1, 1, 1])


def test_states_that_do_not_fit() -> None:
    """An optimizer's that is not known before it steps; and what is no such state."""
    model = nn.Linear(2, 2)
    training = TrainingState(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(tsck.InvalidOptionError, match="LBFGS"):
        training.state_dict()
    with pytest.raises(tsck.MismatchError, match="no state of a TrainingState"):
        training.load_state_dict({"model": {}})
