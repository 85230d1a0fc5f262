"""Ranks whose arguments differ from the others': all learn at once which rank has what, and the next save works."""

from collections.abc import Callable
from typing import Any

import pytest

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import (
    InvalidOptionError,
    MismatchError,
    QuotaExceededError,
    SnapshotAbortedError,
    StoreError,
    UnsupportedValueError,
)
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sharding import Mesh
from tensorstore_ck.maintenance.quotas import remove_quota, set_quota
from tests.gc.stores import stay_in_one_thread
from tests.session.group.putting import (
    new_backend,
    open_engine,
    putting_ranks,
    teller,
    tensors_of,
)
from tests.session.group.simulation import TIMEOUT, Simulation
from tests.session.group.states import captured
from tests.session.group.worlds import (
    RANKS,
    SECOND,
    STEPS,
    World,
    require_no_garbage,
    require_restorable,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 900}, "step: ranks 0-1: 2; rank 2: 900"),
        ({"parent": Digest(b"p" * 32)}, "parent: ranks 0-1: {root} (job@1); rank 2: 7070707070707070"),
        ({"expect": ANY}, "expect: ranks 0-1: {root} (job@1); rank 2: 'tsck.ANY'"),
        ({"metrics": {"loss": 2.5}}, "metrics.loss: ranks 0-1: nothing; rank 2: 2.5"),
        ({"metadata": encode_metadata({"lr": 1, "data": {"seed": 7}})}, "metadata.data.seed: ranks 0-1: nothing; rank 2: 7; metadata.lr: "),
    ],
    ids=["step", "parent", "expect", "metrics", "metadata"],
)
def test_a_rank_that_wants_something_else(changes: dict[str, Any], said: str) -> None:
    world = World()
    odd = world.group[2]
    odd.puts[SECOND] = odd.puts[SECOND].but(**changes)
    world.run()
    (reason,) = world.refusals(InvalidOptionError)
    root = world.group[0].endings[0].info
    assert root is not None
    assert f"the ranks differ in {said.format(root=root.root.hex()[:16])}" in reason
    assert "nothing needs to be cleaned up" in reason
    assert "try again" not in reason
    require_restorable(world.engine, [1, 3])
    require_no_garbage(world.engine)


def test_a_rank_that_wants_another_ref_is_named_with_both() -> None:
    world = World()
    world.group[2].puts[SECOND] = world.group[2].puts[SECOND].but(ref="other")
    world.run()
    reasons = world.refusals(InvalidOptionError)
    assert all("the ranks differ in ref: ranks 0-1: 'job'; rank 2: 'other'" in reason for reason in reasons)
    assert set(world.engine.log.view().branches()) == {"job"}


def test_a_quota_that_is_used_up_ends_the_save_on_all_ranks() -> None:
    world = World()
    lead = world.group[0]
    lead.puts[SECOND] = lead.puts[SECOND].but(before=lambda: set_quota(world.engine, "*", warn=None, refuse=1))
    lead.puts[SECOND + 1] = lead.puts[SECOND + 1].but(before=lambda: remove_quota(lead.engine, "*"))
    world.run()
    (reason,) = {str(error).partition("saves to")[2] for error in world.errors(QuotaExceededError)}
    assert "'job' are refused: the quota for '*' is 1 B" in reason
    require_restorable(world.engine, [1, 3])
    require_no_garbage(world.engine)


def with_another_mesh(step: int, rank: int) -> CapturedState:
    """A rank that takes the group for one rank larger."""
    meshes = [Mesh((RANKS + 1,), tuple(range(RANKS + 1)))]
    return captured(tensors_of(step, RANKS), meshes, rank, RANKS, ["text", step])._replace(own=teller(step, RANKS)(rank).own)


def without_own(step: int, rank: int) -> CapturedState:
    return teller(step, RANKS, with_own=False)(rank)


def refused(step: int, rank: int) -> CapturedState:
    raise UnsupportedValueError("state.loader is a generator, which cannot be stored", object_id="state.loader")


@pytest.mark.parametrize("odd", [0, RANKS - 1])
@pytest.mark.parametrize(
    ("tell", "said"),
    [
        (with_another_mesh, "on the mesh of ranks 0-3"),
        (without_own, "the ranks differ in rank_state: "),
        (refused, "rank {odd}: UnsupportedValueError: state.loader is a generator"),
    ],
)
def test_a_rank_with_another_state(tell: Callable[[int, int], CapturedState], said: str, odd: int) -> None:
    """Which other states do not fit is in `test_united` and `test_pipelines`."""
    world = World()
    world.group[odd].puts[SECOND] = world.group[odd].puts[SECOND].but(take_apart=lambda: tell(2, odd))
    world.run()
    kinds: dict[object, type[StoreError]] = {without_own: InvalidOptionError, refused: UnsupportedValueError}
    (reason,) = world.refusals(kinds.get(tell, MismatchError))
    assert said.format(odd=odd) in reason
    assert f"rank {odd}" in reason or f", {odd}" in reason or f"{odd}-" in reason or f"-{odd}" in reason
    assert all(rank.endings[SECOND].seconds < TIMEOUT for rank in world.group), "known at once"
    require_restorable(world.engine, [1, 3])
    require_no_garbage(world.engine)


@pytest.mark.parametrize("odd", [2, RANKS])
def test_a_rank_that_takes_the_group_for_a_larger_one(odd: int) -> None:
    """In the place of one of them, or beyond them, where nobody waits for it."""
    backend, simulation = new_backend(), Simulation()
    group = putting_ranks(simulation, backend, RANKS, [1], only={0, 1, 2} - {odd})
    group += putting_ranks(simulation, backend, RANKS + 1, [1], only={odd})
    group[1].start = TIMEOUT / 2  # so that nothing is decided before
    simulation.run()
    reasons = {str(rank.endings[0].error) for rank in group}
    (reason,) = reasons
    assert f"rank {odd}: it came with world size {RANKS + 1}, and rank 0 with {RANKS}" in reason
    assert all(isinstance(rank.endings[0].error, SnapshotAbortedError) for rank in group)
    assert group[0].endings[0].seconds < TIMEOUT * 0.6, "known at once"
    assert not list(group[0].engine.log.view().snapshots())


def test_a_rank_beyond_the_group_that_comes_late_has_no_part_in_its_success() -> None:
    backend, simulation = new_backend(), Simulation()
    putting_ranks(simulation, backend, RANKS, STEPS)
    (stranger,) = putting_ranks(simulation, backend, RANKS + 1, [1], only={RANKS})
    stranger.start = TIMEOUT / 2
    simulation.run()
    error = stranger.endings[0].error
    assert isinstance(error, SnapshotAbortedError)
    assert "world size" in str(error)
    engine = open_engine(simulation, backend)
    engine.log.sync()
    require_restorable(engine, list(STEPS))
