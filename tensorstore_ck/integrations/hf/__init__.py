"""transformers' Trainer over a store: ``tensorstore_ck.hf.Trainer(..., store="./ckpt", ref="runs/x")``.

trainer.py         Trainer, SnapshotMixin and attach: saves and resumes where transformers does
trainer_values.py  what transformers loses at a resume: losses that are not logged yet
resume_source.py   what resume_from_checkpoint= means: a snapshot, also an imported one, a folder, or the beginning
weights.py         how a model takes its weights; the base below an adapter, to which snapshots refer by name and hash
exception_save.py  saves the last completed step after an exception
small_files.py     configuration and tokenizer, in each snapshot
compatibility.py   versions of transformers, and the private methods that are replaced

A Trainer saves into the store whenever it would have written a checkpoint folder, and its own arguments keep their meaning. The folder
`checkpoint-N` stays, without tensors, for code that looks for it.
"""

from tensorstore_ck.common.extras import extra

with extra("hf", "the Trainer of transformers over a store"):
    import transformers  # noqa: F401

from tensorstore_ck.integrations.hf.small_files import model_files
from tensorstore_ck.integrations.hf.trainer import SnapshotMixin, Trainer, attach

__all__ = ["SnapshotMixin", "Trainer", "attach", "model_files"]
