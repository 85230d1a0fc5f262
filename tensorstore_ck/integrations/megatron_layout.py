"""How a state of Megatron-core lies in a snapshot: a flat dict.

A tensor has the key of its ``ShardedTensor``, an object the unique key of its ``ShardedObject`` (``rng_state/shard_0.0_1.1``), and what
`dist_checkpointing.save` calls the common state is below `COMMON`.
"""

import re
from typing import Final

COMMON: Final = "common"
COMMON_OBJECT: Final = "common_state/shard_0_1"
"""The unique key of the object in which Megatron-core keeps the common state since 0.19."""
_OBJECT_KEY: Final = re.compile(r"[^/]+/shard_[\d.]*_[\d.]*")


def is_object_key(key: object) -> bool:
    """Whether it is the unique key of a ``ShardedObject``, and not the key of a tensor."""
    return type(key) is str and _OBJECT_KEY.fullmatch(key) is not None
