"""DeepSpeed's engine over a store: ``tensorstore_ck.deepspeed.attach(engine, "s3://bucket/ckpt", ref="runs/x")``.

engine.py          attach and SnapshotMixin: save_checkpoint and load_checkpoint
engine_state.py    an engine's shared state, by parameter name; and an engine as a TrainingState
global_names.py    names of experts that are the same on every number of ranks
fragments.py       where each parameter's elements lie in DeepSpeed's flat tensors
compatibility.py   versions of DeepSpeed, and the names that are used
"""

from tensorstore_ck.common.extras import missing_extra

try:
    import deepspeed  # noqa: F401
except ImportError as exc:
    raise missing_extra("deepspeed", "DeepSpeed's engine over a store") from exc

from tensorstore_ck.integrations.deepspeed.engine import SnapshotMixin, attach

__all__ = ["SnapshotMixin", "attach"]
