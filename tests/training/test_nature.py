"""What differs by rank by nature: unsynced buffers, a user's own values. Each rank gets its own back; another number takes the first's."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import tensorstore_ck as tsck
from tensorstore_ck.training import EnvironmentChangedWarning, TrainingState, buffers
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

pytestmark = pytest.mark.slow
KINDS = ("fsdp2", "ddp")
BIG = buffers.BIG_BYTES // 4 + 1


class Net(nn.Module):
    def __init__(self, *, mask: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("mask", torch.full((BIG,), mask))  # equal on all
        self.register_buffer("bank", torch.zeros(BIG))  # each rank fills its own

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(batch)).relu())
        return found


class Job:
    """Each rank sees other batches, so that batch norm's statistics differ; the wrapper of the model averages gradients."""

    def __init__(self, kind: str, ranks: int, seed: int, **options: Any) -> None:
        self.rank = dist.get_rank() if ranks > 1 else 0
        torch.manual_seed(seed)
        self.net = Net(mask=float(seed))
        self.model: nn.Module = self.net
        group = GROUPS[ranks] if ranks > 1 else None
        if kind == "fsdp2":
            fully_shard(self.model, mesh=DeviceMesh.from_group(GROUPS[ranks], "cpu"))
        elif kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model, process_group=group, broadcast_buffers=False)
        self.mean = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.own: dict[str, Any] = {"seen": 0, "hidden": torch.zeros(3), "noise": torch.Generator().manual_seed(seed), "log": {"lines": []}}
        self.training = TrainingState(
            model=self.model, optimizer=self.optimizer, extra={"mean": self.mean}, rank_values=self.own, **options
        )

    def step(self) -> None:
        self.model(torch.randn(4, 6) * (1 + self.rank)).square().mean().backward()
        self.mean(torch.randn(4, 3) * self.rank)
        for parameter in self.model.parameters() if self.model is self.net and not isinstance(self.net, FSDPModule) else ():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        buffer: Any = self.net.bank
        buffer += 1 + self.rank
        self.own["seen"] += 1 + self.rank
        self.own["hidden"] += self.rank
        self.own["log"]["lines"].append(f"rank {self.rank}")
        torch.rand((), generator=self.own["noise"])

    def told(self) -> dict[str, Any]:
        """What differs by rank."""
        return {
            **{name: each.tolist() for name, each in self.net.norm.state_dict().items() if "running" in name or "num" in name},
            "bank": float(self.net.get_buffer("bank")[0]),
            "mask": float(self.net.get_buffer("mask")[0]),
            "mean": self.mean.get_buffer("module.running_mean").tolist(),
            "values": (self.own["seen"], self.own["hidden"].tolist(), self.own["log"]),
        }

    def drawn(self) -> float:
        return float(torch.rand((), generator=self.own["noise"]))


def put(folder: str, kind: str, ranks: int, ref: str, puts: int) -> Any:
    job, store = Job(kind, ranks, 1), opened(folder, ranks)
    for number in range(puts):
        job.step()
        snapshot = job.training.put(store, ref=ref, step=number, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    marks = [each.mark for each in store.log(ref)]
    return job.told(), job.drawn(), marks, snapshot.new_bytes


def restore(folder: str, kind: str, ranks: int, ref: str, merge: Any = None) -> Any:
    job, store = Job(kind, ranks, 2, rank_merge=merge), opened(folder, ranks)
    hidden, log = job.own["hidden"], job.own["log"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        job.training.restore(store, ref, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    assert job.own["hidden"] is hidden
    assert job.own["log"] is log
    return job.told(), job.drawn(), [str(each.message) for each in warned]


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_own_and_nothing_is_marked(pool: Pool, folder: Path, kind: str) -> None:
    expected = pool.run(put, str(folder), kind, 4, f"own/{kind}", 4, ranks=4)
    assert len({str(each[0]["running_mean"]) for each in expected}) == 4
    assert {mark for each in expected for mark in each[2]} == {""}
    for found, told in zip(pool.run(restore, str(folder), kind, 4, f"own/{kind}", ranks=4), expected, strict=True):
        assert found == (told[0], told[1], [])
    for ranks in (2, 1):
        restored = pool.run(restore, str(folder), "plain" if ranks == 1 else kind, ranks, f"own/{kind}", ranks=ranks)
        for found in restored:
            assert found[0] == expected[0][0]
            (said,) = found[2]
            assert "seeded again, and buffers and rank_values are the first rank's" in said
        assert len({found[1] for found in restored}) == ranks
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        shared = store.checkout(f"own/{kind}")["model"]
        assert shared["norm.running_mean"].tolist() == expected[0][0]["running_mean"]


def test_a_big_buffer_that_is_equal_is_stored_once(pool: Pool, folder: Path) -> None:
    """And one that is not, once for each rank."""
    (new_bytes,) = {each[3] for each in pool.run(put, str(folder), "fsdp2", 2, "big", 1, ranks=2)}
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        own = [store.rank_state("big", rank) for rank in range(2)]
    assert [set(each["buffers"]) & {"mask", "bank"} for each in own] == [{"bank"}] * 2
    assert new_bytes < 3.5 * BIG * 4


def add(path: str, values: list[Any]) -> Any:
    """What a user may do."""
    return sum(values[1:], values[0]) if path.endswith(("seen", "num_batches_tracked", "bank")) else values[-1]


def test_what_a_function_makes_of_all(pool: Pool, folder: Path) -> None:
    expected = [each[0] for each in pool.run(put, str(folder), "fsdp2", 4, "merged", 1, ranks=4)]
    for found in pool.run(restore, str(folder), "fsdp2", 2, "merged", add, ranks=2):
        assert found[0]["values"] == (sum(each["values"][0] for each in expected), *expected[-1]["values"][1:])
        assert found[0]["num_batches_tracked"] == 4
        assert found[0]["bank"] == 1 + 2 + 3 + 4
        assert found[0]["running_mean"] == expected[-1]["running_mean"]
        assert found[0]["mean"] == expected[-1]["mean"]
        assert "are those that rank_merge= made from all ranks" in found[2][0]


def test_values_that_are_not_there(pool: Pool, folder: Path) -> None:
    pool.run(put, str(folder), "plain", 2, "fewer", 1, ranks=2)
    for ranks in (2, 4):
        for error in pool.ask(restore_more, str(folder), ranks, ranks=ranks):
            assert isinstance(error, tsck.MismatchError)
            assert "no state of rank_values.more" in str(error)


def restore_more(folder: str, ranks: int) -> None:
    job = Job("plain", ranks, 2)
    job.own["more"] = 1
    job.training.restore(opened(folder, ranks), "fewer", group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)


def test_one_process_has_them_too(store: tsck.Store) -> None:
    job = Job("plain", 1, 1)
    job.step()
    job.training.put(store, ref="one")
    other = Job("plain", 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvironmentChangedWarning)
        other.training.restore(store, "one")
    assert (other.told(), other.drawn()) == (job.told(), job.drawn())
