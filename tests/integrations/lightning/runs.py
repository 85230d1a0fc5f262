"""A small run of Lightning's Trainer, over a store or natively."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

import tensorstore_ck as tsck

REF = "runs/a"
EPOCHS = 3
BATCHES = 5
Logged = list[tuple[int, dict[str, float]]]


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """20 samples, each with noise of its own, so that the order of random numbers matters."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(number)) + 0.01 * torch.randn(4)
        return drawn, drawn.sum().reshape(1)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples in an order that is drawn, without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (Numbers()[number] for number in torch.randperm(20).tolist())


def streamed(_: Any, *, batch_size: int, num_workers: int, **options: Any) -> DataLoader[Any]:
    """In place of a DataLoader of `Numbers`."""
    return DataLoader(Stream(), batch_size=batch_size, num_workers=num_workers)


class Unchanging(Numbers):
    """Without the noise that workers draw: what those of an earlier pass drew is lost with them."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return drawn, drawn.sum().reshape(1)


def persistent(_: Any, **options: Any) -> DataLoader[Any]:
    """In place of a DataLoader of `Numbers`."""
    return DataLoader(Unchanging(), persistent_workers=True, **options)


class Killed(Exception):
    """In place of a kill: the process goes on, without what it had in memory."""


class Killing:
    """Ends a run when a batch begins, after `step` steps."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            raise Killed


class KillAfter(Killing, Callback):  # type: ignore[misc]
    """Of `lightning.pytorch`."""


class Kept(Logger):  # type: ignore[misc]
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: Logged = []

    name, version = "kept", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not kept."""


class Training:
    """Dropout, batch norm, a metric, a schedule that watches a value, and values that are logged as means over an epoch."""

    trainer: Any
    log: Any
    parameters: Any
    save_hyperparameters: Any

    def __init__(self, width: int = 8, loader: Any = None, workers: int = 0, frequency: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["loader"])
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.error = MeanSquaredError()
        self.seen: list[tuple[int, float]] = []
        self._loader, self._workers, self._frequency = loader or DataLoader, workers, frequency

    def on_train_batch_start(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        self.log("input", batch[0].mean(), on_step=False, on_epoch=True)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        values, wanted = batch
        found = self.net(values)
        loss = nn.functional.mse_loss(found, wanted)
        self.error(found, wanted)
        self.seen.append((self.trainer.global_step, values.double().sum().item()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        values, wanted = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(values), wanted) + 0.01 * torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "frequency": self._frequency}}

    def train_dataloader(self) -> Any:
        return self._loader(Numbers(), batch_size=4, shuffle=True, num_workers=self._workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=10)


class Model(Training, lightning.LightningModule):  # type: ignore[misc]
    """Of `lightning.pytorch`."""


def trainer(folder: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_progress_bar": False, "enable_model_summary": False}
    logger = options.pop("logger", None) or Kept()
    given |= {"log_every_n_steps": 1, "default_root_dir": folder, **options}
    return lightning.Trainer(**given, logger=logger, callbacks=list(callbacks))


def seeded(kind: type[Model] = Model, **options: Any) -> Model:
    """As at the start of a script."""
    lightning.seed_everything(7, verbose=False)
    return kind(**options)


def checkpoint(folder: Path, store: tsck.Store | Path, **options: Any) -> Any:
    given = {"dirpath": folder / "files", "every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}", **options}
    if given.get("when") is not None:
        del given["every_n_train_steps"]
    return tsck.lightning.SnapshotCheckpoint(store, REF, **given)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def logged(run: lightning.Trainer) -> Logged:
    return [entry for entry in run.logger.logged if entry[1].keys() != {"epoch"}]


class Sharded(Model):
    """For ModelParallelStrategy."""

    def configure_model(self) -> None:
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def of_strategy(name: str) -> tuple[Model, Any]:
    """A module and a strategy for two ranks; `ddp_workers`: with loaders in processes of their own."""
    if name == "fsdp2":
        return seeded(Sharded), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return seeded(workers=2 if name == "ddp_workers" else 0, loader=StatefulDataLoader if name == "ddp_stateful" else None), "ddp"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
