"""The state of a job after its last completed step, which can be saved while the next step has not changed weights yet.

A step draws a batch and random numbers long before it changes a weight. So small objects are copied after each step; models, optimizers and
scalers are watched for later changes. Knows no store.
"""

import copy
import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tensorstore_ck.training import random_generators
from tensorstore_ck.training.per_rank_state import VALUES, PerRankState
from tensorstore_ck.training.sample_cursor import SampleCursor
from tensorstore_ck.training.shared_state import SharedState
from tensorstore_ck.training.stateful_parts import is_stateful

MAX_VALUES: Final = 1000
"""The most values of a container that is copied after each step."""
MAX_BYTES: Final = 1 << 20
"""The most bytes of a tensor or array that is copied."""
_SMALL: Final = (LRScheduler, SampleCursor)
"""Objects with a small state."""
_IMMUTABLE: Final = (type(None), int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device, torch.Size)
State = dict[str, Any]


class UnknownStateError(Exception):
    """The state of the last completed step is not known; the message says why. Never leaves this package."""


class _Noted(NamedTuple):
    versions: list[tuple[int, int]]
    copied: State


class StepWatch:
    """Watches one `TrainingState` in one process: call `note` after each step, and `state` when the job ends unexpectedly."""

    def __init__(self, shared: SharedState, own: PerRankState, captured: Callable[[], State], own_key: str) -> None:
        """`captured`: see `TrainingState.captured`; `own_key`: where it has the rank's own state."""
        self._shared, self._own, self._captured, self._own_key = shared, own, captured, own_key
        self._noted: _Noted | None = None
        self._why = "no step was completed"
        self._tensors: list[torch.Tensor] = []
        """The watched tensors as of the first `note`: walking through a model takes as long as a small step."""
        self._began = False
        """Whether an optimizer has begun a step since `note`."""
        optimizers = shared.objects("optimizer").values()
        self._unhooked = [type(optimizer).__qualname__ for optimizer in optimizers if not hasattr(optimizer, "_optimizer_step_pre_hooks")]
        """Wrappers that torch's constructor did not see, such as PostLocalSGDOptimizer."""
        self._hooks = [optimizer.register_step_pre_hook(self._note_begin) for optimizer in optimizers if not self._unhooked]

    def close(self) -> None:
        """Removes its hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def note(self) -> None:
        """A step was completed."""
        is_seen, self._began = self._began or not self._hooks, False
        try:
            if not is_seen:  # a CUDA graph that is replayed calls no optimizer, and no tensor counts its changes
                raise UnknownStateError("no optimizer was called in that step, so the begin of the next one may not be noticed either")
            self._tensors = self._tensors or list(self._watched())
            self._noted = _Noted(_versions(self._tensors), self._copied())
        except UnknownStateError as exc:
            self._noted, self._why = None, str(exc)

    def state(self) -> State:
        """The state after the last completed step, in the form of `TrainingState.captured`.

        Raises:
            UnknownStateError: it has changed, or is not known.
        """
        if self._noted is None:
            raise UnknownStateError(self._why)
        if self._began:
            raise UnknownStateError("an optimizer had begun the next step")
        if self._noted.versions != _versions(self._watched()):
            raise UnknownStateError("the next step had changed a parameter, a buffer or the gradient scaler")
        state, copied = self._captured(), self._noted.copied
        return state | copied | {key: state[key] | copied[key] for key in (self._own_key, "extra") if key in state}

    def _note_begin(self, *_: object) -> None:
        self._began = True

    def _watched(self) -> Iterator[torch.Tensor]:
        """Tensors that a step changes in place."""
        for module in [*self._shared.objects("model").values(), *filter(_is_module, self._shared.objects("extra").values())]:
            yield from module.parameters()
            yield from module.buffers()
        for scaler in self._shared.objects("scaler").values():
            yield from (value for value in vars(scaler).values() if isinstance(value, torch.Tensor))

    def _copied(self) -> State:
        if self._unhooked:
            raise UnknownStateError(f"a {self._unhooked[0]} does not say when it begins a step")
        parts = {name: self._shared.objects(name) for name in ("scheduler", "extra")}
        for name, objects in {**parts, "dataloader": self._own.loaders, VALUES: self._own.values}.items():
            for key, value in objects.items():
                known = isinstance(value, _SMALL) or random_generators.is_generator(value) or (name == "extra" and _is_module(value))
                if is_stateful(value) and not known:
                    kind = type(value).__qualname__
                    raise UnknownStateError(f"{name}{key and '.'}{key} is a {kind}, whose state at the end of a step is not known later")
        state = {**self._shared.capture_values(), self._own_key: self._own.capture_values()}
        return {name: _copy(name, value) for name, value in state.items()}


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The id of each tensor, and the count of its changes."""
    return [(id(tensor), tensor._version) for tensor in tensors]


def _is_module(candidate: object) -> bool:
    return isinstance(candidate, nn.Module)


def _copy(path: str, value: Any) -> Any:
    """A copy of a small value. Raises `UnknownStateError` if it is large, or has another type than plain values."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes <= MAX_BYTES:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, dict) and len(value) <= MAX_VALUES:
        copied = copy.copy(value)
        for key, child in value.items():  # `update` of a Counter, as MultiStepLR has, adds
            copied[key] = _copy(f"{path}.{key}", child)
        return copied
    if type(value) in (list, tuple) and len(value) <= MAX_VALUES:
        return type(value)(_copy(path, child) for child in value)
    raise UnknownStateError(f"{path} has a {type(value).__qualname__} that is not copied after each step, or is too large for that")
