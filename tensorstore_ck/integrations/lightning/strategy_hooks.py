"""The places of a Strategy where a resume takes effect: where Lightning loads a checkpoint, and the last one before its loop goes on."""

import os
from collections.abc import Callable
from typing import Any

Load = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]


def install(strategy: Any, load: Load, before_training: Callable[[], None]) -> None:
    """Makes a Strategy call these two. Methods of the object are replaced, not of its class.

    Args:
        strategy: The Strategy.
        load: Called with a path, and a function that lets Lightning load it.
        before_training: Called when all hooks of the start of the training have run.
    """
    load_natively, start = strategy.load_checkpoint, strategy.on_train_start

    def load_checkpoint(checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        return load(str(checkpoint_path), lambda: load_natively(checkpoint_path, weights_only=weights_only))

    def on_train_start() -> None:
        start()
        before_training()

    strategy.load_checkpoint, strategy.on_train_start = load_checkpoint, on_train_start


def uninstall(strategy: Any) -> None:
    """Leaves the Strategy as it was."""
    for name in ("load_checkpoint", "on_train_start"):
        vars(strategy).pop(name, None)
