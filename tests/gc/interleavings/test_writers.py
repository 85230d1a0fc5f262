"""Two and three writers, and what moves refs during a save: every interleaving, every crash, every fault, and no gc.

The counts are floors, so that no case shrinks unnoticed: a change of the code may change them a little.
"""

from collections.abc import Callable

import pytest

from tensorstore_ck.errors import AlreadyExistsError, NoSpaceError
from tensorstore_ck.store import Store
from tests.gc.interleavings.scenes import FAILED, REFUSED, Scene, root_of, user, writer
from tests.gc.interleavings.schedule import Case, drive, explore

FAULTS = ("lost", "refused", "delayed")
FALLIBLE = FAILED + REFUSED


def writers(*names: str, cold: bool = False) -> Case:
    """Writers to one ref, who all know its head."""
    scene = Scene()
    scene.put("job", "shared a0")
    host, root = scene.host(), root_of(scene.engine, "job")
    return scene.case(
        *(writer(name, "job", f"shared {name}1", table=None if cold else host, expect=root, may_raise=FALLIBLE) for name in names),
        faults=FAULTS,
    )


pytestmark = pytest.mark.race


@pytest.mark.parametrize(("faults", "states"), [(2, 700), pytest.param(3, 2000, marks=pytest.mark.slow)])
def test_two_writers_to_one_ref(faults: int, states: int) -> None:
    case = writers("A", "B")._replace(max_faults=faults)
    explored = explore(case)
    assert explored.states > states
    assert explored.crashes > explored.states // 5


@pytest.mark.parametrize(
    ("faults", "most", "states"), [(("full", "lost"), 1, 250), pytest.param(("full", "lost", "delayed"), 2, 1500, marks=pytest.mark.slow)]
)
def test_a_disk_that_is_full_for_a_while(faults: tuple[str, ...], most: int, states: int) -> None:
    """A save that fails for space deletes what it wrote: never what an entry names, however late that comes."""
    assert explore(writers("A", "B")._replace(faults=faults, max_faults=most)).states > states


@pytest.mark.parametrize("stop", ["put packs/", "put parts/", "put snapshots/", "create log/"])
def test_a_save_that_fails_for_space_leaves_nothing(stop: str) -> None:
    case = writers("A", "B")._replace(faults=("full",), max_faults=1)
    contents, ended = drive(case, f"A until {stop}", "A:full", "A")
    assert isinstance(ended["A"].error, NoSpaceError)
    assert contents.objects == case.start.objects


def test_three_writers_to_one_ref() -> None:
    assert explore(writers("A", "B", "C")).states > 2500


def test_two_writers_on_new_hosts() -> None:
    assert explore(writers("A", "B", cold=True)).states > 500


def test_the_reduction_loses_no_contents() -> None:
    """Without it there are more states and many more schedules, and what a store comes to hold is the same at each end."""
    reduced, whole = (explore(writers("A", "B")._replace(reduce=reduce)) for reduce in (True, False))
    assert whole.states > reduced.states
    assert whole.schedules > 1000 * reduced.schedules
    assert whole.ends == reduced.ends


def test_two_refs_with_shared_blocks() -> None:
    scene = Scene()
    scene.put("one", "shared x")
    host = scene.host()
    case = scene.case(
        writer("A", "one", "shared y", table=host, may_raise=FALLIBLE),
        writer("B", "two", "shared y", table=host, expect=None, may_raise=FALLIBLE),
        faults=FAULTS,
    )
    assert explore(case).states > 500


@pytest.mark.parametrize("act", ["branch", *(pytest.param(act, marks=pytest.mark.slow) for act in ("tag", "reset"))])
def test_writer_and_a_ref_that_moves(act: str) -> None:
    scene = Scene()
    scene.put("other", "o")
    scene.put("job", "shared a0")
    host = scene.host()
    move: dict[str, Callable[[Store], object]] = {
        "branch": lambda store: store.branch("new", "job"),
        "tag": lambda store: store.tag("new", "job"),
        "reset": lambda store: store.reset("other", "job"),
    }
    case = scene.case(
        writer("A", "job", "shared a1", table=host, may_raise=FALLIBLE),
        user("M", move[act], table=host, may_raise=(*FALLIBLE, AlreadyExistsError)),
        user("N", lambda store: store.branch("new", "other"), table=host, may_raise=(*FALLIBLE, AlreadyExistsError)),
        faults=FAULTS,
    )
    assert explore(case).states > 1000
