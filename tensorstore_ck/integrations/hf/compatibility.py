"""The versions of transformers that are supported, and the private methods of its Trainer that are replaced."""

import inspect
from typing import Final

import transformers
from transformers.trainer import Trainer as NativeTrainer

from tensorstore_ck.errors import MissingExtraError

SUPPORTED: Final = ((5, 3), (6, 0))
"""From the first up to, but not including, the second. 5.0 and earlier have neither `rotate_checkpoints` nor `_run_epoch`."""
SUPPORTED_PACKAGE: Final = "transformers>=5.3,<6"
TESTED_PACKAGE: Final = "transformers==5.23.0"
REPLACED: Final = {
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_scaler": ("self", "checkpoint"),
    "_load_rng_state": ("self", "checkpoint"),
    "_load_best_model": ("self",),
    "_prepare_for_training": ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial", "ignore_keys_for_eval"),
        *("start_time", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
    ),
}
"""Method -> the parameters that it must have."""
EXTENDED: Final = ("_inner_training_loop", "get_batch_samples", "_maybe_log_save_evaluate")
"""Methods that are called with whatever parameters they have."""
LOSSES: Final = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Attributes that the training loop sets, and a resume restores."""


def require_supported() -> None:
    """Checks the installed transformers.

    Raises:
        MissingExtraError: its version is not supported, or a replaced method has changed.
    """
    lowest, above = SUPPORTED
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not lowest <= version < above:
        raise MissingExtraError(
            f"transformers {transformers.__version__} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`", object_id="transformers"
        )
    changed = [name for name, parameters in REPLACED.items() if _parameters(name) != parameters]
    changed += [name for name in EXTENDED if not callable(getattr(NativeTrainer, name, None))]
    loop = getattr(NativeTrainer, "_inner_training_loop", None)
    changed += [name for name in LOSSES if loop is None or name not in loop.__code__.co_names]
    if changed:
        raise MissingExtraError(
            f"the Trainer of transformers {transformers.__version__} has another {changed[0]} than the one that is replaced here: run "
            f"`pip install '{TESTED_PACKAGE}'`, with which this was tested",
            object_id=f"transformers.Trainer.{changed[0]}",
        )


def _parameters(name: str) -> tuple[str, ...] | None:
    method = getattr(NativeTrainer, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)
