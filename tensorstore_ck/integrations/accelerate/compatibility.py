"""The versions of accelerate that are supported, and the names of its Accelerator that are replaced or used."""

from typing import Final

import accelerate

from tensorstore_ck.integrations.trainer.versions import Package, changed_overrides, missing_attributes

PACKAGE: Final = Package(title="accelerate", name="accelerate", lowest=(1, 12), above=(2, 0), tested="accelerate==1.15.0")
REPLACED: Final = ("save_state", "load_state", "prepare", "prepare_data_loader", "skip_first_batches", "end_training", "free_memory")
"""Methods that the mixin overrides, with the same parameters."""
USED: Final = (
    *("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step", "is_fsdp2"),
    *("_save_model_state_pre_hook", "_load_model_state_pre_hook", "project_configuration", "gradient_state.dataloader_references"),
)


def require_supported(accelerator: accelerate.Accelerator, mixin: type) -> None:
    """Checks the installed accelerate. Raises `MissingExtraError` if its version is not supported, or a name that is used has changed."""
    PACKAGE.require_version(accelerate.__version__)
    changed = [*changed_overrides(accelerate.Accelerator, mixin, REPLACED), *missing_attributes(accelerator, USED)]
    PACKAGE.require_unchanged(accelerate.__version__, changed, owner="the Accelerator of", module="accelerate.Accelerator")
