"""torchtitan's checkpoint manager over a store: ``checkpoint=tensorstore_ck.titan.SnapshotManager.Config(store="./ckpt", ref="runs/x")``.

snapshot_manager.py   SnapshotManager: saves, loads, and what torchtitan's options mean for a store
compatibility.py      versions of torchtitan, and the private names that are used
"""

from tensorstore_ck.common.extras import extra
from tensorstore_ck.integrations.titan.compatibility import require_supported

with extra("titan", "the checkpoint manager of torchtitan over a store"):
    require_supported()

from tensorstore_ck.integrations.titan.snapshot_manager import SnapshotManager

__all__ = ["SnapshotManager"]
