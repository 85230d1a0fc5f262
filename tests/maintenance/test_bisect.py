"""`Store.bisect`: which history it searches, what it pins meanwhile, and what it says of ends that are not as they should be."""

from collections.abc import Callable

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, PermissionDeniedError, StoreError
from tensorstore_ck.log.snapshot import Snapshot
from tests.gc.stores import AT_ONCE, Clock, open_store, state


def put(store: tsck.Store, *steps: int, ref: str = "run") -> None:
    for step in steps:
        store.put_snapshot(state(step), ref=ref, step=step)


def bad_from(first: int, *untestable: int) -> Callable[[Snapshot], bool | None]:
    def is_bad(snapshot: Snapshot) -> bool | None:
        assert snapshot.step is not None
        return None if snapshot.step in untestable else snapshot.step >= first

    return is_bad


@pytest.fixture
def store() -> tsck.Store:
    """Steps 1 to 9 on run."""
    store = open_store(MemoryBackend())
    put(store, *range(1, 10))
    return store


def test_it_tests_the_ends_first_and_finds_the_first_bad_one_or_a_range_around_what_cannot_be_tested(store: tsck.Store) -> None:
    found = store.bisect("run", bad_from(4))
    assert (found.last_good.step, found.first_bad.step, found.skipped) == (3, 4, ())
    assert [each.snapshot.step for each in found.tested][:2] == [1, 9]
    assert len(found.tested) <= 5
    assert {(each.snapshot.step or 0) >= 4: each.verdict for each in found.tested} == {True: "bad", False: "good"}
    assert repr(found).startswith("Bisection(first bad Snapshot(")
    found = store.bisect("run", bad_from(6), good="run@5", bad=store.resolve("run@7").root)
    assert [each.snapshot.step for each in found.tested] == [5, 7, 6]
    assert found.first_bad.step == 6
    found = store.bisect("run", bad_from(4, 4, 5, 1, 9))
    assert (found.last_good.step, found.first_bad.step) == (3, 6)
    assert [each.step for each in found.skipped] == [4, 5]
    assert repr(found).endswith(", 2 not tested between them)")


@pytest.mark.parametrize(
    ("ends", "first", "error", "says"),
    [
        ({}, 1, NotFoundError, r"\(step 1\) of 'run' is bad already"),
        ({}, 10, NotFoundError, r"no bad snapshot of 'run' was found: snapshot .* \(step 9\) is good"),
        ({"good": "run@3"}, 2, InvalidOptionError, "'run@3' is bad, but was given as good"),
        ({"bad": "run@3"}, 4, InvalidOptionError, "'run@3' is good, but was given as bad"),
        ({"good": "run@5", "bad": "run@3"}, 4, InvalidOptionError, "'run@5' is not in the history of 'run' before 'run@3'"),
        ({"good": "run@3", "bad": "run@3"}, 4, NotFoundError, "no two snapshots"),
        ({"good": "other"}, 4, InvalidOptionError, "'other' is not in the history of 'run'"),
        ({"bad": "other"}, 4, InvalidOptionError, "'other' is not in the history of 'run'"),
        ({"good": "run@8"}, 9, InvalidOptionError, "'run@8' cannot be tested"),
        ({"ref": "v1"}, 4, InvalidOptionError, "'v1' is not a branch"),
        ({"ref": "nope"}, 4, NotFoundError, "there is no ref"),
    ],
)
def test_ends_that_are_not_as_they_should_be(
    store: tsck.Store, ends: dict[str, str], first: int, error: type[StoreError], says: str
) -> None:
    put(store, 11, ref="other")
    store.tag("v1", "run@3")
    with pytest.raises(error, match=says):
        store.bisect(ends.get("ref", "run"), bad_from(first, 8), good=ends.get("good"), bad=ends.get("bad"))
    with pytest.raises(NotFoundError, match="no two snapshots of 'run' could be tested"):
        store.bisect("run", lambda snapshot: None)
    assert store.pins() == ()


def test_what_training_was_taken_back_from_is_left_out(store: tsck.Store) -> None:
    """Steps 7 to 9 were bad, and given up; the run that continues from 6 is bad from 8 on again."""
    store.reset("run", "run@6")
    for step in (7, 8, 9):
        store.put_snapshot(state(100 + step), ref="run", step=step)
    given_up = [snapshot.root for snapshot in store.log("run")][4:7]
    found = store.bisect("run", lambda snapshot: snapshot.root in given_up or snapshot.step in (8, 9))
    assert (found.last_good.step, found.first_bad.step) == (7, 8)
    assert not {each.snapshot.root for each in found.tested} & set(given_up)
    earlier = store.bisect("run", lambda snapshot: snapshot.root in given_up, bad=given_up[0])
    assert (earlier.last_good.step, earlier.first_bad.step) == (6, 7)


@pytest.mark.parametrize(("step", "parent", "last_good"), [(12, "run@6", 6), (5, None, 4)])
def test_a_run_that_continues_from_an_earlier_snapshot_leaves_out_what_came_after_it(
    store: tsck.Store, step: int, parent: str | None, last_good: int
) -> None:
    """Where what it resumed from isn't kept, it goes back by steps."""
    root = store.put_snapshot(state(1), ref="run", step=step, parent=parent, expect=tsck.ANY).root
    found = store.bisect("run", lambda snapshot: snapshot.root == root or (snapshot.step or 0) in (7, 8, 9))
    assert (found.last_good.step, found.first_bad.step) == (last_good, step)


def test_what_may_be_the_answer_stays_meanwhile(store: tsck.Store) -> None:
    other = open_store(store.engine.backend)
    pinned: list[list[int | None]] = []

    def is_bad(snapshot: Snapshot) -> bool:
        pinned.append([pin.snapshot.step for pin in other.pins()])
        assert {(pin.owner[:7], pin.reason, pin.expires_ns is not None) for pin in other.pins()} == {("bisect ", "bisect of run", True)}
        if len(pinned) == 1:
            other.set_policy("run", keep_last=1)
            other.apply_policies()
            other.gc(AT_ONCE)
        assert store.find_nan(snapshot.root) is None
        return bad_from(4)(snapshot) or False

    assert store.bisect("run", is_bad).first_bad.step == 4
    assert [len(steps) for steps in pinned][:3] == [9, 9, 9]
    assert sorted(step or 0 for step in pinned[-1]) == list(range(3, 6))
    assert store.pins() == ()


def test_nothing_stays_pinned_when_it_is_interrupted(store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an entry of the log does not hold all pins."""
    monkeypatch.setattr("tensorstore_ck.maintenance.bisect_history._OPERATIONS", 2)
    store.pin("run@5", owner="me")

    def is_bad(snapshot: Snapshot) -> bool:
        assert len(store.pins()) == 10
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.bisect("run", is_bad)
    assert [pin.owner for pin in store.pins()] == ["me"]


def test_pins_are_renewed_while_it_runs() -> None:
    clock = Clock()
    store = open_store(MemoryBackend(clock=clock), clock=clock)
    put(store, 1, 2, 3)
    left: list[float] = []

    def is_bad(snapshot: Snapshot) -> bool:
        left.append(min((pin.expires_ns or 0) - clock() for pin in store.pins()) / 1e9)
        clock.advance(50)
        return snapshot.step == 3

    store.bisect("run", is_bad, pin_for=60)
    assert left == [60, 60, 60]


def test_a_store_that_cannot_be_written_to_needs_an_option(store: tsck.Store) -> None:
    refusing = open_store(store.engine.backend)
    refusing.engine.log._writer.backend = ReadOnlyBackend(store.engine.backend)  # as a key that may only read
    with pytest.raises(PermissionDeniedError, match=r"bisect pins snapshots while it tests them, and may not.*unpinned_unsafe=True"):
        refusing.bisect("run", bad_from(4))
    refusing.engine.read_only = True
    with pytest.raises(PermissionDeniedError, match="unpinned_unsafe=True has none"):
        refusing.bisect("run", bad_from(4))
    entries = store.engine.log.sync().n
    assert refusing.bisect("run", bad_from(4), unpinned_unsafe=True).first_bad.step == 4
    assert store.engine.log.sync().n == entries


@pytest.mark.parametrize("pins", [False, True])
def test_what_is_freed_meanwhile_is_skipped(store: tsck.Store, pins: bool) -> None:
    other = open_store(store.engine.backend)
    asked: list[int | None] = []

    def is_bad(snapshot: Snapshot) -> bool:
        asked.append(snapshot.step)
        if snapshot.step == 5:
            for pin in other.pins():
                other.unpin(pin.snapshot.root, owner=pin.owner)
            other.forget("run@3", "run@4", "run@5")
            other.gc(AT_ONCE)
        return snapshot.step is not None and snapshot.step >= 3

    found = store.bisect("run", is_bad, unpinned_unsafe=not pins)
    assert (found.last_good.step, found.first_bad.step) == (2, 6)
    assert [each.step for each in found.skipped] == [3, 4, 5]
    assert not {3, 4} & set(asked)


def test_a_nan_is_found_in_any_tensor_with_numbers(store: tsck.Store) -> None:
    tensors = {"a.x": torch.ones(10), "a.y": torch.tensor([1.0, float("inf")]), "b": torch.tensor([float("nan")]), "n": torch.arange(3)}
    store.put_snapshot(tensors, ref="nan")
    assert store.find_nan("nan") == "a.y"
    assert store.find_nan("nan", ["b", "n"]) == "b"
    assert store.find_nan("nan", ["a.x"]) is None
