"""Checks of a whole store, offline or beside writers. Nothing here changes a store.

check.py          the order of things, and what lies in a store that nothing names
logcheck.py       the log and its checkpoints
snapshotcheck.py  one snapshot: record, part, layout, extents
packcheck.py      packs: footers, and every stored byte
findings.py       what is reported
"""

from tensorstore_ck.fsck.check import abort_stale_uploads, run_fsck
from tensorstore_ck.fsck.findings import Finding, FsckReport

__all__ = ["Finding", "FsckReport", "abort_stale_uploads", "run_fsck"]
