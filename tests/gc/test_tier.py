"""What policies say of age: packs are encoded smaller and move to colder locations, are read there, and come back."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import BackendUnavailableError, GcRefusedError, InvalidOptionError, InvalidUrlError, PlaceUnavailableError
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.gc.compact import SparsePack
from tensorstore_ck.log.entry import EntryReader
from tensorstore_ck.maintenance.copy_store import copy
from tensorstore_ck.maintenance.salvage import salvage
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import (
    AT_ONCE,
    Clock,
    Noted,
    copied,
    each_call,
    interrupted,
    open_store,
    require_sound,
    same,
    state,
    stay_in_one_thread,
)

DAY_SECONDS = 86_400
COLD = "s3://cold/ckpt"
COLDER = "s3://colder/ckpt"


class Places:
    """A store, and the locations to which its packs may be moved."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.own = MemoryBackend(clock=self.clock)
        self.others: dict[str, MemoryBackend] = {}

    def open_place(self, url: str) -> Backend:
        return self.others.setdefault(url, MemoryBackend(clock=self.clock))

    def open(self, own: Backend | None = None, open_place: Callable[[str], Backend] | None = None) -> tsck.Store:
        return open_store(own or self.own, clock=self.clock, open_place=open_place or self.open_place)

    def copied(self) -> "Places":
        """With the same objects in the store itself, from which nothing was moved yet."""
        copy = Places()
        copy.clock.now_ns = self.clock.now_ns
        copy.own = copied(self.own, copy.clock)
        return copy

    def packs(self) -> dict[str, int]:
        """Location -> bytes of packs there."""
        there = {"own": self.own, **{url.partition("://")[2].partition("/")[0]: place for url, place in self.others.items()}}
        found = {name: sum(info.size_bytes for info in place.list("packs/")) for name, place in there.items()}
        return {name: size for name, size in found.items() if size}


def cut(places: Places) -> Callable[[str], Any]:
    """Opens locations that do not answer."""
    return lambda url: FaultyBackend(places.open_place(url), Faults("unavailable", 1, persistent=True), atomic_put=True)


def put_daily(places: Places, store: tsck.Store, days: int, ref: str = "run", first: int = 0) -> dict[str, Any]:
    """A snapshot a day, each with a block of its own and one that it has from the day before; address -> state."""
    states = {}
    for day in range(first, first + days):
        states[f"{ref}@{day}"] = state(day, day + 1)
        store.put_snapshot(states[f"{ref}@{day}"], ref=ref, step=day)
        places.clock.advance(DAY_SECONDS)
    return states


def moved(days: int, after: str) -> tuple[Places, tsck.Store, dict[str, Any]]:
    """A store with a snapshot a day, of which the older ones are only at the colder location."""
    places = Places()
    store = places.open()
    states = put_daily(places, store, days)
    store.set_policy("run", move_after=(after, COLD))
    store.migrate_tiers()
    store.gc(AT_ONCE)
    return places, store, states


def test_old_packs_go_and_are_read_where_they_lie() -> None:
    places = Places()
    store = places.open()
    states = put_daily(places, store, 5)
    roots = [snapshot.root for snapshot in store.log("run")]
    before = places.packs()
    store.set_policy("run", move_after=[("36h", COLD), ("3d", COLDER)])
    planned = store.migrate_tiers(dry_run=True)
    assert places.packs() == before
    done = store.migrate_tiers()
    assert [(pack.name, pack.place) for pack in done.packs] == [(pack.name, pack.place) for pack in planned.packs]
    assert {str(pack.place).partition("/ckpt")[0] for pack in done.packs} == {"s3://cold", "s3://colder"}
    assert all(str(pack.place).endswith(store.engine.config.uuid) for pack in done.packs)
    store.gc(AT_ONCE)
    after = places.packs()
    assert after.keys() == {"own", "cold", "colder"}
    assert after["own"] < before["own"]
    assert [snapshot.root for snapshot in store.log("run")] == roots
    for reader in (store, places.open()):
        require_sound(reader, states)
    assert store.migrate_tiers().packs == ()
    usage = store.usage()
    assert {place.url.partition("/ckpt")[0]: place.bytes for place in usage.places} == {
        "s3://cold": after["cold"],
        "s3://colder": after["colder"],
    }
    assert sum(after.values()) < usage.objects_bytes


def test_they_go_on_with_age_and_come_back_when_needed() -> None:
    places = Places()
    store = places.open()
    states = put_daily(places, store, 3)
    store.set_policy("*", move_after=[("36h", COLD), ("10d", COLDER)])
    store.migrate_tiers()
    store.gc(AT_ONCE)
    assert places.packs().keys() == {"own", "cold"}
    places.clock.advance(10 * DAY_SECONDS)
    store.migrate_tiers()
    store.gc(AT_ONCE)
    assert places.packs().keys() == {"colder"}
    store.branch("again", "run@0")  # somebody goes on from there
    store.pin("run@2", reason="evaluation")
    store.migrate_tiers()
    store.gc(AT_ONCE)
    cut_off = places.open(open_place=cut(places))
    assert all(same(cut_off.checkout(address), states[address]) for address in ("run@0", "run@2"))
    require_sound(places.open(), states)
    store.unpin("run@2")
    store.forget("again")
    store.migrate_tiers()
    store.gc(AT_ONCE)
    assert places.packs().keys() == {"colder"}
    require_sound(places.open(), states)


def whole_and_as_a_difference() -> tuple[Places, tsck.Store, dict[str, Any]]:
    """Two branches, moved together: one has a block whole that the other one has as a difference."""
    places = Places()
    store = places.open()
    changed = torch.arange(50_000.0)
    changed[7] = -1
    states: dict[str, Any] = {"run@0": {"w": torch.arange(50_000.0)}, "run@1": {"w": changed}, "other@0": {"w": changed}}
    for step in range(2):
        store.put_snapshot(states[f"run@{step}"], ref="run", step=step, delta=True)
    store.set_policy("*", move_after=[("1d", COLD), ("30d", COLDER)])
    places.clock.advance(2 * DAY_SECONDS)
    store.migrate_tiers()
    store.gc(AT_ONCE)
    store.put_snapshot(states["other@0"], ref="other", step=0)  # whole, as it may not need the cold location
    places.clock.advance(40 * DAY_SECONDS)
    store.migrate_tiers()
    store.gc(AT_ONCE)
    return places, store, states


def test_a_block_that_is_stored_whole_and_as_a_difference_stays_both(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)
    places, store, states = whole_and_as_a_difference()
    assert set(places.packs()) == {"colder"}
    require_sound(store, states)
    store.forget("run")
    store.gc(AT_ONCE)
    require_sound(store, {"other@0": states["other@0"]})


def test_fsck_repairs_a_whole_block_that_an_earlier_build_made_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)  # the difference is copied first
    monkeypatch.setattr("tensorstore_ck.gc.compact.interchangeable", lambda packs: [list(packs)])
    _, store, states = whole_and_as_a_difference()
    with pytest.raises(tsck.DamageError):
        store.checkout("other")
    assert [hit.partition(" ")[0] for finding in store.fsck().findings for hit in finding.hits] == ["other@0"]
    store.repair()
    require_sound(store, states)


@pytest.mark.parametrize("kind", ["a cast", "a difference to another base"])
def test_what_earlier_builds_merged_is_found_and_repaired(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    stay_in_one_thread(monkeypatch)
    places = Places()
    store, generator = places.open(), torch.Generator().manual_seed(1)
    states: dict[str, Any] = {}

    def put(ref: str, step: int, **tensors: torch.Tensor) -> None:
        states[f"{ref}@{step}"] = tensors
        store.put_snapshot(tensors, ref=ref, step=step, delta=True, codec="small", expect=tsck.ANY)

    def random() -> torch.Tensor:
        return torch.randn(200_000, generator=generator)

    with monkeypatch.context() as patch:  # two jobs at a time: neither knows of the other's blocks
        patch.setattr("tensorstore_ck.log.block_index.BlockIndex.find", lambda *_: {})
        if kind == "a cast":
            masters, rest = random(), random()
            weights = masters.to(torch.bfloat16)
            for step, more in ((0, {"z": rest}), (1, {})):
                put("run", step, masters=masters, weights=weights, **more)
                put("other", step, weights=weights, **({"z": rest + 1} if more else {}))
        else:
            base, wanted, other = torch.arange(50_000.0), torch.arange(50_000.0), torch.arange(50_000.0)
            wanted[7] = other[7] = -1
            other[9] = -5
            for ref, first in (("run", base), ("other", other)):
                put(ref, 0, w=first, z=random())
            for ref in ("run", "other"):
                put(ref, 1, w=wanted, z=random())
            same = random()
            for ref in ("run", "other"):
                put(ref, 2, w=wanted, z=same)
    for address in ("run@0", "other@0") if kind == "a cast" else ("run@1", "other@1"):
        store.forget(address)
        del states[address]
    with monkeypatch.context() as patch:
        patch.setattr("tensorstore_ck.gc.compact.interchangeable", lambda packs: [sorted(packs, key=is_without_casts)])  # casts first
        patch.setattr("tensorstore_ck.gc.plan.interchangeable", lambda packs: [list(packs)])
        store.gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1.0))
    damaged = [address for address, state in states.items() if not is_readable(store, address, state)]
    assert damaged
    hits = {hit.partition(" ")[0]: hit.rpartition(": ")[2] for finding in store.fsck().findings for hit in finding.hits}
    assert hits == dict.fromkeys(damaged, "weights" if kind == "a cast" else "w")
    store.repair()
    require_sound(store, states)


def is_without_casts(pack: SparsePack) -> bool:
    return int(Codec.CAST) not in pack.footer.entries["codec"]


def is_readable(store: tsck.Store, address: str, state: Any) -> bool:
    try:
        return same(store.checkout(address), state)
    except tsck.DamageError:
        return False


def test_the_age_of_a_copied_snapshot_counts_from_when_it_was_made() -> None:
    source, places = Places(), Places()
    states = put_daily(source, source.open(), 4)
    places.clock.now_ns = source.clock.now_ns
    store = places.open()
    copy(source.open(), store)
    store.set_policy("run", move_after=("60h", COLD))
    assert store.migrate_tiers().packs != ()
    require_sound(places.open(), states)


def test_a_snapshot_to_which_a_branch_goes_back_is_young() -> None:
    places = Places()
    store = places.open()
    states = put_daily(places, store, 2)
    store.tag("there", "run@0")
    places.clock.advance(9 * DAY_SECONDS)
    store.reset("run", "there")
    store.set_policy("run", move_after=("2d", COLD))
    assert len(store.migrate_tiers().packs) == 1  # day 1 alone: the branch is at day 0 again
    require_sound(places.open(), states)


def test_a_pack_that_something_younger_needs_stays() -> None:
    places = Places()
    store = places.open()
    old = {"shared": state(1)["t1"], "own": state(2)["t2"]}
    store.put_snapshot(old, ref="run", step=0)
    places.clock.advance(9 * DAY_SECONDS)
    store.set_policy("run", move_after=("2d", COLD))
    store.put_snapshot({"shared": old["shared"]}, ref="run", step=1)
    assert store.migrate_tiers().packs == ()
    store.put_snapshot({"shared": old["shared"]}, ref="free", step=0)  # nobody says anything of this one: what it needs stays, too
    places.clock.advance(9 * DAY_SECONDS)
    assert store.migrate_tiers().packs == ()
    store.forget("free")
    assert store.migrate_tiers().packs != ()


def test_what_no_policy_speaks_of_any_more_stays_where_it_is() -> None:
    places, store, states = moved(3, after="12h")
    there = places.packs()
    store.remove_policy("run")
    assert store.migrate_tiers().packs == ()
    store.tag("kept", "run@0")
    store.forget("run")
    store.gc(AT_ONCE)
    assert places.packs()["cold"] < there["cold"], "gc frees elsewhere, too"
    require_sound(places.open(), {"kept": states["run@0"]})


def test_a_pin_alone_brings_back() -> None:
    places, store, states = moved(2, after="12h")
    assert places.packs().keys() == {"cold"}
    store.pin("run@0")
    assert {pack.place for pack in store.migrate_tiers().packs} == {None}
    assert same(places.open(open_place=cut(places)).checkout("run@0"), states["run@0"])


def test_what_would_not_become_smaller_is_read_once() -> None:
    places = Places()
    reads = (noted := Noted()).seen
    watched: Any = FaultyBackend(places.own, noted, atomic_put=True)
    store = places.open(watched)
    put_daily(places, store, 2)
    store.set_policy("run", recode_after="1h")

    def reads_of_packs() -> int:
        reads.clear()
        assert store.migrate_tiers().packs == ()
        return sum("packs/" in what and what.startswith("read") for what in reads)

    assert reads_of_packs() > 0
    assert reads_of_packs() == 0


def test_recode_after() -> None:
    places = Places()
    store = places.open()
    generator = torch.Generator().manual_seed(0)
    states: dict[str, Any] = {f"run@{day}": {"w": torch.randn(50_000, generator=generator) * 0.02} for day in range(4)}
    for day, each in enumerate(states.values()):
        store.put_snapshot(each, ref="run", step=day, codec="raw")
        places.clock.advance(DAY_SECONDS)
    store.set_policy("run", recode_after="36h", move_after=("60h", COLD))
    done = store.migrate_tiers()
    moved = [(pack.place is not None, pack.is_moved) for pack in done.packs]  # not the first pack: all have the layout that is in it
    assert sorted(moved) == [(False, False), (False, False), (True, True)]
    assert done.written_bytes < 0.9 * done.before_bytes
    store.gc(AT_ONCE)
    assert {usage.codec for usage in store.usage().codecs} == {"raw", "planes"}
    require_sound(store, states)
    assert store.migrate_tiers().packs == ()
    assert places.open().migrate_tiers().packs == (), "nor is there anything to do for another host"


def due() -> tuple[Places, dict[str, Any]]:
    """A store of two snapshots, both old enough to move."""
    places = Places()
    states = put_daily(places, places.open(), 2)
    places.open().set_policy("run", move_after=("12h", COLD))
    return places, states


@pytest.mark.slow
@pytest.mark.race
def test_another_host_at_any_call() -> None:
    template, saved = due()

    def run(at: int, what: str) -> str:
        places, states = template.copied(), dict(saved)
        other = places.open()

        def interfere() -> None:
            match what:
                case "gc":
                    other.gc(AT_ONCE)
                case "tier":
                    other.migrate_tiers()
                    other.gc(AT_ONCE)
                case "forget":
                    other.forget("run@0")
                    other.gc(AT_ONCE)
                    del states["run@0"]
                case "pin":
                    other.pin("run@0")
                    other.migrate_tiers()
                case _:
                    states["run@7"] = state(1, 7)
                    other.put_snapshot(states["run@7"], ref="run", step=7, expect=tsck.ANY)

        tiering, interrupt = interrupted(places.own, at, interfere, clock=places.clock, open_place=places.open_place)
        tiering.migrate_tiers()
        if interrupt.struck:
            places.open().gc(AT_ONCE)
            require_sound(places.open(), states)
        return interrupt.struck

    assert {"list", "get", "put", "create"} <= each_call(run, ["gc", "tier", "forget", "put", "pin"])


@pytest.mark.slow
@pytest.mark.race
def test_it_may_die_anywhere() -> None:
    """At any call, of either location; another run continues, and gc frees what was left."""
    template, states = due()
    template.open().set_policy("run", move_after=("12h", COLD), recode_after="1d")

    def run(at: int, mode: str) -> str:
        places, faults = template.copied(), Faults()
        dying: Any = FaultyBackend(places.own, faults, atomic_put=True)
        store = places.open(dying, lambda url: FaultyBackend(places.open_place(url), faults, atomic_put=True))
        faults.mode, faults.at = mode, faults.calls + at
        with contextlib.suppress(Death, BackendUnavailableError):
            store.migrate_tiers()
        if faults.struck:
            require_sound(places.open(), states)
            places.open().migrate_tiers()
            places.open().gc(AT_ONCE)
            places.open().gc(AT_ONCE)
            require_sound(places.open(), states)
            assert places.packs().keys() == {"cold"}
            assert places.open().usage().unreferenced_bytes < 5000, "moved objects at the most"
        return faults.struck

    assert {"list", "get", "put", "create"} <= each_call(run, ["die-before", "tear", "unavailable"])


def test_a_location_that_does_not_answer() -> None:
    """Nothing is taken for lost, or freed; what lies here is read as ever."""
    places, _store, states = moved(3, after="36h")

    cut_off = places.open(open_place=cut(places))
    assert same(cut_off.checkout("run@2"), states["run@2"])
    with pytest.raises(BackendUnavailableError):
        cut_off.checkout("run@0")
    for look in (cut_off.gc, cut_off.fsck, cut_off.migrate_tiers):
        with pytest.raises(BackendUnavailableError):
            look()
    require_sound(places.open(), states)


def test_a_location_that_is_not_mounted_is_not_an_empty_one() -> None:
    """An empty folder, or another bucket, instead of the location: nothing is read from it, written to it, or taken for lost."""
    places, store, states = moved(3, after="36h")
    empty = MemoryBackend(clock=places.clock)
    elsewhere = places.open(open_place=lambda _: empty)
    before = {info.name: info.size_bytes for info in places.own.list("")}
    for look in (
        elsewhere.gc,
        elsewhere.fsck,
        elsewhere.repair,
        elsewhere.migrate_tiers,
        elsewhere.usage,
        lambda: elsewhere.checkout("run@0"),
    ):
        with pytest.raises(PlaceUnavailableError, match="mounted"):
            look()
    places.own.delete(["store.json"])
    with pytest.raises(PlaceUnavailableError):
        salvage(places.own, open_place=lambda _: empty)
    assert not list(empty.list(""))
    places.own.put("store.json", store.engine.config.encode())
    assert {info.name: info.size_bytes for info in places.own.list("")} == before
    require_sound(places.open(), states)


def test_a_copy_of_the_files_frees_nothing_that_the_original_needs() -> None:
    places, store, states = moved(3, after="36h")
    copied = MemoryBackend(clock=places.clock)
    copied.url = "memory://copy"
    for info in places.own.list(""):
        copied.put(info.name, places.own.get(info.name, max_bytes=1 << 30))
    places.clock.advance(3 * DAY_SECONDS)
    store.migrate_tiers()  # more goes there, of which the copy does not know
    store.gc(AT_ONCE)
    copy = places.open(copied)
    require_sound(copy, {"run@0": states["run@0"]})
    copy.forget("run")
    for free in (lambda: copy.gc(AT_ONCE), copy.migrate_tiers):
        with pytest.raises(GcRefusedError, match=r"--claim-locations"):
            free()
    require_sound(places.open(), states)
    copy.undo("run")
    copy.migrate_tiers(claim_locations=True)
    with pytest.raises(GcRefusedError, match="memory://copy"):
        store.gc(AT_ONCE)


def marked(days: int) -> tuple[Places, dict[str, Any], Backend, bytes]:
    """A store whose packs were moved; the location, and its mark."""
    places, _store, states = moved(days, after="12h")
    [url] = [url for url in places.others if url != COLD]
    return places, states, places.others[url], places.others[url].get("place.json", max_bytes=1 << 16)


def test_a_mark_that_is_lost() -> None:
    """A user who knows that it is the location can say so; but not of a location without anything of the store."""
    places, states, location, _ = marked(2)
    location.delete(["place.json"])
    with pytest.raises(PlaceUnavailableError, match="--claim-locations"):
        places.open().checkout("run@0")
    places.open().migrate_tiers(claim_locations=True)
    require_sound(places.open(), states)
    empty = MemoryBackend(clock=places.clock)
    with pytest.raises(PlaceUnavailableError):
        places.open(open_place=lambda _: empty).migrate_tiers(claim_locations=True)
    assert not list(empty.list(""))


def test_a_location_that_is_lost_permanently() -> None:
    """It looks like one that is not mounted, so a user must say that it is lost; then another store repairs it."""
    places, states, location, _ = marked(2)
    other = open_store(clock=places.clock)
    copy(places.open(), other)
    location.delete([info.name for info in location.list("")])
    with pytest.raises(PlaceUnavailableError) as lost:
        places.open().migrate_tiers(claim_locations=True)
    location.put(str(lost.value).partition("empty file ")[2].split()[0], b"")
    store = places.open()
    store.migrate_tiers(claim_locations=True)
    assert store.repair(other=other).ok
    require_sound(places.open(), states)


def test_a_mark_with_a_flipped_bit() -> None:
    """It still shows that it was this store's: everything goes on, and repair writes it again."""
    places, states, location, mark = marked(1)
    data = bytearray(mark)
    data[23] ^= 4
    location.replace("place.json", bytes(data))
    store = places.open()
    [finding] = store.fsck().findings
    assert finding.object.endswith("/place.json")
    assert "`tsck fsck --repair -s " in finding.message
    store.gc()
    store.migrate_tiers()
    assert store.repair().ok
    assert location.get("place.json", max_bytes=1 << 16) == mark
    require_sound(places.open(), states)


def test_a_mark_that_may_be_of_another_store() -> None:
    """Packs are read; what could free a copy's packs refuses until a user has looked."""
    places, states, location, _ = marked(1)
    location.replace("place.json", b"{")
    store = places.open()
    assert same(store.checkout("run@0"), states["run@0"])
    assert "--claim-locations" in store.repair().after.findings[0].message
    for free in (store.gc, store.migrate_tiers):
        with pytest.raises(GcRefusedError, match="--claim-locations"):
            free()
    store.migrate_tiers(claim_locations=True)
    assert store.fsck().ok
    store.gc()


def test_saves_do_not_need_the_location() -> None:
    """Nor does a later restore of a new save: it writes blocks again that are only there."""
    places, _store, states = moved(1, after="12h")
    for codec in ("raw", "small"):
        cut_off = places.open(open_place=cut(places))
        snapshot = cut_off.put_snapshot(states["run@0"], ref="run", step=1, codec=codec, expect=tsck.ANY)
        assert same(cut_off.checkout(snapshot.root), states["run@0"])


def test_a_cache_that_is_emptied_costs_time_only() -> None:
    places, _store, states = moved(3, after="36h")
    reader = places.open()
    with reader.open_snapshot("run@0") as lazy:
        with reader.engine.table.batch() as batch:  # as another process of this host does with one of another version
            batch.clear(b"")
        assert all(torch.equal(lazy[name][:], each) for name, each in states["run@0"].items())


@pytest.mark.race
def test_fsck_during_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever packs go elsewhere while it looks: nothing is damaged."""
    stay_in_one_thread(monkeypatch)
    template, _ = due()

    def run(at: int, _: None) -> str:
        places = template.copied()

        def interfere() -> None:
            places.open().migrate_tiers()
            places.open().gc(AT_ONCE)

        checking, interrupt = interrupted(places.own, at, interfere, clock=places.clock, open_place=places.open_place)
        report = checking.fsck(read_data=True)
        assert report.ok, (at, report.findings)
        return interrupt.struck

    assert {"list", "get", "read"} <= each_call(run, [None])


def test_fsck_of_a_broken_log_knows_where_packs_lie() -> None:
    """By the entries that are left, on a host that has no cache and can make none."""
    places, store, states = moved(3, after="36h")
    store.put_snapshot(states["run@2"], ref="other")
    chain = EntryReader(places.own, uuid=b"", prefix="log")
    places.own.replace(chain.name(max(chain.listed("log/"))), b"nothing")
    report = places.open().fsck(read_data=True)
    assert {finding.kind for finding in report.findings if finding.severity == "error"} == {"broken_log"}


def test_unfinished_uploads_at_a_location_are_found() -> None:
    places = Places()
    store = places.open()
    put_daily(places, store, 2)
    store.set_policy("run", move_after=("12h", COLD))
    store.migrate_tiers()
    [place] = [url for url in places.others if url != COLD]
    places.others[place].open_writer("packs/00/unfinished").append([b"x"])
    places.clock.advance(30 * DAY_SECONDS)
    [upload] = list(store.engine.backend.list_uploads())
    store.engine.backend.abort_upload(upload.name)
    assert not list(places.others[place].list_uploads())


@pytest.mark.parametrize("lost", ["relocations", "all", "checkpointed", "store.json"])
def test_salvage_finds_them(lost: str) -> None:
    """By what is left of the log, or by the moved objects and what is there."""
    places, store, states = moved(3, after="36h")
    store.put_snapshot(states["run@0"], ref="run", step=9)  # names the moved pack itself
    chain = EntryReader(places.own, uuid=b"", prefix="log")
    numbers = sorted(chain.listed("log/"))
    first = next(n for n in numbers if b"place" in places.own.get(chain.name(n), max_bytes=1 << 20))
    gone = {"relocations": [first], "all": numbers[first - 1 :], "checkpointed": [numbers[-1]]}.get(lost, [])
    places.own.delete([chain.name(n) for n in gone] or ["store.json"])
    report = salvage(places.own, open_place=places.open_place)
    assert report.log
    for _ in range(2):
        require_sound(places.open(), states)
        places.open().gc(AT_ONCE)


def test_a_real_folder_and_another_process_cache(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for step in range(2):
            store.put_snapshot(state(step), ref="run", step=step)
        store.set_policy("run", move_after=("1s", str(tmp_path / "cold")))
        clock = store.engine.clock
        store.engine.clock = lambda: clock() + 10**12
        assert {pack.place for pack in store.migrate_tiers().packs} == {str(tmp_path / "cold" / store.engine.config.uuid)}
        store.gc(AT_ONCE)
    assert list((tmp_path / "store" / "packs").rglob("*/*")) == []
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "other") as store:
        require_sound(store, {f"run@{step}": state(step) for step in range(2)})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"move_after": ("30d", "cold/ckpt")}, "absolute path"),
        ({"move_after": "30d"}, "must be like"),
        ({"move_after": ("30d", 7)}, "not to 7"),
        ({"move_after": ("0s", COLD)}, "must be at least 0.001 seconds"),
        ({"move_after": [("30d", COLD), ("30d", COLDER)]}, "different ages"),
        ({"move_after": ("30d", "s3://cold/x?storage_class=DEEP_ARCHIVE")}, "read at once"),
        ({"move_after": ("30d", "az://c/x?sv=secret")}, "only s3://"),
        ({"move_after": ("30d", "sftp://me:secret@host/x")}, "leave user, password, keys and signatures out"),
        ({"move_after": ("30d", "memory:/cold")}, "absolute path"),
        ({"move_after": ("30d", "s3://cold/" + "x" * 300)}, "256"),
        ({"recode_after": "soon"}, "duration"),
        ({"recode_after": "7d", "expire_after": "30d"}, "keeps something"),
    ],
)
def test_rules_that_make_no_sense(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        open_store().set_policy("run", **rules)


def test_locations_that_cannot_be(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for inside in (tmp_path / "store", tmp_path / "store" / "cold"):
            with pytest.raises(InvalidOptionError, match="inside the store"):
                store.set_policy("run", move_after=("30d", str(inside)))
        with pytest.raises(InvalidOptionError, match="memory of one process"):
            store.set_policy("run", move_after=("30d", "memory://cold"))
        with pytest.raises(PlaceUnavailableError, match=r"places=\['s4://cold/x'\]"):
            store.set_policy("run", move_after=("30d", "s4://cold/x"))
        assert store.policies() == {}
    with (
        tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache", places=["s4://cold"]) as store,
        pytest.raises(InvalidUrlError, match="no protocol"),
    ):
        store.set_policy("run", move_after=("30d", "s4://cold/x"))


def test_a_policy_of_age_alone_lets_nothing_go() -> None:
    places = Places()
    store = places.open()
    store.set_policy("run", recode_after="1d")
    put_daily(places, store, 4)
    assert len(store.log("run")) == 4
    assert store.apply_policies().going == 0
