"""A small loop with an `Accelerator`, in the form of accelerate's own example of checkpointing, over a store or natively."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstore_ck as tsck
from tensorstore_ck.store import Store

REF = "runs/a"
EPOCHS = 3
SAVE_EVERY = 3


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """20 rows: 10 batches an epoch on one process, 5 on two."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


class PythonSampler(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(random.sample(range(20), 20))


class NumpySampler(PythonSampler):
    def __iter__(self) -> Any:
        return iter(np.random.permutation(20).tolist())


class TorchSampler(PythonSampler):
    def __iter__(self) -> Any:
        return iter(torch.randperm(20).tolist())


SAMPLERS: dict[str, Any] = {
    "python": PythonSampler,
    "numpy": NumpySampler,
    "torch": TorchSampler,
    "sequential": lambda: torch.utils.data.SequentialSampler(Rows()),
    "weighted": lambda: torch.utils.data.WeightedRandomSampler([1.0] * 20, 20),
    "subset": lambda: torch.utils.data.SubsetRandomSampler(range(20)),
}


class Killed(Exception):
    """In place of a kill."""


class Average:
    """Registered for checkpointing: a plain number."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run(NamedTuple):
    """What a run did."""

    batches: list[list[float]]
    """The first column of each batch."""
    losses: list[float]
    weights: dict[str, torch.Tensor]
    average: float
    iteration: int
    is_sharded: bool


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """On every rank all of each, by the names of the unwrapped model."""
    found = {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone() for name, tensor in found.items()}


def forget_earlier() -> None:
    """What accelerate keeps of an earlier run of this process, such as its loaders."""
    for kind in (accelerate.state.AcceleratorState, accelerate.state.GradientState):
        kind._reset_state()


def train(
    folder: Path,
    store: Store | None,
    *,
    resume: Any = None,
    kill_after: int | None = None,
    stop_after: int | None = None,
    save_every: int = SAVE_EVERY,
    seed: int = 1,
    config: dict[str, Any] | None = None,
    loader_kind: str = "",
    workers: int = 0,
    persistent: bool = False,
    fsdp: bool = False,
    deepspeed: Any = None,
    ref: str = REF,
    attach: dict[str, Any] | None = None,
    on_load: Callable[[dict[str, torch.Tensor]], object] = lambda weights: None,
    on_loaded_model: Callable[[Any], object] = lambda model: None,
    on_step: Callable[[int], object] = lambda step: None,
) -> Run:
    """Steps are counted over all epochs. `resume`: False: no; else what `load_state` gets; `deepspeed`: a DeepSpeedPlugin."""
    forget_earlier()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    project = ProjectConfiguration(**{"project_dir": str(folder), "automatic_checkpoint_naming": True, **(config or {})})
    loading = DataLoaderConfiguration(use_seedable_sampler=loader_kind == "seedable", use_stateful_dataloader=loader_kind == "stateful")
    device = {"cpu": True} if deepspeed is None else {"deepspeed_plugin": deepspeed}
    accelerator = accelerate.Accelerator(**device, project_config=project, dataloader_config=loading)
    if fsdp:  # on CPUs accelerate takes no notice of `fsdp_plugin` (`AcceleratorState.__init__`): all that follows is its own
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    if store is not None:
        tsck.accelerate.attach(accelerator, store=store, ref=ref, **(attach or {}))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if deepspeed is not None and "optimizer" in deepspeed.deepspeed_config:
        optimizer = accelerate.utils.DummyOptim(model.parameters(), lr=0.01)
        scheduler = accelerate.utils.DummyScheduler(optimizer, warmup_num_steps=20)
    generator = torch.Generator().manual_seed(seed) if loader_kind == "generator" else None
    processes: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    order = {"sampler": SAMPLERS[loader_kind]()} if loader_kind in SAMPLERS else {"shuffle": True}
    rows = torch.utils.data.DataLoader(Rows(), batch_size=2, generator=generator, **order, **processes)
    model, optimizer, scheduler, rows = accelerator.prepare(model, optimizer, scheduler, rows)
    average = Average()
    accelerator.register_for_checkpointing(average)
    done = 0
    if resume is not False:
        accelerator.load_state(resume)
        on_load(whole_weights(model))
        on_loaded_model(model)
        done = int(average.value // 1000)
    batches, losses = [], []
    step = done
    for epoch in range(done // len(rows), EPOCHS):
        skipped = done % len(rows) if epoch == done // len(rows) and loader_kind != "stateful" else 0
        active = accelerator.skip_first_batches(rows, skipped) if skipped else rows
        for batch in active:
            loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            batches.append(batch[:, 0].tolist())
            losses.append(loss.item())
            average.value = step * 1000 + losses[-1] / 1000
            if step % save_every == 0:
                accelerator.save_state()
            on_step(step)
            if step == kill_after:
                raise Killed
            if step == stop_after:
                break
        if step == stop_after:
            break
    weights = whole_weights(model)
    accelerator.end_training()
    is_sharded = any(isinstance(each, DTensor) for each in model.parameters())
    return Run(batches, losses, weights, average.value, accelerator.project_configuration.iteration, is_sharded)
