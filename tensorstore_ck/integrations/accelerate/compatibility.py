"""The versions of accelerate that are supported, and the names of its Accelerator that are replaced or used."""

import inspect
from typing import Final

import accelerate

from tensorstore_ck.errors import MissingExtraError

SUPPORTED: Final = ((1, 12), (2, 0))
"""From the first up to, but not including, the second."""
SUPPORTED_PACKAGE: Final = "accelerate>=1.12,<2"
TESTED_PACKAGE: Final = "accelerate==1.15.0"
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
    """Checks the installed accelerate.

    Raises:
        MissingExtraError: its version is not supported, or a name that is used has changed.
    """
    lowest, above = SUPPORTED
    version = tuple(int(part) for part in accelerate.__version__.split(".")[:2])
    if not lowest <= version < above:
        raise MissingExtraError(
            f"accelerate {accelerate.__version__} is not supported: run `pip install '{SUPPORTED_PACKAGE}'`", object_id="accelerate"
        )
    changed = [name for name, parameters in REPLACED.items() if _parameters(name) != parameters]
    changed += [name for name in USED if not _has(accelerator, name)]
    if changed:
        raise MissingExtraError(
            f"the Accelerator of accelerate {accelerate.__version__} has another {changed[0]} than the one that is used here: run "
            f"`pip install '{TESTED_PACKAGE}'`, with which this was tested",
            object_id=f"accelerate.Accelerator.{changed[0]}",
        )


def _has(found: object, path: str) -> bool:
    name, _, rest = path.partition(".")
    return hasattr(found, name) and (not rest or _has(getattr(found, name), rest))


def _parameters(name: str) -> tuple[str, ...] | None:
    method = getattr(accelerate.Accelerator, name, None)
    return None if method is None else tuple(inspect.signature(method).parameters)
