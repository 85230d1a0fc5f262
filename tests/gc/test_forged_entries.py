"""A writer who may only create objects appends what it likes: the keeper's gc deletes nothing that was needed within the undo window."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import ObjectInfo
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.record import record_name
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import Op
from tensorstore_ck.log.entry import entry_name
from tests.effort import in_turns
from tests.gc.forged import (
    DAY_NS,
    Forgery,
    condemn_all,
    end_all_windows,
    forge,
    forget_tombstones,
    needed_objects,
    pin_with_a_past_date,
    release_all,
    sweep_all,
)
from tests.gc.relocated import footer_of, packs_of, relocate
from tests.gc.stores import Clock, open_store, put_all, require_readable, sizes, state, stay_in_one_thread

KEEPER = GcOptions(min_age_seconds=0, max_delete=1, compact_below=0)
"""The least careful keeper that leaves undo windows alone."""
KINDS = ("pack", "part", "snapshot", "moved")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


class World:
    """A store, its job, and a ledger of what was needed when; every run of gc is a keeper's on a host of its own."""

    def __init__(self, backend: MemoryBackend | None = None) -> None:
        self.clock = Clock()
        self.backend = backend or MemoryBackend(clock=self.clock)
        self.job = open_store(self.backend, clock=self.clock)
        self._needed_ns: dict[str, int] = {}

    def filled(self) -> "World":
        put_all(self.job, "job", [state(1), state(1, 2), state(3)])
        put_all(self.job, "other", [state(2, 4)])
        self.job.tag("kept", "job@1")
        self.job.pin("job@2", owner="ada")
        self.clock.advance(2 * 86_400)
        self.note()
        return self

    def note(self) -> None:
        self._needed_ns.update(dict.fromkeys(needed_objects(self.job.engine), self.clock.now_ns))

    def gc(self, options: GcOptions = KEEPER) -> None:
        open_store(self.backend, clock=self.clock).gc(options)
        self.check()

    def check(self) -> None:
        """What was needed within the last day is there."""
        young = {name for name, at_ns in self._needed_ns.items() if at_ns > self.clock.now_ns - DAY_NS}
        assert young <= sizes(self.backend).keys()

    def attack(self, *forgeries: Forgery) -> None:
        for forgery in forgeries:
            forge(self.job.engine, forgery)
            self.gc()

    def wait(self, days: float) -> None:
        self.clock.advance(days * 86_400)


def condemn(*kinds: str) -> Callable[[World], Forgery]:
    return lambda world: condemn_all(world.backend, *kinds)


def sweep(*kinds: str) -> Callable[[World], Forgery]:
    return lambda world: sweep_all(world.backend, *kinds)


def plain(forgery: Forgery) -> Callable[[World], Forgery]:
    return lambda _: forgery


RELEASE, PURGE, SETTLE = plain(lambda view: [*release_all(view)]), plain(lambda view: [*end_all_windows(view)]), plain(forget_tombstones)
RELEASING = {
    "an entry of long ago": [RELEASE],
    "a window that is ended": [RELEASE, PURGE],
    "a pin that has run out": [plain(lambda view: [*pin_with_a_past_date(view), *(op for op in release_all(view) if op.name != "unpin")])],
}
SWEEPING = {
    "what is live is condemned": [condemn(*KINDS)],
    "what is live is swept": [condemn(*KINDS), sweep(*KINDS)],
    "a pack alone": [condemn("pack"), sweep("pack")],
    "all of it": [RELEASE, PURGE, condemn(*KINDS), sweep(*KINDS)],
    "and the log forgets it": [RELEASE, PURGE, condemn(*KINDS), sweep(*KINDS), SETTLE],
}


@pytest.mark.parametrize("attack", RELEASING)
def test_what_was_released_stays_for_the_undo_window_and_can_be_held_again(attack: str) -> None:
    world = World().filled()
    roots = {info.root: content for info, content in zip(world.job.log("job"), [state(3), state(1, 2), state(1)], strict=True)}
    world.attack(*(make(world) for make in RELEASING[attack]))
    world.wait(0.99)
    world.gc()
    for number, root in enumerate(roots):
        world.job.branch(f"back{number}", root)
    require_readable(world.job, roots)
    for number in range(len(roots)):
        world.job.forget(f"back{number}")
    world.note()
    world.wait(2)
    for _ in range(2):
        world.gc()  # by then it is as any other forgotten snapshot
        world.wait(2)
    assert not sizes(world.backend)


@pytest.mark.parametrize("attack", SWEEPING)
def test_a_sweep_is_no_proof(attack: str) -> None:
    world = World().filled()
    before = sizes(world.backend)
    world.attack(*(make(world) for make in SWEEPING[attack]))
    world.wait(0.99)
    world.gc()
    assert sizes(world.backend) == before
    if "live" in attack:
        require_readable(world.job, {"job": state(3), "job@2": state(1, 2), "kept": state(1), "other": state(2, 4)})
        put_all(world.job, "new", [state(1, 2)])
        world.wait(2)
        world.gc()
        require_readable(world.job, {"job": state(3), "kept": state(1), "new": state(1, 2)})


def test_honest_gc_frees_what_was_forgotten_when_its_window_ends() -> None:
    world = World().filled()
    world.job.unpin("job@2", owner="ada")
    world.job.forget("job@2", "other")
    world.wait(0.9)
    world.gc()
    world.wait(0.2)
    world.gc()
    assert len(sizes(world.backend)) == 3 * 2


# --- relocations ------------------------------------------------------------------------------------------------------


def compacted() -> World:
    """A store whose only pack in use was rewritten long ago: the map leads there."""
    world = World()
    put_all(world.job, "job", [state(1, 2, 3, 4), state(1)])
    world.job.forget("job@1")
    world.wait(2)
    open_store(world.backend, clock=world.clock).gc(replace(KEEPER, compact_below=1))
    world.wait(9)
    world.gc(replace(KEEPER, compact_below=1))
    world.note()
    require_readable(world.job, {"job": state(1)})
    assert [name for name in sizes(world.backend) if name.startswith("moved/")]
    return world


def lead_astray(world: World) -> None:
    """Says that the entries of every pack are in one that holds something else."""
    packs = {*packs_of(world.job.engine), *(pack for pack, _ in world.job.engine.log.newest_view().all_relocations())}
    put_all(world.job, "mallory", [state(90, 91, 92, 93, 94)])
    (bait,) = {*packs_of(world.job.engine)} - packs
    footer = footer_of(world.job.engine, bait)
    mallory = open_store(world.backend, clock=world.clock)
    relocate(mallory.engine, [(pack, [(entry, bait, entry) for entry in range(4)]) for pack in sorted(packs)], footer)


@pytest.mark.parametrize("is_swept", [False, True])
@pytest.mark.parametrize("is_led_astray", [False, True])
def test_what_relocations_lead_to_and_from_stays(*, is_led_astray: bool, is_swept: bool) -> None:
    world = compacted()
    if is_led_astray:
        lead_astray(world)
        world.gc()
    if is_swept:
        world.attack(condemn_all(world.backend, "moved"), sweep_all(world.backend, "moved"))
    world.attack(condemn_all(world.backend, "pack"), sweep_all(world.backend, "pack"))
    world.wait(0.9)
    world.gc()


# --- a job that frees what its policy dropped -------------------------------------------------------------------------


def dropping() -> World:
    world = World()
    world.job.set_policy("job", keep_last=1)
    put_all(world.job, "other", [state(1), state(2)])
    put_all(world.job, "job", [state(1, 3), state(3, 4)])
    world.note()
    return world


def test_a_job_frees_what_its_own_saves_dropped_alone() -> None:
    """Whoever may append can append an entry that publishes to the job's branch, and forgets the rest of it."""
    world = dropping()
    world.job.set_policy("job", keep_last=9)
    put_all(world.job, "job", [state(5), state(6)])
    world.note()
    info = world.job.engine.log.newest_view().by_root(bytes.fromhex(world.job.resolve("job").root))
    assert info is not None
    record = world.job.engine.read_record(info)
    gone = [move.ulid for move in world.job.engine.log.view().moves("job")][1:]
    put = Op.put("job", ulid := new_ulid(), record, record.encode(), anchor=0, txn=new_ulid())
    world.backend.put(record_name(ulid), record.encode())
    forge(world.job.engine, lambda _: [put, Op.expire("job", gone)])
    forge(world.job.engine, lambda view: [*end_all_windows(view)])
    world.job.put_snapshot(state(7), ref="job", step=9, expect=ANY)
    world.job.free_dropped("job")
    world.check()


@pytest.mark.parametrize("attack", ["released", "condemned"])
def test_a_job_frees_nothing_that_others_need(attack: str) -> None:
    """A pack of the dropped snapshot holds blocks of another branch."""
    world = World()
    world.job.set_policy("job", keep_last=1)
    put_all(world.job, "job", [state(1, 2)])
    world.job.branch("other", "job")
    root = world.job.put_snapshot(state(1), ref="other", step=2).root
    world.job.forget("other@1")
    world.wait(2)
    world.gc()
    for step in (2, 3):
        world.job.put_snapshot(state(step + 3), ref="job", step=step)
    if attack == "released":
        forge(world.job.engine, lambda _: [Op.expire("other", None)])
        forge(world.job.engine, lambda view: [Op.purge(window.n, "other") for window in view.windows() if window.name == "other"])
    else:
        forge(world.job.engine, condemn_all(world.backend, "pack"))
    assert world.job.free_dropped("job").snapshots == 1
    if attack == "released":
        world.job.branch("other", root)
    require_readable(world.job, {"other": state(1)})


# --- the store's time -------------------------------------------------------------------------------------------------


class Timeless(MemoryBackend):
    """A backend that does not say when it got an object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (info._replace(stored_ns=0) for info in super().list(prefix))


def test_without_times_an_entry_is_as_old_as_this_host_has_seen_it() -> None:
    world = World()
    world.backend = Timeless(clock=world.clock)
    world.job = keeper = open_store(world.backend, clock=world.clock)
    put_all(keeper, "job", [state(1), state(2)])
    world.job = open_store(world.backend, clock=world.clock)
    world.note()
    forge(world.job.engine, lambda view: [*release_all(view)])
    for _ in range(3):
        keeper.gc(KEEPER)
        world.check()
        world.wait(0.4)
    keeper.gc(KEEPER)
    assert not sizes(world.backend)


def test_a_writer_of_a_folder_sets_no_time_that_counts(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "ck", create=True, no_sync=True, cache_dir=tmp_path / "a", state_dir=tmp_path / "a") as store:
        for step in range(3):
            store.put_snapshot({"w": torch.full((5000,), float(step))}, ref="r", step=step, expect=tsck.ANY)
        numbers = [forge(store.engine, lambda view: [*release_all(view)]), forge(store.engine, lambda view: [*end_all_windows(view)])]
    for path in (tmp_path / "ck").rglob("*"):
        os.utime(path, (0, 0))
    assert (tmp_path / "ck" / entry_name("log", numbers[0])).stat().st_mtime == 0
    with tsck.open(tmp_path / "ck", no_sync=True, cache_dir=tmp_path / "b", state_dir=tmp_path / "b") as store:
        assert store.gc(KEEPER).deleted_bytes == 0
        assert store.gc(replace(KEEPER, undo_window_seconds=0)).deleted["pack"] == 3


# --- all orders -------------------------------------------------------------------------------------------------------


def honest(world: World) -> list[Callable[[], object]]:
    return [
        lambda: world.job.put_snapshot(state(1, 7), ref="other", step=9, expect=ANY),
        lambda: world.job.forget("job@1"),
        lambda: world.wait(0.6),
        world.gc,
    ]


def forged_steps(world: World, makes: Sequence[Callable[[World], Forgery]]) -> list[Callable[[], object]]:
    return [partial(lambda make: forge(world.job.engine, make(world)), make) for make in makes]


PLANS = {
    "released": [RELEASE, PURGE, condemn(*KINDS), sweep(*KINDS)],
    "swept": [condemn(*KINDS), sweep(*KINDS), SETTLE, RELEASE],
    "twice": [condemn("pack"), RELEASE, sweep("pack"), PURGE],
    "forgotten": [RELEASE, condemn("snapshot", "part"), sweep("snapshot", "part"), SETTLE],
}


VARIANTS = [(plan, order) for order in permutations(range(4)) for plan in PLANS]
"""A plan, and an order of the honest operations."""


@pytest.mark.slow
@pytest.mark.race
def test_all_orders_of_four_forged_and_four_honest_operations() -> None:
    """Each way to merge the two sequences, with the honest one in any order: 70 of 6,720 cases, and all in `make soak` (a quarter hour)."""
    merges = list(combinations(range(8), 4))
    for number, (plan, ours_in_order) in in_turns(range(len(merges)), VARIANTS):
        world = World().filled()
        steps, theirs = honest(world), iter(forged_steps(world, PLANS[plan]))
        ours = iter([steps[at] for at in ours_in_order])
        for place in range(8):
            with suppress(StoreError):  # what was released cannot be forgotten, and the like
                next(theirs if place in merges[number] else ours)()
            world.note()
        for days in (0, 0.3, 0.3):
            world.wait(days)
            world.gc()
