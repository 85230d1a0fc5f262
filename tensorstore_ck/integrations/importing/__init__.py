"""Imports checkpoints of other libraries: torch.save, Lightning, safetensors, torch.distributed.checkpoint, transformers' Trainer,
DeepSpeed.

import_checkpoint.py      imports one checkpoint as one snapshot
import_history.py         imports several checkpoints of a run, one snapshot each
outside_importers.py      importers of other packages
detect_format.py          detects the format, and reads the state
detect_history.py         distinguishes one checkpoint in several files from several steps
numbers_in_names.py       training steps in file names, and which of numbered files are missing
lookup.py                 one value by its path in a state
torch_file.py             files of torch.save
zip_directory.py          their zip archives
safe_unpickler.py         pickles, read without running anything
pickle_allowlist.py       the names that a pickle may use
numpy_pickles.py          numpy's values in pickles
placeholders.py           what stands for an object while a pickle is read, and a state that has some
omegaconf.py              OmegaConf's containers as plain ones
key_types.py              which keys a foreign dict may have
resolve_placeholders.py   the final state, without placeholders
safetensors_file.py       safetensors files
sharded_index.py          several files with an index
dcp_folder.py             folders of torch.distributed.checkpoint
dcp_safetensors.py        folders of its HuggingFaceStorageWriter
megatron_folder.py        folders of Megatron-core
megatron_types.py         the types that it pickles
deepspeed/                folders of DeepSpeed
rank_generators.py        the generators that trainers save for each rank
trainer_folder.py         checkpoint folders of transformers' Trainer
mapped_files.py           foreign files, opened with care and mapped
crc_check.py              checks CRC-32s while a save reads the bytes
compare_snapshot.py       whether a snapshot equals a checkpoint
malformed.py              the error for malformed bytes

Foreign files are untrusted. Nothing in them is run or imported, every size is checked before use, and anything unknown is rejected by name.
A format's reader raises `CorruptObjectError` for what is damaged, incomplete or inconsistent, and `UnsupportedValueError` for what is of a
kind that is not imported.
"""

from tensorstore_ck.integrations.importing.detect_history import SeveralStepsError
from tensorstore_ck.integrations.importing.import_checkpoint import CheckpointContents, Imported, import_checkpoint, inspect_checkpoint
from tensorstore_ck.integrations.importing.import_history import ImportedStep, PlannedImport, import_history, inspect_history
from tensorstore_ck.integrations.importing.outside_importers import ForeignCheckpoint

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
