"""The generators that a trainer saves for each rank, as `TrainingState` has them."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.integrations.importing.malformed import MalformedError, printable
from tensorstore_ck.integrations.importing.resolve_placeholders import finished

_WORDS: Final = 624
"""The words of a Mersenne Twister's state."""


class GeneratorKeys(NamedTuple):
    """Under which keys a trainer's file has them."""

    python: str
    numpy: str
    torch: str
    cuda: str


OF_TRANSFORMERS: Final = GeneratorKeys("python", "numpy", "cpu", "cuda")
OF_ACCELERATE: Final = GeneratorKeys("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")


def generators_of(content: Mapping[Any, Any], keys: GeneratorKeys, name: str) -> dict[str, Any]:
    """The states in the content of the file `name`. Raises `MalformedError` if they are none."""
    states: dict[str, Any] = {
        "python": _python(content.get(keys.python), name),
        "numpy": _numpy(content.get(keys.numpy), name),
        "torch": _torch(content.get(keys.torch), name),
    }
    if (cuda := content.get(keys.cuda)) is not None:
        states["cuda"] = [_torch(state, name) for state in (cuda if isinstance(cuda, list | tuple) else [cuda])]
    return states


def _python(state: object, name: str) -> object:
    if not isinstance(state, tuple) or len(state) != 3 or state[0] != 3 or not isinstance(state[1], tuple):
        raise MalformedError(f"{name} has no state of Python's generator")
    words, gauss = state[1:]
    if len(words) != _WORDS + 1 or not all(type(word) is int and 0 <= word < 1 << 32 for word in words) or words[-1] > _WORDS:
        raise MalformedError(f"the state of Python's generator in {name} is malformed")
    if gauss is not None and type(gauss) is not float:
        raise MalformedError(f"the state of Python's generator in {name} is malformed")
    return state


def _numpy(state: object, name: str) -> dict[str, Any]:
    kind, words, position, has_gauss, gauss = state if isinstance(state, tuple) and len(state) == 5 else (None,) * 5
    words = finished(words)
    if kind != "MT19937" or not isinstance(words, np.ndarray) or words.shape != (_WORDS,) or words.dtype != np.uint32:
        raise MalformedError(f"{name} has no state of NumPy's generator ({printable(kind, 40)})")
    if type(position) is not int or not 0 <= position <= _WORDS or type(has_gauss) is not int or type(gauss) is not float:
        raise MalformedError(f"the state of NumPy's generator in {name} is malformed")
    key = tuple(int(word) for word in words.tolist())
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}


def _torch(state: object, name: str) -> torch.Tensor:
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.dim() != 1 or state.layout is not torch.strided:
        raise MalformedError(f"{name} has no state of torch's generator")
    return state
