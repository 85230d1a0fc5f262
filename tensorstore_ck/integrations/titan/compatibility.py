"""The versions of torchtitan that are supported, and the names of its checkpoint manager that are replaced or used."""

import dataclasses
import importlib
import inspect
from typing import Any, Final

from tensorstore_ck.errors import MissingExtraError

SUPPORTED: Final = ((0, 3), (0, 4))
"""From the first up to, but not including, the second. Earlier ones have no interface for checkpoint managers."""
SUPPORTED_PACKAGE: Final = "torchtitan>=0.3,<0.4"
TESTED_PACKAGE: Final = "torchtitan==0.3.0"
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
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    lowest, above = SUPPORTED
    if not lowest <= numbers < above:
        raise MissingExtraError(f"torchtitan {version} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`", object_id="torchtitan")
    manager = importlib.import_module("torchtitan.components.checkpointer").CheckpointManager
    changed = [name for name, parameters in METHODS.items() if _parameters(manager, name) != parameters]
    changed += sorted(OPTIONS ^ {field.name for field in dataclasses.fields(manager.Config)})
    if changed:
        raise MissingExtraError(
            f"the CheckpointManager of torchtitan {version} has another {changed[0]} than the one that is used here: run "
            f"`pip install '{TESTED_PACKAGE}'`, with which this was tested",
            object_id=f"torchtitan.CheckpointManager.{changed[0]}",
        )


def _parameters(manager: Any, name: str) -> tuple[str, ...] | None:
    method = getattr(manager, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)
