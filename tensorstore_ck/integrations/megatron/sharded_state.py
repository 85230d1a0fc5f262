"""A sharded state dict of Megatron as this rank's side of a state of the store.

`megatron_layout` says how it is laid out. Replicas (``replica_id`` other than 0) are left out.
"""

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.megatron_layout import COMMON, is_object_key
from tensorstore_ck.state import Box, Boxes


def state_of(sharded_state_dict: Any) -> dict[str, Any]:
    """The state that this rank stores of a sharded state dict, not copied.

    Raises:
        UnsupportedValueError: two different things have one key, or a key means something else here.
    """
    boxes: dict[str, list[Box]] = {}
    state: dict[str, Any] = {}
    for item in nested_values(sharded_state_dict):
        if not is_main_replica(item.replica_id):
            continue
        if isinstance(item, ShardedTensor):
            if item.key == COMMON or is_object_key(item.key):
                raise UnsupportedValueError(f"a ShardedTensor may not have the key {item.key!r}: rename it", object_id=item.key)
            boxes.setdefault(item.key, []).append(Box(with_prepended_axes(item), item.global_shape, item.global_offset))
        elif isinstance(item, ShardedObject):
            if item.unique_key in state:
                raise UnsupportedValueError(f"this rank has two main replicas of the ShardedObject {item.unique_key!r}", object_id=item.key)
            state[item.unique_key] = item.data
        else:
            raise UnsupportedValueError(f"a {type(item).__qualname__} in a sharded state dict cannot be stored", object_id=str(item)[:200])
    return state | {key: held[0] if len(held) == 1 else Boxes(held) for key, held in boxes.items()}


def with_prepended_axes(tensor: ShardedTensor) -> Any:
    """The local data with as many dims as the whole tensor has: the same memory."""
    return tensor.data.detach()[(None,) * tensor.prepend_axis_num]
