"""Replicas that part after the first save: found in rotation, both copies kept, the snapshot marked."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.format import block_assignment
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.group import replica_drift
from tensorstore_ck.store import Store
from tests.session.group.states import Spreading, captured, sharded, whole
from tests.session.group.stores import Hosts

RANKS = 4
HSDP = Mesh((2, 2), (0, 1, 2, 3))


class Job(Hosts):
    """Ranks that save together again and again."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend(), RANKS)
        self._step = 0

    def save(self, state: Callable[[int], CapturedState]) -> SnapshotRow:
        self._step += 1
        return self.put(state, step=self._step)

    def save_often(self, state: Callable[[int], CapturedState]) -> list[SnapshotRow]:
        return [self.save(state) for _ in range(RANKS - 1)]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(block_assignment, "MIN_RUN_BYTES", 10_000)
    return Job()


def replicated(rank: int, changed: dict[int, int] = {}) -> CapturedState:  # noqa: B006 - not changed
    """`changed`: rank -> an element that is another one there."""
    return captured({"small": Spreading(whole((10,)), None), "w": Spreading(altered(rank, changed), None)}, [], rank, RANKS)


def altered(rank: int, changed: dict[int, int]) -> np.ndarray[Any, Any]:
    array = whole((20_000,))
    if rank in changed:
        array[changed[rank]] += 1
    return array


def kept(store: Store) -> dict[str, Any]:
    return {name: store.checkout(name) for name in store.branches() if name.startswith("drift/")}


@pytest.mark.parametrize(("rank", "element"), [(0, 0), (1, 19_999), (3, 0)])
def test_every_replica_is_compared_in_turn(job: Job, rank: int, element: int) -> None:
    """Of each block, each rank is the one that writes it, or is looked at in one of the saves that follow."""
    first = job.save(replicated)
    found = []
    for _ in range(RANKS - 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            info = job.save(lambda number: replicated(number, {rank: element}))
        mark = job.stores[0].resolve(info.root.hex()).mark
        assert (mark == "drift") == bool(caught)
        found.append(mark)
    assert "drift" in found
    assert job.stores[0].resolve(first.root.hex()).mark == ""


def test_both_copies_are_kept(job: Job) -> None:
    job.save(replicated)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.save_often(lambda rank: replicated(rank, {2: 0}))
    by_first, by_rank = sorted((str(warning.message) for warning in caught), reverse=True)
    assert by_rank.startswith("rank 2 no longer has the values of rank 0 in 'w'"), "by the rank itself"
    assert by_first.startswith("the snapshot of step 2 on 'job' is marked drift: rank 2 had other values than rank 0"), "by rank 0, once"
    assert all("drift/job/rank-2" in each for each in (by_first, by_rank))
    store = job.stores[3]
    marked = [snapshot for snapshot in store.log("job") if snapshot.mark]
    assert [snapshot.mark for snapshot in marked] == ["drift"]
    assert marked[0].reason == "rank 2 had other values than rank 0 of the same data; its own are at drift/job/rank-2"
    with pytest.warns(UserWarning, match="is marked drift: rank 2"):
        shared = store.checkout(marked[0].root)[1]
    assert np.array_equal(shared, whole((20_000,)))
    branch = store.branches()["drift/job/rank-2"]
    own = store.checkout("drift/job/rank-2")
    assert list(own) == ["w"], "what did not differ is not kept"
    assert np.array_equal(own["w"], altered(2, {2: 0}))
    assert branch.step == marked[0].step
    assert store.show("drift/job/rank-2").metadata == {"drift": {"snapshot": marked[0].root, "written_by_rank": 0, "rank": 2}}


def test_regions_of_a_mesh(job: Job) -> None:
    """Half of the tensor is on each side; the copy says which elements it has."""

    def state(rank: int, changed: dict[int, int]) -> CapturedState:
        return captured({"w": Spreading(altered(rank, changed), sharded(0, None, Shard(0)))}, [HSDP], rank, RANKS)

    job.save(lambda rank: state(rank, {}))
    with pytest.warns(UserWarning, match="'w'"), pytest.warns(UserWarning, match="is marked drift"):
        job.save(lambda rank: state(rank, {3: 10_000}))
    own = kept(job.stores[0])
    assert [list(each) for each in own.values()] == [["w[10000:20000]"]]


def test_a_copy_that_cannot_be_kept(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NoSpaceError("disk full")

    job.save(replicated)
    monkeypatch.setattr(replica_drift, "save_captured", fail)
    with pytest.warns(UserWarning, match="its own could not be kept: disk full"), pytest.warns(UserWarning, match="is marked drift"):
        infos = job.save_often(lambda rank: replicated(rank, {2: 0}))
    assert "drift" in [job.stores[0].resolve(info.root.hex()).mark for info in infos]


def test_the_rotation() -> None:
    for ranks in range(2, 6):
        replicas = tuple(range(10, 10 + ranks))
        for rank in replicas:
            assert {replica_drift.watched(replicas, rank, turn) for turn in range(1, ranks)} == set(replicas) - {rank}
        for turn in range(1, 7):
            assert sorted(replica_drift.watched(replicas, rank, turn) for rank in replicas) == list(replicas)
