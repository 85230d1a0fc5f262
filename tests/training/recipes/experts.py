"""Recipes of expert parallelism, in the three styles that are in use."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.training.recipes.dense import Block, adamw
from tests.training.recipes.harness import Job, at, mesh_of, recipe, stepped

EXPERTS = 8


class Mixture(nn.Module):
    """Dense layers, and the experts of this rank by their numbers. Each takes all tokens: what is routed where is not our matter."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.block = Block()
        self.router = nn.Linear(8, EXPERTS)
        everyone = [nn.Linear(8, 8) for _ in range(EXPERTS)]  # all, so that ranks have the same numbers
        self.experts = nn.ModuleDict({str(number): everyone[number] for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        gates = self.router(x).softmax(-1)
        return sum((gates[..., int(number), None] * expert(x) for number, expert in self.experts.items()), x)


def numbers_of(mesh: DeviceMesh) -> range:
    each = EXPERTS // mesh.size()
    return range(each * mesh.get_local_rank(), each * (mesh.get_local_rank() + 1))


@recipe(at(4), [at(2), at(8)])
def plain_experts_of_each_rank() -> Job:
    """Plain tensors under names that only this rank has, in addition to FSDP2 over all ranks."""
    mesh = mesh_of(ep=torch.distributed.get_world_size())
    model = Mixture(numbers_of(mesh))
    fully_shard(model, mesh=mesh, ignored_params=set(model.experts.parameters()))
    return stepped(model, adamw(model))


@recipe(at(4, dp=2, ep=2), [at(4, dp=1, ep=4), at(2, dp=2, ep=1), at(8, dp=2, ep=4)])
def experts_on_a_submesh(dp: int, ep: int) -> Job:
    """Each expert is split over the dp dim of its own ep rank, the rest over all ranks."""
    mesh = mesh_of(dp=dp, ep=ep)
    model = Mixture(numbers_of(mesh["ep"]))
    for expert in model.experts.values():
        fully_shard(expert, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh_of(all=dp * ep))
    return stepped(model, adamw(model))


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, 16))
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,edh,ehf->bf", x, *(local(each) for each in (self.up, self.down)))


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@recipe(at(4, dp=2, ep=2), [at(4, dp=1, ep=4), at(2, dp=2, ep=1), at(8, dp=2, ep=4)])
def stacked_experts(dp: int, ep: int) -> Job:
    """One tensor of all experts, split over ep by its first dim and over dp by the second, as torchtitan does; the rest over all ranks."""
    mesh = mesh_of(dp=dp, ep=ep)
    model = nn.Sequential(Block(), Stacked(), Block())
    for name in ("up", "down"):
        whole = getattr(model[1], name).data
        share = whole.chunk(ep)[mesh["ep"].get_local_rank()]
        setattr(model[1], name, nn.Parameter(DTensor.from_local(share, mesh["ep"], [Shard(0)], run_check=False)))
    fully_shard(model[1], mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=mesh_of(all=dp * ep))
    return stepped(model, adamw(model))
