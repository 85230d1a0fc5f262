"""Lightning over a store: ``callbacks=[tensorstore_ck.lightning.SnapshotCheckpoint("./ckpt", "runs/x")]``.

snapshot_checkpoint.py   SnapshotCheckpoint and SnapshotMixin: a ModelCheckpoint that saves into a store
snapshot_resume.py       loads snapshots, and restores what Lightning loses
lightning_state.py       what a snapshot has of a Trainer, the checkpoint dict that Lightning loads from it, and a module from it
train_loaders.py         positions of training data loaders, which Lightning loses
logged_values.py         logged values since the start of the epoch, which Lightning loses
fabric.py                attach: Fabric's save and load over a store
pointer_files.py         the .ckpt files, which name snapshots
compatibility.py         versions of Lightning, and its private names that are used

A snapshot is saved whenever Lightning would write a checkpoint file, and Lightning's own arguments keep their meaning.
"""

from tensorstore_ck.common.extras import extra

with extra("lightning", "Lightning over a store"):
    import lightning.pytorch  # noqa: F401

from tensorstore_ck.integrations.lightning.fabric import attach
from tensorstore_ck.integrations.lightning.lightning_state import load_from_checkpoint
from tensorstore_ck.integrations.lightning.snapshot_checkpoint import SnapshotCheckpoint, SnapshotMixin

__all__ = ["SnapshotCheckpoint", "SnapshotMixin", "attach", "load_from_checkpoint"]
