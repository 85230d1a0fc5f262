"""The versions of torchtitan that are supported, and the names of its checkpoint manager that are replaced or used."""

import dataclasses
import importlib
from typing import Final

from tensorstore_ck.integrations.trainer.versions import Package, changed_methods

PACKAGE: Final = Package(title="torchtitan", name="torchtitan", lowest=(0, 3), above=(0, 4), tested="torchtitan==0.3.0")
"""Earlier ones have no interface for checkpoint managers."""
METHODS: Final = {
    "_save": ("self", "curr_step", "last_step"),
    "_load": ("self", "step"),
    "_maybe_wait_for_staging": ("self",),
    "_wait_for_saving": ("self",),
    "_close": ("self",),
    "_should_save": ("self", "curr_step", "last_step"),
    "_save_last_step": ("self", "curr_step"),
}
"""Method of the CheckpointManager -> the parameters that it must have."""
OPTIONS: Final = frozenset(
    (
        *("enable", "folder", "interval", "initial_load_path", "initial_load_model_only", "initial_load_in_hf"),
        *("initial_load_in_hf_quantized", "last_save_model_only", "last_save_in_hf", "export_dtype", "keep_latest_k", "load_step"),
        *("exclude_from_loading", "enable_first_step_checkpoint", "create_seed_checkpoint", "load_only", "async_mode"),
    )
)
"""All options of its Config. Another one would be ignored here."""


def require_supported() -> None:
    """Checks the installed torchtitan.

    Raises:
        ImportError: it, or a package that it needs, is not installed.
        MissingExtraError: its version is not supported, or a name that is used has changed.
    """
    version = importlib.import_module("torchtitan").__version__
    PACKAGE.require_version(version)
    manager = importlib.import_module("torchtitan.components.checkpointer").CheckpointManager
    changed = [*changed_methods(manager, METHODS), *sorted(OPTIONS ^ {field.name for field in dataclasses.fields(manager.Config)})]
    PACKAGE.require_unchanged(version, changed, owner="the CheckpointManager of", module="torchtitan.CheckpointManager")
