"""A job frees what its policy dropped, during writers, readers and gcs: small cases completely."""

import pytest

from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.gc.interleavings.scenes import Scene, collector, freer, reader
from tests.gc.interleavings.schedule import explore
from tests.gc.interleavings.test_gc import saver, settler, with_faults

pytestmark = [pytest.mark.slow, pytest.mark.race]


def dropped(*, is_shared: bool = False) -> tuple[Scene, MemoryTable]:
    """A pack of blocks x and y whose snapshot the policy has dropped; shared: the branch still needs y."""
    scene = Scene()
    Store(scene.engine).set_policy("job", keep_last=1)
    scene.put("job", "x y", step=0)
    scene.put("job", "y z" if is_shared else "z", step=1)
    scene.put("job", "y w" if is_shared else "w", step=2)
    return scene, scene.host()


@pytest.mark.parametrize("is_shared", [False, True])
def test_writer_takes_blocks_that_die(is_shared: bool) -> None:
    scene, host = dropped(is_shared=is_shared)
    case = scene.case(freer("F", "job", table=host), saver(host, "x q"))
    assert explore(case).states > 1000


def test_writer_with_faults() -> None:
    scene, host = dropped()
    case = with_faults(scene.case(freer("F", "job", table=host), saver(host, "x q")))
    assert explore(case._replace(max_switches=2)).states > 3000


def test_beside_gc_and_tombstones_that_are_forgotten() -> None:
    scene, host = dropped(is_shared=True)
    case = scene.case(freer("F", "job", table=host), collector("G", table=host, compact=True, settle=True), settler(host))
    assert explore(case._replace(max_switches=2)).states > 3000


def test_two_at_once_and_a_reader() -> None:
    """What it reads is held all the time, so it must get it."""
    scene, host = dropped(is_shared=True)
    case = scene.case(freer("F", "job", table=host), freer("E", "job", table=host), reader("R", "job", table=host))
    assert explore(case._replace(max_switches=effort(2, 3))).states > 3000
