"""What the golden store of the codecs holds. It was made once, and is never made again: see the history of this file for how."""

import random

import numpy as np
import torch

COUNT = 6000


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
