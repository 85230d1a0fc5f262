"""The versions of Lightning that are supported, and its private names that are used here."""

import dataclasses
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.integrations.trainer.versions import Package, changed_methods, missing_attributes

PACKAGE: Final = Package(title="Lightning", name="lightning", lowest=(2, 6), above=(3, 0), tested="lightning==2.6.6")
"""Earlier ones call `Strategy.load_checkpoint` with other arguments."""
STRATEGIES: Final = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Whose states can be saved; and their subclasses."""
METHODS: Final = {
    "callbacks.model_checkpoint.ModelCheckpoint._save_checkpoint": ("self", "trainer", "filepath"),
    "callbacks.model_checkpoint.ModelCheckpoint._save_topk_checkpoint": ("self", "trainer", "monitor_candidates"),
    "callbacks.model_checkpoint.ModelCheckpoint._save_last_checkpoint": ("self", "trainer", "monitor_candidates"),
    "callbacks.model_checkpoint.ModelCheckpoint._monitor_candidates": ("self", "trainer"),
    "callbacks.model_checkpoint.ModelCheckpoint._find_last_checkpoints": ("self", "trainer"),
    "callbacks.model_checkpoint.ModelCheckpoint._should_skip_saving_checkpoint": ("self", "trainer"),
    "strategies.Strategy.load_checkpoint": ("self", "checkpoint_path", "weights_only"),
    "strategies.Strategy.process_dataloader": ("self", "dataloader"),
    "strategies.Strategy.on_train_start": ("self",),
    "strategies.Strategy.optimizer_state": ("self", "optimizer"),
    "trainer.connectors.checkpoint_connector._CheckpointConnector.dump_checkpoint": ("self", "weights_only"),
    "loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx": ("self", "data_fetcher"),
    "loops.training_epoch_loop._TrainingEpochLoop._should_accumulate": ("self",),
    "loops.training_epoch_loop._TrainingEpochLoop._num_ready_batches_reached": ("self",),
    "loops.training_epoch_loop._TrainingEpochLoop.update_lr_schedulers": ("self", "interval", "update_plateau_schedulers"),
    "loops.fit_loop._FitLoop.reset_restart_stage": ("self",),
    "trainer.connectors.logger_connector.result._ResultMetric.__init__": ("self", "metadata", "is_tensor"),
}
"""Method -> the parameters that it must have."""
FABRIC_METHODS: Final = {
    "strategies.Strategy.save_checkpoint": ("self", "path", "state", "storage_options", "filter"),
    "strategies.Strategy.load_checkpoint": ("self", "path", "state", "strict", "weights_only"),
}
FIELDS: Final = {
    "_Metadata": (
        *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "add_dataloader_idx"),
        *("dataloader_idx", "metric_attribute", "_sync"),
    ),
    "_Sync": ("fn", "_should", "rank_zero_only", "_op", "_group"),
}
"""Dataclass of logged values -> its fields."""
ATTRIBUTES: Final = {
    "fit_loop": ("_restarting", "_resuming_from_checkpoint", "_data_fetcher", "_combined_loader", "epoch_loop", "epoch_progress"),
    "fit_loop.epoch_loop": ("_results", "batch_progress"),
    "_logger_connector": ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx"),
    "_checkpoint_connector": ("trainer",),
}
"""Object of a Trainer -> the attributes that it must have."""


def package_of(trainer: object) -> str:
    """`lightning.pytorch` or `pytorch_lightning`, which are separate packages with the same contents."""
    modules = [kind.__module__ for kind in type(trainer).__mro__]
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if any(module.startswith(f"{name}.") for module in modules):
            return name
    raise InvalidOptionError(f"{modules[0]}.{type(trainer).__qualname__} is not a Trainer of Lightning", object_id="trainer")


def require_supported(trainer: Any) -> None:
    """Checks the installed Lightning (see `Package`). Raises `InvalidOptionError` if states of this Trainer's strategy cannot be saved."""
    package = package_of(trainer)
    version = _require_version(package.removesuffix(".pytorch"))
    changed = [*_changed(package, METHODS)]
    result = importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")
    for name, fields in FIELDS.items():
        kind = getattr(result, name, None)
        if not dataclasses.is_dataclass(kind) or tuple(field.name for field in dataclasses.fields(kind)) != fields:
            changed.append(name)
    changed += missing_attributes(trainer, (f"{path}.{name}" for path, names in ATTRIBUTES.items() for name in names))
    PACKAGE.require_unchanged(version, changed)
    _require_strategy(trainer.strategy)


def require_supported_fabric(fabric: Any) -> None:
    """As `require_supported`, for a Fabric."""
    package = next((kind.__module__ for kind in type(fabric).__mro__ if kind.__name__ == "Fabric"), "").removesuffix(".fabric")
    if package not in ("lightning.fabric", "lightning_fabric"):
        raise InvalidOptionError(f"{type(fabric).__qualname__} is not a Fabric", object_id="fabric")
    version = _require_version(package.removesuffix(".fabric"))
    PACKAGE.require_unchanged(version, _changed(package, FABRIC_METHODS))
    _require_strategy(fabric.strategy)


def _require_version(package: str) -> str:
    version: str = importlib.import_module(package).__version__
    PACKAGE.require_version(version)
    return version


def _changed(package: str, methods: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    """`methods`: module, class and method -> parameters."""
    for name, parameters in methods.items():
        module, owner, method = f"{package}.{name}".rsplit(".", 2)
        if [*changed_methods(importlib.import_module(module), {f"{owner}.{method}": parameters})]:
            yield name


def _require_strategy(strategy: object) -> None:
    if not any(kind.__name__ in STRATEGIES for kind in type(strategy).__mro__):
        kind = type(strategy).__name__
        instead = ": use ModelParallelStrategy, with fully_shard" if kind == "FSDPStrategy" else ""
        raise InvalidOptionError(f"states of {kind} cannot be saved into a store{instead}", object_id=kind)


def is_sharded(strategy: object) -> bool:
    """Whether ranks hold shards, which they save and restore in place."""
    return any(kind.__name__ == "ModelParallelStrategy" for kind in type(strategy).__mro__)
