"""The weights of a model: how it takes them from a snapshot, and which of them an adapter of peft leaves as they are."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer as NativeTrainer

from tensorstore_ck.errors import FrozenChangedError
from tensorstore_ck.integrations.hf.adapter_base import AdapterBase
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


def takes_by_name(trainer: NativeTrainer) -> bool:
    """Whether tensors can be filled in place: the model has no `load_state_dict` of its own, through which transformers restores it.

    Such a model may, for example, resize a buffer that grew.
    """
    native: Any = trainer
    return type(native.model).load_state_dict is nn.Module.load_state_dict or native.is_fsdp_enabled


def restore(trainer: NativeTrainer, store: Store, address: str, group: "ProcessGroup | None", *, base: AdapterBase) -> None:
    """Restores the weights in place, or through the model's own `load_state_dict`; `base`: of the model, to which a snapshot may refer.

    Raises:
        MismatchError: the snapshot refers to another base.
    """
    native: Any = trainer
    if takes_by_name(trainer):
        left_out, found = store.restoring(address, base.left_out, group=group)
        TrainingState(model=native.model).leaving_out(left_out).restore(store, found.root, group=group, parts=("model",))
    else:
        stored = store.checkout(address, select=["model.*"], group=group)["model"]
        native.model.load_state_dict(model_state.state_dict_of(native.model, stored))
