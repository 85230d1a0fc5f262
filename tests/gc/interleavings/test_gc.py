"""gc during writers, readers, other gcs, and all that moves, forgets and restores: small cases completely.

Every crash is in it (see schedule.py), and so is an actor asleep across any other's whole run. The counts are floors, so that no
case shrinks unnoticed.
"""

from collections.abc import Callable
from typing import Final

import pytest

from tensorstore_ck.errors import ConflictError, NotFoundError, SnapshotExpiredError
from tensorstore_ck.log import ObjectKey, Objects, Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.gc.interleavings.actor import Actor
from tests.gc.interleavings.scenes import FAILED, REFUSED, Scene, collector, reader, user, writer
from tests.gc.interleavings.schedule import FAULTS, Case, explore, explore_random

pytestmark = [pytest.mark.slow, pytest.mark.race]

FALLIBLE: Final = FAILED + REFUSED
SCHEDULES: Final = effort(600, 3000)
"""How many are drawn at random, over all tests that draw some."""
GONE: Final = (*FAILED, SnapshotExpiredError, NotFoundError, ConflictError)


def dying() -> tuple[Scene, MemoryTable]:
    """A pack of blocks x and y, all of which are about to go, and a host that knows where they are."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "z", step=1)
    scene.forget("job@0")
    return scene, scene.host()


def sparse() -> tuple[Scene, MemoryTable]:
    """A pack of which x is about to go, and y is needed."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    scene.forget("job@0")
    return scene, scene.host()


def saver(host: MemoryTable, labels: str, name: str = "A") -> Actor:
    """Saves to another branch a state whose blocks are in the store."""
    return writer(name, "other", labels, table=host, expect=None, may_raise=FALLIBLE)


def settler(host: MemoryTable) -> Actor:
    """Settles whenever it likes: that is a matter of efficiency only."""

    def settle(store: Store) -> object:
        return store.engine.log.append(lambda view: [Op.truncate_tombstones(head.n)] if (head := view.head()) else []).n

    return user("S", settle, table=host)


def with_faults(case: Case, count: int = 1) -> Case:
    return case._replace(faults=FAULTS, max_faults=count)


Setup = Callable[[], tuple[Scene, MemoryTable]]
Actors = Callable[[MemoryTable], list[Actor]]


@pytest.mark.parametrize(
    ("setup", "actors", "faults", "switches", "states"),
    [
        (dying, lambda host: [collector("G", table=host), saver(host, "x q")], 0, None, 3000),
        (dying, lambda host: [collector("G", table=host), saver(host, "x q")], 1, effort(2, 3), 5000),
        (dying, lambda host: [collector("G", table=host, settle=True), saver(host, "x q")], 0, None, 3000),
        (dying, lambda host: [collector("G", table=host), saver(host, "x q"), settler(host)], 0, effort(2, 3), 5000),
        (sparse, lambda host: [collector("G", table=host, compact=True, settle=True), saver(host, "x q")], 0, effort(4, 5), 8000),
        (sparse, lambda host: [collector("G", table=host, compact=True, settle=True), saver(host, "x y")], 0, effort(4, 5), 7000),
        (sparse, lambda host: [collector("G", table=host, compact=True), saver(host, "x y")], 1, effort(2, 3), 8000),
    ],
    ids=["plain", "faults", "tombstones forgotten", "forgotten by others", "compaction", "all of it", "compaction and faults"],
)
def test_writer_takes_blocks_that_die(setup: Setup, actors: Actors, faults: int, switches: int | None, states: int) -> None:
    """Where it sleeps until the tombstones of its blocks are forgotten, too."""
    explore_all(setup, actors, faults, switches, states)


@pytest.mark.parametrize(
    ("setup", "actors", "faults", "switches", "states"),
    [
        (dying, lambda host: [collector(name, table=host) for name in "GH"], 0, None, 4000),
        (dying, lambda host: [collector(name, table=host, settle=True) for name in "GH"], 1, 2, 4000),
        (sparse, lambda host: [collector(name, table=host, compact=True) for name in "GH"], 0, effort(2, 3), 4000),
        (sparse, lambda host: [collector("G", table=host, compact=True), collector("H", table=host, settle=True)], 0, 3, 100),
        (dying, lambda host: [collector("G", table=host), collector("H", table=host, settle=True), saver(host, "x q")], 0, 2, 20_000),
    ],
    ids=["plain", "tombstones forgotten, and faults", "compactors", "compactor and one that forgets", "and a writer"],
)
def test_two_gcs(setup: Setup, actors: Actors, faults: int, switches: int | None, states: int) -> None:
    explore_all(setup, actors, faults, switches, states)


def test_two_writers_and_gc() -> None:
    """They take blocks from each other's packs, too, as soon as these are published."""

    def actors(host: MemoryTable) -> list[Actor]:
        return [collector("G", table=host), saver(host, "x q"), writer("B", "job", "x q", table=host, may_raise=FALLIBLE)]

    explore_all(dying, actors, 0, 2, 9_500)


def explore_all(setup: Setup, actors: Actors, faults: int, switches: int | None, states: int) -> None:
    scene, host = setup()
    assert explore(with_faults(scene.case(*actors(host)), faults)._replace(max_switches=switches)).states > states


def test_reader_across_compaction_and_sweep() -> None:
    """What it reads is held all the time, so it must get it."""
    scene, host = sparse()
    assert explore(scene.case(collector("G", table=host, compact=True), reader("R", "job", table=host))).states > 200
    case = scene.case(*(collector(name, table=host, compact=True) for name in "GH"), reader("R", "job", table=host))
    assert explore(case._replace(max_switches=2)).states > 10_000


def test_reader_of_what_goes() -> None:
    """Right bytes, or a word that it is gone."""
    scene = Scene()
    scene.put("old", "x y")
    scene.put("job", "y z")
    host = scene.host()
    forget = user("F", lambda store: store.forget("old"), table=host)
    case = scene.case(collector("G", table=host, compact=True), forget, reader("R", "old", table=host, may_raise=GONE))
    assert explore(case).states > 600


@pytest.mark.parametrize(
    "act",
    [
        lambda store, root: store.tag("t", root),
        lambda store, root: store.branch("b", root),
        lambda store, root: store.reset("job", root),
        lambda store, root: store.pin(root, owner="me"),
    ],
    ids=["tag", "branch", "reset", "pin"],
)
def test_hold_of_what_is_swept(act: Callable[[Store, str], object]) -> None:
    """A branch or tag is made from a root that is being swept (icechunk design 011): it holds all of it, or fails."""
    scene = Scene()
    info = scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    scene.forget("job@0")
    scene.purge()
    host = scene.host()
    holder = user("U", lambda store: act(store, info.root.hex()), table=host, may_raise=GONE)
    assert explore(with_faults(scene.case(collector("G", table=host, compact=True, settle=True), holder))).states > 2000
    assert explore(scene.case(collector("G", table=host), collector("H", table=host), holder)._replace(max_switches=2)).states > 1000


def test_undo_against_sweep() -> None:
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    host = scene.host()
    case = scene.case(
        collector("G", table=host, compact=True),
        user("F", lambda store: store.forget("job@0"), table=host),
        user("U", lambda store: store.undo("job@0"), table=host, may_raise=GONE),
    )
    assert explore(case).states > 400


def test_pin_and_unpin() -> None:
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    host = scene.host()

    def pin_for_a_while(store: Store) -> None:
        store.pin("job@0", owner="me")
        store.unpin("job@0", owner="me")

    case = scene.case(
        collector("G", table=host),
        user("F", lambda store: store.forget("job@0"), table=host),
        user("P", pin_for_a_while, table=host, may_raise=GONE),
    )
    assert explore(case._replace(max_switches=4)).states > 2000


def test_index_that_jumps_over_forgotten_tombstones() -> None:
    """A host that was away while blocks went, and their tombstones too."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "z", step=1)
    away = scene.host()
    scene.forget("job@0")
    scene.gc(settle=True)
    case = scene.case(saver(away, "x q"), collector("G", table=away, settle=True))
    assert explore(with_faults(case)._replace(max_switches=3)).states > 1000


def test_relocation_that_ends_while_its_snapshot_is_held_again() -> None:
    """A part names a pack that was compacted and is gone. Its snapshot is let go, and so is the way to the new pack; then it is tagged."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    info = scene.put("job", "y z", step=1)
    scene.forget("job@0")
    scene.gc(compact=True)
    scene.put("job", "w", step=2)
    scene.forget("job@1")
    scene.purge()
    host = scene.host()
    ((_, ulid),) = scene.engine.log.view().all_relocations()
    moved = Objects([ObjectKey("moved", ulid)])

    def end_relocation(store: Store) -> object:
        store.engine.log.append(lambda view: [] if view.is_live(info.ulid) else [Op.condemn(moved)])
        return store.engine.log.append(lambda _view: [Op.sweep(moved)]).n

    tagger = user("U", lambda store: store.tag("t", info.root.hex()), table=host, may_raise=GONE)
    assert explore(scene.case(user("M", end_relocation, table=host), settler(host), tagger)).states > 100


def two_gcs_and_a_writer() -> Case:
    scene, host = dying()
    return scene.case(collector("G", table=host), collector("H", table=host, settle=True), saver(host, "x q"))


def two_compactors_and_a_writer() -> Case:
    scene, host = sparse()
    gcs = (collector(name, table=host, compact=True, settle=True) for name in "GH")
    return scene.case(*gcs, saver(host, "x y"))


def two_of_each() -> Case:
    scene, host = sparse()
    return scene.case(
        collector("G", table=host, compact=True, settle=True),
        collector("H", table=host, compact=True),
        saver(host, "x y q"),
        writer("B", "job", "x q", table=host, may_raise=FALLIBLE),
        settler(host),
    )


def everybody() -> Case:
    scene, host = sparse()
    root = scene.put("old", "y w").root.hex()
    return scene.case(
        collector("G", table=host, compact=True),
        collector("H", table=host, compact=True, settle=True),
        saver(host, "x y"),
        reader("R", "job", table=host),
        user("F", lambda store: store.forget("old"), table=host),
        user("U", lambda store: store.undo("old"), table=host, may_raise=GONE),
        user("T", lambda store: store.tag("t", root), table=host, may_raise=GONE),
    )


@pytest.mark.parametrize(
    ("make", "percent"),
    [(two_gcs_and_a_writer, 35), (two_compactors_and_a_writer, 35), (two_of_each, 10), (everybody, 10)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_random_schedules(make: Callable[[], Case], percent: int) -> None:
    """Cases that are too large to be explored whole, with up to three faults."""
    explore_random(with_faults(make(), 3), SCHEDULES * percent // 100, seed=1)
