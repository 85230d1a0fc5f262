"""The generators that a trainer saves for each rank, as `TrainingState` has them."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.integrations.importing.resolve_placeholders import finished

_WORDS: Final = 624
"""Of a Mersenne Twister."""


class GeneratorKeys(NamedTuple):
    """Under which keys a trainer's file has them."""

    python: str
    numpy: str
    torch: str
    cuda: str


OF_TRANSFORMERS: Final = GeneratorKeys("python", "numpy", "cpu", "cuda")
OF_ACCELERATE: Final = GeneratorKeys("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")


def generators_of(found: Mapping[Any, Any], keys: GeneratorKeys, name: str) -> dict[str, Any]:
    """The states in the content of the file `name`. Raises `MalformedError` if they are none."""
    states: dict[str, Any] = {
        "python": _python(found.get(keys.python), name),
        "numpy": _numpy(found.get(keys.numpy), name),
        "torch": _torch(found.get(keys.torch), name),
    }
    if (cuda := found.get(keys.cuda)) is not None:
        states["cuda"] = [_torch(each, name) for each in (cuda if isinstance(cuda, list | tuple) else [cuda])]
    return states


def _python(found: object, name: str) -> object:
    if not isinstance(found, tuple) or len(found) != 3 or found[0] != 3 or not isinstance(found[1], tuple):
        raise MalformedError(f"{name} has no state of Python's generator")
    words, gauss = found[1:]
    if len(words) != _WORDS + 1 or not all(type(each) is int and 0 <= each < 1 << 32 for each in words) or words[-1] > _WORDS:
        raise MalformedError(f"the state of Python's generator in {name} is malformed")
    if gauss is not None and type(gauss) is not float:
        raise MalformedError(f"the state of Python's generator in {name} is malformed")
    return found


def _numpy(found: object, name: str) -> dict[str, Any]:
    kind, words, position, has_gauss, gauss = found if isinstance(found, tuple) and len(found) == 5 else (None,) * 5
    words = finished(words)
    if kind != "MT19937" or not isinstance(words, np.ndarray) or words.shape != (_WORDS,) or words.dtype != np.uint32:
        raise MalformedError(f"{name} has no state of NumPy's generator ({printable(kind, 40)})")
    if type(position) is not int or not 0 <= position <= _WORDS or type(has_gauss) is not int or type(gauss) is not float:
        raise MalformedError(f"the state of NumPy's generator in {name} is malformed")
    key = tuple(int(each) for each in words.tolist())
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}


def _torch(found: object, name: str) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.dtype != torch.uint8 or found.dim() != 1 or found.layout is not torch.strided:
        raise MalformedError(f"{name} has no state of torch's generator")
    return found
