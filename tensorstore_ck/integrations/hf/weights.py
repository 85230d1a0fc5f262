"""The weights of a model: how it takes them from a snapshot, and which of them an adapter of peft leaves as they are."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer as NativeTrainer

from tensorstore_ck.errors import FrozenChangedError
from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState, model_state
from tensorstore_ck.training.parameter_names import MODEL, ParameterNames

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FrozenBase:
    """The parameters below adapters: those that are not trained when a run saves first, and must stay as they are."""

    def __init__(self) -> None:
        self._declared: dict[str, tuple[torch.Tensor, int]] = {}

    def names(self, model: nn.Module) -> list[str]:
        """Their names in a snapshot.

        Raises:
            FrozenChangedError: one is trained now, or an operation has changed it. Saves in the background read these parameters while the
                training goes on, so a snapshot could have values of a later step.
        """
        parameters = ParameterNames({"": model}).parameters
        frozen = {f"{MODEL}{name}": parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        if not self._declared:
            self._declared = {name: (parameter, parameter._version) for name, parameter in frozen.items()}
        for name, (parameter, version) in self._declared.items():
            if frozen.get(name) is not parameter or parameter._version != version:
                raise FrozenChangedError(
                    f"{name} was frozen at an earlier save of this run, and is trained or was changed since: nothing was saved. "
                    "Leave out frozen_base=True",
                    object_id=name,
                )
        return list(self._declared)


def restore(trainer: NativeTrainer, store: Store, address: str, group: "ProcessGroup | None") -> None:
    """Restores the weights in place; through the model's own `load_state_dict`, if it has one, as transformers does.

    Such a model may, for example, resize a buffer that grew.
    """
    native: Any = trainer
    if type(native.model).load_state_dict is nn.Module.load_state_dict or native.is_fsdp_enabled:
        TrainingState(model=native.model).restore(store, address, group=group, parts=("model",))
    else:
        stored = store.checkout(address, select=["model.*"], group=group)["model"]
        native.model.load_state_dict(model_state.state_dict_of(native.model, stored))
