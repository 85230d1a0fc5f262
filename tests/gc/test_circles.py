"""Relocations as only a broken or hostile log has them, and longer ways than gc makes: an error or the blocks, in linear work."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.reachability import follow, locate_blocks
from tensorstore_ck.errors import CorruptObjectError, DamageError, GcRefusedError, StoreError
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.log import ObjectKey, RefTable
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.store import Store
from tests.gc.made import Place, make_part, open_engine, pack_ulid
from tests.gc.relocated import copy_pack, footer_of, packs_of, relocate
from tests.gc.stores import AT_ONCE, open_store, require_readable, require_sound, state

HELD = {"runs/a": state(1, 2)}


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store() as store:
        store.put_snapshot(HELD["runs/a"], ref="runs/a", step=1)
        store.put_snapshot(state(1, 3), ref="runs/b", step=1)
        yield store


def go_round(store: Store, length: int) -> str:
    """Moves the pack of runs/a in a circle of so many packs, and says so of the blocks that snapshots need; the last moved object."""
    packs = packs_of(store.engine)[:1]
    for _ in range(length - 1):
        packs.append(copy_pack(store.engine, packs[-1]))
    footer = footer_of(store.engine, packs[0])
    (moved,) = relocate(store.engine, [(packs[-1], [(entry, packs[0], entry) for entry in range(len(footer.entries))])], footer)
    return ObjectKey("moved", moved).name


READERS: dict[str, Callable[[Store, Path], object]] = {
    "checkout": lambda store, _: store.checkout("runs/a"),
    "show": lambda store, _: store.show("runs/a"),
    "diff": lambda store, _: store.diff("runs/a", "runs/b"),
    "usage": lambda store, _: store.usage(),
    "export": lambda store, folder: export_snapshot(store, "runs/a", folder / "out.safetensors", format="safetensors"),
    "gc": lambda store, _: store.gc(AT_ONCE),
}


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_ends_at_a_circle(store: Store, tmp_path: Path, reader: str, length: int) -> None:
    moved = go_round(store, length)
    with pytest.raises(StoreError) as caught:
        READERS[reader](store, tmp_path)
    assert isinstance(caught.value, DamageError | GcRefusedError)
    assert moved in str(caught.value)
    assert "in a circle" in str(caught.value)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_fsck_names_the_relocation_that_closes_a_circle_and_repair_leads_past_it(store: Store, length: int) -> None:
    moved = go_round(store, length)
    (finding,) = [finding for finding in store.fsck().findings if finding.severity == "error"]
    assert (finding.kind, finding.object, finding.repairable) == ("corrupt_object", moved, True)
    assert [hit.partition(" ")[0] for hit in finding.hits] == ["runs/a@1", "runs/b@1"]
    assert "in a circle" in finding.message
    report = store.repair()
    assert report.ok, report.after.findings
    require_sound(store, HELD)
    store.gc(AT_ONCE)
    require_sound(store, HELD)


def test_fsck_notices_a_circle_that_no_snapshot_meets(store: Store) -> None:
    relocate(store.engine, [(pack_ulid(1), [(0, pack_ulid(2), 0)]), (pack_ulid(2), [(0, pack_ulid(1), 0)])])
    report = store.fsck()
    found = [finding for finding in report.findings if "in a circle" in finding.message]
    assert [(finding.kind, finding.severity) for finding in found] == [("corrupt_object", "notice")]
    assert report.ok
    require_sound(store, HELD)


def test_salvage_ends_at_a_circle(store: Store) -> None:
    go_round(store, 2)
    assert len(salvage(store.engine.backend, dry_run=True).lost) == 2


# --- many ways and long ones ------------------------------------------------------------------------------------------


Moves = list[tuple[Ulid, list[tuple[int, Ulid, int]]]]
START = pack_ulid(0)


def a_diamond() -> Moves:
    left, right, end = map(pack_ulid, (1, 2, 3))
    return [(START, [(0, left, 0), (1, right, 0)]), (left, [(0, end, 0)]), (right, [(0, end, 1)])]


def ways_that_meet(count: int) -> Moves:
    """Each entry comes to the same chain of packs, one pack later than the entry before."""
    chain = [pack_ulid(1 + number) for number in range(count + 1)]
    return [(START, [(entry, chain[entry], 0) for entry in range(count)]), *((chain[n], [(0, chain[n + 1], 0)]) for n in range(count))]


def a_lattice(levels: int, entries: int) -> Moves:
    """2 ** levels ways, of which the entries take as many as they are."""
    at = [(pack_ulid(2 * level), pack_ulid(2 * level + 1)) for level in range(levels)]
    return [
        (pack, [(entry, below[entry >> level & 1], entry) for entry in range(entries)])
        for level, below in enumerate(at[1:])
        for pack in at[level]
    ]


@pytest.mark.parametrize(
    ("moves", "entries", "ends"),
    [(a_diamond(), 2, 1), (ways_that_meet(60), 60, 1), (a_lattice(10, 512), 512, 2)],
    ids=["diamond", "ways that meet", "lattice"],
)
def test_each_relocation_is_read_once(monkeypatch: pytest.MonkeyPatch, moves: Moves, entries: int, ends: int) -> None:
    engine = open_engine(MemoryBackend())
    relocate(engine, moves)
    places: list[Place] = [(0, entry) for entry in range(entries)]
    read, looked = Counter[Ulid](), Counter[Ulid]()
    read_moved, relocations = type(engine).read_moved, RefTable.relocations
    monkeypatch.setattr(type(engine), "read_moved", lambda self, found: read.update([found.moved]) or read_moved(self, found))
    monkeypatch.setattr(RefTable, "relocations", lambda self, pack: looked.update([pack]) or relocations(self, pack))

    def once(steps: Callable[[], Any]) -> Any:
        read.clear()
        looked.clear()
        done = steps()
        assert (max(read.values()), max(looked.values())) == (1, 1)
        return done

    found = once(lambda: locate_blocks(engine, engine.log.view(), make_part(places)))
    assert len({found.packs[number] for number in found.extents["pack"].tolist()}) == ends
    steps = once(lambda: list(follow(engine, engine.log.view(), {START: np.arange(entries)})))
    assert len([pack for pack, at, moved in steps if moved is None and len(at)]) == ends
    assert {moved for _, _, moved in steps if moved is not None} == found.moved


def test_the_parts_of_all_snapshots_read_each_relocation_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(backend := MemoryBackend())
    packs = [engine.new_id() for _ in range(200)]
    maps = relocate(engine, [(pack, [(0, engine.new_id(), 0)]) for pack in packs])
    read, get = Counter[str](), backend.get
    monkeypatch.setattr(backend, "get", lambda name, *, max_bytes: read.update([name]) or get(name, max_bytes=max_bytes))
    for _ in range(3):
        steps = list(follow(engine, engine.log.view(), dict.fromkeys(packs, np.arange(1))))
        assert len([moved for _, _, moved in steps if moved is not None]) == len(packs)
    assert read == {ObjectKey("moved", moved).name: 1 for moved in maps}


HOPS = 520


@pytest.mark.slow
def test_a_snapshot_lives_through_any_number_of_compactions() -> None:
    with open_store(backend := MemoryBackend()) as store:
        store.put_snapshot(HELD["runs/a"], ref="runs/a", step=1)
        (pack,) = packs_of(store.engine)
        for _ in range(HOPS):
            pack = copy_pack(store.engine, pack)
        require_sound(store, HELD)
        assert store.show("runs/a").snapshot.step == 1
        assert not salvage(backend, dry_run=True).lost
        store.gc(AT_ONCE)
        assert len(packs_of(store.engine)) == 1
        require_readable(store, HELD)
        store.put_snapshot(HELD["runs/a"], ref="runs/b")
        store.forget("runs/a")
        store.forget("runs/b")
        store.gc(AT_ONCE)
        assert not packs_of(store.engine)
        assert not list(backend.list("moved/"))


def test_a_circle_of_many_packs() -> None:
    engine = open_engine(MemoryBackend())
    chain = [pack_ulid(number) for number in range(HOPS)]
    relocate(engine, [(pack, [(0, to, 0)]) for pack, to in zip(chain, [*chain[1:], chain[0]], strict=True)])
    for look in (
        lambda: locate_blocks(engine, engine.log.view(), make_part([(0, 0)])),
        lambda: [*follow(engine, engine.log.view(), {START: np.zeros(1)})],
    ):
        with pytest.raises(CorruptObjectError, match=f"{HOPS} relocations lead in a circle"):
            look()
