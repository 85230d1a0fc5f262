"""Megatron-core on a machine without GPUs: what it asks of CUDA is done on the CPU. Imported before Megatron is.

Its DistributedOptimizer cannot load the state of torch's Adam, only that of Apex or of the Transformer Engine: `_FusedAdam` has that form.
"""

import warnings
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

_CPU: Final = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Makes tensors for CUDA on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")  # what the DistributedOptimizer looks for
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to:
            args = tuple(_CPU if isinstance(each, str) and each.startswith("cuda") else each for each in args)
        return func(*args, **kwargs)


class _Stream:
    """In place of a CUDA stream, where nothing runs at the same time."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
torch.cuda.synchronize = lambda device=None: None
torch.cuda.Stream = torch.cuda.current_stream = _Stream  # type: ignore[assignment,misc]
torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,return-value]
_OnCpu().__enter__()  # type: ignore[no-untyped-call]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's, of what is not installed
    import megatron.core
    import megatron.core.optimizer
    from megatron.core.optimizer import distrib_optimizer


class _FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, whose step counters are in the groups."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_: object) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (first, second), rate = group["betas"], group["lr"]
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(each), torch.zeros_like(each)
                state["exp_avg"].lerp_(each.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(each.grad, each.grad, value=1 - second)
                scale = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
                each.mul_(1 - rate * group["weight_decay"]).addcdiv_(state["exp_avg"], scale, value=-rate / (1 - first**step))


megatron.core.optimizer.Adam = distrib_optimizer.Adam = _FusedAdam
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True

__all__ = ["megatron"]
