"""Megatron-core's `dist_checkpointing` over a store: ``tensorstore_ck.megatron.register("s3://bucket/ckpt", ref="runs/gpt")``.

register.py        `register`: lets Megatron save into a store and load from it
run_script.py      runs a script of Megatron-LM as it is, with flags for the store
registered_strategies.py  0.16: the backend "tsck" among the strategies of Megatron's registry
redirected_calls.py       0.17 and newer, without a registry: Megatron's own functions, for folders that name snapshots
save_strategy.py   saves a sharded state dict as one snapshot of all ranks, now or by Megatron's `AsyncRequest`
load_strategy.py   loads from the snapshot that a folder names: sharded tensors and objects, the common state, and what there is
snapshot_folder.py the folder that names a snapshot
stored_state.py    a sharded state dict as a state of the store; an opened snapshot by Megatron's keys
safe_types.py      the types that Megatron's ``safe_globals`` lists
version.py         the versions of Megatron-core that are supported
compatibility.py   the names of Megatron-core that are used
"""

from tensorstore_ck.common.extras import missing_extra

try:
    import megatron.core  # noqa: F401
except ImportError as exc:
    raise missing_extra("megatron", "Megatron-core's dist_checkpointing over a store") from exc
else:  # before the imports below, which fail with other versions
    from tensorstore_ck.integrations.megatron.version import require_supported_version

    require_supported_version()

from tensorstore_ck.integrations.megatron.load_strategy import LoadStrategy
from tensorstore_ck.integrations.megatron.register import Strategies, register
from tensorstore_ck.integrations.megatron.save_strategy import SaveStrategy

__all__ = ["LoadStrategy", "SaveStrategy", "Strategies", "register"]
