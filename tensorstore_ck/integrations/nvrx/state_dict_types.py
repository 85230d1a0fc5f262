"""The tensor-aware state dicts that can be stored: NVRx's own, Megatron-core's, and those that a user registers with `register_type`.

NVRx's manager pickles the object. Here its attributes are a state: tensors are tensors, and everything else must be plain, or of a
registered type.
"""

import importlib
import sys
from typing import Any, Final

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

from tensorstore_ck.errors import CorruptObjectError, MissingExtraError
from tensorstore_ck.state import register_type

_MEGATRON: Final = "megatron.core.dist_checkpointing."
_MEGATRON_TYPES: Final = (
    ("MCoreTensorAwareStateDict", f"{_MEGATRON}tensor_aware_state_dict"),
    ("ShardedObject", f"{_MEGATRON}mapping"),
    ("ShardedTensor", f"{_MEGATRON}mapping"),
)


def register_state_dict_types() -> None:
    """Lets the states of this process hold them; if Megatron-core is imported, its own, with what they hold. May be called again."""
    _register_attributes(BasicTensorAwareStateDict, "nvrx.BasicTensorAwareStateDict")
    if "megatron.core" not in sys.modules:
        return
    try:
        from tensorstore_ck.integrations.megatron.safe_types import register_safe_types  # noqa: PLC0415 - it needs Megatron-core
    except MissingExtraError:  # another version of it: a save says that its state dict cannot be stored
        return
    register_safe_types()
    for name, module in _MEGATRON_TYPES:  # Megatron imports its state dict when it first saves one: a resumed job has not done so
        _register_attributes(getattr(importlib.import_module(module), name), f"megatron.{name}")


def _register_attributes(cls: type[Any], name: str) -> None:
    """Stores the attributes of a class. As pickle does, a load does not call `__init__`."""

    def from_state(state: Any) -> Any:
        if not (isinstance(state, dict) and all(isinstance(key, str) for key in state)):
            raise CorruptObjectError(f"a stored {name} has no attributes; run `tsck fsck`", object_id=name)
        made = object.__new__(cls)
        made.__dict__.update(state)
        return made

    register_type(cls, name, lambda value: dict(vars(value)), from_state)
