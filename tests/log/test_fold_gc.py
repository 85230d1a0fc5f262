"""The fold of what is kept: total, the same from a checkpoint, holds as a naive count has them, and undo takes forgetting back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable
from tensorstore_ck.log import checkpoint as checkpoints
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.fold import fold
from tensorstore_ck.log.table_rows import ObjectRow
from tests.effort import effort
from tests.log.scripted import entries_of, folded, new_id, put_op
from tests.log.test_fold import ops as other_ops

REFS = ["main", "runs/a", "run"]
STEPS = [None, 0, 7]
PUTS = [put_op(ref, number, step=step) for ref in REFS[:2] for number in range(2) for step in STEPS]
ROOTS = [*{Digest(put.fields["root"]) for put in PUTS}, Digest(bytes(32))]
SNAPSHOTS = [*{Ulid(put.fields["snapshot"]) for put in PUTS}, Ulid(bytes(16))]
NAMES = [Ulid(bytes([number]) * 16) for number in range(1, 5)]
OBJECTS = [ObjectKey(kind, name) for kind in ("pack", "part", "moved") for name in NAMES] + [
    ObjectKey("snapshot", ulid) for ulid in SNAPSHOTS
]
OWNERS = ["ada", "grace", "ada\N{GREEK SMALL LETTER ALPHA}"]


def raw(kind: str, /, **fields: Any) -> Op:
    """An operation whose preconditions nobody checked."""
    return Op({"op": kind, "critical": True, **fields})


refs, roots, ulids = st.sampled_from(REFS), st.sampled_from(ROOTS), st.sampled_from(SNAPSHOTS)
some_ulids = st.frozensets(ulids, max_size=3)
objects = st.builds(Objects, st.frozensets(st.sampled_from(OBJECTS), max_size=4))
counts = st.integers(0, 14)
names = st.sampled_from(NAMES)
repeated_puts = st.builds(lambda put, txn: Op({**put.fields, "txn": txn}), st.sampled_from(PUTS), st.builds(new_id))
ref_ops = st.one_of(
    st.sampled_from(PUTS),
    repeated_puts,
    st.builds(Op.branch, refs, roots),
    st.builds(Op.reset, refs, roots),
    st.builds(Op.tag, refs, roots),
    st.builds(Op.pin, roots, st.sampled_from(OWNERS), st.sampled_from(["", "why"]), st.none() | counts),
)
letting_go = st.one_of(
    st.builds(lambda name: raw("untag", name=name), refs),
    st.builds(lambda ulid, owner: raw("unpin", snapshot=ulid, owner=owner), ulids, st.sampled_from(OWNERS)),
    st.builds(Op.expire, refs, st.none() | some_ulids),
    st.builds(Op.quota, st.sampled_from(["*", "ru*"]), st.none(), st.none() | st.just(1)),
)
undoing = st.builds(Op.undo, counts, refs, some_ulids) | st.builds(Op.purge, counts, refs)
gc_ops = st.one_of(
    st.builds(Op.condemn, objects),
    st.builds(Op.condemn, objects),
    st.builds(Op.rescue, objects),
    st.builds(Op.sweep, objects),
    st.builds(Op.relocate, names, names, roots, st.frozensets(names, min_size=1, max_size=2)),
    st.builds(Op.set_location, st.frozensets(names, max_size=2), st.sampled_from(["/cold", "s3://colder"])),
    st.builds(Op.truncate_tombstones, counts | st.just((1 << 63) - 1)),
)
logs = st.lists(st.lists(ref_ops | letting_go | undoing | gc_ops, max_size=4), max_size=14)
ref_logs = st.lists(st.lists(ref_ops | letting_go | undoing, max_size=3), max_size=14)


def rows_of(table: MemoryTable) -> list[tuple[bytes, bytes]]:
    return list(table.scan(b"r/"))


def naive_holds(view: RefTable) -> Counter[bytes]:
    """How many things hold each snapshot, by looking at all of them."""
    held: Counter[bytes] = Counter()
    for branch in view.branches():
        held.update(move.ulid for move in view.moves(branch))
    for tag in view.tags():
        row = view.tag_row(tag)
        assert row is not None
        held[row.ulid] += 1
    held.update(pin.ulid for pin in view.pins())
    for window in view.windows():
        assert window.moves, "a window closes with the last that is in it"
        held.update(move.ulid for move in window.moves)
    return held


@settings(max_examples=effort(120, 1000))
@given(logs)
def test_the_fold_is_total_and_counts_what_holds(log: list[list[Op]]) -> None:
    table = MemoryTable()
    expired: dict[bytes, int] = {}
    known: set[bytes] = set()
    for entry in entries_of(log):
        folded([entry], table)
        view = RefTable(table)
        held = naive_holds(view)
        known.update(held)
        for ulid in SNAPSHOTS:
            assert view.is_live(ulid) == (held[ulid] > 0)
            if held[ulid]:
                assert view.expired_at(ulid) is None
                expired.pop(ulid, None)
                assert view.snapshot(ulid) is not None, "what is held is never dropped"
            elif ulid in known and view.snapshot(ulid) is not None:
                assert view.expired_at(ulid) == expired.setdefault(ulid, entry.n)
        added: Counter[str] = Counter()
        for info in view.snapshots():
            added[info.ref] += info.new_bytes
        assert {ref: view.added_bytes_of(ref) for ref in REFS} == {ref: added[ref] for ref in REFS}, "what quotas count"
        assert {glob: row.used_bytes for glob, row in view.quotas().items()} == {glob: view.added_bytes_of(glob) for glob in view.quotas()}
        for branch in view.branches():
            head = view.branch(branch)
            last = next(iter(view.moves(branch, limit=1)), None)
            assert head is not None
            assert last is not None
            assert (head.ulid, head.step, head.n) == (last.ulid, last.step, last.n), "a branch is where its last move is"
            for step in {move.step for move in view.moves(branch)} - {None}:
                assert step is not None
                newest = next(move.ulid for move in view.moves(branch) if move.step == step)
                assert view.newest_with_step(branch, step) == newest
        for branch in REFS:
            present = {move.step for move in view.moves(branch)}
            assert all(view.newest_with_step(branch, step) is None for step in (0, 7) if step not in present)


@settings(max_examples=effort(120, 1000))
@given(logs)
def test_the_lists_of_gc_are_what_a_model_says(log: list[list[Op]]) -> None:
    table = MemoryTable()
    states: dict[ObjectKey, tuple[bool, int]] = {}
    relocations: dict[tuple[bytes, bytes], None] = {}
    pack_of: dict[bytes, bytes] = {}
    """Of each relocation's object: no two packs share one in a real log; here the last one counts."""
    places: dict[Ulid, str] = {}
    horizon = 0
    for entry in entries_of(log):
        with table.batch() as batch:
            swept_packs = fold(entry, batch)
        expected_packs: list[bytes] = []
        for op in entry.ops:
            fields = op.fields
            match op.name:
                case "condemn":
                    for key in Objects.of_fields(fields):
                        states.setdefault(key, (False, entry.n))
                case "rescue":
                    for key in Objects.of_fields(fields):
                        if states.get(key, (True, 0))[0] is False:
                            del states[key]
                case "sweep":
                    dying = [key for key in Objects.of_fields(fields) if states.get(key, (True, 0))[0] is False]
                    for key in dying:
                        states[key] = (True, entry.n)
                        expected_packs += [key.ulid] if key.kind == "pack" else []
                    for key in dying:
                        pack = pack_of.pop(key.ulid, None) if key.kind == "moved" else None
                        if pack is not None:
                            del relocations[pack, key.ulid]
                            if states.get(ObjectKey("pack", Ulid(pack)), (False, 0))[0]:
                                states[ObjectKey("pack", Ulid(pack))] = (True, entry.n)
                case "relocate":
                    involved = [ObjectKey("pack", fields["pack"]), ObjectKey("moved", fields["moved"])]
                    involved += [ObjectKey("pack", Ulid(fields["targets"][at : at + 16])) for at in range(0, len(fields["targets"]), 16)]
                    if not any(states.get(key, (False, 0))[0] for key in involved):
                        relocations[fields["pack"], fields["moved"]] = None
                        pack_of[fields["moved"]] = fields["pack"]
                case "settle" if min(fields["n"], entry.n - 1) > horizon:
                    horizon = min(fields["n"], entry.n - 1)
                    away = {pack for pack, _ in relocations}
                    for key, (swept, n) in list(states.items()):
                        if swept and n <= horizon and not (key.kind == "pack" and key.ulid in away):
                            del states[key]
                            if key.kind == "pack":
                                places.pop(key.ulid, None)
                case "place":
                    places |= {Ulid(fields["packs"][at : at + 16]): fields["url"] for at in range(0, len(fields["packs"]), 16)}
        view = RefTable(table)
        assert view.locations() == places
        assert all(view.location_of(pack) == places.get(pack) for pack in NAMES)
        assert sorted(swept_packs) == sorted(expected_packs)
        assert dict(view.objects()) == {key: ObjectRow(*state) for key, state in states.items()}
        assert set(view.all_relocations()) == set(relocations)
        assert view.horizon() == horizon


@settings(max_examples=effort(80, 1000))
@given(st.lists(st.lists(ref_ops | letting_go | undoing | gc_ops | other_ops, max_size=4), min_size=1, max_size=14), st.data())
def test_a_checkpoint_anywhere_changes_nothing(log: list[list[Op]], data: st.DataObject) -> None:
    entries = entries_of(log)
    at = data.draw(st.integers(1, len(entries)))
    table, restored = folded(entries[:at]), MemoryTable()
    with table.batch() as batch:
        sealed = checkpoints.dump(batch, at, entries[at - 1].hash)
    assert sealed is not None
    with restored.batch() as batch:
        batch.put(b"r/leftover", b"")
        batch.put(b"b/other", b"kept")
        checkpoints.load(batch, checkpoints.decode_checkpoint(sealed, "checkpoint"))
    assert restored.get(b"b/other") == b"kept"
    assert rows_of(folded(entries[at:], restored)) == rows_of(folded(entries))
    with restored.batch() as batch:
        assert checkpoints.dump(batch, len(entries), entries[-1].hash) == checkpoints.dump(batch, len(entries), entries[-1].hash)


def told(view: RefTable) -> object:
    """All that users see of branches, tags and steps."""
    return (
        [(name, view.branch(name), list(view.moves(name))) for name in view.branches()],
        [(name, view.tag_row(name)) for name in view.tags()],
        [(name, step, view.newest_with_step(name, step)) for name in REFS for step in (0, 7)],
        [(ulid, view.is_live(ulid)) for ulid in SNAPSHOTS],
        list(view.pins()),
        [view.length(name) for name in REFS],
    )


@settings(max_examples=effort(120, 1000))
@given(ref_logs, refs, st.none() | some_ulids, st.booleans(), st.booleans())
def test_undo_takes_forgetting_back(log: list[list[Op]], name: str, ulids: frozenset[Ulid] | None, as_tag: bool, in_pieces: bool) -> None:
    n = len(log) + 1
    forget = raw("untag", name=name) if as_tag else Op.expire(name, ulids)
    undo = [[Op.undo(n, name, some)] for some in ([[ulid] for ulid in SNAPSHOTS] if in_pieces else [SNAPSHOTS])]
    entries = entries_of([*log, [forget], *undo])
    before = folded(entries[: len(log)])
    if RefTable(before).branch(name) is not None and RefTable(before).tag(name) is not None:
        return  # a name is one of both, whenever operations are checked
    after = folded(entries)
    assert told(RefTable(after)) == told(RefTable(before))
    assert list(RefTable(after).windows()) == list(RefTable(before).windows())


@settings(max_examples=effort(60, 1000))
@given(ref_logs, refs)
def test_purge_ends_every_hold_of_a_window(log: list[list[Op]], name: str) -> None:
    n = len(log) + 1
    entries = entries_of([*log, [Op.expire(name, None)], [Op.purge(n, name)], [Op.undo(n, name, SNAPSHOTS)]])
    view = RefTable(folded(entries))
    assert all(window.n != n for window in view.windows())
    held = naive_holds(view)
    assert all(view.is_live(ulid) == (held[ulid] > 0) for ulid in SNAPSHOTS)
    assert view.branch(name) is None


def test_a_swept_record_takes_its_rows_with_it_unless_it_is_held_again() -> None:
    put = PUTS[1]
    ulid, root = Ulid(put.fields["snapshot"]), Digest(put.fields["root"])
    key = Objects([ObjectKey("snapshot", ulid)])
    annotate = Op.annotate(root, {"loss": 1.0})
    log = [[put], [annotate], [Op.expire("main", None)], [Op.purge(3, "main")], [Op.condemn(key)], [Op.sweep(key)]]
    entries = entries_of(log)
    view = RefTable(folded(entries[:5]))
    assert view.snapshot(ulid) is not None
    assert view.expired_at(ulid) == 4
    table = folded(entries)
    view = RefTable(table)
    assert view.snapshot(ulid) is None
    assert view.by_root(root) is None
    assert view.roots_with_prefix(root.hex()) == []
    assert view.expired_at(ulid) is None
    assert not [row for row, _ in table.scan(b"r/a")], "nor is anything said about it any more"
    view = RefTable(folded(entries_of([*log[:-1], [Op.tag("kept", root)], log[-1]])))
    info = view.by_root(root)
    assert info is not None
    assert (info.ulid, info.metrics, view.tag("kept")) == (ulid, {"loss": 1.0}, root)


def test_what_was_said_of_a_root_stays_while_another_snapshot_has_it() -> None:
    one, other = put_op("main", 1), put_op("runs/a", 1)
    assert one.fields["root"] == other.fields["root"]
    key = Objects([ObjectKey("snapshot", Ulid(one.fields["snapshot"]))])
    log = [[one, other], [Op.mark(one.fields["root"], "bad", "spike")], [Op.expire("main", None)], [Op.purge(3, "main")]]
    view = RefTable(folded(entries_of([*log, [Op.condemn(key)], [Op.sweep(key)]])))
    info = view.by_root(one.fields["root"])
    assert info is not None
    assert (info.ulid, info.mark, info.reason) == (other.fields["snapshot"], "bad", "spike")


@pytest.mark.parametrize("count", [1, 2])
def test_a_moved_pack_is_remembered_until_its_relocations_end(count: int) -> None:
    pack, target = NAMES[0], NAMES[1]
    moved = NAMES[2 : 2 + count]
    relocate = [Op.relocate(pack, name, Digest(bytes(32)), [target]) for name in moved]
    dead = Objects([ObjectKey("pack", pack)])
    log = [[*relocate, Op.condemn(dead)], [Op.sweep(dead)], [], [Op.truncate_tombstones(3)]]
    gone = Objects(ObjectKey("moved", name) for name in moved)
    log += [[Op.condemn(gone)], [Op.sweep(gone)], [Op.truncate_tombstones(5)], [Op.truncate_tombstones(6)]]
    entries = entries_of(log)

    def state(n: int) -> ObjectRow | None:
        return RefTable(folded(entries[:n])).object_state(ObjectKey("pack", pack))

    assert state(2) == state(4) == ObjectRow(swept=True, n=2)
    assert state(6) == state(7) == ObjectRow(swept=True, n=6), "it counts from the relocation's end"
    assert state(8) is None
