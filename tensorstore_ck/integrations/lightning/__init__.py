"""Lightning over a store: ``callbacks=[tensorstore_ck.lightning.SnapshotCheckpoint("./ckpt", "runs/x")]``.

snapshot_checkpoint.py   SnapshotCheckpoint and SnapshotMixin: a ModelCheckpoint that saves into a store
snapshot_resume.py       loads snapshots, and restores what Lightning loses
lightning_state.py       what a snapshot has of a Trainer, and the checkpoint dict that Lightning loads from it
train_loaders.py         positions of training data loaders, which Lightning loses
logged_values.py         logged values since the start of the epoch, which Lightning loses
fabric.py                attach: Fabric's save and load over a store
load_module.py           a module from a snapshot
pointer_files.py         the .ckpt files, which name snapshots
compatibility.py         versions of Lightning, and its private names that are used

A snapshot is saved whenever Lightning would write a checkpoint file, and Lightning's own arguments keep their meaning.
"""

from tensorstore_ck.common.extras import missing_extra

try:
    import lightning.pytorch  # noqa: F401
except ImportError as exc:
    raise missing_extra("lightning", "Lightning over a store") from exc

from tensorstore_ck.integrations.lightning.fabric import attach
from tensorstore_ck.integrations.lightning.load_module import load_from_checkpoint
from tensorstore_ck.integrations.lightning.snapshot_checkpoint import SnapshotCheckpoint, SnapshotMixin

__all__ = ["SnapshotCheckpoint", "SnapshotMixin", "attach", "load_from_checkpoint"]
