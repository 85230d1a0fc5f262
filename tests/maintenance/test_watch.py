"""Watchers learn of each published snapshot, in order, and it stays while they work on it."""

from collections.abc import Callable
from typing import Any

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.maintenance.watch import watch
from tests.gc.stores import AT_ONCE, Clock, open_store, same, state


def put(store: tsck.Store, *steps: int) -> None:
    for step in steps:
        store.put_snapshot(state(step), ref="run", step=step)


def watched(store: tsck.Store, acts: list[Callable[[], object]], **options: Any) -> list[int | None]:
    """The steps that are reported, while at each look that finds nothing the next of `acts` happens; it ends after the last."""
    left = list(acts)

    def sleep(_: float) -> None:
        left.pop(0)() if left else done.append(None)

    done: list[None] = []
    return [info.step for info in watch(store.engine.of_store(), "run", sleep=sleep, until=lambda: bool(done), **options)]


def test_each_is_reported_once_and_in_order_also_of_a_branch_that_is_not_there_yet() -> None:
    store, other = open_store(backend := MemoryBackend()), open_store(backend)
    put(other, 1, 2)
    assert watched(store, [lambda: put(other, 3), lambda: put(other, 4, 5), lambda: None]) == [3, 4, 5]
    assert watched(store, [], since_step=2) == [2, 3, 4, 5]
    assert watched(store, [lambda: put(other, 6, 7, 8)], newest_only=True) == [8]
    assert store.pins() == ()
    store, other = open_store(backend := MemoryBackend()), open_store(backend)
    assert watched(store, [lambda: None, lambda: put(other, 1)]) == [1]


def test_what_is_worked_on_stays_and_two_watches_do_not_take_each_others_pins() -> None:
    store, other = open_store(backend := MemoryBackend()), open_store(backend)
    other.set_policy("run", keep_last=1)
    put(other, 1)
    watching = store.watch("run", since_step=1)
    found = next(watching)
    assert [(pin.snapshot.step, pin.reason) for pin in store.pins()] == [(1, "watched")]
    put(other, 2, 3, 4)
    other.gc(AT_ONCE)
    assert same(store.checkout(found.root), state(1))
    assert next(watching).step != 1
    assert [pin.snapshot.step for pin in store.pins()] != [1]
    watching.close()
    assert store.pins() == ()
    store, other = open_store(backend := MemoryBackend()), open_store(backend)
    put(other, 1)
    one, two = store.watch("run", since_step=1), other.watch("run", since_step=1)
    next(one)
    next(two)
    one.close()
    assert len(store.pins()) == 1
    two.close()
    assert store.pins() == ()


def test_what_went_before_it_could_be_pinned_is_left_out() -> None:
    clock = Clock()
    store, other = open_store(backend := MemoryBackend(clock=clock), clock=clock), open_store(backend, clock=clock)

    def burst() -> None:
        put(other, 1, 2, 3)
        other.forget("run@1")
        other.gc(AT_ONCE)

    assert watched(store, [burst]) == [2, 3]
