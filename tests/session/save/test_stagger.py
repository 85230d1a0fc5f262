"""Ranks and jobs that save in the background do not all begin to write at once; the ranks of a job share its rates."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.common import waiting
from tensorstore_ck.common.stagger import stagger_delay
from tensorstore_ck.errors import InvalidOptionError, SnapshotDroppedError
from tensorstore_ck.session.save.save_status import SaveStatus
from tests.gc.stores import stay_in_one_thread
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store
from tests.session.save.places import MIB, SECONDS, SIZE, Scene, put_beside, state_of

WINDOW_SECONDS = 3600.0


def test_a_save_in_the_background_waits_for_its_turn_before_it_writes(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store.engine.stagger_seconds = WINDOW_SECONDS
    pauses: list[float] = []

    def wait_turn(status: SaveStatus, seconds: float) -> None:
        assert not [call for call in place.gate.calls_made if call.startswith("open packs/")], "it has written before its turn"
        pauses.append(seconds)

    monkeypatch.setattr(SaveStatus, "wait_turn", wait_turn)
    for ref in ("runs/a", "runs/b"):
        place.gate.calls_made.clear()
        put_beside(place.store, 1, ref=ref).wait(SECONDS)
    assert len(set(pauses)) == len(pauses) == 2, "another job begins at another moment"
    assert all(0 < seconds < WINDOW_SECONDS for seconds in pauses)
    place.store.put_snapshot(state_of(2), ref="runs/a", step=2)
    assert len(pauses) == 2, "training waits for this one"
    assert [place.steps(ref) for ref in ("runs/a", "runs/b")] == [[1, 2], [1]]


def test_a_save_that_waits_for_its_turn_can_be_cancelled(place: Scene) -> None:
    place.store.engine.stagger_seconds = WINDOW_SECONDS
    pending = put_beside(place.store, 1)
    assert pending.cancel()
    with pytest.raises(SnapshotDroppedError):
        pending.wait(SECONDS)
    assert place.steps() == []


WAITS: dict[str, Callable[[Scene, tsck.PendingSnapshot], object]] = {
    "for it": lambda _, pending: pending.wait(SECONDS),
    "for all": lambda place, _: place.store.drain(SECONDS),
    "to save": lambda place, _: place.store.put_snapshot(state_of(2), ref="job", step=2),
    "to restore": lambda place, _: place.store.checkout("before"),
    "for memory": lambda place, _: put_beside(place.store, 2, size_bytes=40 * MIB).wait(SECONDS),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_save_that_somebody_waits_for_does_not_wait_for_its_turn(place: Scene, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    place.store.put_snapshot(state_of(0), ref="before")
    place.store.engine.stagger_seconds = WINDOW_SECONDS
    pending = put_beside(place.store, 1, size_bytes=40 * MIB if how == "for memory" else SIZE)
    assert not pending.done()
    WAITS[how](place, pending)
    assert pending.wait(SECONDS).step == 1


def test_a_save_without_a_thread_of_its_own_does_not_wait_for_its_turn(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store.engine.stagger_seconds = WINDOW_SECONDS
    stay_in_one_thread(monkeypatch)
    assert put_beside(place.store, 1, size_bytes=SIZE).done()


@pytest.mark.parametrize("ranks", [1, 2, 7, 4096])
def test_ranks_are_spread_evenly_over_the_window(ranks: int) -> None:
    delays = sorted(stagger_delay(WINDOW_SECONDS, "runs/gpt", rank, ranks) for rank in range(ranks))
    assert delays[0] >= 0
    assert delays[-1] < WINDOW_SECONDS
    assert [later - earlier for earlier, later in pairwise(delays)] == pytest.approx([WINDOW_SECONDS / ranks] * (ranks - 1), rel=1e-6)
    assert stagger_delay(0, "runs/gpt", ranks - 1, ranks) == 0


def save_on_rank(folder: str, ranks: int) -> list[float]:
    """The pauses of this rank's save."""
    pauses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveStatus, "wait_turn", lambda _, seconds: pauses.append(seconds))
        with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}", stagger_seconds=WINDOW_SECONDS) as store:
            state = {"w": torch.full((5000,), 1.0)}
            store.put_snapshot_async(state, ref="job", group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS).wait(TIMEOUT_SECONDS)
    return pauses


def test_each_rank_waits_for_its_turn(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    assert pool.run(save_on_rank, str(tmp_path), 3, ranks=3) == [[stagger_delay(WINDOW_SECONDS, "job", rank, 3)] for rank in range(3)]


def rates_on_rank(folder: str, ranks: int) -> tuple[float, float]:
    """This rank's share of both rates."""
    options: dict[str, Any] = {"cache_dir": f"{folder}/cache-{dist.get_rank()}", "rate_limit": "3GB", "read_rate_limit": 6e9}
    with tsck.open(f"{folder}/store", **options) as store:
        state = {"w": torch.full((5000,), 1.0)}
        store.put_snapshot(state, ref="job", group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
        store.checkout("job", into=state, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
        return store.engine.writes.rate, store.engine.reads.rate


def test_the_ranks_of_a_job_share_its_rates(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    assert pool.run(rates_on_rank, str(tmp_path), 3, ranks=3) == [(1e9, 2e9)] * 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stagger_seconds": -1}, "must be 0 or more"),
        ({"stagger_seconds": 5, "staging": "stage"}, r"staging=tsck\.Staging\(path, stagger_"),
    ],
)
def test_windows_that_are_none(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidOptionError, match=problem):
        tsck.open(tmp_path / "store", create=True, **options)
