"""Local checkpoints of NVRx (nvidia-resiliency-ext) in a store: ``tensorstore_ck.nvrx.LocalCheckpointManager("/nvme/local")``.

checkpoint_manager.py  LocalCheckpointManager: in place of NVRx's manager of that name
rank_store.py          one rank's store on a disk of its host: save, load and delete local checkpoints
"""

from tensorstore_ck.common.extras import extra

with extra("nvrx", "NVRx's local checkpoint manager over a store"):
    import nvidia_resiliency_ext.checkpointing.local  # noqa: F401

from tensorstore_ck.integrations.nvrx.checkpoint_manager import LocalCheckpointManager, LocalCheckpointUnavailableError
from tensorstore_ck.integrations.nvrx.rank_store import LocalCheckpointDamagedError

__all__ = ["LocalCheckpointDamagedError", "LocalCheckpointManager", "LocalCheckpointUnavailableError"]
