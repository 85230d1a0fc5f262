"""The versions of DeepSpeed that are supported, and the names of its engine that are replaced or used."""

from typing import Any, Final

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.integrations.deepspeed.fragments import OPTIMIZERS, base_optimizer, has_other_experts, partly_tied
from tensorstore_ck.integrations.trainer.versions import Package, changed_methods, missing_attributes

PACKAGE: Final = Package(title="DeepSpeed", name="deepspeed", lowest=(0, 19), above=(0, 20), tested="deepspeed==0.19.8")
REPLACED: Final = {
    "save_checkpoint": ("self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
    "load_checkpoint": (
        *("self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"),
        *("load_module_only", "custom_load_fn"),
    ),
    "destroy": ("self",),
    "_checkpoint_tag_validation": ("self", "tag"),
}
"""Method -> the parameters that it must have."""
USED: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps", "module", "optimizer", "lr_scheduler", "has_moe_layers")


def require_supported(engine: Any) -> None:
    """Checks the installed DeepSpeed (see `Package`). Raises `InvalidOptionError` if something in this engine cannot be saved."""
    PACKAGE.require_version(deepspeed.__version__)
    changed = [*changed_methods(DeepSpeedEngine, REPLACED), *missing_attributes(engine, USED)]
    PACKAGE.require_unchanged(deepspeed.__version__, changed, owner="the engine of", module="deepspeed.DeepSpeedEngine")
    if problem := _problem(engine):
        raise InvalidOptionError(f"tsck.deepspeed cannot save an engine with {problem}", object_id="engine")


def _problem(engine: Any) -> str | None:
    """The reason why an engine cannot be saved; None: it can."""
    optimizer: Any = engine.optimizer
    if engine.has_moe_layers and has_other_experts(engine.module):
        return "experts outside deepspeed.moe.layer.MoE, such as those of AutoEP"
    slices = engine.grid.get_slice_parallel_world_size() if engine.pipeline_parallelism else engine.mp_world_size
    if slices > 1:
        return "tensor parallelism"
    if engine.pipeline_parallelism and (name := partly_tied(engine.module)):
        return f"the parameter {name}, of which each stage has its own, under one name: list it in tied_weight_attr of its TiedLayerSpec"
    if engine.zero_optimization() and engine.zero_nvme_offload_optimizer():
        return "an optimizer that is offloaded to NVMe"
    parts = [parameter.ds_tensor for parameter in engine.module.parameters() if hasattr(parameter, "ds_tensor")]
    if any(getattr(part, "final_location", None) == OffloadDeviceEnum.nvme for part in parts):
        return "parameters that are offloaded to NVMe"
    if any(hasattr(part, "ds_quant_scale") for part in parts):
        return "quantized weights (zero_quantized_weights)"
    if optimizer is not None and not isinstance(optimizer, OPTIMIZERS):
        return f"an optimizer of the class {type(optimizer).__qualname__}"
    if optimizer is not None and not isinstance(base_optimizer(optimizer), torch.optim.Optimizer):
        return f"a client optimizer of the class {type(base_optimizer(optimizer)).__qualname__}"
    return None
