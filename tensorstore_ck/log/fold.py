"""The fold: how one log entry changes the ref table. A pure function of the entry and the table, and total.

Entries were checked by whoever appended them; what makes no sense here all the same (a reset of a branch that does not
exist, a root that nobody put) has no effect, on every host alike. No clock, no backend, no randomness.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tensorstore_ck.ids import Ulid
from tensorstore_ck.log import foldgc, keys, rows
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.ops import MAX_METRICS, is_ulid
from tensorstore_ck.log.reftable import RefTable, SnapshotInfo
from tensorstore_ck.table import Batch


def fold(entry: Entry, batch: Batch) -> list[Ulid]:
    """Applies `entry`, which follows the head of `batch`; returns the packs that it swept."""
    view = RefTable(batch)
    swept: list[Ulid] = []
    for op in entry.ops:
        apply = _APPLY.get(op.name)
        if apply is not None:
            swept += apply(batch, view, entry, op.fields) or ()
        elif op.critical and view.stop() is None:
            batch.put(keys.STOP_KEY, rows.encode_row(rows.StopRow(entry.n, op.name)))
    batch.put(keys.HEAD_KEY, rows.encode_row(rows.Head(entry.n, entry.hash)))
    return swept


Fields = Mapping[str, Any]


def _put(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is not None:
        return  # aborted before, or this very put again: the first of them is the outcome
    batch.put(keys.txn_key(op["txn"]), rows.encode_row(rows.TxnOutcome(put=True, n=entry.n)))
    row = rows.SnapshotRow(
        op["root"],
        op["record"],
        op["parent"],
        op["ref"],
        op["step"],
        entry.n,
        entry.time_ns,
        op["metrics"],
        op["logical_bytes"],
        op["new_bytes"],
    )
    batch.put(keys.snapshot_key(op["snapshot"]), rows.encode_row(row))
    batch.put(keys.root_key(op["root"], op["snapshot"]), rows.encode_row(rows.RootRow(entry.n)))
    _move(batch, view, entry, op["ref"], rows.Move(op["snapshot"], op["root"], op["step"], entry.n, entry.time_ns, "put"))
    if is_ulid(op.get("staged")):
        batch.delete(keys.staged_key(op["staged"]))


def _staged(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        row = rows.StagedRow(
            op["snapshot"],
            op["root"],
            op["record"],
            op["parent"],
            op["ref"],
            op["step"],
            entry.n,
            entry.time_ns,
            op["metrics"],
            op["logical_bytes"],
            op["new_bytes"],
        )
        batch.put(keys.staged_key(op["txn"]), rows.encode_row(row))


def _branch(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is None:
        _move(batch, view, entry, op["name"], _arrival(info, entry, "branch"))


def _reset(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is not None:
        _move(batch, view, entry, op["name"], _arrival(info, entry, "reset"))


def _arrival(info: SnapshotInfo, entry: Entry, op: str) -> rows.Move:
    return rows.Move(info.ulid, info.root, info.step, entry.n, entry.time_ns, op)


def _move(batch: Batch, view: RefTable, entry: Entry, name: str, move: rows.Move) -> None:
    seq = view.length(name)
    batch.put(keys.move_key(name, seq), rows.encode_row(move))
    if move.step is not None:
        batch.put(keys.step_key(name, move.step), rows.encode_row(rows.StepRow(seq)))
    batch.put(keys.branch_key(name), rows.encode_row(rows.BranchRow(*move[:-1], length=seq + 1)))
    batch.delete(keys.length_key(name))
    foldgc.hold(batch, move.ulid, 1, entry)


def _tag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.tag(op["name"]) is None:
        batch.put(keys.tag_key(op["name"]), rows.encode_row(rows.TagRow(info.ulid, info.root, entry.n, entry.time_ns)))
        foldgc.hold(batch, info.ulid, 1, entry)


def _untag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    foldgc.forget_tag(batch, view, entry, op["name"])


def _policy(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    key = keys.policy_key(op["glob"])
    if op["rules"] is None:
        batch.delete(key)
    else:
        batch.put(key, rows.encode_row(rows.PolicyRow(op["rules"], entry.n, entry.time_ns)))


def _annotate(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        note = _note(batch, op["root"])
        metrics = {**note.metrics, **op["metrics"]}
        if len(metrics) <= MAX_METRICS:
            batch.put(keys.note_key(op["root"]), rows.encode_row(note._replace(metrics=metrics)))


def _mark(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        note = _note(batch, op["root"])._replace(mark=op["mark"], reason=op["reason"])
        batch.put(keys.note_key(op["root"]), rows.encode_row(note))


def _note(batch: Batch, root: bytes) -> rows.NoteRow:
    value = batch.get(keys.note_key(root))
    return rows.NoteRow({}, "", "") if value is None else rows.decode_row(rows.NoteRow, value)


def _abort(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        batch.put(keys.txn_key(op["txn"]), rows.encode_row(rows.TxnOutcome(put=False, n=entry.n)))
        batch.delete(keys.staged_key(op["txn"]))


_APPLY: Final[Mapping[str, Callable[[Batch, RefTable, Entry, Fields], list[Ulid] | None]]] = {
    "put": _put,
    "staged": _staged,
    "branch": _branch,
    "reset": _reset,
    "tag": _tag,
    "untag": _untag,
    "annotate": _annotate,
    "mark": _mark,
    "abort": _abort,
    "pin": foldgc.pin,
    "unpin": foldgc.unpin,
    "policy": _policy,
    "expire": foldgc.expire,
    "undo": foldgc.undo,
    "purge": foldgc.purge,
    "condemn": foldgc.condemn,
    "rescue": foldgc.rescue,
    "sweep": foldgc.sweep,
    "relocate": foldgc.relocate,
    "place": foldgc.place,
    "settle": foldgc.settle,
}
