"""Ranks of one model: they stage the version that rank 0 finds, or none does; share what they read, and swap together. Real processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.feed import Feed
from tensorstore_ck.feed.followed_tensor import ChangedElements
from tests.feed.versions import REF, State, copy_of, equal, first_state, save, train, zeros
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, RemoteError, make_store

COUNT = 3
DEAD_AFTER_SECONDS = 10
FEEDS: dict[str, tuple[tsck.ReadOnlyStore, Feed, Any, list[tsck.Event]]] = {}
"""In a rank's process, by name."""


def follow(folder: str, name: str = "feed", *, share_rows: bool = False, wrong_on: int | None = None) -> None:
    """A rank begins to follow whole tensors; or with `share_rows`, its part of the rows of one."""
    rank = dist.get_rank()
    store = tsck.open(f"{folder}/store", read_only=True, cache_dir=f"{folder}/cache-{rank}", dead_after_seconds=DEAD_AFTER_SECONDS)
    into: Any = zeros(first_state())
    if share_rows:
        into["model"]["layers.0"] = tsck.Box(torch.zeros(20, 128).bfloat16(), (64, 128), (20 * rank, 0))
    if rank == wrong_on:
        into["model"]["bias"] = torch.zeros(9)
    events: list[tsck.Event] = []
    store.on_event(events.append)
    feed = store.follow(REF, into=into, group=GROUPS[COUNT], timeout_seconds=TIMEOUT_SECONDS, poll_seconds=0.01)
    FEEDS[name] = store, feed, into, events


def call(method: str, *args: Any, name: str = "feed", only: int | None = None, **options: Any) -> Any:
    if only not in (None, dist.get_rank()):
        return None
    version = getattr(FEEDS[name][1], method)(*args, **options)
    return version and version.step


def tensors(name: str = "feed") -> State:
    return copy_of(FEEDS[name][2])


def local_rows(name: str = "feed") -> torch.Tensor:
    local: torch.Tensor = FEEDS[name][2]["model"]["layers.0"].local
    return local.clone()


def read_bytes(name: str = "feed") -> int:
    """By the last poll of a rank."""
    return int([event.fields["read_bytes"] for event in FEEDS[name][3] if event.kind == "fetched"][-1])


def change(name: str = "feed", only: int = 1) -> None:
    """Somebody changes a tensor of one rank."""
    if dist.get_rank() == only:
        FEEDS[name][2]["model"]["layers.1"].view(-1)[:64] += 1


def fail_to_apply(only: int) -> None:
    """The swaps of one rank fail from now on."""
    if dist.get_rank() == only:
        failing = patch.object(ChangedElements, "apply", side_effect=MemoryError("no memory is left on this rank"))
        failing.start()
        UNDO.append(failing.stop)


UNDO: list[Any] = []


def fail_to_read(only: int) -> None:
    """The reads of packs of one rank fail from now on."""
    if dist.get_rank() == only:
        error = tsck.BackendUnavailableError("no way to the store", object_id="test")
        failing = patch.object(FEEDS["feed"][0].engine.backend, "read_into", side_effect=error)
        failing.start()
        UNDO.append(failing.stop)


def fail_to_read_once(only: int) -> None:
    """The next read of a pack of one rank fails."""
    if dist.get_rank() == only:
        backend = FEEDS["feed"][0].engine.backend
        error = tsck.BackendUnavailableError("no way to the store", object_id="test")
        failing = patch.object(backend, "read_into", side_effect=chain([error], repeat(DEFAULT)), wraps=backend.read_into)
        failing.start()
        UNDO.append(failing.stop)


def read_little_at_a_time() -> None:
    """So that a small version has ranges for several ranks."""
    few = patch("tensorstore_ck.feed.read_changes.MERGE_BYTES", 1)
    few.start()
    UNDO.append(few.stop)


def mend() -> None:
    while UNDO:
        UNDO.pop()()


def end() -> None:
    mend()
    while FEEDS:
        FEEDS.popitem()[1][0].close()


@pytest.fixture
def folder(tmp_path: Path, pool: Pool) -> Iterator[Path]:
    make_store(tmp_path)
    yield tmp_path
    pool.run(end, ranks=COUNT)


@pytest.fixture
def saved(folder: Path) -> Iterator[tuple[tsck.Store, State]]:
    with tsck.open(folder / "store", cache_dir=folder / "cache") as trainer:
        state = first_state()
        save(trainer, state, 0)
        yield trainer, state


def publish(saved: tuple[tsck.Store, State], step: int) -> State:
    trainer, state = saved
    train(state, step)
    save(trainer, state, step)
    return copy_of(state)


def test_each_version_is_read_once_by_all_and_swapped_by_all(pool: Pool, folder: Path, saved: tuple[tsck.Store, State]) -> None:
    pool.run(follow, str(folder), ranks=COUNT)
    pool.run(read_little_at_a_time, ranks=COUNT)
    before = zeros(saved[1])
    for step in range(3):
        state = publish(saved, step) if step else copy_of(saved[1])
        assert pool.run(call, "swap", ranks=COUNT) == [None] * COUNT, "nothing is staged"
        assert pool.run(call, "poll", ranks=COUNT) == [step] * COUNT
        assert pool.run(call, "poll", ranks=COUNT) == [step] * COUNT, "it is staged already"
        read = pool.run(read_bytes, ranks=COUNT)
        assert pool.run(call, "swap", ranks=COUNT) == [step] * COUNT
        assert all(equal(rank, state) for rank in pool.run(tensors, ranks=COUNT))
        with (
            tsck.open(folder / "store", read_only=True, cache_dir=folder / "alone") as store,
            store.follow(REF, into=before) as alone,
        ):
            events: list[tsck.Event] = []
            store.on_event(events.append)
            alone.poll()
        assert sum(read) == events[0].fields["read_bytes"]
        assert min(read) > 0
        before = state
    assert pool.run(call, "wait", 0, ranks=COUNT) == [None] * COUNT
    publish(saved, 3)
    pool.run(change, ranks=COUNT)
    assert pool.run(call, "wait", ranks=COUNT) == [3] * COUNT
    assert pool.run(call, "swap", ranks=COUNT) == [3] * COUNT
    assert all(equal(rank, saved[1]) for rank in pool.run(tensors, ranks=COUNT)), "also where somebody had changed a rank's tensors"


def test_ranks_take_their_shares(pool: Pool, folder: Path, saved: tuple[tsck.Store, State]) -> None:
    pool.run(follow_shares, str(folder), ranks=COUNT)
    for step in range(3):
        state = publish(saved, step) if step else copy_of(saved[1])
        assert pool.run(call, "poll", ranks=COUNT) == [step] * COUNT
        assert pool.run(call, "swap", ranks=COUNT) == [step] * COUNT
        for rank, rows in enumerate(pool.run(local_rows, ranks=COUNT)):
            assert torch.equal(rows, state["model"]["layers.0"][20 * rank : 20 * rank + 20])


def follow_shares(folder: str) -> None:
    follow(folder, share_rows=True)


def follow_wrongly(folder: str) -> None:
    follow(folder, wrong_on=1)


def test_what_does_not_fit_on_one_rank_is_staged_on_none(pool: Pool, folder: Path, saved: tuple[tsck.Store, State]) -> None:
    pool.run(follow_wrongly, str(folder), ranks=COUNT)
    for answer in pool.ask(call, "poll", ranks=COUNT):
        assert isinstance(answer, tsck.MismatchError)
        assert "rank 1: MismatchError" in str(answer)
    assert pool.run(call, "swap", ranks=COUNT) == [None] * COUNT


@pytest.mark.parametrize("only", [0, 1])
def test_a_rank_that_cannot_read_or_swap_leaves_all_at_their_version(
    pool: Pool, folder: Path, saved: tuple[tsck.Store, State], only: int
) -> None:
    first = copy_of(saved[1])
    pool.run(follow, str(folder), ranks=COUNT)
    pool.run(call, "poll", ranks=COUNT)
    pool.run(call, "swap", ranks=COUNT)
    state = publish(saved, 1)
    pool.run(read_little_at_a_time, ranks=COUNT)
    pool.run(fail_to_read, only, ranks=COUNT)
    try:
        answers = pool.ask(call, "poll", ranks=COUNT)
    finally:
        pool.run(mend, ranks=COUNT)
    for answer in answers:
        assert isinstance(answer, tsck.SnapshotAbortedError)
        assert f"rank {only}: BackendUnavailableError: no way to the store" in str(answer)
    assert pool.run(call, "swap", ranks=COUNT) == [None] * COUNT
    assert pool.run(call, "poll", ranks=COUNT) == [1] * COUNT
    pool.run(fail_to_apply, only, ranks=COUNT)
    try:
        answers = pool.ask(call, "swap", ranks=COUNT)
    finally:
        pool.run(mend, ranks=COUNT)
    for answer in answers:
        assert isinstance(answer, tsck.SnapshotAbortedError)
        assert "no memory is left" in str(answer)
    assert all(equal(rank, first) for rank in pool.run(tensors, ranks=COUNT))
    assert pool.run(call, "swap", ranks=COUNT) == [1] * COUNT
    assert all(equal(rank, state) for rank in pool.run(tensors, ranks=COUNT))


@pytest.mark.parametrize("only", [0, 1])
def test_what_one_rank_could_not_read_at_once_is_read_by_each(pool: Pool, folder: Path, saved: tuple[tsck.Store, State], only: int) -> None:
    pool.run(follow, str(folder), ranks=COUNT)
    pool.run(read_little_at_a_time, ranks=COUNT)
    pool.run(call, "poll", ranks=COUNT)
    pool.run(call, "swap", ranks=COUNT)
    state = publish(saved, 1)
    pool.run(fail_to_read_once, only, ranks=COUNT)
    assert pool.run(call, "poll", ranks=COUNT) == [1] * COUNT
    assert pool.run(call, "swap", ranks=COUNT) == [1] * COUNT
    assert all(equal(rank, state) for rank in pool.run(tensors, ranks=COUNT))


def wait_in_a_thread(only: int) -> int | None:
    """All ranks wait in threads, as a guide says; one closes its feed."""
    steps: list[int | None] = []
    thread = threading.Thread(target=lambda: steps.append(call("wait")))
    thread.start()
    if dist.get_rank() == only:
        FEEDS["feed"][1].close()
    thread.join()
    (step,) = steps
    return step


def close_before_a_look(only: int) -> int | None:
    """All ranks wait; one closes its feed, as another thread, when it has decided to look."""
    feed = FEEDS["feed"][1]
    look = feed._look

    def close_and_look(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == only:
            feed.close()
        return look(*args, **options)

    with patch.object(feed, "_look", side_effect=close_and_look):
        return call("wait")  # type: ignore[no-any-return]


@pytest.mark.parametrize("only", [0, 2])
@pytest.mark.parametrize("closes", [wait_in_a_thread, close_before_a_look])
def test_one_rank_that_closes_its_feed_ends_the_wait_of_all(
    pool: Pool, folder: Path, saved: tuple[tsck.Store, State], closes: Callable[[int], int | None], only: int
) -> None:
    pool.run(follow, str(folder), ranks=COUNT)
    pool.run(call, "poll", ranks=COUNT)
    pool.run(call, "swap", ranks=COUNT)
    assert pool.run(closes, only, ranks=COUNT) == [None] * COUNT


def follow_another(folder: str) -> None:
    with tsck.open(f"{folder}/store", read_only=True, cache_dir=f"{folder}/cache-{dist.get_rank()}") as store:
        store.follow(f"runs/{dist.get_rank() % 2}", into=zeros(first_state()), group=GROUPS[COUNT], timeout_seconds=TIMEOUT_SECONDS)


def test_ranks_that_follow_different_branches_are_told(pool: Pool, folder: Path, saved: tuple[tsck.Store, State]) -> None:
    with pytest.raises(RemoteError, match="the ranks differ in ref"):
        pool.run(follow_another, str(folder), ranks=COUNT)


def kill_itself(at: str, only: int) -> None:
    """One rank is killed when it reads, or has begun to swap."""
    if dist.get_rank() == only:
        where = (FEEDS["feed"][0].engine.backend, "read_into") if at == "read" else (ChangedElements, "apply")
        patch.object(*where, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)).start()


@pytest.mark.slow
@pytest.mark.parametrize("only", [0, 2])
@pytest.mark.parametrize("at", ["read", "swap"])
def test_a_rank_that_is_killed_leaves_the_others_at_their_version(tmp_path: Path, at: str, only: int) -> None:
    make_store(tmp_path)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as trainer, Pool(COUNT) as pool:
        state = first_state()
        save(trainer, state, 0)
        first = copy_of(state)
        pool.run(follow, str(tmp_path), ranks=COUNT)
        pool.run(call, "poll", ranks=COUNT)
        pool.run(call, "swap", ranks=COUNT)
        publish((trainer, state), 1)
        pool.run(read_little_at_a_time, ranks=COUNT)
        pool.run(kill_itself, at, only, ranks=COUNT)
        for method in ("poll", "swap"):
            answers = pool.ask(call, method, ranks=COUNT)
            if any(isinstance(answer, EOFError) for answer in answers):
                break
        assert all(isinstance(answer, EOFError if rank == only else tsck.SnapshotAbortedError) for rank, answer in enumerate(answers))
        for rank in {*range(COUNT)} - {only}:
            assert equal(pool.ask_one(rank, tensors), first)
