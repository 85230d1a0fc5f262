"""A follower that waits asks for one log entry a look, and misses nothing."""

import random
from collections.abc import Callable
from itertools import count

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.feed.feed import LOOKS_A_POLL
from tensorstore_ck.log.watermark import LogChangedWarning
from tests.feed.versions import REF, NotedFaults, State, first_state, follower, save, train, update, zeros
from tests.gc.stores import open_store


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def meanwhile(monkeypatch: pytest.MonkeyPatch, happen: Callable[[int], bool]) -> None:
    """Calls `happen` with the number of each pause of a `wait`, instead of the pause; a result of True closes the feed."""
    pauses = count()

    class Closed(Flag):
        def wait(self, timeout_seconds: float | None = None) -> bool:
            if happen(next(pauses)):
                self.set()
            return self.is_set()

    monkeypatch.setattr("tensorstore_ck.feed.feed.Flag", Closed)


@pytest.mark.parametrize("seed", range(4))
def test_wait_pauses_only_at_the_newest_version(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Most looks of a wait ask for one log entry alone; they find what a poll would find."""
    generator, trainer, reader, state = random.Random(seed), open_store(backend), open_store(backend), first_state()
    roots, mine, swaps = [save(trainer, state, 0).root], zeros(state), 0

    def happen(number: int) -> bool:
        assert feed.version is not None
        assert feed.version.root == reader.resolve(REF).root
        what = generator.choice(
            ["nothing"] * 12 + ["save", "save two", "reset", "another branch", "another branch, save", "another version"]
        )
        if what == "reset":
            trainer.reset(REF, to=generator.choice(roots))
        elif what.startswith("another branch"):
            trainer.branch(f"other/{number}", at=roots[0])
        elif what == "another version":  # as another thread does it
            feed.poll(generator.choice(roots))
            feed.swap()
        for _ in range(2 if what == "save two" else int(what.endswith("save"))):
            train(state, number + 1)
            roots.append(save(trainer, state, number).root)
        return number == 100

    meanwhile(monkeypatch, happen)
    feed = follower(backend).follow(REF, into=mine)
    while feed.wait() is not None:
        feed.swap()
        swaps += 1
    assert swaps > 5


def test_wait_leaves_what_is_staged_to_another_thread_for_a_pause(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state, mine, swapped = open_store(backend), first_state(), zeros(first_state()), []
    save(trainer, state, 0)

    def happen(number: int) -> bool:  # as another thread does it
        swapped.append(feed.swap())
        save(trainer, state, 1)
        return number == 1

    meanwhile(monkeypatch, happen)
    feed = follower(backend).follow(REF, into=mine)
    staged = feed.poll()
    assert feed.wait(0) == staged
    version = feed.wait()
    assert swapped == [staged]
    assert version is not None
    assert version.step == 1
    assert feed.wait() is None, "it was closed during the pause"


def test_a_look_that_finds_nothing_is_one_request(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state, faults, requests = open_store(backend), first_state(), NotedFaults(), list[int]()
    backend.is_local = False
    save(trainer, state, 0)

    def happen(number: int) -> bool:
        requests.append(len(faults.noted))
        faults.noted.clear()
        return number == 2 * LOOKS_A_POLL - 1

    meanwhile(monkeypatch, happen)
    feed = follower(backend, faults).follow(REF, into=zeros(state))
    update(feed)
    faults.noted.clear()
    assert feed.wait() is None
    assert requests == [2, *[1] * (LOOKS_A_POLL - 1)] * 2


def test_a_wait_sees_that_the_log_went_back(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, state = open_store(backend), first_state()
    save(trainer, state, 0)
    train(state, 1)
    save(trainer, state, 1)

    def happen(number: int) -> bool:
        if number == 0:
            backend.delete([max(info.name for info in backend.list("log/"))])
        return number == LOOKS_A_POLL

    meanwhile(monkeypatch, happen)
    feed = follower(backend).follow(REF, into=zeros(state))
    update(feed)
    with pytest.warns(LogChangedWarning):
        version = feed.wait()
    assert version is not None
    assert version.step == 0


def bad_then_reset(trainer: tsck.Store, first: str, _: State) -> None:
    trainer.mark(REF, "bad")
    trainer.reset(REF, to=first)


def forgotten_then_branched(trainer: tsck.Store, first: str, _: State) -> None:
    trainer.forget(REF)
    trainer.branch(REF, at=first)


def bad_save_then_another(trainer: tsck.Store, _: str, state: State) -> None:
    for step in (2, 3):
        train(state, step)
        save(trainer, state, step)
        if step == 2:
            trainer.mark(REF, "bad")


@pytest.mark.parametrize(("events", "step"), [(bad_then_reset, 0), (forgotten_then_branched, 0), (bad_save_then_another, 3)])
def test_a_look_passes_over_what_was_replaced_before_it(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, events: Callable[[tsck.Store, str, State], None], step: int
) -> None:
    trainer, state = open_store(backend), first_state()
    first = save(trainer, state, 0).root
    train(state, 1)
    save(trainer, state, 1)

    def happen(number: int) -> bool:
        if number == 0:
            events(trainer, first, state)
        return number > 0

    meanwhile(monkeypatch, happen)
    feed = follower(backend).follow(REF, into=zeros(state))
    update(feed)
    version = feed.wait()
    assert version is not None
    assert version.step == step
