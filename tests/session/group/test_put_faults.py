"""Whatever befalls one rank of a save: all learn one outcome, nothing of an aborted save is visible, and the next one works.

Three ranks, real code above a backend in memory, in simulated time: at every call of every rank to the backend or the channel.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import (
    BackendUnavailableError,
    NoSpaceError,
    PermissionDeniedError,
    SnapshotAbortedError,
    StoreError,
)
from tensorstore_ck.gc import run_gc
from tensorstore_ck.maintenance.forget import forget
from tensorstore_ck.maintenance.fsck import run_fsck
from tensorstore_ck.session.group.round import GRACE_SECONDS
from tests.effort import effort, in_turns
from tests.gc.stores import AT_ONCE, stay_in_one_thread
from tests.session.group.putting import (
    PutRank,
    SteppedFaults,
    new_backend,
    open_engine,
    putting_ranks,
    require_agreement,
    teller,
    teller_of_kinds,
    tensors_of,
)
from tests.session.group.simulation import TIMEOUT, Fault, Simulation
from tests.session.group.stores import read_tensor
from tests.session.group.worlds import (
    AGAIN,
    RANKS,
    ROWS,
    SECOND,
    World,
    require_no_garbage,
    require_readable,
    require_restorable,
)

MAX_CALLS = 200
LEADER_AND_FOLLOWER = (0, RANKS - 1)
"""All but rank 0 do the same."""
SLACK = 10.0
FAULTS = [*product(["unavailable", "lost-reply", "unknown-lands-later"], [False, True])]
"""And whether all later calls fail, too."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


def test_without_faults_everything_is_visible() -> None:
    world = World()
    world.run()
    assert world.steps() == [1, 2, 3]
    require_restorable(world.engine, [1, 2, 3])
    history = list(world.engine.log.view().history("job"))
    assert [info.parent for info in history] == [*(info.root for info in history[1:]), None]
    assert [ending.info for ending in world.group[1].endings] == history[::-1]


# --- ranks that cannot --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failing", "what"),
    [*product(LEADER_AND_FOLLOWER, ["open packs", "append", "close", "put parts"]), (0, "put snapshots")],
)
@pytest.mark.parametrize(
    "error", [NoSpaceError("the disk is full"), PermissionDeniedError("403: the credentials have expired")], ids=["space", "credentials"]
)
def test_a_rank_that_cannot_write(failing: int, error: StoreError, what: str) -> None:
    world = World()
    world.group[failing].faults = SteppedFaults(error=error, what=what)
    world.run()
    (reason,) = world.refusals(type(error))
    assert f"rank {failing}: {type(error).__name__}: {error}" in reason
    assert all(rank.endings[SECOND].seconds < TIMEOUT for rank in world.group), "known at once"
    assert (world.group[failing].endings[SECOND].error or error).__cause__ is error
    require_restorable(world.engine, [1, 3])
    left = run_gc(world.engine, AT_ONCE, dry_run=True).deleted
    assert (left["pack"] + left["part"] == 0) or isinstance(error, PermissionDeniedError), "if there is no space, each rank deletes its own"
    require_no_garbage(world.engine)


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_death_at_every_call_to_the_backend(rank: int) -> None:
    """Nothing is visible, or what rank 0 has published: then the others say so. They go on as a new group, and gc frees the rest."""
    struck: set[str] = set()
    for at, mode in in_turns(range(1, MAX_CALLS), ["die-before", "tear", "die-after"]):
        world = World(seed=at)
        faults = world.group[rank].faults = SteppedFaults(mode, at)
        world.run()
        others = [other for other in world.group if other is not world.group[rank]]
        if not faults.struck:
            assert world.steps() == [1, 2, 3]
            break
        if not faults.dead:
            continue  # the call itself failed: it asked for a log entry that is not there yet
        struck.add(" ".join(faults.struck.split("/")[0].split()[:2]))
        published = world.steps() == [1, 2]
        if faults.struck.startswith("create log"):
            assert published == (mode == "die-after")
        assert rank == 0 or not published
        assert all((other.endings[SECOND].info is not None) == published for other in others)
        if rank:
            assert all(f"rank {rank} of {RANKS} came to it but did not finish" in str(other.endings[SECOND].error) for other in others)
        assert all(other.endings[0].info is not None for other in restart(world, RANKS - 1))
        require_no_garbage(world.engine)
        require_restorable(world.engine, [1, 2, AGAIN] if published else [1, AGAIN])
    else:
        pytest.fail("there are more calls than were tried")
    assert {"open packs", "append", "close", "put parts"} <= struck
    assert {"put snapshots", "create log"} <= struck or rank


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_fault_at_every_call_to_the_backend(rank: int) -> None:
    """A rank without a backend may be unable to find out; it says so, and a rank that can read the log reports what it says."""
    struck: set[str] = set()
    for at, (mode, persistent) in in_turns(range(1, MAX_CALLS), FAULTS):
        world = World(seed=at)
        faults = world.group[rank].faults = SteppedFaults(mode, at, persistent=persistent)
        world.simulation.run()
        if faults.later is not None:
            faults.later()
        engine = world.engine
        others = [other for other in world.group if other is not world.group[rank]]
        require_agreement(others, engine)
        require_agreement_or_doubt(world.group[rank], world)
        assert all(other.endings[2].info is not None for other in world.group), (mode, at, faults.struck)
        require_restorable(engine, world.steps())
        if not faults.struck:
            assert world.steps() == [1, 2, 3]
            break
        struck.add(" ".join(faults.struck.split("/")[0].split()[:2]))
    else:
        pytest.fail("there are more calls than were tried")
    assert {"open packs", "append", "close", "put parts"} <= struck
    assert {"put snapshots", "create log"} <= struck or rank


def require_agreement_or_doubt(rank: PutRank, world: World) -> None:
    """It says nothing that the log does not say; any other error leaves the question open."""
    ending = rank.endings[SECOND]
    if ending.info is not None:
        assert 2 in world.steps()
    if isinstance(ending.error, SnapshotAbortedError):
        assert 2 not in world.steps()


@pytest.mark.slow
@pytest.mark.parametrize("are_alike", [True, False])
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_a_fault_at_every_step(rank: int, are_alike: bool) -> None:
    """Steps are before and after each call to the channel or the backend; a rank that stalls comes back when all others have ended.

    Ranks that are not alike send rank 0 a description of their states, and get the plan, in that save.
    """
    for step, kind in in_turns(range(3 * MAX_CALLS), ["die", "stall", "error"]):
        world = World(faults=(Fault(rank, step, kind),), seed=step)
        for number, each in enumerate(world.group if not are_alike else ()):
            each.puts[SECOND] = each.puts[SECOND].but(take_apart=partial(teller_of_kinds(2, RANKS), number))
        world.run()
        steps = world.steps()
        require_restorable(world.engine, steps)
        for other in world.group:
            if other.rank == rank:
                continue
            assert len(other.endings) == 3
            assert other.endings[SECOND].seconds <= TIMEOUT + 2 * GRACE_SECONDS + SLACK
            assert isinstance(other.endings[SECOND].error, SnapshotAbortedError | BackendUnavailableError | None)
        if step >= world.group[rank].steps_of_faulty:
            assert 2 in steps
            return
        if kind == "error":
            was_told = all(other.endings[SECOND].seconds < TIMEOUT for other in world.group)
            assert was_told or (rank == 0 and 2 in steps), "only rank 0 can lose what the others wait for"
            if was_told:
                assert all(other.endings[2].info is not None for other in world.group), "the next save works"
        else:
            restarted = restart(world, 2)
            assert all(other.endings[0].info is not None for other in restarted), [other.endings[0].error for other in restarted]
            if step % 10 == 0:
                require_no_garbage(world.engine)
    pytest.fail("there are more steps than were tried")


def restart(world: World, ranks: int) -> list[PutRank]:
    """A new group of those that are left."""
    world.simulation = Simulation(1)
    group = putting_ranks(world.simulation, world.backend, ranks, [AGAIN], rows=ROWS)
    for rank in group:
        rank.puts[0] = rank.puts[0].but(expect=ANY, parent=None, ref="restarted")
    world.simulation.run()
    return group


# --- while others run ---------------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("rank", LEADER_AND_FOLLOWER)
def test_gc_at_every_call_frees_what_the_save_relies_on(rank: int) -> None:
    """The parent is forgotten, and freed at once, while the ranks write: the save is right, or starts over, or is aborted."""
    outcomes = set()
    for at in range(1, MAX_CALLS):
        world = World(seed=at)
        faults = world.group[rank].faults = Collects(world, at)
        world.run(gone=frozenset({1}))
        outcomes.add(2 in world.steps())
        engine = world.engine
        assert 3 in world.steps()
        view = engine.log.view()
        for info in [info for info in view.snapshots() if view.is_live(info.ulid)]:
            require_readable(engine, info)
        report = run_fsck(engine)
        assert report.ok, report.findings
        if not faults.done:
            break
    else:
        pytest.fail("there are more calls than were tried")
    assert True in outcomes


class Collects(SteppedFaults):
    """Forgets the parent, and runs gc, before a call of the save."""

    def __init__(self, world: World, at: int) -> None:
        super().__init__()
        self.done = False
        self._world, self._at = world, at

    def call(self, what: str, effect: Callable[[], Any], *rest: Any, **options: Any) -> Any:
        if self.armed and not self.done and self.calls + 1 == self._at:
            self.done = True
            engine = self._world.engine
            if engine.log.view().branch("job") is not None:
                forget(engine, ("job@1",))
            run_gc(self._world.engine, AT_ONCE)
        return super().call(what, effect, *rest, **options)


@pytest.mark.slow
@pytest.mark.race
def test_step_1000_again_after_an_abort_and_a_rollback() -> None:
    """The late records of the first try are never taken for those of the second."""
    for stalled in range(RANKS):
        for step in range(stalled, 120, effort(9, 3)):
            backend = new_backend()
            simulation = Simulation(step, faults=(Fault(stalled, step, "stall"),), max_delay=0.05, duplicates=0.3, stall=TIMEOUT / 3 + 10)
            group = putting_ranks(simulation, backend, RANKS, [900, 1000, 950, 960], faulty=1)
            for rank in group:
                again = teller(1001, RANKS)  # other numbers under the step of the first try
                rank.puts[2] = rank.puts[2].but(step=1000, take_apart=lambda rank=rank, again=again: again(rank.rank))
                rank.puts[3] = rank.puts[3].but(step=1000, take_apart=lambda rank=rank, again=again: again(rank.rank))
            simulation.run()
            engine = open_engine(simulation, backend)
            engine.log.sync()
            for info in engine.log.view().snapshots():
                reader = SnapshotReader(engine, info)
                assert read_tensor(reader, 0) == tensors_of(reader.values[1], RANKS)["sharded"].whole.tobytes()
            returned = {ending.info.root for rank in group for ending in rank.endings if ending.info is not None}
            assert returned <= {info.root for info in engine.log.view().snapshots()}
