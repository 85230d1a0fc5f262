"""Many ranks: what they share fits any number, a rank's own state fits the number of ranks that saved it."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorstore_ck as tsck
from tensorstore_ck.training import EnvironmentChangedWarning, TrainingState, verify_resume
from tests.session.group.pool import GROUPS, RANKS, TIMEOUT_SECONDS, Pool, opened
from tests.training.job import Loader, seed

pytestmark = pytest.mark.slow
PUT_BY = 4


def plain(model: nn.Module, ranks: int) -> nn.Module:
    return model


def fsdp2(model: nn.Module, ranks: int) -> nn.Module:
    fully_shard(model, mesh=DeviceMesh.from_group(GROUPS[ranks], "cpu"))
    return model


def fsdp2_over_tp(model: nn.Module, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))  # all must make it
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def ddp(model: nn.Module, ranks: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=GROUPS[ranks])


KINDS: dict[str, Callable[[nn.Module, int], nn.Module]] = {"plain": plain, "fsdp2": fsdp2, "fsdp2 over tp": fsdp2_over_tp, "ddp": ddp}


class Job:
    """Gradients are made by hand: what a backward pass does is not what is tested here."""

    def __init__(self, kind: str, ranks: int, number: int, *, loader: str = "cursor", apart: bool = False) -> None:
        self.rank = dist.get_rank() if ranks > 1 else 0
        seed(number)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
        self.mean = torch.zeros(3, 2)
        model.register_buffer("mean", self.mean.T)
        model.register_buffer("batches", torch.tensor(0))
        self.model = KINDS[kind](model, ranks)
        self.apart = self.rank if apart else 0
        """By how much a buffer differs from rank 0's, as batch norm's do."""
        seed(number + 100 * self.rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.cursor = tsck.SampleCursor(1000, batch_size=24, seed=1)
        self.loader = Loader()
        self.noise = torch.Generator().manual_seed(number + self.rank)
        self.extra: dict[str, Any] = {"noise": self.noise, "seen": 0}
        self.training = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            dataloader={"cursor": self.cursor, **({"own": self.loader} if loader == "own" else {})},
            extra=self.extra,
        )

    def accumulate(self, same: float) -> None:
        """Sharded gradients are sums over ranks, so the same on all."""
        for number, parameter in enumerate(self.model.parameters()):
            gradient = torch.full_like(parameter, same + number)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def step(self) -> None:
        self.cursor.advance()
        self.loader.next_batch()
        self.accumulate(float(self.cursor.position % 7))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.extra["seen"] += 24
        self.mean += 1 + self.apart

    def drawn(self) -> list[float]:
        """What this rank draws next."""
        return [random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), generator=self.noise))]

    def gathered(self) -> dict[str, Any]:
        """What all ranks share, in full."""
        state = self.training.captured()
        shared = {key: state[key] for key in ("model", "optimizer", "scheduler")} | {"seen": self.extra["seen"]}
        return {key: gathered(each) for key, each in shared.items()}


def gathered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: gathered(item) for name, item in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor().detach().numpy().tobytes()
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def put(folder: str, kind: str, ranks: int, ref: str, options: dict[str, Any]) -> Any:
    """What it was, and how it goes on."""
    steps, gradients = options.get("steps", 3), options.get("gradients", False)
    job = Job(kind, ranks, 1, loader=options.get("loader", "cursor"), apart=options.get("apart", False))
    for _ in range(steps):
        job.step()
    if gradients:
        job.accumulate(1.0 + job.rank * (kind in ("plain", "ddp")))
    store = opened(folder, ranks)
    job.training.put(store, ref=ref, step=steps, group=GROUPS[ranks], gradients=gradients, timeout_seconds=TIMEOUT_SECONDS)
    found = job.gathered(), job.cursor.position, job.drawn()
    for _ in range(2):
        job.step()
    return *found, job.gathered(), job.loader.next_batch().tolist()


def restore(folder: str, kind: str, ranks: int, address: str, options: dict[str, Any]) -> Any:
    job = Job(kind, ranks, 2, loader=options.get("loader", "cursor"), apart=options.get("apart", False))
    for _ in range(options.get("stepped", 0)):
        job.step()
    store = opened(folder, ranks)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        snapshot = job.training.restore(store, address, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    said = [str(each.message) for each in warned if each.category is EnvironmentChangedWarning]
    if snapshot is None:
        return None
    found = job.gathered(), job.cursor.position, job.drawn()
    seeds = store.random_streams(address, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    for _ in range(2):
        job.step()
    return *found, job.gathered(), job.loader.next_batch().tolist(), snapshot.step, said, seeds


@pytest.mark.parametrize(("kind", "stepped"), [("plain", 0), ("fsdp2", 1), ("fsdp2 over tp", 0), ("ddp", 1)])
def test_as_many_ranks_go_on_bit_for_bit(pool: Pool, folder: Path, kind: str, stepped: int) -> None:
    ref = f"as-many/{kind.replace(' ', '-')}-{stepped}"
    options = {"loader": "own", "stepped": stepped, "apart": kind == "ddp"}
    ranks = RANKS if kind == "fsdp2 over tp" else PUT_BY
    expected = pool.run(put, str(folder), kind, ranks, ref, options, ranks=ranks)
    assert len({str(each[2]) for each in expected}) == ranks
    for found, told in zip(pool.run(restore, str(folder), kind, ranks, ref, options, ranks=ranks), expected, strict=True):
        assert found[:5] == told
        assert found[5:7] == (3, [])


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("fsdp2 over tp", 8), ("ddp", 3), ("plain", 1)])
def test_another_number_of_ranks_has_the_same_tensors(pool: Pool, folder: Path, kind: str, ranks: int) -> None:
    """Of another parallelism, too; each rank's generators start over, and a warning says so."""
    ref = f"other/{ranks}"
    expected = pool.run(put, str(folder), "fsdp2", PUT_BY, ref, {}, ranks=PUT_BY)[0]
    restored = pool.run(restore, str(folder), kind, ranks, ref, {}, ranks=ranks)
    for found in restored:
        assert found[:2] == expected[:2]
        assert found[3] == expected[3]
        (told,) = found[6]
        assert f"ranks {PUT_BY} -> {ranks} (" in told
        assert "seeded again" in told
    drawn = [found[2] for found in restored]
    assert len({str(each) for each in drawn}) == ranks
    for each, streams in zip(drawn, (found[7] for found in restored), strict=True):
        numbers = random.Random(streams.seed("python")), np.random.RandomState(streams.seed("numpy") % (1 << 32))
        assert each[:2] == [numbers[0].random(), numbers[1].rand()]
        own = [torch.Generator().manual_seed(streams.seed(name)) for name in ("torch", "extra.noise")]
        assert each[2:] == [float(torch.rand((), generator=generator)) for generator in own]


def test_many_ranks_restore_what_one_process_saved(pool: Pool, folder: Path) -> None:
    job = Job("plain", 1, 1)
    for _ in range(3):
        job.step()
    with tsck.open(folder / "store", cache_dir=folder / "cache-one") as store:
        job.training.put(store, ref="one", step=3)
    expected = [job.gathered(), job.cursor.position, job.drawn()]
    for _ in range(2):
        job.step()
    expected.append(job.gathered())
    (found,) = pool.run(restore, str(folder), "plain", 1, "one", {}, ranks=1)
    assert list(found[:4]) == expected
    for found in pool.run(restore, str(folder), "fsdp2 over tp", RANKS, "one", {}, ranks=RANKS):
        assert (found[0], found[3]) == (expected[0], expected[3])
        assert "ranks 1 -> 8" in found[6][0]


def put_alone(folder: str) -> None:
    Job("plain", 2, 1).training.put(opened(folder, 2), ref="alone")


def test_a_rank_alone_does_not_save_for_all(pool: Pool, folder: Path) -> None:
    for answer in pool.ask(put_alone, str(folder), ranks=2):
        assert isinstance(answer, tsck.InvalidOptionError)
        assert "group=" in str(answer)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_gradients_of_half_a_step(pool: Pool, folder: Path, kind: str) -> None:
    ref = f"half/{kind}"
    expected = pool.run(put, str(folder), kind, PUT_BY, ref, {"gradients": True}, ranks=PUT_BY)
    for found, told in zip(pool.run(restore, str(folder), kind, PUT_BY, ref, {}, ranks=PUT_BY), expected, strict=True):
        assert found[3] == told[3]
    answers = pool.ask(restore, str(folder), kind, 2, ref, {}, ranks=2)
    if kind == "fsdp2":
        assert [found[3] for found in answers] == [told[3] for told in expected[:2]]
    else:
        assert all(isinstance(each, tsck.MismatchError) and "in the middle of a step" in str(each) for each in answers)


def verify(folder: str, address: str) -> str:
    """In the second run rank 1 goes another way."""
    runs: list[Job] = []

    def built() -> Any:
        job = Job("fsdp2", PUT_BY, len(runs))
        runs.append(job)

        def step() -> None:
            job.step()
            if len(runs) == 2 and job.rank == 1:
                bias: Any = job.model.get_parameter("3.bias").data
                bias.to_local().add_(1)

        return job.training, step

    return str(verify_resume(built, opened(folder, PUT_BY), address, steps=2, group=GROUPS[PUT_BY]))


def test_a_rank_that_goes_another_way_is_named(pool: Pool, folder: Path) -> None:
    pool.run(put, str(folder), "fsdp2", PUT_BY, "verify", {}, ranks=PUT_BY)
    told = pool.run(verify, str(folder), "verify", ranks=PUT_BY)
    assert "after step 1 of 2: model.3.bias differs: 3 of 3 elements differ, by 1 at most" in told[1]
    assert all("same both times" in each for rank, each in enumerate(told) if rank != 1)


def accumulate_unreduced(folder: str) -> list[str]:
    """What a save says before, between and after two micro-batches of which only the second sums gradients over ranks."""
    model: Any = fsdp2(nn.Linear(4, 2), 2)
    training = TrainingState(model=model)
    said = []
    for sync in (None, False, True):
        if sync is not None:
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, 4)).sum().backward()
        try:
            training.put(opened(folder, 2), ref="unreduced", group=GROUPS[2], gradients=True, timeout_seconds=TIMEOUT_SECONDS)
        except tsck.UnsupportedValueError as exc:
            said.append(str(exc))
        else:
            said.append("put")
    return said


def test_gradients_that_nobody_reaches_are_not_lost(pool: Pool, folder: Path) -> None:
    for before, between, after in pool.run(accumulate_unreduced, str(folder), ranks=2):
        assert before == after == "put"
        assert "FSDP holds gradients that are not summed over the ranks yet: save after the last micro-batch" in between


def test_positions_of_other_ranks_are_refused(pool: Pool, folder: Path) -> None:
    pool.run(put, str(folder), "fsdp2", PUT_BY, "own", {"loader": "own"}, ranks=PUT_BY)
    for error in pool.ask(restore, str(folder), "fsdp2", 2, "own", {"loader": "own"}, ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert "dataloader.own has a position for each of 4 ranks, and there are 2 now. Use a tsck.SampleCursor" in str(error)


def test_all_ranks_start_over_or_none(pool: Pool, folder: Path) -> None:
    assert pool.run(restore, str(folder), "fsdp2", 2, "nothing", {}, ranks=2) == [None, None]
    for error in pool.ask(restore, str(folder), "fsdp2", 2, "nothing@3", {}, ranks=2):
        assert isinstance(error, tsck.NotFoundError)
