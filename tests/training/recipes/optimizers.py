"""Recipes of optimizers and of what trains with them, on a model under FSDP2 and HSDP."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.training.recipes.dense import Block, adamw, hybrid
from tests.training.recipes.harness import Job, at, mesh_of, recipe, state_of, step, stepped

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
def foreach_adamw(shards: int) -> Job:
    """Of several groups."""
    model = sharded(shards)
    biases = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": [model.up.weight, model.down.weight]}, {"params": biases, "lr": 0.1}]
    return stepped(model, torch.optim.AdamW(groups, foreach=True))


@recipe(SAVED, OTHERS)
def sgd_with_momentum(shards: int) -> Job:
    model = sharded(shards)
    return stepped(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True))


@recipe(SAVED, OTHERS)
def muon_beside_adamw(shards: int) -> Job:
    """Muon takes matrices alone."""
    model = sharded(shards)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return stepped(model, torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others))


@recipe(at(4), [at(2), at(8)])
def adafactor() -> Job:
    """Under DDP: torch's (2.13) steps no DTensor."""
    model = nn.parallel.DistributedDataParallel(Block())
    return stepped(model, torch.optim.Adafactor(model.parameters(), lr=0.01))


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


@recipe(SAVED, OTHERS)
def grad_scaler(shards: int) -> Job:
    model = sharded(shards)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale(model(torch.randn(4, 8)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return Job(state_of(model, optimizer, scaler=scaler.state_dict()), model=model, optimizers=(optimizer,))


@recipe(SAVED, OTHERS)
def ema(shards: int) -> Job:
    model = Block()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    fully_shard(model, mesh=hybrid(shards))
    fully_shard(mean, mesh=hybrid(shards))
    optimizer = adamw(model)
    for _ in range(2):  # the first is a copy
        step(model, optimizer)
        mean.update_parameters(model)
    return Job(state_of(model, optimizer, ema=get_model_state_dict(mean)), model={"model": model, "ema": mean}, optimizers=(optimizer,))


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


@recipe(SAVED, OTHERS, imports=OPTIM)
def adamw_4bit(shards: int) -> Job:
    return low_bits(shards, "AdamW4bit")


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


@recipe(at(4), [at(2), at(1)], imports=QUANTISED)
def float8_weights_on_each_rank() -> Job:
    return quantised("Float8WeightOnlyConfig")


@recipe(
    at(4),
    [at(2), at(1)],
    dcp="it takes the wrapper for a plain tensor, of which one rank's shard is as good as another's",
    imports=QUANTISED,
)
def int8_weights_under_tp() -> Job:
    """Split, then quantised: a wrapper whose inner tensors are DTensors."""
    return quantised("Int8WeightOnlyConfig", tp=True)
