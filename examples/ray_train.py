"""Ray Train with snapshots in a store: ``python -m examples.ray_train FOLDER [STEPS] [WORKERS]``. It continues when it is started
again, also with another number of workers, and when a worker dies.

Of a script without a store, `restore` and `report` are other lines, and `finish` is one more.
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from torch import nn

import tensorstore_ck as tsck

SAVE_EVERY = 5


def train(config: dict[str, Any]) -> None:
    """Runs in each worker."""
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(1)
    values = torch.randn(160, 8)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cursor = tsck.SampleCursor(len(values), batch_size=16)
    training = tsck.TrainingState(model=model, optimizer=optimizer, dataloader=cursor)
    with tsck.open(config["store"], create=True) as store:
        resumed = tsck.ray.restore(training, store=store, ref="runs/regression")
        step = (resumed.step or 0) if resumed else 0
        while step < config["steps"]:
            for numbers in cursor.batches(rank, workers):
                batch = values[numbers]
                loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                cursor.advance()
                step += 1
                if step % SAVE_EVERY == 0 or step == config["steps"]:
                    tsck.ray.report({"loss": loss.item(), "step": step}, training, store=store, ref="runs/regression", step=step)
                if step == config["steps"]:
                    break
        if rank == 0:
            store.finish("runs/regression")  # no page or alert expects another save


def main(folder: Path, steps: int, workers: int = 1) -> float:
    """Trains; returns the newest loss."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"store": str(folder.resolve() / "store"), "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=f"to-{steps}",
            storage_path=str(folder.resolve() / "ray"),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    metrics = trainer.fit().metrics
    return float(metrics["loss"]) if metrics else float("nan")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=40)
    options.add_argument("workers", type=int, nargs="?", default=1)
    given = options.parse_args()
    ray.init()
    print("loss", main(given.folder, given.steps, given.workers))
