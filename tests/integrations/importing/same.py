"""Whether two states are the same: types, keys and their order, bits, what shares memory aside."""

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def require_same(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), (path, type(found), type(expected))
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, item in expected.items():
            require_same(found[key], item, f"{path}.{key}")
        if type(expected) is OrderedDict:
            require_same(vars(found), vars(expected), f"{path}._")
    elif isinstance(expected, list | tuple) and type(expected) is not torch.Size:
        assert len(found) == len(expected), path
        for number, (one, two) in enumerate(zip(found, expected, strict=True)):
            require_same(one, two, f"{path}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad), path
        assert bits(found) == bits(expected), path
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, path
        assert found.tobytes() == expected.tobytes(), path
        assert found.shape == expected.shape, path
    elif isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected), path
    else:
        assert found == expected, path


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
