"""Whatever fails at any call of a poll or a swap, the tensors are one version, whole, and `version` says which."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.feed.feed import Feed
from tensorstore_ck.feed.followed_tensor import ChangedElements, ChangedRange, FollowedTensor
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Death
from tests.feed.versions import REF, NotedFaults, State, copy_of, equal, first_state, follower, save, step_of, train, update, zeros
from tests.gc.stores import AT_ONCE, copied, open_store

Made = tuple[MemoryBackend, State, State]


@pytest.fixture(scope="module")
def made() -> Made:
    """A store with version 0, that version, and the next one, which is not saved: some tensors change a little, one in full."""
    backend, state = MemoryBackend(), first_state()
    save(open_store(backend), state, 0)
    old = copy_of(state)
    train(state, 1)
    state["model"]["layers.2"] += 1
    return backend, old, state


class Following:
    """A trainer that has saved version 1, and a follower that is at version 0."""

    def __init__(self, made: Made, host_cache: Path | None = None) -> None:
        backend, self.old, self.new = made
        self.backend, self.faults = copied(backend), NotedFaults()
        self.backend.is_local = host_cache is None
        self.trainer = open_store(self.backend)
        self.trainer.checkout(REF)
        self.mine = zeros(self.old)
        self.feed = follower(self.backend, self.faults).follow(REF, into=self.mine, host_cache=host_cache)
        update(self.feed)
        save(self.trainer, self.new, 1)
        self.faults.calls, self.faults.noted[:] = 0, []

    def require(self, step: int) -> None:
        """The tensors are that version, and the feed says so."""
        assert equal(self.mine, [self.old, self.new][step])
        assert step_of(self.feed) == step


def calls_of_poll(made: Made, host_cache: Path | None = None) -> int:
    following = Following(made, host_cache)
    following.feed.poll()
    calls = following.faults.calls
    following.feed.swap()
    assert following.faults.calls == calls, "a swap asks the store for nothing"
    return calls


@pytest.mark.race
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("mode", ["unavailable", "die-before"])
def test_every_call_of_a_poll_fails_or_is_the_last(made: Made, mode: str, cached: bool, tmp_path: Path) -> None:
    calls = calls_of_poll(made, tmp_path / "counted" if cached else None)
    assert calls >= 4
    for at in range(1, calls + 1):
        folder = tmp_path / str(at) if cached else None
        following = Following(made, folder)
        following.faults.mode, following.faults.at = mode, at
        with pytest.raises((tsck.StoreError, Death)):
            following.feed.poll()
        assert following.feed.swap() is None
        following.require(0)
        following.faults.mode, following.faults.dead = "", False
        if cached:  # another engine of the host, which finds what the first one left
            others = zeros(following.old)
            update(follower(following.backend).follow(REF, into=others, host_cache=folder))
            assert equal(others, following.new)
        update(following.feed)
        following.require(1)


@pytest.mark.race
@pytest.mark.slow
def test_a_version_vanishes_at_every_call_of_a_poll(made: Made) -> None:
    middle, newest, ends = copy_of(made[2]), copy_of(made[2]), set[int | None]()
    train(middle, 2, 1.0)
    train(newest, 3, 1.0)
    for at in range(1, calls_of_poll(made) + 1):
        following = Following(made)
        following.trainer.set_policy(REF, keep_last=1)

        def call(what: str, effect: Any, tear: Any = None, *, create: bool = False, at: int = at, following: Following = following) -> Any:
            following.faults.calls += 1
            if following.faults.calls == at:
                for step, version in enumerate((middle, newest), start=2):
                    save(following.trainer, version, step)
                following.trainer.gc(AT_ONCE)
            return effect()

        following.faults.call = call  # type: ignore[method-assign]
        version = following.feed.poll()
        assert version is not None
        following.feed.swap()
        assert equal(following.mine, following.new if version.step == 1 else newest)
        assert following.feed.version == version
        ends.add(version.step)
        update(following.feed)
        assert equal(following.mine, newest)
    assert ends == {1, 3}


def changes_of(feed: Feed) -> list[Any]:
    staged = feed._staged
    assert staged is not None
    return list(staged.changes)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_every_copy_of_a_swap_fails(made: Made, applied: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Following(made)
    probe.feed.poll()
    assert {type(change) for change in changes_of(probe.feed)} == {ChangedElements, ChangedRange}
    for failing in range(len(changes_of(probe.feed))):
        following = Following(made)
        following.feed.poll()
        change = changes_of(following.feed)[failing]
        with monkeypatch.context() as patched:
            apply = change.apply

            def fail(apply: Callable[[], None] = apply) -> None:
                if applied:
                    apply()
                raise error

            patched.setattr(change, "apply", fail)
            with pytest.raises(error):
                following.feed.swap()
        following.require(0)
        following.feed.swap()
        following.require(1)


def test_tensors_are_compared_on_the_stream_of_swaps_after_what_the_caller_queued(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    own, callers = MagicMock(), MagicMock()
    own.wait_stream.side_effect = lambda stream: happened.append("it waits" if stream is callers else "")

    @contextmanager
    def current(stream: object) -> Iterator[None]:
        happened.append("on its own stream" if stream is own else "")
        yield
        happened.append("on the caller's stream")

    write = FollowedTensor.write

    def noted(tensor: FollowedTensor, start: int, data: memoryview) -> None:
        happened.append("a tensor is read")
        write(tensor, start, data)

    monkeypatch.setattr("tensorstore_ck.feed.stage_version.streams_of", lambda _: [(own, callers)])
    monkeypatch.setattr("torch.cuda.stream", current)
    monkeypatch.setattr(FollowedTensor, "write", noted)
    Following(made).feed.poll()
    told = [what for what, before in zip(happened, ["", *happened], strict=False) if what != before]
    assert "a tensor is read" in told
    for at, what in enumerate(told):
        assert what != "a tensor is read" or told[at - 2 : at + 2] == ["it waits", "on its own stream", what, "on the caller's stream"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_follows_the_stream_of_its_caller_who_then_follows_the_swap(
    made: Made, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    own, callers = MagicMock(), MagicMock()
    own.wait_stream.side_effect = lambda stream: happened.append("the swap waits" if stream is callers else "")
    callers.wait_stream.side_effect = lambda stream: happened.append("the caller waits" if stream is own else "")
    following = Following(made)
    following.feed.poll()
    here = threading.current_thread()

    def streams_of(_: object) -> list[tuple[MagicMock, MagicMock]]:
        assert threading.current_thread() is here, "each thread has its own current stream"
        return [(own, callers)]

    monkeypatch.setattr("tensorstore_ck.feed.feed.streams_of", streams_of)  # tests/gpu/test_order.py has real ones

    def apply() -> None:
        happened.append("a change")
        if fails:
            raise MemoryError

    for change in changes_of(following.feed):
        monkeypatch.setattr(change, "apply", apply)
    with pytest.raises(MemoryError) if fails else nullcontext():
        following.feed.swap()
    assert list(dict.fromkeys(happened)) == ["the swap waits", "a change", "the caller waits"]


@pytest.mark.parametrize("at", ["the look", "the reads"])
def test_no_swap_while_a_version_is_staged(made: Made, at: str) -> None:
    following = Following(made)
    following.feed.poll()
    arrived, goes_on = threading.Event(), threading.Event()
    save(following.trainer, copy_of(following.old), 2)

    def call(what: str, effect: Any, tear: Any = None, *, create: bool = False) -> Any:
        if at == "the look" or what.startswith("get snapshots/"):
            arrived.set()
            goes_on.wait(PATIENCE_SECONDS)
        return effect()

    following.faults.call = call  # type: ignore[method-assign]
    polling = threading.Thread(target=following.feed.poll)
    polling.start()
    try:
        assert arrived.wait(PATIENCE_SECONDS)
        swapped = following.feed.swap()
        following.require(1 if at == "the look" else 0)
        assert (swapped is None) == (at == "the reads")
    finally:
        goes_on.set()
        polling.join(PATIENCE_SECONDS)
    version = following.feed.swap()
    assert version is not None
    assert version.step == 2
    assert equal(following.mine, following.old)


def test_wrong_bytes_of_a_difference_are_read_again_then_reported(made: Made) -> None:
    following = Following(made)
    reads = 0

    def read(name: str, offset: int, target: memoryview) -> None:
        nonlocal reads
        following.backend.read_into(name, offset, target)
        if name.startswith("packs/"):
            reads += 1
            if is_damaged or reads == 1:
                target[len(target) // 2] ^= 1

    following.feed._engine.backend.read_into = read  # type: ignore[method-assign]
    is_damaged = False
    update(following.feed)
    following.require(1)
    train(following.new, 2)
    save(following.trainer, following.new, 2)
    before = copy_of(following.mine)
    is_damaged = True
    with pytest.raises(tsck.errors.DamageError):
        following.feed.poll()
    assert equal(following.mine, before)
