"""accelerate and transformers with DeepSpeed on a machine without GPUs: imported before an Accelerator is made."""

from typing import Any

import transformers.training_args
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from tests.integrations.deepspeed import on_cpu  # noqa: F401


def _gloo(self: Any, *_: object) -> tuple[str, DistributedType]:
    """accelerate finds no backend for DeepSpeed on CPUs, and then counts one process. All that follows is its own."""
    return "gloo", DistributedType.NO


PartialState._prepare_backend = _gloo
transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # else transformers refuses bfloat16 without `use_cpu`
PartialState.destroy_process_group = lambda *_: None  # `end_training` calls it, and a process of the tests has more runs
