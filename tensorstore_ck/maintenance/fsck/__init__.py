"""Checks and repairs a whole store, offline or alongside writers and gc. Only repair changes the store.

check_store.py         Fsck: the order of all checks, and unreferenced objects
findings.py            FsckOptions: how much data is read; Finding, FsckReport
check_config.py        store.json: checks and repairs it
check_log.py           the log and its checkpoints; an engine at the log as it was checked
check_snapshot.py      one snapshot: record, parts, layout, extents; the tensors that damage affects
check_bases.py         the bases of the differences that a part names
check_storage.py       modes of files, markers of cold locations, unfinished uploads; when gc frees unreferenced objects
check_packs.py         footers, and known bad blocks; tables of blocks, and where they have copies
check_data.py          reads every stored byte, in pieces
repairable.py          whether and how damage can be repaired; snapshots that repair marked as damaged
repair.py              the order of all repairs; log entries, checkpoints, this host's cache
rebuild_parts.py       records and parts
rebuild_packs.py       packs
good_copies.py         verified blocks from other packs and other stores; read errors, after which repair marks nothing
"""

from tensorstore_ck.maintenance.fsck.check_storage import abort_stale_uploads
from tensorstore_ck.maintenance.fsck.check_store import run_fsck
from tensorstore_ck.maintenance.fsck.findings import Finding, FsckOptions, FsckReport
from tensorstore_ck.maintenance.fsck.repair import RepairReport, run_repair

__all__ = ["Finding", "FsckOptions", "FsckReport", "RepairReport", "abort_stale_uploads", "run_fsck", "run_repair"]
