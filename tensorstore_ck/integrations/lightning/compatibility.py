"""The versions of Lightning that are supported, and its private names that are used here."""

import dataclasses
import importlib
import inspect
from typing import Any, Final

from tensorstore_ck.errors import InvalidOptionError, MissingExtraError

SUPPORTED: Final = ((2, 6), (3, 0))
"""From the first up to, but not including, the second. Earlier ones call `Strategy.load_checkpoint` with other arguments."""
SUPPORTED_PACKAGE: Final = "lightning>=2.6,<3"
TESTED_PACKAGE: Final = "lightning==2.6.6"
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
    module = type(trainer).__module__
    name = next(
        (name for name in ("lightning.pytorch", "pytorch_lightning") if any(_is_in(each, name) for each in type(trainer).__mro__)), ""
    )
    if not name:
        raise InvalidOptionError(f"{module}.{type(trainer).__qualname__} is not a Trainer of Lightning", object_id="trainer")
    return name


def require_supported(trainer: Any) -> None:
    """Checks the version of Lightning, and that this Trainer's states can be saved.

    Raises:
        MissingExtraError: the version is not supported, or a private name has changed.
        InvalidOptionError: the strategy is not supported.
    """
    package = package_of(trainer)
    version = _require_version(package.removesuffix(".pytorch"))
    changed = [name for name, parameters in METHODS.items() if _parameters(f"{package}.{name}") != parameters]
    result = importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")
    for name, fields in FIELDS.items():
        found = getattr(result, name, None)
        if not dataclasses.is_dataclass(found) or tuple(each.name for each in dataclasses.fields(found)) != fields:
            changed.append(name)
    for path, names in ATTRIBUTES.items():
        found = trainer
        for part in path.split("."):
            found = getattr(found, part, None)
        changed += [f"{path}.{name}" for name in names if not hasattr(found, name)]
    _require_unchanged(changed, version)
    _require_strategy(trainer.strategy)


def require_supported_fabric(fabric: Any) -> None:
    """As `require_supported`, for a Fabric."""
    package = next((each.__module__ for each in type(fabric).__mro__ if each.__name__ == "Fabric"), "").removesuffix(".fabric")
    if package not in ("lightning.fabric", "lightning_fabric"):
        raise InvalidOptionError(f"{type(fabric).__qualname__} is not a Fabric", object_id="fabric")
    version = _require_version(package.removesuffix(".fabric"))
    _require_unchanged([name for name, parameters in FABRIC_METHODS.items() if _parameters(f"{package}.{name}") != parameters], version)
    _require_strategy(fabric.strategy)


def _require_version(package: str) -> str:
    version: str = importlib.import_module(package).__version__
    lowest, above = SUPPORTED
    if not lowest <= tuple(int(part) for part in version.split(".")[:2]) < above:
        raise MissingExtraError(f"Lightning {version} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`", object_id="lightning")
    return version


def _require_unchanged(changed: list[str], version: str) -> None:
    if changed:
        raise MissingExtraError(
            f"Lightning {version} has another {changed[0]} than the one that is used here: run `pip install '{TESTED_PACKAGE}'`, with "
            "which this was tested",
            object_id=changed[0],
        )


def _require_strategy(strategy: object) -> None:
    if not any(each.__name__ in STRATEGIES for each in type(strategy).__mro__):
        kind = type(strategy).__name__
        instead = ": use ModelParallelStrategy, with fully_shard" if kind == "FSDPStrategy" else ""
        raise InvalidOptionError(f"states of {kind} cannot be saved into a store{instead}", object_id=kind)


def is_sharded(strategy: object) -> bool:
    """Whether ranks hold shards, which they save and restore in place."""
    return any(each.__name__ == "ModelParallelStrategy" for each in type(strategy).__mro__)


def _is_in(kind: type, package: str) -> bool:
    return kind.__module__.startswith(f"{package}.")


def _parameters(name: str) -> tuple[str, ...] | None:
    module, owner, method = name.rsplit(".", 2)
    found = getattr(getattr(importlib.import_module(module), owner, None), method, None)
    return None if found is None else tuple(inspect.signature(found).parameters)
