"""Many ranks save in the background: no save is ever torn, ranks never drop different snapshots, and all get the same errors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.common.host_memory import default_limit_bytes
from tests.session.group.pool import Pool, make_store
from tests.session.save import rank_side
from tests.session.save.rank_side import Ending, full_tensors

Ask = Callable[..., list[Any]]


@pytest.fixture
def begin(pool: Pool, tmp_path: Path) -> Iterator[Callable[..., Ask]]:
    """``begin(copies of memory on each rank)`` opens the store on these ranks, and returns what asks them."""
    begun: list[int] = []

    def start(*copies: int | None) -> Ask:
        make_store(tmp_path, block_bytes=64 << 10)
        ranks = len(copies)
        pool.run(rank_side.begin, str(tmp_path), ranks, list(copies), ranks=ranks)
        begun.append(ranks)
        return lambda function, *args: pool.run(function, *args, ranks=ranks)

    yield start
    for ranks in begun:
        pool.run(rank_side.end, ranks=ranks)


def put(ask: Ask, step: int, **options: Any) -> list[Ending]:
    return ask(with_options, step, options)


def with_options(step: int, options: dict[str, Any]) -> Ending:
    return rank_side.put(step, **options)


def require_published(ask: Ask, *steps: int) -> None:
    """On all ranks, and the same."""
    for step in steps:
        endings = ask(rank_side.wait, step)
        assert {kind for kind, _ in endings} == {"published"}, endings
        assert len(set(endings)) == 1


def require_visible(folder: Path, ranks: int, *steps: int) -> None:
    """These and no others, each what was saved, and on top of the one before."""
    with tsck.open(folder / "store", cache_dir=folder / "look") as store:
        snapshots = store.log("job")
        assert [snapshot.step for snapshot in reversed(snapshots)] == list(steps)
        assert [snapshot.parent for snapshot in snapshots] == [*(snapshot.root for snapshot in snapshots[1:]), None]
        for step in steps:
            found = store.checkout(f"job@{step}")
            for name, full in full_tensors(step).items():
                assert torch.equal(found["model"][name], full), f"step {step} is torn"
            assert torch.equal(found["same"], torch.full((900,), float(step)))
            assert found["list"] == [step, {"step": step}]
            for rank in range(ranks):
                own = store.rank_state(f"job@{step}", rank)
                assert (own["rng"].tolist(), own["seen"]) == ([step, rank], bytearray([rank] * 100))


def kinds(endings: list[Ending]) -> list[str]:
    return [kind for kind, _ in endings]


# --- in flight ----------------------------------------------------------------------------------------------------------


def test_several_in_flight_each_as_it_was_at_its_call(begin: Callable[..., Ask], tmp_path: Path) -> None:
    """With one that is waited for and restores after them; memory that nobody sized is shared by the ranks of the host."""
    ask = begin(None, None, None)
    ask(rank_side.stop, "put parts/", 2)
    for step in (1, 2, 3):
        assert kinds(put(ask, step)) == ["published"] * 3, "it must return"
    ask(rank_side.let_go)
    assert ask(rank_side.restore, "job") == [(True, 3)] * 3
    put(ask, 4)
    assert kinds(ask(rank_side.put_now, 5)) == ["published"] * 3
    put(ask, 6)
    require_published(ask, 1, 2, 3, 4, 6)
    require_visible(tmp_path, 3, 1, 2, 3, 4, 5, 6)
    assert ask(rank_side.told, "stalled", "stall_seconds") == [[]] * 3, "there was memory for all"
    for in_use, limit in ask(rank_side.memory):
        assert not in_use
        assert default_limit_bytes(3) / 2 < limit < 2 * default_limit_bytes(3)


def test_frozen_tensors_of_many_ranks(begin: Callable[..., Ask], tmp_path: Path) -> None:
    """A state that fits only because of them; and all ranks raise for a change on one."""
    ask = begin(4, 4)
    for step in range(1, 12):
        ask(rank_side.keep, step, step == 11)
    endings = ask(rank_side.wait, 11)
    assert kinds(endings) == ["FrozenChangedError"] * 2
    assert all("model.w was declared frozen, but has changed" in text for _, text in endings), endings
    hashed = ask(rank_side.told, "published", "hashed_bytes")
    for rank in (0, 1):
        assert [step for step, size in hashed[rank] if size > 100_000] == [1]
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "look") as store:
        assert [snapshot.step for snapshot in reversed(store.log("job"))] == list(range(1, 11))
        found = store.checkout("job@10")
        assert torch.equal(found["model"]["w"], full_tensors(1)["w"])
        assert torch.equal(found["same"], torch.full((900,), 10.0))


# --- memory is used up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"on_full": "skip"}], ids=["block", "skip"])
def test_a_rank_that_has_less_memory_than_rank_0_waits(begin: Callable[..., Ask], tmp_path: Path, options: dict[str, Any]) -> None:
    """It does not skip alone: the others save."""
    ask = begin(3, 1, None)
    for step in range(1, 4):
        put(ask, step, **options)
    require_published(ask, 1, 2, 3)
    require_visible(tmp_path, 3, 1, 2, 3)


def test_block_and_skip_are_decided_by_rank_0_for_all(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask = begin(1, 8, None)
    ask(rank_side.stop, "put parts/", 1)
    put(ask, 1)
    put(ask, 2, on_full="skip")
    endings = ask(rank_side.wait, 2)
    assert kinds(endings) == ["SnapshotDroppedError"] * 3
    assert all("skipped" in text for _, text in endings)
    ask(rank_side.let_go)
    require_published(ask, 1)
    put(ask, 3, on_full="skip")
    put(ask, 4)
    put(ask, 5)
    require_published(ask, 3, 4, 5)
    require_visible(tmp_path, 3, 1, 3, 4, 5)
    assert ask(rank_side.told, "dropped") == [[(2, "skipped")]] * 3
    assert ask(rank_side.told, "failed") == [[]] * 3


def test_replace_is_decided_by_rank_0_for_all(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask = begin(3, 8, 4)
    ask(rank_side.stop, "put parts/", 2)
    put(ask, 1, on_full="replace")
    ask(rank_side.await_work_on, 1, 0)
    for step in (2, 3, 4, 5):
        put(ask, step, on_full="replace")
    ask(rank_side.let_go)
    require_published(ask, 1, 4, 5)
    for step in (2, 3):
        endings = ask(rank_side.wait, step)
        assert kinds(endings) == ["SnapshotDroppedError"] * 3, endings
    assert ask(rank_side.told, "dropped") == [[(2, "replaced"), (3, "replaced")]] * 3
    assert ask(rank_side.told, "failed") == [[]] * 3
    put(ask, 6)
    require_published(ask, 6)
    require_visible(tmp_path, 3, 1, 4, 5, 6)
    assert [in_use for in_use, _ in ask(rank_side.memory)] == [0] * 3


def test_what_waits_on_rank_0_is_replaced_though_it_is_in_work_on_another(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask = begin(2, 8)
    ask(rank_side.hold_after, 1, 0)
    put(ask, 1)
    ask(rank_side.await_hold, 0)
    put(ask, 2)
    put(ask, 3)
    ask(rank_side.await_work_on, 2, 1)
    put(ask, 4, on_full="replace")
    ask(rank_side.let_go)
    require_published(ask, 1, 3, 4)
    assert kinds(ask(rank_side.wait, 2)) == ["SnapshotDroppedError"] * 2
    assert ask(rank_side.told, "failed") == [[]] * 2
    require_visible(tmp_path, 2, 1, 3, 4)


def test_the_newest_replaces_on_all_ranks_what_waits_on_rank_0(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask = begin(8, 8)
    ask(rank_side.hold_after, 1, 0)
    put(ask, 1)
    ask(rank_side.await_hold, 0)
    put(ask, 2, on_full="newest")
    ask(rank_side.await_work_on, 2, 1)
    put(ask, 3, on_full="newest")
    ask(rank_side.let_go)
    require_published(ask, 1, 3)
    assert kinds(ask(rank_side.wait, 2)) == ["SnapshotDroppedError"] * 2
    assert ask(rank_side.told, "dropped") == [[(2, "replaced")]] * 2
    assert ask(rank_side.told, "failed") == [[]] * 2
    require_visible(tmp_path, 2, 1, 3)


def test_ranks_replace_no_save_that_one_of_them_makes_alone(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask, alone = begin(None, None), range(100, 110)
    ask(rank_side.stop, "put parts/", 0)
    put(ask, 1)
    ask(rank_side.put_alone, alone, 1)
    put(ask, 2, on_full="newest")
    put(ask, 3, on_full="newest")
    ask(rank_side.let_go)
    require_published(ask, 1, 3)
    assert [ask(rank_side.wait, step, 1)[1][0] for step in alone] == ["published"] * len(alone)
    assert ask(rank_side.told, "dropped") == [[(2, "replaced")]] * 2
    require_visible(tmp_path, 2, 1, 3)


def test_ranks_replace_no_save_of_other_ranks(begin: Callable[..., Ask]) -> None:
    """Rank 2 would not learn that it was dropped."""
    ask = begin(8, 8, 8)
    ask(rank_side.stop, "put parts/", 0)
    put(ask, 1)
    put(ask, 2, on_full="newest")
    ask(put_pair, 3, {"on_full": "newest"})
    ask(rank_side.let_go)
    require_published(ask, 1, 2)
    assert kinds([ask(rank_side.wait, 3, rank)[rank] for rank in (0, 1)]) == ["published"] * 2
    assert ask(rank_side.told, "dropped") == ask(rank_side.told, "failed") == [[]] * 3


def put_pair(step: int, options: dict[str, Any]) -> Ending | None:
    return rank_side.put_pair(step, **options)


def test_a_state_that_does_not_fit_on_one_rank(begin: Callable[..., Ask], tmp_path: Path) -> None:
    ask = begin(8, 8, 8)
    put(ask, 1)
    ask(limit_memory, 1, 1000)
    endings = put(ask, 2)
    assert kinds(endings)[1] == "NoSpaceError"
    assert "rank 1" in endings[1][1]
    assert "host_memory_bytes" in endings[1][1]
    for rank in (0, 2):  # one that comes late gets the error at once
        told = ask(rank_side.wait, 2, rank)[rank] if kinds(endings)[rank] == "published" else endings[rank]
        assert "rank 1" in told[1]
    ask(limit_memory, 1, 8 * rank_side.COPY)
    put(ask, 3)
    require_published(ask, 1, 3)
    require_visible(tmp_path, 3, 1, 3)


def limit_memory(rank: int, limit_bytes: int) -> None:
    side = rank_side.SIDES[-1]
    side.store.session.queue.wait_idle()
    arena = side.store.session.queue._memory.arena
    assert arena is not None
    if rank_side.mine(rank):
        arena.limit_bytes = limit_bytes


# --- errors -------------------------------------------------------------------------------------------------------------


def test_what_one_rank_cannot_store(begin: Callable[..., Ask], tmp_path: Path) -> None:
    """That rank gets the error at once, the others by the wait; saves before and after are not hurt."""
    ask = begin(4, 4, 4)
    ask(rank_side.stop, "put parts/", 0)
    put(ask, 1)
    ask(let_go_soon)
    endings = put(ask, 2, odd=1)
    assert kinds(endings)[:2] == ["published", "UnsupportedValueError"], endings
    assert "odd" in endings[1][1]
    for rank in (0, 2):  # rank 2 may learn of it before its save begins
        kind, text = ask(rank_side.wait, 2, rank)[rank] if kinds(endings)[rank] == "published" else endings[rank]
        assert kind == "UnsupportedValueError"
        assert "rank 1" in text
        assert "odd" in text
    put(ask, 3)
    require_published(ask, 1, 3)
    require_visible(tmp_path, 3, 1, 3)


def let_go_soon() -> None:
    """As soon as the next save of this rank is refused or captured: it may have to wait for those before."""
    import threading

    threading.Timer(0.1, rank_side.let_go).start()


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "waited for"])
def test_an_error_that_nobody_waited_for_is_raised_on_all_ranks_by_the_next_save(
    begin: Callable[..., Ask], tmp_path: Path, beside: bool
) -> None:
    ask = begin(4, 4, 4)
    put(ask, 1)
    ask(rank_side.settle)
    ask(rank_side.fail, "put parts/", 2)
    put(ask, 2)
    ask(rank_side.settle)
    endings = put(ask, 3) if beside else ask(rank_side.put_now, 3)
    assert kinds(endings) == ["SnapshotAbortedError"] * 3
    assert all("rank 2" in text and "injected" in text for _, text in endings), endings
    again = put(ask, 4) if beside else ask(rank_side.put_now, 4)
    assert kinds(again) == ["published"] * 3, again
    ask(rank_side.settle)
    require_visible(tmp_path, 3, 1, 4)


@pytest.mark.parametrize(("told", "beside"), [(0, True), (1, False)])
def test_ranks_of_which_one_has_its_result_already_stay_together(
    begin: Callable[..., Ask], tmp_path: Path, told: int, beside: bool
) -> None:
    """Whichever rank raises, all take the same step: the next save but one takes place at the latest."""
    ask = begin(4, 4)
    again = (lambda step: put(ask, step)) if beside else (lambda step: ask(rank_side.put_now, step))
    put(ask, 1)
    ask(rank_side.settle)
    ask(rank_side.fail, "put parts/", 1)
    put(ask, 2)
    ask(rank_side.settle)
    ask(rank_side.wait, 2, told)
    outcomes = []
    for step in (3, 4, 5):
        endings = again(step)
        ask(rank_side.settle)
        outcomes.append(kinds(endings)[0])
        assert len(set(kinds(endings))) == 1, endings
    assert outcomes[1:] == ["published", "published"]
    expected = [1, *(step for step, outcome in zip((3, 4, 5), outcomes, strict=True) if outcome == "published")]
    require_visible(tmp_path, 2, *expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancel_on_one_rank_is_one_on_all(begin: Callable[..., Ask], tmp_path: Path, rank: int) -> None:
    ask = begin(4, 4)
    ask(rank_side.stop, "put parts/", 1)
    put(ask, 1)
    put(ask, 2)
    put(ask, 3)
    assert ask(rank_side.cancel, 2, rank)[rank] is True
    ask(rank_side.let_go)
    require_published(ask, 1, 3)
    endings = ask(rank_side.wait, 2)
    assert kinds(endings)[rank] == "SnapshotDroppedError"
    assert kinds(endings)[1 - rank] in ("SnapshotDroppedError", "SnapshotAbortedError")
    assert "cancelled" in endings[1 - rank][1]
    put(ask, 4)
    require_published(ask, 4)
    require_visible(tmp_path, 2, 1, 3, 4)
