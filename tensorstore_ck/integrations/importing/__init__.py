"""Imports checkpoints of other libraries: torch.save, Lightning, safetensors, torch.distributed.checkpoint, transformers' Trainer,
DeepSpeed.

import_checkpoint.py      imports one checkpoint as one snapshot
import_history.py         imports several checkpoints of a run, one snapshot each
detect_format.py          detects the format, or that there are several steps, and reads the state; importers of other packages
numbers_in_names.py       training steps in file names, and which of numbered files are missing
lookup.py                 one value by its path in a state
torch_file.py             files of torch.save
safe_unpickler.py         pickles, read without running anything
pickle_allowlist.py       the names that a pickle may use
library_classes.py        values of numpy, OmegaConf and DeepSpeed in pickles
placeholders.py           what stands for an object while a pickle is read, and a state that has some
key_types.py              which keys a foreign dict may have
resolve_placeholders.py   the final state, without placeholders
safetensors_file.py       safetensors files
dcp_folder.py             folders of torch.distributed.checkpoint, also of its HuggingFaceStorageWriter
megatron_folder.py        folders of Megatron-core
deepspeed/                folders of DeepSpeed
model_folder.py           several files with an index, and checkpoint folders of transformers' Trainer
mapped_files.py           foreign files, opened with care and mapped; their CRC-32s
malformed.py              the error for malformed bytes

Foreign files are untrusted. Nothing in them is run or imported, every size is checked before use, and anything unknown is rejected by name.
"""

from tensorstore_ck.integrations.importing.detect_format import ForeignCheckpoint, SeveralStepsError
from tensorstore_ck.integrations.importing.import_checkpoint import CheckpointContents, Imported, import_checkpoint, inspect_checkpoint
from tensorstore_ck.integrations.importing.import_history import ImportedStep, PlannedImport, import_history, inspect_history

__all__ = [
    "CheckpointContents",
    "ForeignCheckpoint",
    "Imported",
    "ImportedStep",
    "PlannedImport",
    "SeveralStepsError",
    "import_checkpoint",
    "import_history",
    "inspect_checkpoint",
    "inspect_history",
]
