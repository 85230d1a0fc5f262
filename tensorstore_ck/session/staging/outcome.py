"""What the log says became of a staged save, and which errors mean that it can never be published."""

from collections.abc import Collection

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import (
    ConflictError,
    CorruptObjectError,
    MissingObjectError,
    SnapshotAbortedError,
    SnapshotDroppedError,
    SnapshotExpiredError,
    StoreError,
)
from tensorstore_ck.log import RefTable, SnapshotRow


def published_as(engine: Engine, view: RefTable, txn: Ulid) -> SnapshotRow | None:
    """The published snapshot that was staged under `txn`, even if it has another ULID (see `renew.py`); None if the log has none.

    Raises:
        StoreError: the log cannot be read.
    """
    info, outcome = view.snapshot(txn), view.outcome(txn)
    if info is not None or outcome is None or outcome.put:
        return info
    entry = next(engine.log.entries(outcome.n))
    for op in entry.ops:
        if op.name == "put" and op.fields.get("staged") == txn:
            return view.snapshot(op.fields["snapshot"]) or SnapshotRow.of_op(op.fields, entry.n, entry.time_ns)
    return None


def can_never_be_published(error: StoreError, names: Collection[str]) -> bool:
    """Whether this error is final: after it, no retry by any process that has this disk can publish the staged bytes.

    `names`: the staged objects of the save. After any other error the save stays on the disk: a fault may pass, credentials can be renewed,
    a store can be repaired.
    """
    match error:
        case CorruptObjectError() | MissingObjectError():  # for another object, the store is damaged
            return error.object_id in names
        case SnapshotDroppedError():  # the caller carries the request out
            return False
        case ConflictError():  # the branch has another history now: this save is fenced off
            return True
        case SnapshotAbortedError():  # the log says so
            return True
        case SnapshotExpiredError():  # blocks that it shares are nowhere: the objects on the disk get new names instead
            return True
    return False
