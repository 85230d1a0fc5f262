"""Exports snapshots as files of other programs: streamed within bounded memory, read back and compared, atomic.

export_snapshot.py      `export_snapshot`, and its report
followed_folder.py      `FollowedFolder`: the newest version of a branch as safetensors
job.py                  the input and the result of a format's writer
torch_file.py           the format of torch.save
safetensors_files.py    the safetensors format
model_folder.py         a model folder of Hugging Face
try_model_folder.py     whether transformers or peft loads it
dcp_folder.py           the format of torch.distributed.checkpoint
megatron_folder.py      the format torch_dist of Megatron-core
deepspeed_universal.py  a universal checkpoint of DeepSpeed
strip_prefix.py         names without a prefix
byte_routing.py         which bytes of which stored tensor go to which place in a file
blocks_to_files.py      writes bytes of stored tensors to ranges of files, or copies whole blocks
meta_state.py           a state whose tensors have no bytes
torch_zip_template.py   torch's zip files with gaps for the bytes
output_file.py          a file that is written in any order, and read back
atomic_target.py        writes under a temporary name, then renames
"""

from tensorstore_ck.integrations.exporting.export_snapshot import FORMATS, ExportReport, Format, export_snapshot
from tensorstore_ck.integrations.exporting.followed_folder import FollowedFolder

__all__ = ["FORMATS", "ExportReport", "FollowedFolder", "Format", "export_snapshot"]
