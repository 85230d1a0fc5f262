"""The versions of transformers that are supported, and the private methods of its Trainer that are replaced."""

from typing import Final

import transformers
from transformers.trainer import Trainer as NativeTrainer

from tensorstore_ck.integrations.trainer.versions import Package, changed_methods, changed_overrides

PACKAGE: Final = Package(title="transformers", name="transformers", lowest=(5, 3), above=(6, 0), tested="transformers==5.23.0")
"""5.0 and earlier have neither `rotate_checkpoints` nor `_run_epoch`."""
REPLACED: Final = (
    *("_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"),
    *("_load_best_model", "_prepare_for_training"),
)
"""Methods that the mixin overrides, with the same parameters."""
RUN_EPOCH: Final = (
    *("self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial", "ignore_keys_for_eval"),
    *("start_time", "resume_from_checkpoint", "epochs_trained", "steps_trained_in_current_epoch"),
)
"""The parameters of `_run_epoch`."""
EXTENDED: Final = ("_inner_training_loop", "get_batch_samples", "_maybe_log_save_evaluate")
"""Methods that are called with all parameters that they got."""
LOSSES: Final = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Attributes that the training loop sets, and a resume restores."""


def require_supported(mixin: type) -> None:
    """Checks the installed transformers. Raises `MissingExtraError` if its version is not supported, or a replaced method has changed."""
    PACKAGE.require_version(transformers.__version__)
    loop = getattr(NativeTrainer, "_inner_training_loop", None)
    lost = [name for name in LOSSES if loop is None or name not in loop.__code__.co_names]
    lost += [name for name in EXTENDED if not callable(getattr(NativeTrainer, name, None))]
    lost += changed_methods(NativeTrainer, {"_run_epoch": RUN_EPOCH})
    changed = [*changed_overrides(NativeTrainer, mixin, REPLACED), *lost]
    PACKAGE.require_unchanged(transformers.__version__, changed, owner="the Trainer of", module="transformers.Trainer")
