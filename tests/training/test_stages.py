"""Stages of a pipeline and experts: each rank has parameters and an optimizer of its own, all together are one state, for any layout."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tests.effort import effort
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

pytestmark = pytest.mark.slow
LAYERS, WIDTH, WORDS = 5, 8, 11


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Of its own: groups that not all ranks of a pool make would keep it from later tests."""
    with Pool() as pool:
        yield pool


class Layout(NamedTuple):
    """How a model is spread. `cuts`: the first layer of each stage."""

    cuts: tuple[int, ...] = (0,)
    width: int = 1
    """Ranks of each stage."""
    sharded: bool = False

    @property
    def ranks(self) -> int:
        return len(self.cuts) * self.width


PIPELINE = Layout((0, 2))
LAYOUTS = {
    "2 stages": PIPELINE,
    "unequal stages": Layout((0, 1)),
    "2 x 2, fsdp2": Layout((0, 3), 2, sharded=True),
    "2 x 2, plain": Layout((0, 3), 2),
    "4 stages": Layout((0, 1, 2, 4)),
    "fsdp2": Layout(width=4, sharded=True),
    "one rank": Layout(),
}


class Model(nn.Module):
    """Some of the layers; the first stage and the last one share the embedding. Gradients are made by hand."""

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        if is_first or is_last:
            self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in layers})
        self.norms = nn.ModuleDict({str(number): nn.BatchNorm1d(WIDTH) for number in layers})


class Job:
    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.rank = layout, dist.get_rank()
        self.stage = self.rank // layout.width
        ends = (*layout.cuts[1:], LAYERS)
        own = range(layout.cuts[self.stage], ends[self.stage])
        self.model = Model(own, is_first=self.stage == 0, is_last=self.stage == len(layout.cuts) - 1)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + hash_of(name))))
        if layout.sharded:
            fully_shard(self.model, mesh=mesh_of(layout, self.stage))
        named = dict(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [each for name, each in named.items() if name.endswith("weight")], "weight_decay": 0.1},
                {"params": [each for name, each in named.items() if name.endswith("bias")], "weight_decay": 0.0},
            ],
            lr=0.1,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        torch.manual_seed(seed + 100 * self.rank)
        self.training = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, rank_values={"rank": self.rank})

    def step(self, number: int) -> None:
        """Gradients by hand; each rank's batch norm goes its own way."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * number + hash_of(name) % 7)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        for norm in self.model.norms.values():
            norm.get_buffer("running_mean").add_(torch.randn(WIDTH) + self.rank)
            norm.get_buffer("num_batches_tracked").add_(1)

    def shared(self) -> dict[str, bytes]:
        """Parameters and moments in full, and the optimizer's options."""
        state: dict[str, bytes] = {}
        for name, parameter in self.model.named_parameters():
            state[name] = whole(parameter)
            state |= {f"{name}.{key}": whole(each) for key, each in self.optimizer.state[parameter].items()}
        for group in self.optimizer.param_groups:
            for each in group["params"]:
                name = next(name for name, other in self.model.named_parameters() if other is each)
                state[f"{name} in group"] = repr({key: value for key, value in group.items() if key != "params"}).encode()
        return state

    def buffers(self) -> dict[str, list[float]]:
        return {name: each.tolist() for name, each in self.model.named_buffers()}


SECOND: dict[str, Any] = {}
"""In a rank's process: the group of ranks 2 and 3."""


def make_second() -> None:
    """All ranks must make a group."""
    SECOND["group"] = dist.new_group([2, 3])


@pytest.fixture(scope="module", autouse=True)
def _second(pool: Pool) -> None:
    pool.run(make_second)


def mesh_of(layout: Layout, stage: int) -> DeviceMesh:
    return DeviceMesh.from_group(SECOND["group"] if stage else GROUPS[layout.width], "cpu")


def hash_of(name: str) -> int:
    return sum(name.encode())


def whole(tensor: torch.Tensor) -> bytes:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy().tobytes()


def put(folder: str, name: str, ref: str) -> Any:
    job = Job(LAYOUTS[name], 1)
    for step in range(3):
        job.step(step)
        job.training.put(
            opened(folder, job.layout.ranks), ref=ref, step=step, group=GROUPS[job.layout.ranks], timeout_seconds=TIMEOUT_SECONDS
        )
    found = job.shared(), job.buffers(), float(torch.rand(()))
    return *found, opened(folder, job.layout.ranks).resolve(ref).mark


def restore(folder: str, name: str, ref: str) -> Any:
    job = Job(LAYOUTS[name], 2)
    ranks = job.layout.ranks
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        job.training.restore(opened(folder, ranks), ref, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    found = job.shared(), job.buffers(), float(torch.rand(())), len(warned)
    job.step(3)
    job.training.put(opened(folder, ranks), ref=f"{ref}/{name.replace(' ', '-').replace(',', '')}", group=GROUPS[ranks])
    return found


def united(each: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks; the first one that has something counts."""
    found: dict[str, Any] = {}
    for own in each:
        found = {**own, **found}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_to_any_other(pool: Pool, folder: Path, name: str) -> None:
    ref = f"stages/{name.replace(' ', '-').replace(',', '')}"
    layout = LAYOUTS[name]
    expected = pool.run(put, str(folder), name, ref, ranks=layout.ranks)
    assert {each[3] for each in expected} == {""}
    shared, buffers = (united(each[at] for each in expected) for at in (0, 1))
    names = [*LAYOUTS]
    at = names.index(name)
    for other in effort((name, names[at - 1], names[at - 3]), names):
        there = LAYOUTS[other]
        for rank, found in enumerate(pool.run(restore, str(folder), other, ref, ranks=there.ranks)):
            assert found[0] == {key: shared[key] for key in found[0]}, (other, rank)
            assert found[0]
            if other == name:
                assert found[1:] == (*expected[rank][1:3], 0)
            elif there.ranks != layout.ranks:
                assert found[1] == {key: buffers[key] for key in found[1]}, (other, rank)
                assert found[3] == 1


# --- misfits ------------------------------------------------------------------------------------------------------------


def restore_without(folder: str, ref: str) -> None:
    """The last layer is on no rank."""
    job = Job(PIPELINE, 2)
    if job.stage == 1:
        del job.model.layers[str(LAYERS - 1)], job.model.norms[str(LAYERS - 1)]
        job.optimizer = torch.optim.AdamW(job.model.parameters())
    training = TrainingState(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, rank_values={"rank": 0})
    training.restore(opened(folder, 2), ref, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)


def test_what_no_stage_takes_is_reported(pool: Pool, folder: Path) -> None:
    pool.run(put, str(folder), "2 stages", "misfit", ranks=2)
    for error in pool.ask(restore_without, str(folder), "misfit", ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert f"model.layers.{LAYERS - 1}.weight" in str(error) or "hold other parameters than in the snapshot" in str(error)


def restore_grouped(folder: str, ref: str) -> None:
    """Weights and biases in one group, which were in two."""
    job = Job(PIPELINE, 2)
    optimizer = torch.optim.AdamW(job.model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    training = TrainingState(model=job.model, optimizer=optimizer, scheduler=scheduler, rank_values={"rank": 0})
    training.restore(opened(folder, 2), ref, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)


def test_other_groups_are_refused(pool: Pool, folder: Path) -> None:
    pool.run(put, str(folder), "2 stages", "grouped", ranks=2)
    for error in pool.ask(restore_grouped, str(folder), "grouped", ranks=2):
        assert isinstance(error, tsck.MismatchError)
        assert "parameter groups of optimizer hold other parameters" in str(error)
