"""The fold: how one log entry changes the ref table. A pure function of the entry and the table, and total.

Writers check entries before they append them; an operation that is still invalid here (a reset of a branch that does not
exist, an unknown root) has no effect, on every host. No clock, no backend, no randomness.

A snapshot is live while it has a holder: a move in a branch's history, a tag, a pin, or a removed move or tag that can still be
restored.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from tensorstore_ck.common.ids import Ulid, split_ulids
from tensorstore_ck.log import table_rows as rows
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.field_checks import MAX_INTEGER, MAX_METRICS, MIN_STEP, ULID, numbered, object_key, window_key
from tensorstore_ck.log.object_set import ObjectKey, Objects
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.snapshot import SnapshotRow
from tensorstore_ck.log.table_rows import BranchHead, BranchMove

TAG: Final = "tag"
"""As a move's op: a removed tag."""

Fields = Mapping[str, Any]


def fold(entry: Entry, batch: Batch) -> list[Ulid]:
    """Applies `entry`, which follows the head of `batch`; returns the packs that it swept."""
    view = RefTable(batch)
    swept: list[Ulid] = []
    for op in entry.ops:
        apply = _APPLY.get(op.name)
        if apply is not None:
            swept += apply(batch, view, entry, op.fields) or ()
        elif op.critical and view.stop() is None:
            rows.STOP.put(batch, b"", rows.StopRow(entry.n, op.name))
    rows.HEAD.put(batch, b"", rows.Head(entry.n, entry.hash))
    return swept


# --- snapshots, branches and tags -------------------------------------------------------------------------------------


def _put(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is not None:
        return  # an earlier abort or put of this transaction is its outcome
    info = SnapshotRow.of_op(op, entry.n, entry.time_ns)
    rows.TXNS.put(batch, op["txn"], rows.TxnOutcome(put=True, n=entry.n))
    is_held = view.is_live(info.ulid)  # no writer draws a ULID twice; if a log repeats one, the later snapshot counts
    if is_held:
        _count(batch, view, view.snapshot(info.ulid), -1)
    rows.SNAPSHOTS.put(batch, info.ulid, info)
    rows.ROOTS.put(batch, info.root + info.ulid, rows.EntryRow(entry.n))
    if is_held:
        _count(batch, view, info, 1)
    _move(batch, view, entry, info, name=info.ref, op="put")
    if ULID.accepts(op.get("staged")):
        rows.STAGED.delete(batch, op["staged"])


def _staged(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        rows.STAGED.put(batch, op["txn"], SnapshotRow.of_op(op, entry.n, entry.time_ns))


def _abort(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.outcome(op["txn"]) is None:
        rows.TXNS.put(batch, op["txn"], rows.TxnOutcome(put=False, n=entry.n))
        rows.STAGED.delete(batch, op["txn"])


def _branch(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is None:
        _move(batch, view, entry, info, name=op["name"], op="branch")


def _reset(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.branch(op["name"]) is not None:
        _move(batch, view, entry, info, name=op["name"], op="reset")


def _move(batch: Batch, view: RefTable, entry: Entry, info: SnapshotRow, *, name: str, op: str) -> None:
    move = BranchMove(ulid=info.ulid, root=info.root, step=info.step, n=entry.n, time_ns=entry.time_ns, op=op)
    branch = view.branch(name)
    seq = view.length(name) if branch is None else branch.length
    rows.MOVES.put(batch, numbered(name, seq), move)
    if move.step is not None:
        rows.STEPS.put(batch, numbered(name, move.step - MIN_STEP), rows.StepRow(seq))
    rows.BRANCHES.put(batch, name.encode(), BranchHead(name, *move[:-1], length=seq + 1))
    if branch is None:  # else the branch was not removed
        rows.LENGTHS.delete(batch, name.encode())
    _hold(batch, view, entry, info.ulid, change=1, info=info)


def _tag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is not None and view.tag(op["name"]) is None:
        rows.TAGS.put(batch, op["name"].encode(), rows.TagRow(info.ulid, info.root, entry.n, entry.time_ns))
        _hold(batch, view, entry, info.ulid, change=1, info=info)


def _annotate(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        note = view.note(op["root"])
        metrics = {**note.metrics, **op["metrics"]}
        if len(metrics) <= MAX_METRICS:
            rows.NOTES.put(batch, op["root"], note._replace(metrics=metrics))


def _mark(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    if view.by_root(op["root"]) is not None:
        rows.NOTES.put(batch, op["root"], view.note(op["root"])._replace(mark=op["mark"], reason=op["reason"]))


# --- policies and pins ------------------------------------------------------------------------------------------------


def _hold(batch: Batch, view: RefTable, entry: Entry, ulid: Ulid, *, change: int, info: SnapshotRow | None = None) -> None:
    """Changes the number of holders of a snapshot; `info`: its row, by default read from `view`."""
    before = view.holds(ulid)
    after = max(0, before + change)
    rows.HOLDS.put(batch, ulid, rows.HoldsRow(after, entry.n))
    if bool(before) != bool(after):
        _count(batch, view, info or view.snapshot(ulid), 1 if after else -1)


def _count(batch: Batch, view: RefTable, info: SnapshotRow | None, sign: int) -> None:
    """Adds a snapshot's new bytes to the sums of its branch and of the matching quotas, or subtracts them."""
    if info is None:
        return
    row = view.read(rows.ADDED, info.ref.encode())
    before = row.new_bytes if row is not None else 0
    added = max(0, min(before + sign * info.new_bytes, MAX_INTEGER))
    for glob, quota in view.quotas().items():
        if fnmatchcase(info.ref, glob):
            used_bytes = max(0, min(quota.used_bytes + added - before, MAX_INTEGER))
            rows.QUOTAS.put(batch, glob.encode(), quota._replace(used_bytes=used_bytes))
    if added:
        rows.ADDED.put(batch, info.ref.encode(), rows.AddedRow(added))
    else:
        rows.ADDED.delete(batch, info.ref.encode())


def _quota(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    key, limits = op["glob"].encode(), (op["warn_bytes"], op["refuse_bytes"])
    if limits == (None, None):
        rows.QUOTAS.delete(batch, key)
    else:
        rows.QUOTAS.put(batch, key, rows.QuotaRow(*limits, view.added_bytes_of(op["glob"]), entry.n, entry.time_ns))


def _policy(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    key = op["glob"].encode()
    if op["rules"] is None:
        rows.POLICIES.delete(batch, key)
    else:
        rows.POLICIES.put(batch, key, rows.PolicyRow(op["rules"], entry.n, entry.time_ns))


def _pin(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    info = view.by_root(op["root"])
    if info is None:
        return
    pin = rows.Pin(ulid=info.ulid, owner=op["owner"], reason=op["reason"], expires_ns=op["expires_ns"], n=entry.n, time_ns=entry.time_ns)
    if not view.is_pinned(pin.ulid, pin.owner):
        _hold(batch, view, entry, pin.ulid, change=1, info=info)
    rows.PINS.put(batch, pin.ulid + pin.owner.encode(), pin)


def _unpin(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    if view.is_pinned(op["snapshot"], op["owner"]):
        rows.PINS.delete(batch, op["snapshot"] + op["owner"].encode())
        _hold(batch, view, entry, op["snapshot"], change=-1)


# --- forget and undo --------------------------------------------------------------------------------------------------


def _expire(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Moves part of a branch's history, or the branch, into an undo window, which still holds the snapshots."""
    name = op["name"]
    branch = view.branch(name)
    if branch is None:
        return
    whole = op["snapshots"] is None
    gone: set[Ulid] = set() if whole else set(split_ulids(op["snapshots"])) - {branch.ulid}
    newest_of_step: dict[int | None, int] = {}
    changed: set[int | None] = set()
    for key, value in list(view.scan(rows.MOVES, name.encode() + b"\0")):
        move, seq = rows.MOVES.decode(value), int.from_bytes(key, "big")
        if whole or move.ulid in gone:
            rows.MOVES.delete(batch, numbered(name, seq))
            rows.FORGOTTEN.put(batch, window_key(entry.n, name) + b"\0" + key, move)
            changed.add(move.step)
        else:
            newest_of_step[move.step] = seq
    if not changed:
        return
    for step in changed:
        if step is None:
            continue
        step_key = numbered(name, step - MIN_STEP)
        if step in newest_of_step:
            rows.STEPS.put(batch, step_key, rows.StepRow(newest_of_step[step]))
        else:
            rows.STEPS.delete(batch, step_key)
    if whole:
        rows.BRANCHES.delete(batch, name.encode())
        rows.LENGTHS.put(batch, name.encode(), rows.StepRow(branch.length))
    _open_window(batch, entry, name, "branch" if whole else "snapshots")


def _untag(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    name = op["name"]
    tag = view.tag_row(name)
    if tag is None:
        return
    info = view.snapshot(tag.ulid)
    rows.TAGS.delete(batch, name.encode())
    move = BranchMove(ulid=tag.ulid, root=tag.root, step=info.step if info else None, n=tag.n, time_ns=tag.time_ns, op=TAG)
    rows.FORGOTTEN.put(batch, window_key(entry.n, name) + b"\0" + bytes(8), move)
    _open_window(batch, entry, name, TAG)


def _open_window(batch: Batch, entry: Entry, name: str, kind: str) -> None:
    window = rows.UndoWindow(n=entry.n, name=name, time_ns=entry.time_ns, kind=kind, moves=[])
    rows.WINDOWS.put(batch, window_key(entry.n, name), window)


def _undo(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    """Restores moves or a tag. The branch is then at its last move, so a branch that was made again since stays where it is."""
    name, window, wanted = op["name"], window_key(op["n"], op["name"]), set(split_ulids(op["snapshots"]))
    if view.tag(name) is not None:
        return
    steps: dict[int, int] = {}
    for key, value in list(view.scan(rows.FORGOTTEN, window + b"\0")):
        move, seq = rows.FORGOTTEN.decode(value), int.from_bytes(key, "big")
        if move.ulid not in wanted:
            continue
        if move.op != TAG:
            rows.MOVES.put(batch, numbered(name, seq), move)
            if move.step is not None:
                steps[move.step] = seq
        elif view.branch(name) is None:
            rows.TAGS.put(batch, name.encode(), rows.TagRow(move.ulid, move.root, move.n, move.time_ns))
        else:
            continue
        rows.FORGOTTEN.delete(batch, window + b"\0" + key)
    for step, seq in steps.items():
        step_key = numbered(name, step - MIN_STEP)
        there = view.read(rows.STEPS, step_key)
        if there is None or there.seq < seq:
            rows.STEPS.put(batch, step_key, rows.StepRow(seq))
    last = next(iter(view.moves(name, limit=1)), None)
    if last is not None:
        rows.BRANCHES.put(batch, name.encode(), BranchHead(name, *last[:-1], length=view.length(name)))
        rows.LENGTHS.delete(batch, name.encode())
    _close_window_if_empty(batch, view, window)


def _purge(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Ends an undo window, which no longer holds its snapshots."""
    window = window_key(op["n"], op["name"])
    for key, value in list(view.scan(rows.FORGOTTEN, window + b"\0")):
        rows.FORGOTTEN.delete(batch, window + b"\0" + key)
        _hold(batch, view, entry, rows.FORGOTTEN.decode(value).ulid, change=-1)
    _close_window_if_empty(batch, view, window)


def _close_window_if_empty(batch: Batch, view: RefTable, window: bytes) -> None:
    if next(view.scan(rows.FORGOTTEN, window + b"\0"), None) is None:
        rows.WINDOWS.delete(batch, window)


def _report(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    given = {name: op[name] for name in ("outcome", "duration_ns", "counts", "message")}
    row = rows.ReportRow(**given, actor=entry.actor, n=entry.n, time_ns=entry.time_ns)
    rows.REPORTS.put(batch, op["run"].encode(), row)


# --- the lists of gc --------------------------------------------------------------------------------------------------


def _condemn(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Condemns objects that are neither condemned nor swept."""
    for key in Objects.of_fields(op):
        if view.object_state(key) is None:
            rows.OBJECTS.put(batch, object_key(key), rows.ObjectRow(swept=False, n=entry.n))


def _rescue(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    """Takes condemned objects off the list; swept ones stay swept."""
    for key in Objects.of_fields(op):
        state = view.object_state(key)
        if state is not None and not state.swept:
            rows.OBJECTS.delete(batch, object_key(key))


def _sweep(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> list[Ulid]:
    """Sweeps condemned objects; returns the packs."""
    swept = [key for key in Objects.of_fields(op) if (state := view.object_state(key)) is not None and not state.swept]
    for key in swept:
        _bury(batch, key, entry)
    for key in swept:
        if key.kind == "moved":
            _end_relocation(batch, view, key.ulid, entry)
        elif key.kind == "snapshot" and not view.is_live(key.ulid):
            _drop_snapshot(batch, view, key.ulid)
    return [key.ulid for key in swept if key.kind == "pack"]


def _bury(batch: Batch, key: ObjectKey, entry: Entry) -> None:
    rows.OBJECTS.put(batch, object_key(key), rows.ObjectRow(swept=True, n=entry.n))


def _end_relocation(batch: Batch, view: RefTable, moved: Ulid, entry: Entry) -> None:
    """Ends a relocation: its targets are gone, so the pack's tombstone counts from now."""
    pack = view.moved_pack(moved)
    if pack is None:
        return
    rows.MOVED.delete(batch, moved)
    rows.RELOCATIONS.delete(batch, pack + moved)
    state = view.object_state(ObjectKey("pack", pack))
    if state is not None and state.swept:
        _bury(batch, ObjectKey("pack", pack), entry)


def _drop_snapshot(batch: Batch, view: RefTable, ulid: Ulid) -> None:
    info = view.snapshot(ulid)
    if info is None:
        return
    rows.SNAPSHOTS.delete(batch, ulid)
    rows.ROOTS.delete(batch, info.root + ulid)
    rows.HOLDS.delete(batch, ulid)
    if view.by_root(info.root) is None:
        rows.NOTES.delete(batch, info.root)


def _relocate(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """From this entry on, entries of a pack are in other packs."""
    needed = [ObjectKey("pack", op["pack"]), ObjectKey("moved", op["moved"])]
    needed += [ObjectKey("pack", target) for target in split_ulids(op["targets"])]
    if any((state := view.object_state(key)) is not None and state.swept for key in needed):
        return
    rows.RELOCATIONS.put(batch, op["pack"] + op["moved"], rows.RelocationRow(entry.n, op["hash"], op["targets"]))
    rows.MOVED.put(batch, op["moved"], rows.MovedRow(op["pack"]))


def _place(batch: Batch, _view: RefTable, _entry: Entry, op: Fields) -> None:
    """Sets the cold location of packs, until their tombstones are dropped."""
    for pack in split_ulids(op["packs"]):
        rows.LOCATIONS.put(batch, pack, rows.LocationRow(op["url"]))


def _settle(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Drops old tombstones, except those of packs with a relocation."""
    horizon = min(op["n"], entry.n - 1)
    if horizon <= view.horizon():
        return
    for key, state in list(view.objects()):
        if state.swept and state.n <= horizon and not (key.kind == "pack" and view.relocations(key.ulid)):
            rows.OBJECTS.delete(batch, object_key(key))
            if key.kind == "pack":
                rows.LOCATIONS.delete(batch, key.ulid)
    rows.HORIZON.put(batch, b"", rows.EntryRow(horizon))


_OPERATIONS: Final = (
    *(_put, _staged, _abort, _branch, _reset, _tag, _untag, _annotate, _mark, _policy, _pin, _unpin),
    *(_expire, _undo, _purge, _condemn, _rescue, _sweep, _relocate, _place, _settle, _quota, _report),
)
_APPLY: Final[Mapping[str, Callable[[Batch, RefTable, Entry, Fields], list[Ulid] | None]]] = {
    apply.__name__.removeprefix("_"): apply for apply in _OPERATIONS
}
