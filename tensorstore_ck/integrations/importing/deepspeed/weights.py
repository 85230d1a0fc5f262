"""Weights of a DeepSpeed checkpoint, and whether they are those of its masters."""

from typing import Final

import torch

SAMPLE: Final = 256
"""Elements at both ends of a run that are compared."""


def same_elements(weights: torch.Tensor, masters: torch.Tensor) -> bool:
    """Whether the ends of these weights are the masters, rounded to the dtype of the weights; both as flat or not.

    DeepSpeed makes weights from masters in each step, so those of one save agree; a sample shows files of different saves, and elements
    in another order.
    """
    weights, masters = weights.detach().reshape(-1), masters.detach().reshape(-1)
    for part in (slice(None, SAMPLE), slice(-SAMPLE, None)):
        one, other = weights[part], masters[part].to(weights.dtype)
        if not bool(((one == other) | (one.isnan() & other.isnan())).all()):
            return False
    return True
