"""The log, through which every change of a store goes, and the ref table that it folds to.

entry.py                                 an entry: sealed, numbered, hash-chained (format); reads entries in order, and creates the next one
operations.py, object_set.py             what an entry holds (format)
table_rows.py                            what the ref table holds: keys and rows (format: checkpoints are dumps of it)
field_checks.py                          what fields and names of refs may hold; how a row and its key are encoded and read
fold.py                                  how an entry changes the table
ref_table.py                             typed reads of the table
address.py                               how a user names a snapshot
snapshot.py                              a snapshot: its row, and what users see of it
snapshot_log.py                          what users see of a history
snapshot_condition.py                    conditions on snapshots in memory, and the numbers to sort them by
maintenance_outcome.py                   what users see of a run of gc or fsck
quota.py                                 quotas, and how much of them is used
block_index.py                           where blocks lie, as far as this host knows
checkpoint.py                            a dump of the table, so that no reader begins at the log's first entry
store_folders.py                         the folders of a store, and what else lies at its root: other programs may keep their own there
lost_log.py                              signs that a log which looks empty was lost
watermark.py, head_file.py               the highest entry that was seen, to notice a log that goes back or forks
trust_file.py                            which keys must have signed which refs
ref_signer.py, ref_verifier.py           signs the refs that an entry moves; checks the signatures of refs
follow.py                                brings a table to the log's head; writes checkpoints
log.py                                   sync and append: the commit protocol
"""

from tensorstore_ck.format.sealed import FOLDERS
from tensorstore_ck.log.entry import Entry, EntryReader, chain_break
from tensorstore_ck.log.field_checks import validate_ref_name
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.head_file import HeadFile, seen_at
from tensorstore_ck.log.log import Log
from tensorstore_ck.log.lost_log import BrokenLogWarning, ChildRecord, lost_log, sign_of_lost_log, without_named_parent
from tensorstore_ck.log.object_set import ObjectKey, Objects, pieces
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.ref_table import BranchHead, BranchMove, Head, Pin, RefTable, Relocation, SnapshotRow, UndoWindow
from tensorstore_ck.log.store_folders import foreign_object, holds_snapshots, logs_in, store_folders, store_objects
from tensorstore_ck.log.watermark import ROLLBACK, LogChangedWarning, Rollback, Watermark

__all__ = [
    "FOLDERS",
    "ROLLBACK",
    "BranchHead",
    "BranchMove",
    "BrokenLogWarning",
    "ChildRecord",
    "Entry",
    "EntryReader",
    "Head",
    "HeadFile",
    "Log",
    "LogChangedWarning",
    "ObjectKey",
    "Objects",
    "Op",
    "Pin",
    "RefTable",
    "Relocation",
    "Rollback",
    "SnapshotRow",
    "UndoWindow",
    "Watermark",
    "chain_break",
    "fold",
    "foreign_object",
    "holds_snapshots",
    "logs_in",
    "lost_log",
    "pieces",
    "seen_at",
    "sign_of_lost_log",
    "store_folders",
    "store_objects",
    "validate_ref_name",
    "without_named_parent",
]
