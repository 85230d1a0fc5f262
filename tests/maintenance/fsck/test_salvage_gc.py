"""Salvage of a store with a past: forgotten, pinned, freed and moved. Whatever entry is lost, all that was live can be restored."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.engine.reachability import snapshot_closure
from tensorstore_ck.format.pack import Footer
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, RelocationMap
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.gc.compact import CompactedPack, SparsePack, compact, read_footer
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable
from tensorstore_ck.maintenance.fsck.rebuild_packs import commit_relocation
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.store import Store
from tests.end_to_end.crash.faulty import Death, FaultyBackend
from tests.gc.stores import Clock, DiesAt, open_store
from tests.maintenance.fsck.stores import backend_of, begun, contents, flip, is_exact, names, reopen, state

NOW = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=0.9)
LATER = GcOptions(min_age_seconds=0, max_delete=1, compact_below=0.9)
FREED = 1
"""The step of the snapshot that gc freed; its pack had the blocks that all others share."""


def build() -> MemoryBackend:
    """Snapshots 1 to 8, most of what can happen to them, and two runs of gc."""
    backend = MemoryBackend()
    init_store(backend)
    store = reopen(backend)
    for number in range(1, 7):
        store.put_snapshot(state(number), ref="runs/a", step=number, metrics={"loss": 1 / number})
    store.branch("runs/b", "runs/a@2")
    store.checkout("runs/b")
    store.put_snapshot(state(7), ref="runs/b", step=7)
    store.tag("paper", "runs/a@3")
    store.pin("runs/a@4", reason="evaluated", owner="eval", expires="30d")
    store.pin("runs/a@2", owner="boss")
    store.annotate("runs/a@3", {"accuracy": 0.5})
    store.mark("runs/a@5", reason="spike")
    store.forget("runs/a@1")
    store.undo()
    store.forget("runs/a@1", "runs/a@3", "runs/a@4")
    report = store.gc(NOW)
    assert [gone.step for gone in report.snapshots] == [FREED]
    assert report.rewritten
    store.checkout("runs/a")
    store.put_snapshot(state(8), ref="runs/a", step=8)
    store.reset("runs/b", "runs/a@6")
    store.tag("old", "runs/a@6")
    store.forget("runs/a@5")
    store.forget("runs/b", "old")
    store.branch("runs/c", "runs/a@2")
    store.reset("runs/c", "runs/a@8")
    store.forget("runs/c@2")
    store.gc(LATER)
    store.annotate("runs/a@8", {"accuracy": 0.9})
    return backend


OBJECTS = contents(build())
LOG = [name for name in OBJECTS if name.startswith("log/")]


def copy_with(changed: dict[str, bytes | None]) -> MemoryBackend:
    return backend_of({**OBJECTS, **changed})


def view_of(backend: Backend) -> RefTable:
    store = reopen(backend)
    store.engine.log.sync()
    return store.engine.log.view()


def live_steps(backend: Backend) -> set[int | None]:
    return {info.step for info in view_of(backend).snapshots()}


LIVE = live_steps(copy_with({}))
OPERATIONS = [{op.name for op in entry.ops} for entry in reopen(copy_with({})).engine.log.entries()]


def logical(view: RefTable, *, windows_begin_anew: bool = False) -> dict[str, Any]:
    """What salvage must not change: all but entry numbers."""
    return {
        "branches": {name: (head.ulid, head.root, head.step, head.time_ns) for name in view.branches() if (head := view.branch(name))},
        "histories": {name: [move._replace(n=0) for move in view.moves(name)] for name in view.branches()},
        "steps": {(name, step): view.newest_with_step(name, step) for name in view.branches() for step in range(10)},
        "tags": {name: row._replace(n=0) for name in view.tags() if (row := view.tag_row(name))},
        "pins": [pin._replace(n=0) for pin in view.pins()],
        "windows": [
            (window.name, window.kind, windows_begin_anew or window.time_ns, [move._replace(n=0) for move in window.moves])
            for window in view.windows()
        ],
        "snapshots": [info._replace(n=0, duration_ns=None) for info in view.snapshots()],
    }


def assert_restorable(store: Store, steps: set[int | None]) -> None:
    store.engine.log.sync()
    infos = {info.step: info for info in store.engine.log.view().snapshots()}
    assert steps <= set(infos)
    for step, info in infos.items():
        assert is_exact(store.checkout(info.root.hex(), allow_marked=True), step or 0)
    assert store.fsck(read_data=True).ok


def assert_gc_frees_the_rest(backend: Backend) -> None:
    """And what refs and pins hold is as it was."""
    store = reopen(backend)
    held = {root.root for root in [*store.log(), *store.tags().values(), *(pin.snapshot for pin in store.pins())]}
    store.gc(NOW)
    store.gc(NOW)
    assert {info.root.hex() for info in view_of(backend).snapshots()} == held
    assert_restorable(reopen(backend), set())
    needed = {key.name for info in view_of(backend).snapshots() for key in closure(store, info.root)}
    assert {name for name in names(backend) if name.startswith(("packs/", "parts/", "snapshots/", "moved/"))} == needed


def closure(store: Store, root: bytes) -> Objects:
    view = store.engine.log.view()
    info = view.by_root(root)
    assert info is not None
    return snapshot_closure(store.engine, view, info)


def test_the_store_has_one_of_everything() -> None:
    seen = set().union(*OPERATIONS)
    assert {"put", "branch", "reset", "tag", "untag", "pin", "expire", "undo", "purge", "condemn", "relocate", "sweep"} <= seen
    view = view_of(copy_with({}))
    assert {2, 3, 4, 5, 6, 7, 8} == LIVE
    assert sorted(window.kind for window in view.windows()) == ["branch", "snapshots", "snapshots", "tag"]
    assert len(list(view.pins())) == 2
    assert list(view.all_relocations())


FIRST = {OPERATIONS.index(ops) for ops in OPERATIONS}
"""The first entry of each kind."""


@pytest.mark.parametrize(
    "position", [pytest.param(number, marks=[] if number in FIRST else pytest.mark.slow) for number in range(len(LOG))]
)
def test_any_entry(position: int) -> None:
    backend = copy_with({LOG[position]: b"damaged"})
    report = salvage(backend)
    assert report.log
    assert report.lost == ()
    assert_restorable(reopen(backend), LIVE)
    lost, before, after = OPERATIONS[position], view_of(copy_with({})), view_of(backend)
    if lost & {"condemn", "relocate", "sweep"}:
        assert logical(after, windows_begin_anew=True) == logical(before, windows_begin_anew=True)
    assert FREED not in {info.step for info in after.snapshots()}
    assert_gc_frees_the_rest(backend)


@pytest.mark.parametrize(
    ("entries", "is_config_kept"),
    [
        (LOG, True),
        (LOG, False),
        (LOG[3:5], True),
        *(
            pytest.param(LOG[start : start + length], True, marks=pytest.mark.slow)
            for start in range(0, len(LOG) - 3, 4)  # the newest few leave no trace
            for length in (2, 3)
        ),
    ],
    ids=lambda case: len(case) if isinstance(case, list) else case,
)
def test_several_entries(entries: list[str], is_config_kept: bool) -> None:
    """Even without any, it is found where gc moved what."""
    backend = copy_with(dict.fromkeys([*entries, *([] if is_config_kept else ["store.json"])]))
    report = salvage(backend)
    assert report.log
    assert entries != LOG or {found.step for found in report.recovered} == LIVE
    assert_restorable(reopen(backend), LIVE)
    assert_gc_frees_the_rest(backend)


def test_store_json_alone() -> None:
    backend = copy_with({"store.json": None})
    report = salvage(backend)
    assert (report.kept, report.recovered, report.lost, report.left_out) == (len(LIVE), (), (), ())
    assert logical(view_of(backend)) == logical(view_of(copy_with({})))
    assert_restorable(reopen(backend), LIVE)
    assert_gc_frees_the_rest(backend)


def test_the_newest_entries_without_a_trace() -> None:
    """The log seems intact, but says that blocks are in a pack that is gone. A damaged moved object doesn't help."""
    first = next(position for position, ops in enumerate(OPERATIONS) if "relocate" in ops)
    moved = next(key.name for key in needed_by_all(synced(copy_with({}))) if key.kind == "moved")
    for is_damaged in (False, True):
        backend = copy_with(dict.fromkeys(LOG[first:]))
        if is_damaged:
            flip(backend, moved)
        report = salvage(backend)
        assert any("no log entry names" in problem for problem in report.problems) != is_damaged
        assert bool(report.lost) == is_damaged
        assert all("packs/" in lost.note for lost in report.lost)
        if not is_damaged:
            assert_restorable(reopen(backend), LIVE)


# --- what gc let go ---------------------------------------------------------------------------------------------------


def keep_deleted(backend: MemoryBackend, change: Callable[[], object]) -> None:
    """Makes a change whose deletes are lost."""
    before = contents(backend)
    change()
    for name in before.keys() - set(names(backend)):
        backend.put(name, before[name])


@pytest.mark.parametrize("lost", ["store.json", "another entry"])
def test_what_was_swept_stays_gone(lost: str) -> None:
    """Though all of it is still there."""
    backend = copy_with({})
    store = reopen(backend)
    store.forget("runs/c")
    store.forget("runs/a@2")
    keep_deleted(backend, lambda: store.gc(NOW))
    freed = {info.step for info in view_of(copy_with({})).snapshots()} - live_steps(backend)
    assert freed == {5, 7}
    backend.delete([LOG[0] if lost == "another entry" else "store.json"])
    report = salvage(backend)
    assert (report.lost, report.left_out) == ((), ())
    assert live_steps(backend) == LIVE - freed
    assert_gc_frees_the_rest(backend)


def expired() -> MemoryBackend:
    """Snapshot 2 is forgotten for good, and not yet freed."""
    backend, store = begun(1, 2, 3)
    store.forget("runs/a@2")
    store.gc(GcOptions(undo_window_seconds=0))
    store.annotate("runs/a@1", {"x": 1.0})
    return backend


def test_what_expired_is_no_stray() -> None:
    backend = expired()
    backend.delete(["store.json"])
    assert salvage(backend).recovered == ()
    assert live_steps(backend) == {1, 3}
    assert not list(view_of(backend).windows())


def test_what_expired_can_be_undone_where_a_lost_entry_may_have_held_it() -> None:
    backend = expired()
    store = reopen(backend)
    store.engine.log.sync()
    (gone,) = store.engine.log.view().snapshots(live=False)
    store.pin(gone.root.hex(), owner="late")
    store.annotate("runs/a@1", {"x": 2.0})
    before = logical(store.engine.log.view())
    backend.delete([names(backend, "log/")[-2]])
    report = salvage(backend)
    assert [(found.step, "tsck undo" in found.note) for found in report.recovered] == [(2, True)]
    store = reopen(backend)
    assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 1]
    store.gc(GcOptions(min_age_seconds=0, max_delete=1))
    store.undo("runs/a@2")
    assert is_exact(store.checkout("runs/a@2"), 2)
    assert store.branches()["runs/a"].step == 3
    assert before["branches"]["runs/a"][2] == 3


def test_a_lost_undo_leaves_time_for_another() -> None:
    """The undo window would have ended long ago."""
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    for number in (1, 2):
        store.put_snapshot(state(number), ref="runs/a", step=number)
    store.forget("runs/a@1")
    store.undo()
    store.annotate("runs/a", {"x": 1.0})
    backend.delete([names(backend, "log/")[-2]])
    clock.advance(10 * 86_400)
    salvage(backend, clock=clock)
    store = open_store(backend, clock=clock)
    assert store.gc(GcOptions(max_delete=1)).snapshots == ()
    assert [snapshot.step for snapshot in store.undo()[0].snapshots] == [1]


# --- what the old log says is retold, even where it cannot be done the same way ------------------------------------------


def retold(change: Callable[[Store], object], *, damage: int | None = None) -> Store:
    """A store with snapshots 1 to 4 on runs/a, salvaged after a change."""
    backend, store = begun(1, 2, 3, 4)
    change(store)
    if damage is not None:
        info = next(info for info in store.engine.log.view().snapshots() if info.step == damage)
        backend.replace(ObjectKey("snapshot", info.ulid).name, b"damaged")
    before = logical(store.engine.log.view())
    backend.delete(["store.json"])
    report = salvage(backend)
    assert [found.step for found in report.lost] == ([] if damage is None else [damage])
    if damage is None:
        assert logical(view_of(backend)) == before
    intact: set[int | None] = {1, 2, 3, 4}
    assert_restorable(reopen(backend), intact - {damage})
    return reopen(backend)


def steps_of(store: Store, ref: str) -> list[int | None]:
    return [snapshot.step for snapshot in store.log(ref)]


def test_a_branch_that_was_undone_in_part_and_one_that_was_moved_to_the_same_snapshots_again_and_again() -> None:
    def change(store: Store) -> None:
        store.branch("runs/b", "runs/a@4")
        for address in ("runs/a@2", "runs/a@4"):
            store.reset("runs/b", address)
        store.forget("runs/b@2")
        for address in (store.forgotten()[0].snapshots[0].root, "runs/a@4"):
            store.reset("runs/b", address)
        store.forget("runs/a")
        store.undo("runs/a@2")
        store.undo("runs/a@3")

    store = retold(change)
    assert (steps_of(store, "runs/a"), steps_of(store, "runs/b")) == ([3, 2], [4, 2, 4, 4])


def test_a_branch_that_started_over() -> None:
    def change(store: Store) -> None:
        store.tag("kept", "runs/a@3")
        store.forget("runs/a")
        store.branch("runs/a", "kept")
        store.checkout("runs/a")
        store.put_snapshot(state(5), ref="runs/a", step=5)
        store.untag("kept")
        store.tag("kept", "runs/a")

    store = retold(change)
    assert steps_of(store, "runs/a") == [5, 3]
    assert store.tags()["kept"].step == 5


def test_snapshots_that_only_a_pin_or_a_tag_holds() -> None:
    def change(store: Store) -> None:
        store.pin("runs/a@1", owner="one", reason="r", expires=1e6)
        store.pin("runs/a@1", owner="one", reason="again")
        store.tag("two", "runs/a@2")
        store.forget("runs/a@1", "runs/a@2")
        store.gc(GcOptions(undo_window_seconds=0))

    store = retold(change)
    assert [(pin.owner, pin.reason, pin.snapshot.step) for pin in store.pins()] == [("one", "again", 1)]
    assert store.tags()["two"].step == 2


def test_the_head_that_was_not_forgotten_is_damaged() -> None:
    """What stays of the branch stays; what was forgotten is still forgotten."""
    store = retold(lambda store: store.forget("runs/a@3"), damage=4)
    assert steps_of(store, "runs/a") == [2, 1]
    assert [snapshot.step for snapshot in store.forgotten()[0].snapshots] == [3]
    store.undo()
    assert steps_of(store, "runs/a") == [3, 2, 1]


def test_all_that_was_not_forgotten_is_damaged() -> None:
    def change(store: Store) -> None:
        store.branch("runs/b", "runs/a@1")
        store.reset("runs/b", "runs/a@4")
        store.forget("runs/b@1")

    store = retold(change, damage=4)
    assert list(store.branches()) == ["runs/a"]
    store.undo()
    assert steps_of(store, "runs/b") == [1]


def test_what_falls_between_contradictions_gets_a_branch() -> None:
    """A tag is there, and was made again meanwhile, as in a log that lacks entries."""
    backend, store = begun(1, 2, 3)
    for number in (1, 2):
        store.tag("twice", f"runs/a@{number}")
        store.untag("twice")
    store.forget("runs/a@1", "runs/a@2")
    log = store.engine.log
    windows = [window for window in log.view().windows() if window.kind == "tag"]
    forgetting = [window for window in log.view().windows() if window.kind == "snapshots"]
    log.append(lambda _: [Op.undo(windows[0].n, "twice", [windows[0].moves[0].ulid]), Op.purge(forgetting[0].n, "runs/a")])
    backend.delete(["store.json"])
    salvage(backend)
    store = reopen(backend)
    assert_restorable(store, {1, 2, 3})
    assert store.tags() == {}
    assert any(branch.startswith("salvaged/") for branch in store.branches())


# --- relocations ------------------------------------------------------------------------------------------------------


def synced(backend: Backend) -> Store:
    store = reopen(backend)
    store.engine.log.sync()
    return store


def needed_by_all(store: Store) -> set[ObjectKey]:
    return {key for info in store.engine.log.view().snapshots() for key in closure(store, info.root)}


def with_a_pack() -> tuple[MemoryBackend, Store, ObjectKey, Footer]:
    """The store, and a pack that snapshots need."""
    backend = copy_with({})
    store = synced(backend)
    key = max((key for key in needed_by_all(store) if key.kind == "pack"), key=lambda key: backend.size(key.name))
    return backend, store, key, read_footer(backend, key.ulid, backend.size(key.name))


def copy_blocks(store: Store, pack: ObjectKey, footer: Footer, entries: list[int]) -> CompactedPack:
    """Into a new pack; not in force."""
    return compact(store.engine, [SparsePack(pack.ulid, footer, np.array(entries), 0)]).moves[0]


def flip_first_block(backend: Backend, pack: ObjectKey) -> None:
    flip(backend, pack.name, int(read_footer(backend, pack.ulid, backend.size(pack.name)).entries["offset"][0]) + 5)


def assert_exact(store: Store) -> None:
    for info in view_of(store.engine.backend).snapshots():
        assert is_exact(store.checkout(info.root.hex(), allow_marked=True), info.step or 0)


@pytest.mark.parametrize("target", ["gone", "other blocks", "beyond its end", "elsewhere in it"])
def test_a_moved_object_that_leads_astray_is_not_used_while_its_pack_is_there(target: str) -> None:
    backend, store, pack, footer = with_a_pack()
    backend.delete(["store.json"])
    one, other = footer.entries[0], footer.entries[1]
    where = {
        "gone": (0, one["stored"], one["offset"], one["codec"]),
        "other blocks": (1, other["stored"], other["offset"], other["codec"]),
        "beyond its end": (len(footer.entries), one["stored"], one["offset"], one["codec"]),
        "elsewhere in it": (0, one["stored"], other["offset"], one["codec"]),
    }[target]
    entry, stored, offset, codec = map(int, where)
    elsewhere = store.engine.new_id() if target == "gone" else pack.ulid
    rows = np.array([(0, 0, entry, stored, offset, codec, 0, 0)], RELOCATION_DTYPE)
    backend.put(ObjectKey("moved", store.engine.new_id()).name, RelocationMap(pack.ulid, [elsewhere], rows).encode())
    report = salvage(backend)
    assert (report.kept, report.lost) == (len(LIVE), ())
    assert_restorable(reopen(backend), LIVE)


def test_a_pack_that_repair_replaced_is_not_used_again() -> None:
    """The moved object says where its good copies are, though its entry is lost and the pack is there."""
    backend, store, pack, footer = with_a_pack()
    commit_relocation(store.engine, copy_blocks(store, pack, footer, list(range(len(footer.entries)))), 0)
    store.annotate("runs/a", {"x": 1.0})
    flip_first_block(backend, pack)
    backend.delete([names(backend, "log/")[-2]])
    salvage(backend)
    assert_exact(synced(backend))


def test_of_two_relocations_the_newer_counts() -> None:
    backend, store, pack, footer = with_a_pack()
    newer = copy_blocks(store, pack, footer, [0])
    older = copy_blocks(store, pack, footer, list(range(len(footer.entries))))
    commit_relocation(store.engine, older, 0)
    commit_relocation(store.engine, newer, 0)
    flip_first_block(backend, ObjectKey("pack", older.targets[0]))
    assert_exact(synced(backend))
    backend.delete(["store.json"])
    salvage(backend)
    assert_exact(synced(backend))


def test_a_moved_object_that_was_swept_is_not_used() -> None:
    """Its pack is gone, and it is still there: so is a pack that it leads to, which a newer moved object replaced."""
    backend, store, pack, footer = with_a_pack()
    move = copy_blocks(store, pack, footer, list(range(len(footer.entries))))
    moved = ObjectKey("moved", move.ulid)
    listed = Objects([moved, ObjectKey("pack", move.targets[0])])
    for make in (Op.condemn, Op.sweep):
        store.engine.log.append(lambda _, make=make: [make(listed)])  # type: ignore[misc]
    backend.delete([pack.name, "store.json"])
    report = salvage(backend)
    assert report.lost
    assert not any(moved.name in problem for problem in report.problems)


# --- saves that were never published ----------------------------------------------------------------------------------


def test_what_gc_condemned_was_not_published_by_an_entry_before() -> None:
    backend, store = begun(1)
    dying = open_store(FaultyBackend(backend, DiesAt("create log"), atomic_put=True))
    dying.checkout("runs/a")
    with pytest.raises(Death):
        dying.put_snapshot(state(9), ref="runs/a", step=9)
    store.annotate("runs/a", {"x": 1.0})
    store.put_snapshot(state(2), ref="runs/a", step=2)
    store.gc(GcOptions(min_age_seconds=0, grace_seconds=1e6))
    backend.delete([names(backend, "log/")[1]])
    report = salvage(backend)
    assert ([found.step for found in report.recovered], [found.step for found in report.left_out]) == ([], [9])
    assert steps_of(reopen(backend), "runs/a") == [2, 1]
