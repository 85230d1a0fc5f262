"""Checks of a whole store, offline or beside writers and gc. Nothing here changes a store, but for repair.py.

check.py          the order of things, and what lies in a store that nothing names
options.py        how much is looked at
logcheck.py       the log and its checkpoints; stillengine.py: an engine at the log as it was checked
snapshotcheck.py  one snapshot: record, part, layout, extents
packcheck.py      packs: footers, and what is known of their blocks
datacheck.py      every stored byte, in pieces; verified.py: when that was done last
blocks.py         tables of blocks, and where there are copies of them
marked.py         snapshots that repair left damaged; uploads.py: unfinished writes
mending.py        how damage can be repaired
findings.py       what is reported
repair.py         mends; logrepair.py: the log and what is derived from it; remake.py: records and parts; repack.py: packs;
storeconfig.py    store.json where it is damaged; sources.py: where repair takes things from
"""

from tensorstore_ck.maintenance.fsck.check_store import run_fsck
from tensorstore_ck.maintenance.fsck.findings import Finding, FsckReport
from tensorstore_ck.maintenance.fsck.options import FsckOptions
from tensorstore_ck.maintenance.fsck.repair import RepairReport, run_repair
from tensorstore_ck.maintenance.fsck.unfinished_uploads import abort_stale_uploads

__all__ = ["Finding", "FsckOptions", "FsckReport", "RepairReport", "abort_stale_uploads", "run_fsck", "run_repair"]
