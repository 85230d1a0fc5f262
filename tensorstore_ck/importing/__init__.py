"""Brings checkpoints of other libraries into a store: torch.save, Lightning, safetensors, torch.distributed.checkpoint.

Foreign files are untrusted to the last byte. Nothing in them is run or imported, each size is checked before it is believed, and what
is not understood is refused by name. What is imported is one put.
"""

from tensorstore_ck.importing.run import Contents, Imported, import_checkpoint, inspect_checkpoint

__all__ = ["Contents", "Imported", "import_checkpoint", "inspect_checkpoint"]
