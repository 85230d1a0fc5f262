"""A rank of a recipe's job that goes on after kills; in processes of its own."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tensorstore_ck as tsck
from tests.training.checkpointing.killed_side import Rank, connect, train
from tests.training.recipes import dense, experts, optimizers, own, pipelines  # noqa: F401 - they register their recipes
from tests.training.recipes.harness import RECIPES, Job, Layout, leaves_of, members_of


def run(rank: Rank, name: str, layout: Layout, form: str, steps: int) -> None:
    """`form`: ``state`` for what users of DCP save, ``training`` for a `TrainingState`; `steps`: of the recipe, before the run begins."""
    connect(rank)
    job = RECIPES[name].job(layout, steps)
    group = members_of(job)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    if form == "state":
        train(rank, group, job.state, lambda: plain_tensors(job.state))
    else:
        training = training_state(job)
        train(rank, group, training, lambda: plain_tensors(training.captured()))


def training_state(job: Job) -> tsck.TrainingState:
    return tsck.TrainingState(model=job.model, optimizer=list(job.optimizers), rank_values=None if job.own is None else {"own": job.own})


def plain_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The memory of each floating-point tensor that this rank has; without what is quantised, as of that not every number can be made."""
    for _, leaf in leaves_of(state):
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(local, torch.Tensor) and not hasattr(local, "__tensor_flatten__") and local.is_floating_point():
            yield local.detach()
