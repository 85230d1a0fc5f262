"""Leaves the store again: snapshots as files of other programs, streamed within bounded memory, read back and compared, atomic.

target.py             where it goes: a temporary name, then the target's
output.py             a file that is written in any order, and read back
placing.py            which bytes of which stored tensor go where in it
hollow.py             a state whose tensors have no bytes yet
rooms.py              torch's zip files with room for the bytes
torch_file.py, safetensors_files.py, dcp_folder.py   one for each format
job.py, report.py     what a format's writer is given; what was written
run.py                `export_snapshot`
"""

from tensorstore_ck.integrations.exporting.export_snapshot import FORMATS, MAX_FILE_BYTES, Format, export_snapshot
from tensorstore_ck.integrations.exporting.report import ExportedFile, ExportReport

__all__ = ["FORMATS", "MAX_FILE_BYTES", "ExportReport", "ExportedFile", "Format", "export_snapshot"]
