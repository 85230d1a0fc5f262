"""DeepSpeed on a machine without GPUs; imported before DeepSpeed is."""

import os
import sys
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's, of torch and of its own names
    import deepspeed
    import torch._inductor.compile_fx
    import torch._inductor.lowering  # noqa: F401 - DeepSpeed imports it late, and then after forks
    from deepspeed.accelerator import get_accelerator

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined] # its lock may be left over
type(get_accelerator()).is_fp16_supported = lambda _: True  # torch's CPU has what these models need

__all__ = ["deepspeed"]
