"""Recipes of pipeline parallelism: ranks of a stage have the layers of that stage, under the names that the whole model gives them."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.training.recipes.dense import Block, adamw
from tests.training.recipes.harness import Job, at, mesh_of, recipe, state_of

LAYERS = 4


class Stage(nn.Module):
    """Some layers; the first stage embeds, and the last has the head."""

    def __init__(self, layers: range, *, tied: bool) -> None:
        super().__init__()
        everything = [Block() for _ in range(LAYERS)]  # so that all stages have the same numbers
        embed, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleDict({str(number): everything[number] for number in layers})
        self.tied = tied
        self.is_first, self.is_last = 0 in layers, LAYERS - 1 in layers
        if self.is_first or (tied and self.is_last):
            self.embed = embed
        if self.is_last and not tied:
            self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(torch.arange(11)) if self.is_first else x
        for layer in self.layers.values():
            x = layer(x)
        if self.is_last:
            x = self.embed(torch.arange(11)) @ x.mT if self.tied else self.head(x)
        return x


def share_gradients(model: Stage, generator: torch.Generator) -> None:
    """What the stages that have the embedding do after the backward pass: here, by agreeing on the sum without a collective."""
    whole = torch.randn(11, 8, generator=generator)
    gradient = model.embed.weight.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        spread = torch.distributed.tensor.distribute_tensor(whole, gradient.device_mesh, gradient.placements, src_data_rank=None)
        gradient.copy_(spread)
    else:
        gradient.copy_(whole)


def staged(model: Stage, optimizer: torch.optim.Optimizer) -> Job:
    """A step of this stage; what comes from the others is random."""
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(11, 8)).square().sum().backward()
    if model.tied and (model.is_first or model.is_last):
        share_gradients(model, generator)
    optimizer.step()
    return Job(state_of(model, optimizer))


def cut(stages: int, number: int) -> range:
    return range(number * LAYERS // stages, (number + 1) * LAYERS // stages)


@functools.cache
def mesh_over(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


def stage_of(sizes: tuple[int, ...]) -> tuple[int, DeviceMesh]:
    """Which this rank is in, where the stages have so many ranks; and a mesh of them. All meshes are made on all ranks."""
    found, first = None, 0
    for number, size in enumerate(sizes):
        mesh = mesh_over(*range(first, first + size))
        if dist.get_rank() in range(first, first + size):
            found = number, mesh
        first += size
    assert found is not None
    return found


def of_stages(sizes: tuple[int, ...]) -> Job:
    number, mesh = stage_of(sizes)
    model = Stage(cut(len(sizes), number), tied=True)
    if mesh.size() > 1 or len(set(sizes)) > 1:
        fully_shard(model, mesh=mesh)
    return staged(model, adamw(model))


@recipe(at(4, sizes=(1, 1, 1, 1)), [at(2, sizes=(1, 1)), at(4, sizes=(2, 2)), at(2, sizes=(2,))])
def stages_that_share_an_embedding(sizes: tuple[int, ...]) -> Job:
    """The first and the last have it, under one name."""
    return of_stages(sizes)


@recipe(at(4, sizes=(3, 1)), [at(4, sizes=(1, 3)), at(4, sizes=(2, 2)), at(2, sizes=(2,))])
def stages_of_unequal_numbers_of_ranks(sizes: tuple[int, ...]) -> Job:
    """They share an embedding, which the one cuts into three and the other has in full."""
    return of_stages(sizes)


@recipe(at(8, pp=2, dp=2, tp=2), [at(4, pp=1, dp=2, tp=2), at(4, pp=2, dp=2, tp=1), at(2, pp=2, dp=1, tp=1)])
def three_dims(pp: int, dp: int, tp: int) -> Job:
    """Layers by stage, TP within each, FSDP2 over what is left; norms, embedding and head on dp alone."""
    mesh = mesh_of(pp=pp, dp=dp, tp=tp)
    model = Stage(cut(pp, mesh["pp"].get_local_rank()), tied=False)
    plan: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return staged(model, adamw(model))
