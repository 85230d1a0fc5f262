"""Advice for values that people often try to store, and that have no stored form."""

from typing import Final

import numpy as np
import torch

_ON_RANKS: Final = (
    "pass group= (such as torch.distributed.group.WORLD) on all ranks that hold shares of it; rank_state= cannot hold shares, so move it "
    "into the state"
)

_STATE_DICT: Final = "store its .state_dict()"
LOADED: Final = (_STATE_DICT, "restore into its .state_dict(), and pass that to its .load_state_dict()")
"""Advice on storing an object, and on restoring into it."""


def advice_for(value: object) -> tuple[str, str] | None:
    """What `value` is, and advice; None for a value that is not among these."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        if kind.__name__ == "DTensor":
            return "it is a DTensor", _ON_RANKS
        if kind.__module__.startswith("torch._subclasses"):
            return f"it is a {kind.__name__}, which has no data", "leave FakeTensorMode before storing"
        if value.is_nested:
            return "it is a nested tensor", "store .unbind(), or .values() and .offsets()"
        if isinstance(value, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            return f"it is a {kind.__name__} of a lazy module, which has no shape yet", "run a batch through the module first"
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return f"it is a {name}, a tensor subclass", "name its class with tsck.register_type, or store a plain tensor"
        if value.is_meta:
            return "it is a meta tensor, which has no data", "materialize it first (.to_empty(), then load or initialize it)"
        if value.is_quantized:
            return "it is a quantized tensor", "store .int_repr() with its scale and zero point, or .dequantize()"
        if value.layout is not torch.strided:
            return f"its layout is {value.layout}", "store .to_dense(), or its indices and values"
        return None
    if isinstance(value, np.ndarray):
        return f"it is a {name}, a numpy subclass", "store a plain array (np.asarray; for a masked array .data and .mask)"
    if kind.__name__ == "ShardedTensor":
        return "it is a ShardedTensor", _ON_RANKS
    if isinstance(value, torch.Generator):
        return "it is a torch.Generator", "store .get_state()"
    if isinstance(value, np.random.Generator):
        return "it is a numpy Generator", "store .bit_generator.state"
    if callable(getattr(kind, "state_dict", None)):
        return f"it is a {name}", _STATE_DICT
    if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
        return "it is a bare storage", "store a tensor over it"
    return None
