"""gc as its users see it: what goes, what stays, what it says, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import (
    GcRefusedError,
    InvalidOptionError,
    NotFoundError,
    PermissionDeniedError,
    SnapshotExpiredError,
    UnreadableError,
    UnsafeBackendError,
)
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.store_config import new_config
from tensorstore_ck.gc import GcOptions, GcReport
from tensorstore_ck.log import Objects, Op, SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.gc.interleavings.actor import copy_table
from tests.gc.stores import (
    AT_ONCE,
    FOLDERS,
    Clock,
    State,
    contents,
    contents_without_log,
    copied,
    counts,
    each_call,
    interrupted,
    leave_orphans,
    open_store,
    put_all,
    require_nothing_needed_is_condemned,
    require_readable,
    require_sound,
    same,
    sizes,
    state,
    stay_in_one_thread,
)

DAY = 86_400
COLLECT_ONLY = replace(AT_ONCE, compact_below=0)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


@pytest.fixture
def backend() -> Backend:
    return MemoryBackend()


def operations(store: Store) -> list[str]:
    return [op.name for entry in store.engine.log.entries() for op in entry.ops]


def collect(store: Store, options: GcOptions = AT_ONCE) -> GcReport:
    """A real run after a dry one, which must have said exactly what the real one does."""
    before = contents(store.engine.backend)
    plan = store.gc(options, dry_run=True)
    assert contents(store.engine.backend) == before
    done = store.gc(options)
    assert plan.dry_run
    assert replace(plan, dry_run=False) == done
    after = sizes(store.engine.backend)
    listed = {name: len(data) for name, data in before.items() if name.startswith(FOLDERS)}
    assert done.total_bytes == sum(listed.values())
    assert done.deleted_bytes == sum(size for name, size in listed.items() if name not in after)
    assert done.written_bytes == sum(size for name, size in after.items() if name not in listed)
    assert done.freed_bytes == sum(listed.values()) - sum(after.values())
    gone = [name.split("/")[0] for name in listed if name not in after]
    assert done.deleted == {kind: gone.count(folder) for kind, folder in zip(("pack", "part", "snapshot", "moved"), FOLDERS, strict=True)}
    return done


# --- what goes, and what stays ------------------------------------------------------------------------------------------


def test_what_nothing_holds_goes(backend: Backend) -> None:
    store = open_store(backend)
    put_all(store, "job", [state(1), state(2)])
    put_all(open_store(backend), "other", [state(3)])
    everything = sizes(backend)
    assert collect(store).deleted_bytes == 0
    assert sizes(backend) == everything
    gone = store.resolve("job@1")
    store.forget("job@1")
    report = collect(store)
    assert [(snapshot.id, snapshot.root, snapshot.ref, snapshot.step) for snapshot in report.snapshots] == [(gone.id, gone.root, "job", 1)]
    assert report.deleted == {"pack": 1, "part": 1, "snapshot": 1, "moved": 0}
    require_sound(store, {"job": state(2), "job@2": state(2), "other": state(3)})
    assert collect(store).deleted_bytes == 0
    store.forget("job")
    collect(store)
    assert counts(backend) == {"packs": 1, "parts": 1, "snapshots": 1, "moved": 0}
    require_sound(store, {"other": state(3)})


def in_a_history(store: Store, root: str) -> None:
    store.branch("other", root)
    store.reset("other", "job@2")


HOLDS: dict[str, tuple[Callable[[Store, str], object], Callable[[Store, str], object]]] = {
    "tag": (lambda store, root: store.tag("best", root), lambda store, root: store.untag("best")),
    "pin": (lambda store, root: store.pin(root, owner="me"), lambda store, root: store.unpin(root, owner="me")),
    "branch": (lambda store, root: store.branch("other", root), lambda store, root: store.forget("other")),
    "history": (in_a_history, lambda store, root: store.forget("other@1")),
}


@pytest.mark.parametrize("how", HOLDS)
def test_what_is_held_in_another_way_stays(how: str) -> None:
    hold, let_go = HOLDS[how]
    backend = MemoryBackend()
    store = open_store(backend)
    root = put_all(store, "job", [state(1), state(2)])[0]
    hold(store, root)
    store.forget("job@1")
    assert collect(store).snapshots == ()
    require_sound(store, {root: state(1), "job": state(2)})
    let_go(store, root)
    assert [snapshot.root for snapshot in collect(store).snapshots] == [root]
    assert counts(backend) == {"packs": 1, "parts": 1, "snapshots": 1, "moved": 0}


def test_an_undo_window_holds_until_it_ends() -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    root = put_all(store, "job", [state(1), state(2)])[0]
    clock.advance(100)
    store.forget("job@1")
    options = replace(AT_ONCE, undo_window_seconds=60)
    clock.advance(59)
    assert collect(store, options).snapshots == ()
    assert [window.kind for window in store.forgotten()] == ["snapshots"]
    store.undo()
    store.forget("job@1")
    clock.advance(59)
    assert collect(store, options).snapshots == (), "the window counts from the entry that forgot last"
    clock.advance(1)
    assert [snapshot.root for snapshot in collect(store, options).snapshots] == [root]
    assert store.forgotten() == ()


def test_two_snapshots_with_one_root() -> None:
    backend = MemoryBackend()
    one, other = open_store(backend), open_store(backend)
    first = one.put_snapshot(state(1), ref="one", step=1)
    second = other.put_snapshot(state(1), ref="other", step=1)
    assert first.root == second.root
    assert first.id != second.id
    one.forget("other")
    assert collect(one).deleted == {"pack": 1, "part": 1, "snapshot": 1, "moved": 0}
    require_sound(one, {"one": state(1), first.root: state(1)})
    one.branch("again", first.root)
    one.forget("one")
    collect(one)
    require_sound(open_store(backend), {"again": state(1), first.root: state(1)})


def test_blocks_that_snapshots_share_stay() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    put_all(store, "job", [state(1, 2), state(1, 2, 3), state(1, 2, 3, 4)])
    store.forget("job@1", "job@2")
    collect(store, COLLECT_ONLY)
    assert counts(backend) == {"packs": 3, "parts": 1, "snapshots": 1, "moved": 0}
    require_sound(store, {"job": state(1, 2, 3, 4)})


def test_what_has_another_name_is_left_alone(backend: Backend) -> None:
    store = open_store(backend)
    put_all(store, "job", [state(1)])
    strange = ["packs/notes.txt", "packs/00/README", "packs/00/01ARZ3NDEKTSV4RRFFQ69G5FAV", "elsewhere/AV/01ARZ3NDEKTSV4RRFFQ69G5FAV"]
    for name in strange:
        backend.put(name, b"mine")
    store.gc(AT_ONCE)
    assert all(backend.get(name, max_bytes=4) == b"mine" for name in strange)


# --- options ------------------------------------------------------------------------------------------------------------


def test_young_orphans_stay_until_they_are_old() -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [state(1)])
    leave_orphans(backend, state(2))
    options = replace(AT_ONCE, min_age_seconds=DAY)
    clock.advance(DAY - 1)
    report = collect(store, options)
    assert (report.young, report.deleted_bytes) == (3, 0)
    clock.advance(1)
    report = collect(store, options)
    assert (report.young, report.deleted) == (0, {"pack": 1, "part": 1, "snapshot": 1, "moved": 0})
    require_sound(store, {"job": state(1)})


def test_grace_waits_between_condemning_and_deleting() -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [state(1, 2, 3), state(1)])
    store.forget("job@1")
    options = replace(AT_ONCE, grace_seconds=60)
    gone = store.forgotten()[0].snapshots[0].id
    report = collect(store, options)
    assert (report.deleted_bytes, report.waiting, report.snapshots) == (0, 3, ()), "record, part and the sparse pack"
    before = sizes(backend)
    clock.advance(59)
    report = collect(store, options)
    assert (report.deleted_bytes, report.waiting) == (0, 3)
    assert sizes(backend) == before
    clock.advance(1)
    report = collect(store, options)
    assert (report.deleted, report.waiting) == ({"pack": 1, "part": 1, "snapshot": 1, "moved": 0}, 0)
    assert [snapshot.id for snapshot in report.snapshots] == [gone]
    require_sound(store, {"job": state(1)})


def test_refuses_when_too_much_would_go() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    put_all(store, "job", [state(1, 2, 3), state(4)])
    store.forget("job@1")
    options = replace(AT_ONCE, max_delete=0.5)
    plan = store.gc(options, dry_run=True)
    before = sizes(backend)
    with pytest.raises(GcRefusedError) as refused:
        store.gc(options)
    assert plan.refused == str(refused.value)
    assert f"{plan.freed_bytes} of {plan.total_bytes} bytes ({plan.freed_bytes / plan.total_bytes:.0%})" in str(refused.value)
    assert "50%" in str(refused.value)
    assert sizes(backend) == before
    fraction = plan.freed_bytes / plan.total_bytes
    with pytest.raises(GcRefusedError):
        store.gc(replace(options, max_delete=fraction - 1e-9))
    assert store.gc(replace(options, max_delete=fraction + 1e-9)).freed_bytes == plan.freed_bytes
    require_sound(store, {"job": state(4)})


@pytest.mark.parametrize(
    "options",
    [
        {"min_age_seconds": -1},
        {"grace_seconds": -0.1},
        {"undo_window_seconds": float("nan")},
        {"max_delete": 1.01},
        {"max_delete": -0.1},
        {"compact_below": 2},
        {"compact_bytes": -1},
        {"tombstone_seconds": -1},
    ],
)
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))):
        GcOptions(**options)  # type: ignore[arg-type]


# --- what has run out ---------------------------------------------------------------------------------------------------


def test_more_runs_out_than_one_entry_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.gc.collect.ENDINGS_AN_ENTRY", 2)
    monkeypatch.setattr("tensorstore_ck.gc.collect.OBJECTS_AN_ENTRY", 2)
    store = open_store()
    put_all(store, "job", [state(number) for number in range(6)])
    for step in range(1, 6):
        store.pin(f"job@{step}", expires=0)
        store.forget(f"job@{step}")
    assert len(collect(store).snapshots) == 5, "as the dry run said"
    assert [len(entry.ops) for entry in store.engine.log.entries() if entry.ops[0].name in ("purge", "unpin")] == [2] * 5
    assert sum(entry.ops[0].name == "sweep" for entry in store.engine.log.entries()) > 1
    assert (store.forgotten(), store.pins()) == ((), ())
    require_sound(store, {"job": state(5)})


def test_only_what_was_planned_ends() -> None:
    """After it has planned, another host undoes, pins for longer, and forgets what the plan does not know of."""
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    roots = {ref: put_all(store, ref, [state(number)])[0] for number, ref in enumerate(("undone", "pinned", "late", "gone"))}
    store.pin("pinned", owner="me", expires=0)
    store.forget("pinned", "undone", "gone")

    def act() -> None:
        store.undo("undone")
        store.pin(roots["pinned"], owner="me", expires=DAY)
        store.forget("late")

    collector, faults = interrupted(backend, "put probe", act, clock=clock)
    report = collector.gc(AT_ONCE)
    assert faults.struck
    assert [snapshot.root for snapshot in report.snapshots] == [roots["gone"]]
    assert [window.ref for window in store.forgotten()] == ["late"]
    assert len(store.pins()) == 1
    store.undo()
    require_sound(store, {"undone": state(0), roots["pinned"]: state(1), "late": state(2)})


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "torn", "another"])
@pytest.mark.parametrize("folder", ["snapshots", "parts"])
def test_frees_nothing_while_a_root_cannot_be_read(folder: str, how: str) -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    put_all(store, "job", [state(1), state(2), state(3)])
    store.forget("job@1")
    name = object_names(store, "job@2")[folder]
    data = backend.get(name, max_bytes=1 << 20)
    other = backend.get(object_names(store, "job@3")[folder], max_bytes=1 << 20)
    backend.delete([name])
    if how != "missing":
        backend.put(name, data[:-1] if how == "torn" else other)
    before = sizes(backend)
    for dry_run in (True, False):
        with pytest.raises(UnreadableError, match="job") as refused:
            open_store(backend).gc(AT_ONCE, dry_run=dry_run)
        assert store.resolve("job@2").root[:16] in str(refused.value)
    assert sizes(backend) == before
    store.forget("job@2")
    collect(open_store(backend))
    assert counts(backend) == {"packs": 1, "parts": 1, "snapshots": 1, "moved": 0}
    require_sound(store, {"job": state(3)})


def test_what_cannot_be_read_can_be_released_and_ends_with_its_undo_window() -> None:
    clock = Clock()
    store = open_store(clock=clock)
    put_all(store, "job", [state(1), state(2)])
    store.tag("best", "job@1")
    pinned = store.pin("job@1", owner="me").root
    backend = store.engine.backend
    backend.delete([object_names(store, "job@1")["snapshots"]])

    def advice() -> str:
        with pytest.raises(UnreadableError) as refused:
            store.gc(replace(AT_ONCE, undo_window_seconds=DAY))
        return str(refused.value).partition("how to repair it; or ")[2].replace(" -s memory:", "")

    window = "wait until its undo window has ended"
    assert advice() == f"release it with `tsck unpin {pinned[:16]} --owner me` and `tsck forget best {pinned[:16]}` and {window}"
    store.unpin(pinned, owner="me")
    assert advice() == f"release it with `tsck forget best {pinned[:16]}` and {window}"
    store.forget("job@1", "best")
    assert advice() == window
    clock.advance(DAY)
    store.gc(replace(AT_ONCE, undo_window_seconds=DAY))
    require_sound(store, {"job": state(2)})


@pytest.mark.parametrize("why", ["too much", "unreadable", "clock"])
def test_what_has_run_out_stays_when_gc_refuses(why: str) -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [state(1), state(2), state(3)])
    store.pin("job@1", expires=60)
    store.forget("job@1", "job@2")
    clock.advance(2 * DAY)
    if why == "unreadable":
        backend.delete([object_names(store, "job")["snapshots"]])
    if why == "clock":
        ahead = Clock()
        ahead.advance(4 * DAY)
        store = open_store(backend, clock=ahead)
    before, head = contents_without_log(backend), store.engine.log.sync().n
    with pytest.raises(UnreadableError if why == "unreadable" else GcRefusedError):
        store.gc(GcOptions(min_age_seconds=0, max_delete=0.1 if why == "too much" else 1))
    assert contents_without_log(backend) == before
    assert [op.name for entry in store.engine.log.entries(head + 1) for op in entry.ops] == ["report"]
    assert store.last_runs()["gc"].outcome == ("failed" if why == "unreadable" else "refused")
    assert len(store.pins()) == 1
    store.undo()
    assert store.resolve("job@2").step == 2


def object_names(store: Store, address: str) -> dict[str, str]:
    """Where the record and the part of a snapshot lie."""
    info = resolve(store.engine.log.view(), address).info
    (part,) = store.engine.read_record(info).parts
    return {"snapshots": f"snapshots/{store.resolve(address).id[-2:]}/{store.resolve(address).id}", "parts": part_name(part)}


def test_refuses_when_the_clocks_are_apart() -> None:
    clock = Clock()
    ahead = Clock()
    ahead.advance(600)
    backend = MemoryBackend(clock=ahead)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [state(1), state(2)])
    store.forget("job@1")
    before = contents_without_log(backend)
    with pytest.raises(GcRefusedError, match="600 s apart"):
        store.gc(GcOptions())
    assert contents_without_log(backend) == before, "not even the probe of the clock is left"
    assert "600 s apart" in store.last_runs()["gc"].message
    before = contents(backend)
    assert "600 s apart" in str(store.gc(GcOptions(), dry_run=True).refused)
    assert contents(backend) == before
    clock.advance(301)
    assert store.gc(GcOptions(), dry_run=True).refused is None
    store.gc(GcOptions())


def test_a_wrong_clock_decides_no_dates() -> None:
    """Nor with a min_age of 0: pins and undo windows have dates too. Without any of them the clock does not matter."""
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    right = open_store(backend, clock=clock)
    put_all(right, "job", [state(1), state(2), state(3)])
    ahead = Clock()
    ahead.advance(60 * DAY)
    wrong = open_store(backend, clock=ahead)

    def refuses(options: GcOptions) -> bool:
        refused = wrong.gc(options, dry_run=True).refused
        if refused is None:
            wrong.gc(options)
            return False
        with pytest.raises(GcRefusedError, match="s apart") as raised:
            wrong.gc(options)
        return str(raised.value) == refused

    right.forget("job@1")
    assert refuses(replace(AT_ONCE, undo_window_seconds=DAY))
    assert refuses(replace(AT_ONCE, grace_seconds=DAY))
    right.undo()
    right.pin("job@1", expires=30 * DAY)
    assert refuses(AT_ONCE)
    right.unpin("job@1")
    right.forget("job@1")
    assert not refuses(AT_ONCE)
    require_sound(right, {"job": state(3), "job@2": state(2)})


def test_a_dry_run_that_may_not_write_says_that_it_did_not_ask_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(name: str, data: object) -> None:
        raise PermissionDeniedError(f"may not write {name}")

    store = open_store()
    put_all(store, "job", [state(1)])
    monkeypatch.setattr(store.engine.backend, "put", put)
    plan = store.gc(GcOptions(), dry_run=True)
    assert (plan.refused, ["were not compared" in note for note in plan.notes]) == (None, [True])
    with pytest.raises(PermissionDeniedError):
        store.gc(GcOptions())


def test_refuses_where_commits_have_no_total_order() -> None:
    backend = MemoryBackend()
    config = new_config(exclusive_create=False)
    backend.put("store.json", config.encode())
    store = Store(make_engine(backend, config, MemoryTable(), single_writer=True))
    put_all(store, "job", [state(1), state(2)])
    store.forget("job@1")
    before = contents(backend)
    assert "exclusively" in str(store.gc(AT_ONCE, dry_run=True).refused)
    with pytest.raises(UnsafeBackendError, match="exclusively"):
        store.gc(AT_ONCE)
    assert contents(backend) == before


# --- compaction ---------------------------------------------------------------------------------------------------------


def sparse_store(backend: Backend, **options: object) -> Store:
    """Step 1 of four tensors is forgotten; steps 2 and 3 need one of them, and their own."""
    store = open_store(backend, **options)  # type: ignore[arg-type]
    put_all(store, "job", [state(1, 2, 3, 4), state(1, 5), state(1, 6)])
    store.forget("job@1")
    return store


def test_what_is_live_in_full_is_never_rewritten(backend: Backend) -> None:
    """However much of a small pack its header and footer are."""
    store = open_store(backend)
    put_all(store, "job", [{"step": 1}, {"step": 2, "more": "text"}])
    assert collect(store, replace(AT_ONCE, compact_below=1)).rewritten == ()
    assert counts(backend) == {"packs": 2, "parts": 2, "snapshots": 2, "moved": 0}


def test_a_sparse_pack_is_rewritten(backend: Backend) -> None:
    store = sparse_store(backend)
    parts, snapshots = contents(backend, "parts/"), store.log("job")
    report = collect(store)
    (rewritten,) = report.rewritten
    assert rewritten.live_bytes == 5000
    assert rewritten.bytes > 4 * 5000
    assert report.deleted == {"pack": 1, "part": 1, "snapshot": 1, "moved": 0}
    assert counts(backend) == {"packs": 3, "parts": 2, "snapshots": 2, "moved": 1}
    assert sum(1 for name in sizes(backend) if name == rewritten.name) == 0
    assert contents(backend, "parts/").items() < parts.items(), "parts never change"
    assert store.log("job") == snapshots
    for reader in (store, open_store(backend)):
        require_sound(reader, {"job": state(1, 6), "job@2": state(1, 5), snapshots[0].root: state(1, 6)})
    assert collect(store).rewritten == ()


@pytest.mark.parametrize(("below", "is_rewritten"), [(0.0, False), (0.24, False), (0.25, True), (1.0, True)])
def test_only_packs_below_the_ratio_are_rewritten(below: float, is_rewritten: bool) -> None:
    store = sparse_store(MemoryBackend())
    packs = {pack.name: pack.live_bytes / pack.bytes for pack in store.gc(replace(AT_ONCE, compact_below=1), dry_run=True).rewritten}
    assert min(packs.values()) == pytest.approx(0.2424, abs=1e-3), "a fourth, less what is not blocks"
    report = collect(store, replace(AT_ONCE, compact_below=below))
    assert {pack.name for pack in report.rewritten} == {name for name, ratio in packs.items() if ratio < below}
    assert bool(report.rewritten) is is_rewritten
    require_sound(store, {"job": state(1, 6), "job@2": state(1, 5)})


def test_the_budget_goes_to_what_frees_most() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    for ref, numbers in (("a", (1, 2, 3, 4)), ("b", (11, 12, 13, 14, 15, 16)), ("c", (21, 22, 23))):
        put_all(store, ref, [state(*numbers), state(numbers[0])])
        store.forget(f"{ref}@1")
    options = replace(AT_ONCE, compact_bytes=10_000)
    every = store.gc(AT_ONCE, dry_run=True).rewritten
    assert len(every) == 3
    report = collect(store, options)
    assert report.rewritten == tuple(sorted(every, key=lambda pack: pack.live_bytes / pack.bytes)[:2])
    assert any("1 more packs" in note for note in report.notes)
    assert collect(store, options).rewritten == every[-1:]
    require_sound(store, {"a": state(1), "b": state(11), "c": state(21)})


def test_compressed_blocks_move_as_they_are() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    texts = {"text": "lorem ipsum " * 40_000, "noise": state(9)["t9"].numpy().tobytes() * 15}  # type: ignore[attr-defined]
    put_all(store, "job", [{**state(*range(20, 60)), **texts}, texts])
    before = store.show("job").stored_bytes
    store.forget("job@1")
    report = collect(store)
    assert len(report.rewritten) == 1
    assert report.rewritten[0].live_bytes < 200_000
    require_sound(store, {"job": texts})
    assert store.show("job").stored_bytes == before


@pytest.mark.parametrize("is_local", [False, True])
def test_readers_across_two_compactions(tmp_path: Path, *, is_local: bool) -> None:
    """A chain of relocations: the pack that the first wrote is rewritten by the second."""
    backend = LocalBackend(str(tmp_path)) if is_local else MemoryBackend()
    store = open_store(backend)
    store.put_snapshot(state(*range(12)), ref="job", step=1)
    store.put_snapshot(state(*range(4)), ref="job", step=2)
    last = store.put_snapshot(state(0), ref="job", step=3)
    other = open_store(backend)
    old_reader, middle = SnapshotReader(store.engine, resolved(store, "job")), SnapshotReader(other.engine, resolved(other, "job@2"))
    with store.open_snapshot("job") as opened, store.open_snapshot("job@2") as doomed:
        store.forget("job@1")
        assert len(collect(store).rewritten) == 1
        assert same({"t0": opened["t0"][:]}, state(0))
        assert bytes(middle.read_range(0, 0, 5000)) == state(0)["t0"].numpy().tobytes()  # type: ignore[attr-defined]
        assert same({"t1": doomed["t1"][:]}, state(1))
        store.forget("job@2")
        assert len(collect(store).rewritten) == 1
        assert counts(backend)["moved"] == 2
        assert same({"t0": opened["t0"][:]}, state(0))
        assert bytes(old_reader.read_range(0, 0, 5000)) == state(0)["t0"].numpy().tobytes()  # type: ignore[attr-defined]
        with pytest.raises(SnapshotExpiredError):
            doomed["t2"][:]
        with pytest.raises(SnapshotExpiredError):
            middle.read_range(1, 0, 5000)
    for reader in (store, other, open_store(backend)):
        require_sound(reader, {"job": state(0), last.root: state(0)})
    store.put_snapshot(state(99), ref="job", step=4)
    store.forget("job@3")
    collect(store)
    assert counts(backend) == {"packs": 1, "parts": 1, "snapshots": 1, "moved": 0}, "relocations go with the last that needs them"
    require_sound(store, {"job": state(99)})


def resolved(store: Store, address: str) -> SnapshotRow:
    store.engine.log.sync()
    return resolve(store.engine.log.view(), address).info


def test_a_save_after_compaction_reuses_what_was_moved(backend: Backend) -> None:
    table = MemoryTable()
    store = sparse_store(backend, table=table)
    collect(store)
    for handle in (store, open_store(backend, table=table), open_store(backend)):
        handle.checkout("job")
        before = counts(backend)["packs"]
        added = handle.put_snapshot(state(1, 6), ref="job", step=9)
        assert counts(backend)["packs"] == before
        assert added.new_bytes < 2000
    store.checkout("job")
    added = store.put_snapshot(state(1, 7), ref="job", step=10)
    assert 5000 < added.new_bytes < 7000
    everything = {"job": state(1, 7), "job@9": state(1, 6), "job@3": state(1, 6)}
    require_sound(store, everything)
    store.forget("job@2", "job@3")
    collect(store)
    require_sound(open_store(backend), {"job": state(1, 7), "job@9": state(1, 6)})


def test_a_block_that_lies_in_two_sparse_packs_is_copied_once() -> None:
    backend = MemoryBackend()
    for ref, first in (("a", state(1, 2, 3, 4)), ("b", state(1, 5, 6, 7))):
        cold = open_store(backend)  # knows nothing of what the other wrote
        put_all(cold, ref, [first, state(1)])
    store = open_store(backend)
    store.forget("a@1", "b@1")
    report = collect(store)
    assert len(report.rewritten) == 2
    assert report.written_bytes < 2 * 5000
    assert counts(backend)["packs"] == 3
    require_sound(store, {"a": state(1), "b": state(1)})


def test_a_pack_with_a_damaged_block_is_left_as_it_is() -> None:
    backend = MemoryBackend()
    store = sparse_store(backend)
    put_all(open_store(backend), "other", [state(11, 12, 13), state(11)])
    store.forget("other@1")
    names = {pack.name for pack in store.gc(AT_ONCE, dry_run=True).rewritten}
    assert len(names) == 2
    (damaged,) = (name for name in names if state(1)["t1"].numpy().tobytes() in backend.get(name, max_bytes=1 << 20))  # type: ignore[attr-defined]
    data = bytearray(backend.get(damaged, max_bytes=1 << 20))
    data[data.index(state(1)["t1"].numpy().tobytes()) + 100] ^= 1  # type: ignore[attr-defined]
    backend.replace(damaged, data)
    report = store.gc(AT_ONCE)
    assert [note for note in report.notes if damaged in note]
    assert {pack.name for pack in report.rewritten} == names - {damaged}
    assert damaged in sizes(backend)
    assert same(store.checkout("other"), state(11))
    data[data.index(state(1)["t1"].numpy().tobytes()[:100]) + 100] ^= 1  # type: ignore[attr-defined]
    backend.replace(damaged, data)
    require_sound(store, {"job": state(1, 6), "other": state(11)})


@pytest.mark.parametrize("tombstone_seconds", [0, DAY])
def test_copies_that_another_gc_freed_are_not_used(tombstone_seconds: float) -> None:
    """The other gc saw them as garbage. Where it also forgot their tombstones, only the age of the plan shows it."""
    backend = MemoryBackend()
    sparse_store(backend)
    other = replace(COLLECT_ONLY, tombstone_seconds=tombstone_seconds)
    collector, faults = interrupted(backend, "put moved", lambda: open_store(backend).gc(other))
    report = collector.gc(AT_ONCE)
    assert faults.struck
    assert (report.notes, report.rewritten) == ((), ())
    reader = open_store(backend)
    require_nothing_needed_is_condemned(reader)
    require_sound(reader, {"job": state(1, 6), "job@2": state(1, 5)})


# --- settle -------------------------------------------------------------------------------------------------------------


def test_tombstones_are_forgotten_after_a_while() -> None:
    clock, table = Clock(), MemoryTable()
    backend = MemoryBackend(clock=clock)
    store = sparse_store(backend, clock=clock, table=table)
    options = replace(AT_ONCE, tombstone_seconds=60)
    asleep = open_store(backend)
    asleep.checkout("job")
    collect(store, options)
    log = store.engine.log
    assert len([1 for _, row in log.view().objects() if row.swept]) == 3
    clock.advance(59)
    collect(store, options)
    assert log.view().horizon() == 0
    clock.advance(1)
    collect(store, options)
    assert log.view().horizon() > 0
    assert [key.kind for key, _ in log.view().objects()] == ["pack"], "one with a relocation away from it is remembered"
    for handle in (store, open_store(backend, table=table), open_store(backend)):
        require_sound(handle, {"job": state(1, 6), "job@2": state(1, 5)})
    asleep.put_snapshot(state(1, 6, 7), ref="job", step=4)
    require_sound(store, {"job": state(1, 6, 7), "job@3": state(1, 6)})
    store.forget("job@2", "job@3")
    collect(store, options)
    store.forget("job")
    collect(store, options)
    assert sizes(backend) == {}
    clock.advance(60)
    collect(store, options)
    assert list(log.view().objects()) == []


# --- while others are at work -------------------------------------------------------------------------------------------


FORGETFUL = [
    (address, options)
    for options in (AT_ONCE, COLLECT_ONLY, replace(AT_ONCE, tombstone_seconds=0), replace(AT_ONCE, grace_seconds=60))
    for address in ("job", "job@1")
]


@pytest.mark.race
def test_a_save_while_what_it_reuses_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each backend call of a save another host forgets all or some snapshots with its blocks, and runs gc."""
    stay_in_one_thread(monkeypatch)
    template, known = MemoryBackend(clock=Clock()), MemoryTable()
    put_all(open_store(template, table=known), "job", [state(1, 2, 3), state(1, 2), state(1, 4)])

    def run(at: int, variant: tuple[str, GcOptions]) -> str:
        address, options = variant
        ref = "new" if address == "job" else "job"
        clock, table = Clock(), copy_table(known)
        backend = copied(template, clock)
        other = open_store(backend, clock=clock)

        def free() -> None:
            other.forget(address)
            other.gc(options)

        store, faults = interrupted(backend, at, free, table=table, clock=clock)
        store.put_snapshot(state(1, 2, 4, 5), ref=ref, step=4, expect=ANY)
        held = {ref: state(1, 2, 4, 5)} | ({"job@2": state(1, 2), "job@3": state(1, 4)} if ref == "job" or not faults.struck else {})
        require_readable(open_store(backend), held)
        clock.advance(100)
        other.gc(options)
        require_sound(open_store(backend), held)
        return faults.struck

    for address in ("job", "job@1"):  # a save to a new branch makes fewer calls
        variants = [variant for variant in FORGETFUL if variant[0] == address]
        assert {"get", "size", "open", "append", "close", "put", "create"} <= each_call(run, variants)


def test_a_save_that_meets_condemned_blocks_rescues_them() -> None:
    """Nothing is written a second time: grace is for that."""
    clock, table = Clock(), MemoryTable()
    backend = MemoryBackend(clock=clock)
    host = open_store(backend, table=table, clock=clock)
    put_all(host, "job", [state(1, 2, 3)])
    other = open_store(backend, clock=clock)
    packs = counts(backend)["packs"]

    def condemn() -> None:
        other.forget("job")
        other.gc(replace(AT_ONCE, grace_seconds=60))

    store, _ = interrupted(backend, "put parts", condemn, table=table, clock=clock)
    added = store.put_snapshot(state(1, 2, 3), ref="new", step=1)
    assert counts(backend)["packs"] == packs
    assert added.new_bytes < 2000
    assert operations(store)[-2:] == ["put", "rescue"]
    clock.advance(100)
    assert other.gc(replace(AT_ONCE, grace_seconds=60)).deleted == {"pack": 0, "part": 1, "snapshot": 1, "moved": 0}
    require_sound(other, {"new": state(1, 2, 3)})


ACTIONS = ["put", "undo", "branch", "forget", "gc", "tag", "put to another branch", "forget and gc", "pin"]


@pytest.mark.slow
@pytest.mark.race
def test_gc_while_others_change_the_roots() -> None:
    """At each backend call of gc, compaction included, another host does something in full."""
    outcomes = set()
    built, known = Clock(), MemoryTable()
    template = MemoryBackend(clock=built)
    store = sparse_store(template, table=known, clock=built)
    lost = store.put_snapshot(state(10, 11), ref="lost", step=1).root
    store.forget("lost")
    built.advance(100)
    store.put_snapshot(state(20, 21), ref="late", step=1)
    store.forget("late")

    def run(at: int, action: str) -> str:
        clock = Clock(built.now_ns)
        backend = copied(template, clock)
        held: dict[str, State] = {"job@2": state(1, 5), "job@3": state(1, 6)}
        other = open_store(backend, table=copy_table(known), clock=clock)
        options = replace(AT_ONCE, undo_window_seconds=50)

        def act() -> None:
            match action:
                case "put":
                    other.put_snapshot(state(1, 2, 10), ref="job", step=4, expect=ANY)
                    held["job@4"] = state(1, 2, 10)
                case "put to another branch":
                    other.put_snapshot(state(1, 2, 3, 10, 11), ref="lost", step=1, expect=ANY)
                    held["lost"] = state(1, 2, 3, 10, 11)
                case "branch" | "tag" | "pin":
                    try:
                        other.pin(lost) if action == "pin" else getattr(other, action)("found", lost)
                    except (NotFoundError, SnapshotExpiredError) as exc:
                        outcomes.add(type(exc).__name__)
                    else:
                        outcomes.add("held")
                        held[lost] = state(10, 11)
                case "undo":
                    other.undo("late")
                    held["late"] = state(20, 21)
                case "forget":
                    other.forget("job@2")
                    held.pop("job@2")
                case "gc":
                    other.gc(options)
                case "forget and gc":
                    other.forget("job@2")
                    held.pop("job@2")
                    clock.advance(100)
                    other.gc(options)

        collector, faults = interrupted(backend, at, act, clock=clock)
        collector.gc(options)
        reader = open_store(backend)
        require_readable(reader, held)
        require_nothing_needed_is_condemned(reader)
        collector.gc(options)
        require_sound(reader, held)
        return faults.struck

    assert {"get", "list", "read", "open", "append", "close", "put", "create", "delete"} <= each_call(run, ACTIONS)
    assert outcomes == {"held", "NotFoundError"}


@pytest.mark.race
def test_a_checkout_while_it_is_freed() -> None:
    outcomes = set()
    template = MemoryBackend()
    put_all(open_store(template), "job", [{**state(1, 2, 3), "text": "text " * 20_000}, state(1, 3)])

    def run(at: int, _: None) -> str:
        backend = copied(template)
        other = open_store(backend)

        def free() -> None:
            other.forget("job@1")
            other.gc(AT_ONCE)

        store, faults = interrupted(backend, at, free)
        try:
            assert same(store.checkout("job@1"), {**state(1, 2, 3), "text": "text " * 20_000})
            outcomes.add("ok")
        except (NotFoundError, SnapshotExpiredError) as exc:
            outcomes.add(type(exc).__name__)
        return faults.struck

    assert {"get", "read"} <= each_call(run, [None])
    assert outcomes == {"ok", "NotFoundError", "SnapshotExpiredError"}


@pytest.mark.race
def test_a_checkout_while_its_blocks_are_moved() -> None:
    template = MemoryBackend()
    put_all(open_store(template), "job", [state(*range(12)), state(0, 1, 2, 3), state(0, 20)])

    def run(at: int, _: None) -> str:
        backend = copied(template)
        store = open_store(backend)

        def move() -> None:
            for step in (1, 2):
                store.forget(f"job@{step}")
                assert store.gc(AT_ONCE).rewritten

        reader, faults = interrupted(backend, at, move)
        assert same(reader.checkout("job"), state(0, 20))
        return faults.struck

    assert {"get", "read"} <= each_call(run, [None])


# --- what was let go, and not freed yet ---------------------------------------------------------------------------------


HOLD_AGAIN: dict[str, Callable[[Store, str], object]] = {
    "branch": lambda store, root: store.branch("again", root),
    "reset": lambda store, root: store.reset("other", root),
    "tag": lambda store, root: store.tag("again", root),
    "pin": lambda store, root: store.pin(root),
}


@pytest.mark.parametrize("how", HOLD_AGAIN)
@pytest.mark.parametrize("options", [GcOptions(undo_window_seconds=0), replace(AT_ONCE, grace_seconds=60)], ids=["young", "condemned"])
def test_an_expired_snapshot_can_be_held_again(how: str, options: GcOptions) -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    root = put_all(store, "job", [state(1, 2)])[0]
    bystander = put_all(store, "other", [state(3)])[0]
    store.forget("job")
    assert store.gc(options).snapshots == (), "it waits"
    with pytest.raises(NotFoundError):
        store.undo()
    HOLD_AGAIN[how](open_store(backend, clock=clock), root)
    clock.advance(2 * DAY)
    for _ in range(2):
        store.gc(replace(options, min_age_seconds=0))
        require_sound(store, {root: state(1, 2), bystander: state(3)})


@pytest.mark.parametrize("how", HOLD_AGAIN)
def test_a_freed_snapshot_cannot_be_held_again(how: str) -> None:
    store = open_store()
    root = put_all(store, "job", [state(1, 2)])[0]
    put_all(store, "other", [state(1)])
    store.forget("job")
    store.gc(AT_ONCE)
    with pytest.raises((NotFoundError, SnapshotExpiredError)):
        HOLD_AGAIN[how](store, root)
    with pytest.raises(NotFoundError):
        store.checkout(root)
    require_sound(store, {"other": state(1)})


def test_half_swept_snapshots_cannot_be_held_again() -> None:
    """The pack is swept, the record is not yet: as after a gc that died between two sweep entries."""
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    root = put_all(store, "job", [state(1, 2)])[0]
    put_all(store, "other", [state(3)])
    store.forget("job")
    store.gc(replace(AT_ONCE, grace_seconds=60))
    view = store.engine.log.view()
    packs = Objects(key for key, _ in view.objects() if key.kind == "pack")
    assert packs
    store.engine.log.append(lambda view: [Op.sweep(packs)])
    for hold in HOLD_AGAIN.values():
        with pytest.raises(SnapshotExpiredError, match="gc freed"):
            hold(store, root)
    clock.advance(100)
    collect(store)
    require_sound(store, {"other": state(3)})
