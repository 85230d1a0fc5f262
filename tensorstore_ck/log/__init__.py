"""The log, the only place where a store changes, and the ref table that it folds to.

entry.py, ops.py, names.py   what an entry holds (format)
fold.py, rows.py             what the ref table holds, and how an entry changes it (format: checkpoints are dumps of it)
reftable.py                  typed reads of it
checkpoint.py                a dump of it, so that nobody must read the log from its start
chain.py                     entries read from the backend
log.py                       sync and append: the commit protocol
"""

from tensorstore_ck.log.chain import Chain, chain_break
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.log import Appended, Log, LogChangedWarning
from tensorstore_ck.log.names import validate_ref_name
from tensorstore_ck.log.ops import Op
from tensorstore_ck.log.reftable import BranchHead, Head, Move, RefTable, SnapshotInfo, TxnOutcome

__all__ = [
    "Appended",
    "BranchHead",
    "Chain",
    "Entry",
    "Head",
    "Log",
    "LogChangedWarning",
    "Move",
    "Op",
    "RefTable",
    "SnapshotInfo",
    "TxnOutcome",
    "chain_break",
    "validate_ref_name",
]
