"""The versions of accelerate that are supported, and the names of its Accelerator that are replaced or used."""

from typing import Final

import accelerate

from tensorstore_ck.integrations.trainer.versions import Package, changed_methods, missing_attributes

PACKAGE: Final = Package(title="accelerate", name="accelerate", lowest=(1, 12), above=(2, 0), tested="accelerate==1.15.0")
REPLACED: Final = {
    "save_state": ("self", "output_dir", "safe_serialization", "save_model_func_kwargs"),
    "load_state": ("self", "input_dir", "load_kwargs", "load_model_func_kwargs"),
    "prepare": ("self", "args", "device_placement"),
    "prepare_data_loader": ("self", "data_loader", "device_placement", "slice_fn_for_dispatch"),
    "skip_first_batches": ("self", "dataloader", "num_batches"),
    "end_training": ("self",),
    "free_memory": ("self", "objects"),
}
"""Method -> the parameters that it must have."""
USED: Final = (
    *(
        "_models",
        "_optimizers",
        "_schedulers",
        "_dataloaders",
        "_custom_objects",
        "_save_model_state_pre_hook",
        "_load_model_state_pre_hook",
    ),
    *("scaler", "step", "is_fsdp2", "project_configuration", "gradient_state.dataloader_references"),
)


def require_supported(accelerator: accelerate.Accelerator) -> None:
    """Checks the installed accelerate. Raises `MissingExtraError` if its version is not supported, or a name that is used has changed."""
    PACKAGE.require_version(accelerate.__version__)
    changed = [*changed_methods(accelerate.Accelerator, REPLACED), *missing_attributes(accelerator, USED)]
    PACKAGE.require_unchanged(accelerate.__version__, changed, owner="the Accelerator of", module="accelerate.Accelerator")
