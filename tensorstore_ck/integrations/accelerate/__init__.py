"""accelerate's `Accelerator` over a store: ``tensorstore_ck.accelerate.attach(accelerator, store="./ckpt", ref="runs/x")``.

accelerator.py     attach and SnapshotMixin: save_state and load_state; the folders of checkpoints
data_order.py      the order of data loaders in the pass that a save interrupts
compatibility.py   versions of accelerate, and the private names that are used

`save_state` and `load_state` keep their meaning. The folders stay, without tensors, for code that looks for them.
"""

from tensorstore_ck.common.extras import extra

with extra("accelerate", "the Accelerator over a store"):
    import accelerate  # noqa: F401

from tensorstore_ck.integrations.accelerate.accelerator import SnapshotMixin, attach

__all__ = ["SnapshotMixin", "attach"]
