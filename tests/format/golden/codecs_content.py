"""What the golden store of the codecs holds. `python -m tests.format.golden.codecs_content FOLDER` makes one: once for a version."""

import random
import sys
from pathlib import Path

import numpy as np
import torch

import tensorstore_ck as tsck

COUNT = 6000
STEPS = (1, 2, 3)


def noise(seed: int) -> torch.Tensor:
    """Numbers from -1 to 1, made without what may differ between versions of torch and numpy."""
    return torch.from_numpy(np.frombuffer(random.Random(seed).randbytes(2 * COUNT), "<i2").astype(np.int32)).float() / (1 << 15)


def codec_state(step: int) -> dict[str, object]:
    """A state in which every codec, and every form of it, has something to do."""
    masters = {f"m{number}": noise(number) * 0.02 + sum(noise(100 * number + each) for each in range(step)) * 1e-5 for number in range(2)}
    table = noise(2).bfloat16()
    table[torch.arange(step) * 97] += 1
    return {
        "masters": masters,
        "weights": {"m0": masters["m0"].bfloat16(), "m1": masters["m1"].half()},
        "table": table,
        "double": noise(3).double() ** 3,
        "counts": torch.arange(COUNT) * 1000 + (noise(4 + step) * 50).long(),
        "zeros": torch.zeros(COUNT),
        "bytes": (noise(9) * 7).to(torch.int8),
        "text": f"step {step}, " * 20_000,
    }


def make(folder: Path) -> None:
    """Makes the store."""
    with tsck.open(folder, create=True, cache_dir=folder.parent / "golden-cache", codec="small") as store:
        for step in STEPS:
            store.put_snapshot(codec_state(step), ref="small", step=step)
        store.put_snapshot(codec_state(9), ref="fast", step=9, codec="fast")
        store.put_snapshot(codec_state(11), ref="raw", step=11, codec="raw")
        store.recode("raw")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
