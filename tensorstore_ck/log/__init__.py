"""The log, the only place where a store changes, and the ref table that it folds to.

entry.py, ops.py, names.py   what an entry holds (format)
keys.py, rows.py             what the ref table holds (format: checkpoints are dumps of it)
fold.py, foldgc.py           how an entry changes it: refs and snapshots; what is kept and what goes
objects.py                   sets of stored objects, as operations name them
reftable.py                  typed reads of it
checkpoint.py                a dump of it, so that nobody must read the log from its start
chain.py                     entries read from the backend
watermark.py, headfile.py    the highest entry that was seen: a log that goes back or forks is noticed
follow.py                    brings a table to the log's head; writes checkpoints
log.py                       sync and append: the commit protocol
"""

from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.entry_reader import EntryReader, chain_break, logs_in
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.head_file import HeadFile
from tensorstore_ck.log.log import Appended, Log
from tensorstore_ck.log.object_set import FOLDERS, ObjectKey, Objects, pieces
from tensorstore_ck.log.operations import Op
from tensorstore_ck.log.ref_names import validate_ref_name
from tensorstore_ck.log.ref_table import BranchHead, BranchMove, Head, Pin, RefTable, Relocation, SnapshotInfo, TxnOutcome, UndoWindow
from tensorstore_ck.log.watermark import ROLLBACK, LogChangedWarning, Rollback, Watermark

__all__ = [
    "FOLDERS",
    "ROLLBACK",
    "Appended",
    "BranchHead",
    "BranchMove",
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
    "SnapshotInfo",
    "TxnOutcome",
    "UndoWindow",
    "Watermark",
    "chain_break",
    "fold",
    "logs_in",
    "pieces",
    "validate_ref_name",
]
