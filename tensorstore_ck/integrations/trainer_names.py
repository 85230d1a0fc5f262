"""The names in snapshots of transformers' Trainer, accelerate, DeepSpeed engines and Megatron-core. Needs none of them, so that imports and
exports have the same names.

A state of Megatron-core is a flat dict: a tensor has the key of its ``ShardedTensor``, an object the unique key of its ``ShardedObject``
(``rng_state/shard_0.0_1.1``), and what `dist_checkpointing.save` calls the common state is below `COMMON`.
"""

import re
from typing import Final

# engines of DeepSpeed
NOTE: Final = "deepspeed"
"""The key of a snapshot's metadata under which the tag of DeepSpeed is."""
LATEST: Final = "latest"
MASTER: Final = "master"
"""The state of the optimizer that is a parameter's master weights."""
COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Attributes of an engine, under ``extra.deepspeed``."""
MICRO_OFFSET: Final = "micro_offset"
"""One more of a pipeline."""
UNSAVED_COUNTERS: Final = ("micro_steps", MICRO_OFFSET)
"""The counters that DeepSpeed does not save."""
EXPORTED: Final = "tensorstore_ck"
"""They are in a dict of this name in the model states of an export."""
SCALE: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of its loss scaler that change, under ``scaler``; the others are its configuration."""
CLIENT_STATE: Final = "client_state"
"""Among each rank's own values."""

# Megatron-core
COMMON: Final = "common"
COMMON_OBJECT: Final = "common_state/shard_0_1"
"""The unique key of the object in which Megatron-core keeps the common state since 0.19."""
_OBJECT_KEY: Final = re.compile(r"[^/]+/shard_[\d.]*_[\d.]*")


def is_object_key(key: object) -> bool:
    """Whether it is the unique key of a ``ShardedObject``, and not the key of a tensor."""
    return type(key) is str and _OBJECT_KEY.fullmatch(key) is not None


# transformers' Trainer, and accelerate
TRAINER_STATE: Final = "trainer_state"
"""The Trainer's ``trainer_state.json``, as text."""
TRAINER_LOSS: Final = "loss_since_log"
TRAINER_LOGGED: Final = "logged_step"
ACCELERATOR_STEP: Final = "accelerator_step"
SAVE_ITERATION: Final = "save_iteration"
LOADERS: Final = "loaders"
CUSTOM: Final = "custom_"
"""The beginning of the name of a registered object; its number follows."""
