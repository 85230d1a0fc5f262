"""A training with Ray Train over a store; workers note what they do in files."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

REF = "runs/r"
EPOCH = 6
"""Steps of one."""


def note(config: dict[str, Any], rank: int, **said: object) -> None:
    with (Path(config["folder"]) / f"said-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\n")


def train(config: dict[str, Any]) -> None:
    """Runs in each worker."""
    import ray.train
    import ray.train.torch
    import torch
    from torch import nn

    import tensorstore_ck as tsck

    context, folder = ray.train.get_context(), Path(config["folder"])
    rank, workers = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(1)
    values = torch.randn(24, 8)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cursor = tsck.SampleCursor(len(values), batch_size=4)
    training = tsck.TrainingState(model=model, optimizer=optimizer, dataloader=cursor)
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        resumed = tsck.ray.restore(training, store=store, ref=REF)
        step = (resumed.step or 0) if resumed else 0
        checkpoint = ray.train.get_checkpoint()
        weights = {name.removeprefix("module."): each.tolist() for name, each in model.state_dict().items()}
        note(config, rank, began=step, from_ray=checkpoint is not None, workers=workers, weights=weights)
        while step < config["steps"]:
            for numbers in cursor.batches(rank, workers):
                batch = values[numbers]
                loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                cursor.advance()
                step += 1
                note(config, rank, step=step, loss=loss.item(), numbers=numbers)
                if step % config.get("every", 2) == 0:
                    score = float(step % 5)
                    tsck.ray.report({"loss": loss.item(), "score": score}, training, store=store, ref=REF, step=step)
                if [rank, step] == config.get("kill") and not (folder / "killed").exists():
                    (folder / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == config["steps"]:
                    break
        weights = {name.removeprefix("module."): each.tolist() for name, each in model.state_dict().items()}
        note(config, rank, ended=step, weights=weights, drawn=torch.rand(()).item())


def run(folder: Path, *, steps: int, workers: int = 1, name: str = "run", train: Callable[..., None] = train, **more: Any) -> Any:
    """The result of Ray's `fit`."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir(exist_ok=True)
    keep, validation = more.pop("keep", {}), more.pop("validation", None)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": steps, **more},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder / "ray"),
            checkpoint_config=CheckpointConfig(**keep),
            failure_config=FailureConfig(max_failures=1 if "kill" in more else 0),
        ),
        validation_config=validation,
    )
    return trainer.fit()


def said(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"said-{rank}.jsonl").read_text().splitlines()]


def losses(folder: Path, rank: int = 0) -> dict[int, tuple[float, list[int]]]:
    """Step -> what was said of it last."""
    return {each["step"]: (each["loss"], each["numbers"]) for each in said(folder, rank) if "step" in each}


def ends(folder: Path, rank: int = 0) -> dict[str, Any]:
    return next(each for each in reversed(said(folder, rank)) if "ended" in each)
