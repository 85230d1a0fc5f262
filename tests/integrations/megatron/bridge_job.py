"""Bridge's checkpoint manager over a store, on one rank: ``bridge_job FOLDER sync|async``.

It trains a GPT 2 steps, saves it by the manager that Bridge makes, loads it into a new one, trains both 2 more, and says what came of it.
"""

import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

# isort: off
import tests.integrations.megatron.bridge_on_cpu  # noqa: F401 - before Bridge

# isort: on
from megatron.bridge.training import checkpointing
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.state import TrainState
from megatron.bridge.utils.instantiate_utils import InstantiationException, register_allowed_target_prefix
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from examples import megatron_bridge
from tests.integrations.megatron.gpt import Job, join, leave
from tests.integrations.rank_runs import say

RUN_CONFIG = """
model: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
checkpoint: {save_rng: true, save_optim: true, fully_parallel_save: false}
optimizer: {use_distributed_optimizer: true}
ddp: {use_megatron_fsdp: false}
"""
"""Of what Bridge writes into ``run_config.yaml``, the part that it reads again."""


def state_of(config: CheckpointConfig, job: Job) -> MagicMock:
    """Stands for Bridge's global state and configuration, of a job that has done its steps."""
    state = MagicMock()
    state.cfg.checkpoint, state.cfg.peft, state.cfg.model = config, None, job.config
    state.cfg.rng.data_parallel_random_init = state.cfg.ddp.use_megatron_fsdp = False
    state.cfg.optimizer.use_distributed_optimizer = True
    state.cfg.dataset.dataloader_save = None
    state.cfg.to_yaml = lambda path: Path(path).write_text(RUN_CONFIG)
    state.train_state, state.async_calls_queue = TrainState(), AsyncCallsQueue()
    state.train_state.step = job.step
    return state


def weights(job: Job) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in job.model.module.state_dict().items() if isinstance(value, torch.Tensor)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def train(job: Job) -> list[float]:
    """Two steps with the same random numbers."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    return [job.train(), job.train()]


def main(folder: Path, saving: str) -> None:
    join(1, 1)
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    vars(checkpointing).update(fault_tolerance=MagicMock(), update_num_microbatches=lambda *_, **__: None)
    megatron_bridge.STORE = str(folder / "store")
    config = CheckpointConfig(
        save=str(folder / "out"),
        load=str(folder / "out"),
        custom_manager_class="examples.megatron_bridge.CheckpointManager",
        async_save=saving == "async",
        async_strategy="mcore",
        fully_parallel_save=False,
        load_rng=False,  # of CUDA
    )
    refused = ""
    try:
        checkpointing.create_checkpoint_manager(config)
    except InstantiationException as exc:
        refused = str(exc)
    register_allowed_target_prefix("examples.")

    job = Job(1, 1, "fully_reshardable")
    train(job)
    manager, state = checkpointing.create_checkpoint_manager(config), state_of(config, job)
    context: dict[str, Any] = {"opt_param_scheduler": None}
    saved = {"state": state, "model": [job.model], "optimizer": job.optimizer, "num_floating_point_operations_so_far": 7}
    manager.save(checkpointing.CheckpointSaveContext(**saved, **context), None)
    manager.finalize_async_saves(state, blocking=True)
    manager.registered.close()

    new = Job(1, 1, "fully_reshardable")
    manager = checkpointing.create_checkpoint_manager(config)
    loaded = {"state": state_of(config, new), "model": [new.model], "optimizer": new.optimizer}
    found = manager.load(checkpointing.CheckpointLoadContext(**loaded, **context))
    is_loaded, new.step = same(weights(job), weights(new)), found[0]
    numbers = [train(job), train(new)]
    snapshot = manager.registered.store.resolve(megatron_bridge.REF)
    files = sorted(each.name for each in (folder / "out" / f"iter_{found[0]:07d}").iterdir())
    ends = same(weights(job), weights(new))
    say(refused=refused, found=found, is_loaded=is_loaded, numbers=numbers, is_same=ends, step=snapshot.step, files=files)
    manager.registered.close()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
