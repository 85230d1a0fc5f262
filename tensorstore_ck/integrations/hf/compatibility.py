"""The versions of transformers that are supported, and the private methods of its Trainer that are replaced."""

from typing import Final

import transformers
from transformers.trainer import Trainer as NativeTrainer

from tensorstore_ck.integrations.trainer.versions import Package, changed_methods

PACKAGE: Final = Package(title="transformers", name="transformers", lowest=(5, 3), above=(6, 0), tested="transformers==5.23.0")
"""5.0 and earlier have neither `rotate_checkpoints` nor `_run_epoch`."""
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
"""Methods that are called with all parameters that they got."""
LOSSES: Final = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Attributes that the training loop sets, and a resume restores."""


def require_supported() -> None:
    """Checks the installed transformers. Raises `MissingExtraError` if its version is not supported, or a replaced method has changed."""
    PACKAGE.require_version(transformers.__version__)
    loop = getattr(NativeTrainer, "_inner_training_loop", None)
    lost = [name for name in LOSSES if loop is None or name not in loop.__code__.co_names]
    lost += [name for name in EXTENDED if not callable(getattr(NativeTrainer, name, None))]
    changed = [*changed_methods(NativeTrainer, REPLACED), *lost]
    PACKAGE.require_unchanged(transformers.__version__, changed, owner="the Trainer of", module="transformers.Trainer")
