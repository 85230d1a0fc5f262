"""Recipes of optimizers and of what trains with them, on a model under FSDP2 and HSDP."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.training.recipes.dense import Block, hybrid
from tests.training.recipes.harness import Job, at, mesh_of, recipe, stepped

SAVED = at(4, shards=4)
OTHERS = [at(2, shards=2), at(4, shards=2)]


def sharded(shards: int) -> Block:
    model = Block()
    fully_shard(model, mesh=hybrid(shards))
    return model


@recipe(SAVED, OTHERS)
def fused_adamw(shards: int) -> Job:
    model = sharded(shards)
    return stepped(model, torch.optim.AdamW(model.parameters(), fused=True, amsgrad=True, lr=torch.tensor(0.01)))


@recipe(SAVED, OTHERS)
def muon_beside_adamw(shards: int) -> Job:
    """Muon takes matrices alone."""
    model = sharded(shards)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return stepped(model, torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others))


class Factored(torch.optim.Optimizer):
    """Keeps means of squared gradients over rows and over columns: the first are split as the parameter, the others on all ranks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square()
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if square.ndim < 2:
                    state["mean"] = square
                    continue
                means = {"rows": square.mean(1), "columns": square.mean(0)}
                for name, mean in means.items():
                    placements = [Replicate() if each.is_partial() else each for each in mean.placements]
                    state[name] = mean.redistribute(placements=placements)
                parameter.sub_(parameter.grad, alpha=group["lr"])


@recipe(SAVED, OTHERS)
def factored_by_hand(shards: int) -> Job:
    model = sharded(shards)
    return stepped(model, Factored(model.parameters()))


# --- torchao ------------------------------------------------------------------------------------------------------------


OPTIM = ("torchao.optim",)
QUANTISED = ("torchao.quantization",)


def wide() -> nn.Module:
    """Its weight's shards are large enough for torchao to quantise their moments."""
    return nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 8))


def low_bits(shards: int, name: str) -> Job:
    import torchao.optim

    model = wide()
    if shards:
        fully_shard(model, mesh=hybrid(shards))
    optimizer = getattr(torchao.optim, name)(model.parameters())
    with torch.compiler.set_stance("force_eager"):
        return stepped(model, optimizer)


@recipe(SAVED, [*OTHERS, at(2, shards=0)], imports=OPTIM)
def adamw_8bit(shards: int) -> Job:
    return low_bits(shards, "AdamW8bit")


@recipe(at(4), [at(2), at(1)], imports=OPTIM)
def adamw_fp8_on_each_rank() -> Job:
    """Gloo gathers no float8, so there would be nothing to compare DTensors with."""
    return low_bits(0, "AdamWFp8")


@recipe(at(4, shards=0), [at(2, shards=0), SAVED], imports=OPTIM)
def adamw_8bit_on_each_rank(shards: int) -> Job:
    """As under DDP."""
    return low_bits(shards, "AdamW8bit")


def quantised(config: str, *, tp: bool = False) -> Job:
    """A head that trains on weights that do not."""
    import torchao.quantization

    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    if tp:
        parallelize_module(model[0], mesh_of(tp=dist.get_world_size()), ColwiseParallel(output_layouts=Replicate()))
    torchao.quantization.quantize_(model[0], getattr(torchao.quantization, config)())
    return stepped(model, torch.optim.AdamW(model[1].parameters()))


@recipe(at(4), [at(2), at(1)], imports=QUANTISED)
def int8_weights_on_each_rank() -> Job:
    return quantised("Int8WeightOnlyConfig")


@recipe(
    at(4),
    [at(2), at(1)],
    imports=QUANTISED,
)
def int8_weights_under_tp() -> Job:
    """Split, then quantised: a wrapper whose inner tensors are DTensors."""
    return quantised("Int8WeightOnlyConfig", tp=True)
