"""Recipes of ranks that do not all have the same: values and buffers of their own, one rank with everything, or a part of the ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.training.recipes.dense import Block, adamw, hybrid
from tests.training.recipes.harness import Job, at, recipe, state_of, step, stepped
from tests.training.recipes.pipelines import mesh_over


@recipe(at(4, full=True), [at(2, full=True), at(4, full=False), at(8, full=False)])
def full_state_on_rank_0_only(full: bool) -> Job:
    """Gathered there; the other ranks bring no more than the step. It comes back there, or in shards."""
    model = Block()
    fully_shard(model, mesh=hybrid(dist.get_world_size()))
    optimizer = adamw(model)
    step(model, optimizer)
    if not full:
        return Job(state_of(model, optimizer, step=1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    states: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    states["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return Job({"step": 1, **states} if dist.get_rank() == 0 else {"step": 1})


@recipe(at(4), [at(2), at(8)])
def unsynced_batch_norm_under_ddp() -> Job:
    """Each rank has seen other samples: its statistics are its own."""
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), broadcast_buffers=False
    )
    job = stepped(model, adamw(model), batch=torch.randn(dist.get_world_size(), 4, 8)[dist.get_rank()])
    buffers = {name: job.state["model"].pop(name) for name in list(job.state["model"]) if "running" in name}
    assert len(buffers) == 2
    return replace(job, own=buffers)


@recipe(at(4, shards=4), [at(2, shards=2), at(4, shards=2)])
def values_of_each_rank(shards: int) -> Job:
    """Of other types and other shapes on each."""
    model = Block()
    fully_shard(model, mesh=hybrid(shards))
    rank = dist.get_rank()
    own: dict[str, Any] = {"rng": torch.get_rng_state(), "seen": list(range(rank)), "cache": torch.randn(rank, 3)}
    if rank == 1:
        own["only here"] = {"error": 0.5}
    return replace(stepped(model, adamw(model)), own=own)


@recipe(at(4, ranks=(1, 2, 3)), [at(4, ranks=(0, 2)), at(2, ranks=(0, 1)), at(4, ranks=(0, 1, 2, 3))])
def a_subset_of_the_ranks(ranks: tuple[int, ...]) -> Job:
    """Only they train and save; the others do something else."""
    mesh = mesh_over(*ranks)
    if dist.get_rank() not in ranks:
        return Job({}, ranks=ranks)
    model = Block()
    fully_shard(model, mesh=mesh)
    return replace(stepped(model, adamw(model)), ranks=ranks)


@recipe(at(4), [at(2), at(8)])
def a_value_and_a_tensor_of_rank_0() -> Job:
    """In addition to shards on all ranks."""
    model = Block()
    fully_shard(model, mesh=hybrid(dist.get_world_size()))
    job = stepped(model, adamw(model))
    if dist.get_rank() == 0:
        job.state["log"] = {"losses": torch.randn(7), "note": "warm-up", "seen": [1, 2, 3]}
    return job


@recipe(at(4), [at(2), at(8)])
def another_order_of_names_on_one_rank() -> Job:
    model = Block()
    fully_shard(model, mesh=hybrid(dist.get_world_size()))
    job = stepped(model, adamw(model))
    if dist.get_rank() == 1:
        job = replace(job, state={name: type(part)(reversed(part.items())) for name, part in reversed(job.state.items())})
    return job


@recipe(at(4), [at(2), at(8)])
def shared_memory_on_one_rank() -> Job:
    """One tensor under two names there, and two equal ones elsewhere."""
    model = Block()
    fully_shard(model, mesh=hybrid(dist.get_world_size()))
    job = stepped(model, adamw(model))
    table = torch.randn(5, 8)
    return replace(job, state={**job.state, "table": table, "head": table if dist.get_rank() == 1 else table.clone()})
