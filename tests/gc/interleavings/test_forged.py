"""A writer who appends what it likes, during gc and savers: what was needed at any entry is there, as all is inside its undo window."""

import pytest

from tensorstore_ck.gc.collect import run_gc
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.log import Op, RefTable
from tensorstore_ck.log.cache import MemoryTable
from tests.effort import effort
from tests.gc.forged import Forgery, condemn_all, end_all_windows, forge, release_all, sweep_all
from tests.gc.interleavings.actor import Actor, Process
from tests.gc.interleavings.contents import Contents
from tests.gc.interleavings.invariant import CONFIG, Folded, Invariant
from tests.gc.interleavings.scenes import FAILED, Scene
from tests.gc.interleavings.schedule import Case, Violation, explore_random
from tests.gc.interleavings.test_gc import FALLIBLE, saver

pytestmark = [pytest.mark.slow, pytest.mark.race]

KINDS = ("pack", "part", "snapshot", "moved")


class EverNeeded(Invariant):
    """What any entry's roots needed is there: no time passes in an exploration. The log may say anything."""

    def check(self, contents: Contents) -> None:
        self.folded(contents)
        for n in range(1, contents.log_end + 1):
            for name, data in self._folded[contents.entry(n)].closure.items():
                if contents.objects.get(name) != data:
                    raise Violation(f"{name} is gone, which entry {n} needed")

    def _check_lists(self, folded: Folded) -> None:
        """Anybody can condemn and sweep anything."""


def release_and_purge(view: RefTable) -> list[Op]:
    """One entry that forgets all branches and ends the windows of that."""
    head = view.head()
    assert head is not None
    return [*release_all(view), *(Op.purge(head.n + 1, name) for name in view.branches())]


def keeper(host: MemoryTable) -> Actor:
    """Runs gc with an undo window."""
    options = GcOptions(min_age_seconds=0, max_delete=1, compact_below=0)
    return Actor("G", lambda process: run_gc(process.engine(), options).deleted, host, FAILED)


def forger(host: MemoryTable, what: str) -> Actor:
    """Appends forged entries."""

    def run(process: Process) -> object:
        engine, backend = process.engine(), process.backend
        plans: dict[str, list[Forgery]] = {
            "released": [lambda view: [*release_all(view)], lambda view: [*end_all_windows(view)]],
            "swept": [condemn_all(backend, *KINDS), sweep_all(backend, *KINDS)],
            "expired, condemned and swept": [release_and_purge, condemn_all(backend, *KINDS), sweep_all(backend, *KINDS)],
        }
        return [forge(engine, make) for make in plans[what]]

    return Actor("F", run, host, FALLIBLE)


def held() -> tuple[Scene, MemoryTable]:
    """Two snapshots, and one that gc may free."""
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "z", step=1)
    return scene, scene.host()


def case(scene: Scene, *actors: Actor) -> Case:
    return scene.case(*actors)._replace(check=EverNeeded(CONFIG).check, check_end=lambda _: None, check_outcome=lambda *_: None)


@pytest.mark.parametrize("what", ["released", "swept", "expired, condemned and swept"])
def test_a_keeper_and_a_saver_during_forgeries(what: str) -> None:
    """Too large to be explored whole; `tests/gc/test_forged_entries.py` has all orders of whole operations."""
    scene, host = held()
    found = explore_random(case(scene, keeper(host), forger(host, what), saver(host, "x q")), effort(400, 4000), seed=1)
    assert found.states > 1000
