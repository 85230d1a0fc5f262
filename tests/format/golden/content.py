"""What the golden store of format 1 holds. It was made once, and is never made again: see the history of this file for how."""

import random
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import torch

from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64")


def golden_state(step: int) -> dict[str, object]:
    """A state with one of everything, made without random numbers of torch, which may differ between its versions."""
    base = torch.arange(step, step + 3 * INLINE_TENSOR_BYTES, dtype=torch.int32)
    model = OrderedDict((name, torch.arange(24).reshape(4, 6).to(getattr(torch, name))) for name in DTYPES)
    model["weight"] = base
    model["tied"] = base
    model["view"] = base[100:200]
    return {
        "model": model,
        "blocks": torch.cat([torch.zeros(5 << 20, dtype=torch.uint8), torch.arange(200, dtype=torch.uint8)]),  # zeros cost git nothing
        "numpy": {"big-endian": np.arange(7, dtype=">f8"), "time": np.array(["2026-11-21"], "<M8[D]"), "scalar": np.float32(0.1)},
        "values": [None, True, step, -1, 1 << 80, 0.1, float("-inf"), 1 + 2j, "text é", b"bytes", (1, (2.5, "x")), {1, 2}, frozenset("a")],
        "keys": {1: "int", (2, "t"): "tuple", None: "none", 2.5: "float"},
        "counter": Counter({5: 2, 7: 1}),
        "default": defaultdict(list, {"a": [1]}),
        "torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu")],
        "rng": random.Random(step).getstate(),
        "long": "0123456789" * 10_000,
        "empty": {"dict": {}, "list": [], "tensor": torch.zeros(0, 3), "scalar": torch.tensor(2.5)},
    }
