"""The fold: how one log entry changes the ref table. A pure function of the entry and the table, and total.

Writers check entries before they append them; an operation that is still invalid here (a reset of a branch that does not
exist, an unknown root) has no effect, on every host. No clock, no backend, no randomness.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import fold_gc, table_keys, table_rows
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.field_checks import MAX_METRICS, is_ulid
from tensorstore_ck.log.ref_table import RefTable, SnapshotInfo


def fold(entry: Entry, batch: Batch) -> list[Ulid]:
    """Applies `entry`, which follows the head of `batch`; returns the packs that it swept."""
    view = RefTable(batch)
    swept: list[Ulid] = []
    for op in entry.ops:
        apply = _APPLY.get(op.name)
        if apply is not None:
            swept += apply(batch, view, entry, op.fields) or ()
        elif op.critical and view.stop() is None:
            batch.put(table_keys.STOP_KEY, table_rows.encode_row(table_rows.StopRow(entry.n, op.name)))
    batch.put(table_keys.HEAD_KEY, table_rows.encode_row(table_rows.Head(entry.n, entry.hash)))
    return swept


Fields = Mapping[str, Any]


def _put(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is not None:
        return  # aborted before, or this put again: the first is the outcome
    batch.put(table_keys.txn_key(op["txn"]), table_rows.encode_row(table_rows.TxnOutcome(put=True, n=entry.n)))
    batch.put(table_keys.snapshot_key(op["snapshot"]), table_rows.encode_row(_snapshot_row(entry, op)))
    batch.put(table_keys.root_key(op["root"], op["snapshot"]), table_rows.encode_row(table_rows.RootRow(entry.n)))
    _move(batch, view, entry, op["ref"], table_rows.BranchMove(op["snapshot"], op["root"], op["step"], entry.n, entry.time_ns, "put"))
    if is_ulid(op.get("staged")):
        batch.delete(table_keys.staged_key(op["staged"]))


def _staged(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        row = table_rows.StagedRow(op["snapshot"], *_snapshot_row(entry, op))
        batch.put(table_keys.staged_key(op["txn"]), table_rows.encode_row(row))


def _snapshot_row(entry: Entry, op: Fields) -> table_rows.SnapshotRow:
    fields: Fields = {**op, "n": entry.n, "time_ns": entry.time_ns}
    return table_rows.SnapshotRow(**{name: fields[name] for name in table_rows.SnapshotRow._fields})


def _branch(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is None:
        _move(batch, view, entry, op["name"], _arrival(info, entry, "branch"))


def _reset(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is not None:
        _move(batch, view, entry, op["name"], _arrival(info, entry, "reset"))


def _arrival(info: SnapshotInfo, entry: Entry, op: str) -> table_rows.BranchMove:
    return table_rows.BranchMove(info.ulid, info.root, info.step, entry.n, entry.time_ns, op)


def _move(batch: Batch, view: RefTable, entry: Entry, name: str, move: table_rows.BranchMove) -> None:
    seq = view.length(name)
    batch.put(table_keys.move_key(name, seq), table_rows.encode_row(move))
    if move.step is not None:
        batch.put(table_keys.step_key(name, move.step), table_rows.encode_row(table_rows.StepRow(seq)))
    batch.put(table_keys.branch_key(name), table_rows.encode_row(table_rows.BranchRow(*move[:-1], length=seq + 1)))
    batch.delete(table_keys.length_key(name))
    fold_gc.hold(batch, move.ulid, 1, entry)


def _tag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.tag(op["name"]) is None:
        batch.put(table_keys.tag_key(op["name"]), table_rows.encode_row(table_rows.TagRow(info.ulid, info.root, entry.n, entry.time_ns)))
        fold_gc.hold(batch, info.ulid, 1, entry)


def _untag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    fold_gc.forget_tag(batch, view, entry, op["name"])


def _policy(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    key = table_keys.policy_key(op["glob"])
    if op["rules"] is None:
        batch.delete(key)
    else:
        batch.put(key, table_rows.encode_row(table_rows.PolicyRow(op["rules"], entry.n, entry.time_ns)))


def _annotate(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        note = _note(batch, op["root"])
        metrics = {**note.metrics, **op["metrics"]}
        if len(metrics) <= MAX_METRICS:
            batch.put(table_keys.note_key(op["root"]), table_rows.encode_row(note._replace(metrics=metrics)))


def _mark(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        note = _note(batch, op["root"])._replace(mark=op["mark"], reason=op["reason"])
        batch.put(table_keys.note_key(op["root"]), table_rows.encode_row(note))


def _note(batch: Batch, root: bytes) -> table_rows.NoteRow:
    value = batch.get(table_keys.note_key(root))
    return table_rows.NoteRow({}, "", "") if value is None else table_rows.decode_row(table_rows.NoteRow, value)


def _abort(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        batch.put(table_keys.txn_key(op["txn"]), table_rows.encode_row(table_rows.TxnOutcome(put=False, n=entry.n)))
        batch.delete(table_keys.staged_key(op["txn"]))


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
    "pin": fold_gc.pin,
    "unpin": fold_gc.unpin,
    "policy": _policy,
    "expire": fold_gc.expire,
    "undo": fold_gc.undo,
    "purge": fold_gc.purge,
    "condemn": fold_gc.condemn,
    "rescue": fold_gc.rescue,
    "sweep": fold_gc.sweep,
    "relocate": fold_gc.relocate,
    "place": fold_gc.set_location,
    "settle": fold_gc.truncate_tombstones,
}
