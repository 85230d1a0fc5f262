"""Recipes of data, tensor and context parallel models, whose parameters are on one mesh, or on some dims of it."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.training.recipes.harness import Job, at, mesh_of, recipe, stepped


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Not foreach: some models mix DTensors of several meshes."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01, foreach=False)


@recipe(at(4, dp=2, tp=2), [at(4, dp=4, tp=1), at(2, dp=1, tp=2), at(8, dp=2, tp=4)])
def norm_outside_tp(dp: int, tp: int) -> Job:
    """The norms are DTensors on the dp dim alone, the others on both."""
    mesh = mesh_of(dp=dp, tp=tp)
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return stepped(model, adamw(model))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.block = Block()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))  # type: ignore[no-any-return]


@recipe(at(4, shards=0), [at(4, shards=4), at(2, shards=2), at(4, shards=2)])
def tied_embeddings(shards: int) -> Job:
    """Under DDP, FSDP2 and HSDP: one tensor of two names, which DDP's state dict has as a tensor and a view of all of it."""
    model: nn.Module = Tied()
    if shards == 0:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=hybrid(shards))
    return stepped(model, adamw(model), batch=torch.arange(11)[None])


@recipe(at(4, dp=2, tp=2), [at(2, dp=1, tp=2), at(4, dp=1, tp=4), at(8, dp=4, tp=2)])
def tie_that_tensor_parallelism_breaks(dp: int, tp: int) -> Job:
    """Torch splits the one tensor twice: from then on its two names are two tensors, which come to differ."""
    mesh = mesh_of(dp=dp, tp=tp)
    model = Tied()
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return stepped(model, adamw(model), batch=torch.arange(11)[None])


def hybrid(shards: int) -> DeviceMesh:
    """FSDP2's mesh of so many shards, HSDP's where there are more ranks."""
    ranks = dist.get_world_size()
    return mesh_of(dp=ranks) if shards == ranks else mesh_of(replicate=ranks // shards, shard=shards)


@recipe(at(4, shards=2), [at(4, shards=4), at(2, shards=2), at(8, shards=4)])
def hsdp_with_frozen_parameters(shards: int) -> Job:
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(False)
    for block in model:
        fully_shard(block, mesh=hybrid(shards))
    fully_shard(model, mesh=hybrid(shards))
    return stepped(model, adamw(model))


@recipe(at(4, shards=4), [at(2, shards=2), at(4, shards=2), at(8, shards=8)])
def bf16_with_fp32_masters(shards: int) -> Job:
    """The optimizer knows the masters alone; the model is their rounding."""
    model = Block().bfloat16()
    fully_shard(model, mesh=hybrid(shards))
    masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.01)
    model(torch.randn(4, 8, dtype=torch.bfloat16)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        masters[name].grad = parameter.grad.float()
    optimizer.step()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(masters[name].data)
    moments = {name: optimizer.state[master] for name, master in masters.items()}
    state = {"model": get_model_state_dict(model), "masters": masters, "moments": moments}
    return Job(state)


@recipe(at(4, shards=4), [at(2, shards=2), at(8, shards=8), at(4, shards=2)])
def uneven_and_smaller_than_the_world(shards: int) -> Job:
    """Some ranks hold nothing of a tensor, or less than others."""
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 1, bias=False), nn.Linear(1, 3))
    for layer in model:
        fully_shard(layer, mesh=hybrid(shards))
    return stepped(model, adamw(model))


@recipe(
    at(4, order=((0, 2), (1, 3))), [at(4, order=((0, 1), (2, 3))), at(8, order=((0, 4), (1, 5), (2, 6), (3, 7))), at(2, order=((0, 1),))]
)
def permuted_meshes(order: tuple[tuple[int, ...], ...]) -> Job:
    """FSDP2 over TP on ranks in an order of their own. (Ascending along each dim: torch gathers along others in the wrong order.)"""
    mesh = permuted(order)
    model = nn.Sequential(Block(), Block())
    parallelize_module(model, mesh["tp"], {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return stepped(model, adamw(model))


@functools.cache
def permuted(order: tuple[tuple[int, ...], ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(order), mesh_dim_names=("dp", "tp"))
