"""The weights of a model: how it takes them from a snapshot, and which of them an adapter of peft leaves as they are."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer as NativeTrainer

from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FrozenBase:
    """The names, in a snapshot, of the parameters below adapters that do not change between saves."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}

    def names(self, model: nn.Module) -> list[str]:
        """Those that are not trained now, and that no operation has changed since the last call; before the first save, all not trained.

        A parameter that changes all the same, as `merge_adapter` changes it, raises `FrozenChangedError` at a later save.
        """
        before, self._seen = self._seen, {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                self._seen[f"model.{name}"] = (parameter, parameter._version)
        return [name for name, seen in self._seen.items() if name not in before or _same(before[name], seen)]


def _same(one: tuple[torch.Tensor, int], other: tuple[torch.Tensor, int]) -> bool:
    return one[0] is other[0] and one[1] == other[1]


def restore(trainer: NativeTrainer, store: Store, address: str, group: "ProcessGroup | None") -> None:
    """Restores the weights in place; through the model's own `load_state_dict`, if it has one, as transformers does.

    Such a model may, for example, resize a buffer that grew.
    """
    native: Any = trainer
    if type(native.model).load_state_dict is nn.Module.load_state_dict or native.is_fsdp_enabled:
        TrainingState(model=native.model).restore(store, address, group=group, parts=("model",))
    else:
        native.model.load_state_dict(store.checkout(address, select=["model.*"])["model"])
