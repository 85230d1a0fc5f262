"""Brings checkpoints of other libraries into a store: torch.save, Lightning, safetensors, torch.distributed.checkpoint.

Foreign files are untrusted to the last byte. Nothing in them is run or imported, each size is checked before it is believed, and what
is not understood is refused by name. What is imported is one put; a history is one for each of its checkpoints.
"""

from tensorstore_ck.integrations.importing.detect_history import SeveralStepsError
from tensorstore_ck.integrations.importing.import_checkpoint import CheckpointContents, Imported, import_checkpoint, inspect_checkpoint
from tensorstore_ck.integrations.importing.import_history import ImportedStep, PlannedImport, import_history, inspect_history

__all__ = [
    "CheckpointContents",
    "Imported",
    "ImportedStep",
    "PlannedImport",
    "SeveralStepsError",
    "import_checkpoint",
    "import_history",
    "inspect_checkpoint",
    "inspect_history",
]
