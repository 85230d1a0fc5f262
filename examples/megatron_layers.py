"""Megatron-core with snapshots in a store: ``torchrun --nproc-per-node 2 -m examples.megatron_layers FOLDER [STEPS]``.

Kill it and start it again, also with another number of ranks, over which the layers are then cut: it continues. The lines that are not in
a script without a store are `register`, `write_folder` and the name of the strategy. It runs on CPUs.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import nn

import tensorstore_ck as tsck

SAVE_EVERY = 5


class Layers(nn.Module):
    """Two layers: the first one is cut by its columns over the ranks, the second one by its rows."""

    def __init__(self) -> None:
        super().__init__()
        options = {"config": ModelParallelConfig(use_cpu_initialization=True), "init_method": nn.init.xavier_normal_, "bias": True}
        self.wide = ColumnParallelLinear(8, 32, gather_output=False, **options)
        self.narrow = RowParallelLinear(32, 1, input_is_parallel=True, skip_bias_add=False, **options)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        found: torch.Tensor = self.narrow(nn.functional.gelu(self.wide(given)[0]))[0]
        return found

    def sharded_state_dict(self) -> dict[str, Any]:
        """As Megatron's modules make it."""
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        return {
            **self.wide.sharded_state_dict("wide.", metadata=groups),
            **self.narrow.sharded_state_dict("narrow.", metadata=groups),
        }


def sharded_state_dict(model: Layers, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """All that a checkpoint has."""
    sharded, state = model.sharded_state_dict(), optimizer.state_dict()
    optim_state_to_sharding_state(state, get_param_id_to_sharded_param_map(sharded, model.parameters()))
    return {"model": sharded, "optimizer": state, "step": step}


def main(folder: Path, steps: int) -> float:
    """Trains; returns the newest loss."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    torch.manual_seed(1)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    step, loss = 0, torch.zeros(())
    with tsck.megatron.register(folder / "store", ref="runs/layers") as registered:
        newest = registered.write_folder(folder)  # None: there is nothing yet
        while step < steps:
            if newest is not None and optimizer.state:  # after a step the optimizer has the tensors that are loaded into
                loaded = dist_checkpointing.load(sharded_state_dict(model, optimizer, step), str(newest))
                model.load_state_dict(loaded["model"], strict=False)
                optimizer.load_state_dict(loaded["optimizer"])
                step, newest = loaded["step"], None
            given = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.mse_loss(model(given), given.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                checkpoint = folder / f"iter_{step:07d}"
                checkpoint.mkdir(parents=True, exist_ok=True)
                dist_checkpointing.save(sharded_state_dict(model, optimizer, step), str(checkpoint), registered.save)
    parallel_state.destroy_model_parallel()
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=20)
    given = options.parse_args()
    dist.init_process_group("gloo")
    print("loss", main(given.folder, given.steps))
    dist.destroy_process_group()
