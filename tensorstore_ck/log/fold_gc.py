"""The part of the fold that decides what is kept: holders of snapshots, undo windows, pins, and the lists of gc.

A snapshot is live while it has a holder: a move in a branch's history, a tag, a pin, or a removed move or tag that can still be
restored. Like all of the fold: pure, total, no clock.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import table_keys, table_rows
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.entry import Entry
from tensorstore_ck.log.object_set import ObjectKey, Objects, split_ulids
from tensorstore_ck.log.ref_table import RefTable

Fields = Mapping[str, Any]
TAG: Final = "tag"
"""As a move's op: a removed tag."""


def hold(batch: Batch, ulid: Ulid, change: int, entry: Entry) -> None:
    """Changes the number of holders of a snapshot."""
    value = batch.get(table_keys.holds_key(ulid))
    before = table_rows.decode_row(table_rows.HoldsRow, value).holds if value is not None else 0
    batch.put(table_keys.holds_key(ulid), table_rows.encode_row(table_rows.HoldsRow(max(0, before + change), entry.n)))


# --- pins -------------------------------------------------------------------------------------------------------------


def pin(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Pins a snapshot, or changes an owner's pin."""
    info = view.by_root(op["root"])
    if info is None:
        return
    key = table_keys.pin_key(info.ulid, op["owner"])
    if batch.get(key) is None:
        hold(batch, info.ulid, 1, entry)
    batch.put(key, table_rows.encode_row(table_rows.PinRow(op["reason"], op["expires_ns"], entry.n, entry.time_ns)))


def unpin(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    """Removes a pin."""
    key = table_keys.pin_key(op["snapshot"], op["owner"])
    if batch.get(key) is not None:
        batch.delete(key)
        hold(batch, op["snapshot"], -1, entry)


# --- forget and undo --------------------------------------------------------------------------------------------------


def expire(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Moves part of a branch's history, or the branch, into an undo window, which still holds the snapshots."""
    name = op["name"]
    branch = view.branch(name)
    if branch is None:
        return
    whole = op["snapshots"] is None
    gone: set[Ulid] = set() if whole else set(split_ulids(op["snapshots"])) - {branch.ulid}
    newest_of_step: dict[int | None, int] = {}
    changed: set[int | None] = set()
    for key, value in list(batch.scan(table_keys.moves_prefix(name))):
        move, seq = table_rows.decode_row(table_rows.BranchMove, value), int.from_bytes(key[-8:], "big")
        if whole or move.ulid in gone:
            batch.delete(key)
            batch.put(table_keys.forgotten_key(entry.n, name, seq), value)
            changed.add(move.step)
        else:
            newest_of_step[move.step] = seq
    if not changed:
        return
    for step in changed:
        if step is None:
            continue
        if step in newest_of_step:
            batch.put(table_keys.step_key(name, step), table_rows.encode_row(table_rows.StepRow(newest_of_step[step])))
        else:
            batch.delete(table_keys.step_key(name, step))
    if whole:
        batch.delete(table_keys.branch_key(name))
        batch.put(table_keys.length_key(name), table_rows.encode_row(table_rows.StepRow(branch.length)))
    _open_window(batch, entry, name, "branch" if whole else "snapshots")


def forget_tag(batch: Batch, view: RefTable, entry: Entry, name: str) -> None:
    """Moves a tag into an undo window."""
    value = batch.get(table_keys.tag_key(name))
    if value is None:
        return
    tag = table_rows.decode_row(table_rows.TagRow, value)
    info = view.snapshot(tag.ulid)
    move = table_rows.BranchMove(tag.ulid, tag.root, info.step if info else None, tag.n, tag.time_ns, TAG)
    batch.delete(table_keys.tag_key(name))
    batch.put(table_keys.forgotten_key(entry.n, name, 0), table_rows.encode_row(move))
    _open_window(batch, entry, name, TAG)


def _open_window(batch: Batch, entry: Entry, name: str, kind: str) -> None:
    batch.put(table_keys.window_key(entry.n, name), table_rows.encode_row(table_rows.WindowRow(entry.time_ns, kind)))


def undo(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    """Restores moves or a tag. A branch is at its last move: one that was made again since stays where it is."""
    n, name, wanted = op["n"], op["name"], set(split_ulids(op["snapshots"]))
    if view.tag(name) is not None:
        return
    steps: dict[int, int] = {}
    for key, value in list(batch.scan(table_keys.forgotten_prefix(n, name))):
        move, seq = table_rows.decode_row(table_rows.BranchMove, value), int.from_bytes(key[-8:], "big")
        if move.ulid not in wanted:
            continue
        if move.op != TAG:
            batch.put(table_keys.move_key(name, seq), value)
            if move.step is not None:
                steps[move.step] = seq
        elif view.branch(name) is None:
            batch.put(table_keys.tag_key(name), table_rows.encode_row(table_rows.TagRow(move.ulid, move.root, move.n, move.time_ns)))
        else:
            continue
        batch.delete(key)
    for step, seq in steps.items():
        there = batch.get(table_keys.step_key(name, step))
        if there is None or table_rows.decode_row(table_rows.StepRow, there).seq < seq:
            batch.put(table_keys.step_key(name, step), table_rows.encode_row(table_rows.StepRow(seq)))
    last = next(iter(view.moves(name, limit=1)), None)
    if last is not None:
        batch.put(table_keys.branch_key(name), table_rows.encode_row(table_rows.BranchRow(*last[:-1], length=view.length(name))))
        batch.delete(table_keys.length_key(name))
    _close_window_if_empty(batch, n, name)


def purge(batch: Batch, _view: RefTable, entry: Entry, op: Fields) -> None:
    """Ends an undo window, which no longer holds its snapshots."""
    for key, value in list(batch.scan(table_keys.forgotten_prefix(op["n"], op["name"]))):
        batch.delete(key)
        hold(batch, table_rows.decode_row(table_rows.BranchMove, value).ulid, -1, entry)
    _close_window_if_empty(batch, op["n"], op["name"])


def _close_window_if_empty(batch: Batch, n: int, name: str) -> None:
    if next(iter(batch.scan(table_keys.forgotten_prefix(n, name))), None) is None:
        batch.delete(table_keys.window_key(n, name))


# --- the lists of gc --------------------------------------------------------------------------------------------------


def condemn(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Condemns objects that are neither condemned nor swept."""
    for key in Objects.of_fields(op):
        if view.object_state(key) is None:
            batch.put(table_keys.object_key(*key), table_rows.encode_row(table_rows.ObjectRow(swept=False, n=entry.n)))


def rescue(batch: Batch, view: RefTable, _entry: Entry, op: Fields) -> None:
    """Takes condemned objects off the list; swept ones stay swept."""
    for key in Objects.of_fields(op):
        state = view.object_state(key)
        if state is not None and not state.swept:
            batch.delete(table_keys.object_key(*key))


def sweep(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> list[Ulid]:
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
    batch.put(table_keys.object_key(*key), table_rows.encode_row(table_rows.ObjectRow(swept=True, n=entry.n)))


def _end_relocation(batch: Batch, view: RefTable, moved: Ulid, entry: Entry) -> None:
    """Ends a relocation: its targets are gone, so the pack's tombstone counts from now."""
    value = batch.get(table_keys.moved_key(moved))
    if value is None:
        return
    pack = ObjectKey("pack", table_rows.decode_row(table_rows.MovedRow, value).pack)
    batch.delete(table_keys.moved_key(moved))
    batch.delete(table_keys.relocation_key(pack.ulid, moved))
    state = view.object_state(pack)
    if state is not None and state.swept:
        _bury(batch, pack, entry)


def _drop_snapshot(batch: Batch, view: RefTable, ulid: Ulid) -> None:
    info = view.snapshot(ulid)
    if info is None:
        return
    for key in (table_keys.snapshot_key(ulid), table_keys.root_key(info.root, ulid), table_keys.holds_key(ulid)):
        batch.delete(key)
    if view.by_root(info.root) is None:
        batch.delete(table_keys.note_key(info.root))


def relocate(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """From this entry on, entries of a pack are in other packs."""
    needed = [ObjectKey("pack", op["pack"]), ObjectKey("moved", op["moved"]), *_targets(op["targets"])]
    if any((state := view.object_state(key)) is not None and state.swept for key in needed):
        return
    batch.put(
        table_keys.relocation_key(op["pack"], op["moved"]),
        table_rows.encode_row(table_rows.RelocationRow(entry.n, op["hash"], op["targets"])),
    )
    batch.put(table_keys.moved_key(op["moved"]), table_rows.encode_row(table_rows.MovedRow(op["pack"])))


def _targets(joined: bytes) -> Iterable[ObjectKey]:
    return (ObjectKey("pack", ulid) for ulid in split_ulids(joined))


def set_location(batch: Batch, _view: RefTable, _entry: Entry, op: Fields) -> None:
    """Sets the cold location of packs, until their tombstones are dropped."""
    for pack in split_ulids(op["packs"]):
        batch.put(table_keys.location_key(pack), table_rows.encode_row(table_rows.LocationRow(op["url"])))


def truncate_tombstones(batch: Batch, view: RefTable, entry: Entry, op: Fields) -> None:
    """Drops old tombstones, except those of packs with a relocation."""
    horizon = min(op["n"], entry.n - 1)
    if horizon <= view.horizon():
        return
    for key, state in list(view.objects()):
        if state.swept and state.n <= horizon and not (key.kind == "pack" and view.relocations(key.ulid)):
            batch.delete(table_keys.object_key(*key))
            if key.kind == "pack":
                batch.delete(table_keys.location_key(key.ulid))
    batch.put(table_keys.HORIZON_KEY, table_rows.encode_row(table_rows.HorizonRow(horizon)))
