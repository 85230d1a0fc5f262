"""`StepGate`: makes the next step of an optimizer wait for the copies of what it changes; nothing else has to wait. Knows no store.

Between two steps nothing changes parameters and moments, so they can be copied beside the next forward and backward passes. The caller says
so; `capture_proofs` checks each copy, and here it is tried out first: an optimizer is trusted if it has called its hooks since the last
capture, and if nothing had changed its tensors between that capture and the next step.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorstore_ck.state.device.side_streams import DeviceArrival
from tensorstore_ck.state.plain_memory import PLAIN


class StepGate:
    """Of one optimizer. `try_open` is called by the thread that captures, and the hooks by those that step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._arrivals: list[DeviceArrival] = []
        self._versions: list[int] | None = None
        """Of its tensors at the last capture; None after the first step that followed."""
        self._has_stepped = False
        """Since the last capture."""
        self._is_steady = False
        """Whether nothing had changed its tensors between the last capture and the next step."""
        self._is_distrusted = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._hold_stream()),
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def try_open(self) -> bool:
        """A capture begins. Returns whether copies of its `storages` may be passed to `hold`."""
        is_open = self._has_stepped and self._is_steady and not self._is_distrusted
        self._has_stepped, self._versions = False, _versions(self._tensors())
        return is_open

    def storages(self) -> set[int]:
        """The addresses of the storages that the optimizer changes."""
        return {_storage_of(each) for each in self._tensors()} - {0}

    def hold(self, arrival: DeviceArrival) -> None:
        """The next step comes after these copies."""
        self._arrivals.append(arrival)

    def distrust(self) -> None:
        """Something else changes its tensors between two steps."""
        self._is_distrusted = True

    def _before_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self._is_distrusted = True  # a compiled step need not call a hook, which would be compiled, too
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._is_distrusted = True  # replays of the graph call no hook
            self._arrivals = []  # a capture begins with a synchronization, so the copies are complete
            return
        self._hold_stream()
        if self._versions is not None:
            self._is_steady, self._versions = self._versions == _versions(self._tensors()), None
        self._has_stepped = True

    def _hold_stream(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.hold_streams()

    def _tensors(self) -> Iterator[torch.Tensor]:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))


def open_storages(gates: Iterable[StepGate]) -> set[int]:
    """A capture begins. The storages whose copies the gates may hold: those that no optimizer without trust changes, too."""
    opened, closed = set[int](), set[int]()
    for gate in gates:
        (opened if gate.try_open() else closed).update(gate.storages())
    return opened - closed


class StepGates:
    """The gates of a store handle, one for each optimizer."""

    def __init__(self) -> None:
        self._gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepGate] = weakref.WeakKeyDictionary()

    def of(self, optimizers: Iterable[object]) -> list[StepGate]:
        """The gates of those objects that are torch optimizers with hooks."""
        return [
            self._gates.get(each) or self._gates.setdefault(each, StepGate(each))
            for each in optimizers
            if isinstance(each, torch.optim.Optimizer) and hasattr(each, "_optimizer_step_pre_hooks")
        ]

    def close(self) -> None:
        """Removes all hooks."""
        for gate in self._gates.values():
            gate.close()
        self._gates.clear()


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The counts of changes; of inference tensors, which have none, -1."""
    return [-1 if each.is_inference() else each._version for each in tensors]


def _storage_of(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 if it has none of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr() if type(local) in PLAIN else 0
