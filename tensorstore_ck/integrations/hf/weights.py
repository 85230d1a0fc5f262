"""How a model takes its weights from a snapshot."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer as NativeTrainer

from tensorstore_ck.store import Store
from tensorstore_ck.training import TrainingState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def restore(trainer: NativeTrainer, store: Store, address: str, group: "ProcessGroup | None") -> None:
    """Restores the weights in place; through the model's own `load_state_dict`, if it has one, as transformers does.

    Such a model may, for example, resize a buffer that grew.
    """
    native: Any = trainer
    if type(native.model).load_state_dict is nn.Module.load_state_dict or native.is_fsdp_enabled:
        TrainingState(model=native.model).restore(store, address, group=group, parts=("model",))
    else:
        native.model.load_state_dict(store.checkout(address, select=["model.*"])["model"])
