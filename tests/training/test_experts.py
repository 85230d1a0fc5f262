"""Experts of which each rank has its own, plain modules under distinct names, in addition to layers that all ranks have."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorstore_ck.training import TrainingState
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

pytestmark = pytest.mark.slow
EXPERTS = 4


class Job:
    def __init__(self, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"router": nn.Linear(6, EXPERTS), "experts": nn.ModuleDict()})
        every = {str(number): nn.Linear(6, 6) for number in range(EXPERTS)}
        share = EXPERTS // ranks
        own = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        self.model["experts"].update({str(number): every[str(number)] for number in own})  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.training = TrainingState(model=self.model, optimizer=self.optimizer)

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.full_like(parameter, float(sum(name.encode()) % 5))
        self.optimizer.step()

    def told(self) -> dict[str, list[Any]]:
        return {
            name: [each.tolist(), *(moment.tolist() for moment in self.optimizer.state[each].values())]
            for name, each in self.model.named_parameters()
        }


def put(folder: str, ranks: int) -> Any:
    job = Job(ranks, 1)
    for step in range(3):
        job.step()
        job.training.put(opened(folder, ranks), ref=f"experts/{ranks}", step=step, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return job.told()


def restore(folder: str, ranks: int, ref: str) -> Any:
    job = Job(ranks, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.training.restore(opened(folder, ranks), ref, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return job.told()


@pytest.mark.parametrize("put_by", [4, 2, 1])
def test_experts_on_any_number_of_ranks(pool: Pool, folder: Path, put_by: int) -> None:
    expected: dict[str, Any] = {}
    for each in pool.run(put, str(folder), put_by, ranks=put_by):
        expected |= each
    assert len(expected) == 2 + 2 * EXPERTS
    for ranks in (4, 2, 1):
        told: dict[str, Any] = {}
        for each in pool.run(restore, str(folder), ranks, f"experts/{put_by}", ranks=ranks):
            told |= each
        assert told == expected
