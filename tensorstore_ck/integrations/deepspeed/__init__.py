"""DeepSpeed's engine over a store: ``tensorstore_ck.deepspeed.attach(engine, "s3://bucket/ckpt", ref="runs/x")``.

engine.py          attach and SnapshotMixin: save_checkpoint and load_checkpoint
engine_state.py    an engine's shared state, by parameter name; and an engine as a TrainingState
fragments.py       where each parameter's elements lie in DeepSpeed's flat tensors; names of experts that are the same on all ranks
compatibility.py   versions of DeepSpeed, and the names that are used
"""

from tensorstore_ck.common.extras import extra

with extra("deepspeed", "DeepSpeed's engine over a store"):
    import deepspeed  # noqa: F401

from tensorstore_ck.integrations.deepspeed.engine import SnapshotMixin, attach

__all__ = ["SnapshotMixin", "attach"]
