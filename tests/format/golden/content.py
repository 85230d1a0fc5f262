"""What the golden store of format 1 holds. `python -m tests.format.golden.content FOLDER` makes one: once, never again for a version."""

import random
import sys
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import torch

import tensorstore_ck as tsck
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


def make(folder: Path) -> None:
    """Makes the store."""
    with tsck.open(folder, create=True, cache_dir=folder.parent / "golden-cache") as store:
        for step in (1, 2):
            store.put_snapshot(
                golden_state(step), ref="runs/golden", step=step, metrics={"loss": 1 / step}, metadata={"lr": 0.1, "tags": ["a", None]}
            )
        store.branch("exp/one", "runs/golden@1")
        store.tag("v1", "runs/golden")
        store.annotate("v1", {"eval": 0.75})
        store.mark("runs/golden@1", "bad", reason="an example")
        for number in range(64):  # enough entries for a checkpoint
            store.annotate("v1", {"late": number})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
