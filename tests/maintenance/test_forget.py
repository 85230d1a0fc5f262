"""forget and undo: what leaves a history, what comes back, and what is said about the rest."""

from collections.abc import Iterator
from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import ConflictError, InvalidNameError, NotFoundError
from tensorstore_ck.log import BranchMove, RefTable
from tensorstore_ck.store import Store
from tests.gc.stores import AT_ONCE, Clock, open_store, put_all, require_sound, state

HOUR = 3600


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    """Steps 1 to 4 on job; fork is at job@2."""
    with open_store(MemoryBackend(clock=clock), clock=clock) as store:
        put_all(store, "job", [state(step) for step in range(1, 5)])
        store.branch("fork", "job@2")
        yield store


def steps(store: Store, ref: str = "job") -> list[int | None]:
    return [snapshot.step for snapshot in store.log(ref)]


def roots(store: Store) -> list[str]:
    """Of the snapshots on job, oldest first."""
    return [snapshot.root for snapshot in reversed(store.log("job"))]


@pytest.mark.parametrize("address", ["job@3", "job~1", "root", "prefix"])
def test_one_snapshot(store: Store, address: str) -> None:
    root = roots(store)[2]
    (forgotten,) = store.forget({"root": root, "prefix": root[:8]}.get(address, address))
    assert (forgotten.ref, forgotten.kind, [snapshot.root for snapshot in forgotten.snapshots]) == ("job", "snapshots", [root])
    assert steps(store) == [4, 2, 1]
    assert store.forgotten() == (forgotten,)
    require_sound(store, {"job": state(4), "job@2": state(2), "job@1": state(1)})


def test_several_at_once_are_one_entry(store: Store) -> None:
    entry = store.engine.log.sync().n
    forgotten = store.forget("job@1", "job@3", "job~1", "fork")
    assert {each.entry for each in forgotten} == {entry + 1}
    assert {each.ref: [snapshot.step for snapshot in each.snapshots] for each in forgotten} == {"job": [1, 3], "fork": [2]}
    assert steps(store) == [4, 2] == [snapshot.step for snapshot in store.log()]
    assert list(store.branches()) == ["job"]


def test_from_one_branch_or_by_its_root_from_every_one(store: Store) -> None:
    root = store.resolve("job@2").root
    with pytest.raises(ConflictError, match="'fork'"):
        store.forget(root)
    store.reset("fork", "job@3")
    store.forget("job@2")
    assert (steps(store), steps(store, "fork")) == ([4, 3, 1], [3, 2])
    assert store.resolve("fork@2").step == 2
    store.undo()
    assert sorted(each.ref for each in store.forget(root)) == ["fork", "job"]
    assert (steps(store), steps(store, "fork")) == ([4, 3, 1], [3])
    other = open_store(store.engine.backend)
    put_all(other, "twin", [state(step) for step in range(1, 4)])
    root = store.resolve("job@1").root
    assert other.resolve("twin@1").root == root
    store.tag("best", root)
    assert {each.ref for each in store.forget("job@1")} == {"job"}
    assert {each.ref for each in store.forget(root)} == {"twin"}
    with pytest.raises(NotFoundError, match="no branch has"):
        store.forget(root)  # a tag is no history
    assert [snapshot.step for snapshot in store.log("job", limit=1)] == [4]


def test_a_snapshot_that_a_branch_came_to_twice(store: Store) -> None:
    for step in (1, 3, 1, 4):
        store.reset("job", f"job@{step}")
    assert steps(store) == [4, 1, 3, 1, 4, 3, 2, 1]
    (forgotten,) = store.forget("job@1")
    assert [snapshot.step for snapshot in forgotten.snapshots] == [1]
    assert steps(store) == [4, 3, 4, 3, 2]
    store.undo()
    assert steps(store) == [4, 1, 3, 1, 4, 3, 2, 1]


def test_the_newest_of_a_step_goes_before_an_older_one(store: Store) -> None:
    again = store.put_snapshot(state(30), ref="job", step=3).root
    store.put_snapshot(state(5), ref="job", step=5)
    assert store.resolve("job@3").root == again
    store.forget("job@3")
    assert store.resolve("job@3").root == roots(store)[2] != again
    store.forget("job@3")
    with pytest.raises(NotFoundError):
        store.resolve("job@3")
    store.undo()
    assert store.resolve("job@3").root != again
    store.undo()
    assert store.resolve("job@3").root == again


def test_training_that_was_repeated_to_the_bit_goes_as_one(store: Store) -> None:
    root = store.resolve("job@2").root
    store.checkout("job@1")
    for step in (2, 3, 5):
        store.put_snapshot(state(step), ref="job", step=step, expect=ANY)
    assert [snapshot.root for snapshot in store.log("job")].count(root) == 2
    assert len({snapshot.id for snapshot in store.log("job") if snapshot.root == root}) == 2
    (forgotten,) = store.forget("job@2")
    assert [snapshot.root for snapshot in forgotten.snapshots] == [root, root]
    assert steps(store) == [5, 3, 4, 3, 1]
    assert steps(store, "fork") == [2]
    with pytest.raises(NotFoundError):
        store.resolve("job@2")
    store.undo("job@2")
    assert steps(store) == [5, 3, 2, 4, 3, 2, 1]
    assert [len(each.snapshots) for each in store.forget(store.resolve("job@3").root)] == [2]
    assert steps(store) == [5, 2, 4, 2, 1]


def test_many_at_once_read_the_history_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(MemoryBackend())
    put_all(store, "job", [{} for _ in range(40)])
    walked: list[str] = []
    moves = RefTable.moves

    def counted(view: RefTable, name: str, **more: Any) -> Iterator[BranchMove]:
        walked.append(name)
        return moves(view, name, **more)

    monkeypatch.setattr(RefTable, "moves", counted)
    (forgotten,) = store.forget(*[f"job@{step}" for step in range(1, 40)])
    assert len(forgotten.snapshots) == 39
    assert walked == ["job"]


@pytest.mark.parametrize("remove", ["forget", "untag"])
def test_a_tag(store: Store, remove: str) -> None:
    store.tag("best", "job@1")
    tagged = store.tags()
    getattr(store, remove)("best")
    (forgotten,) = store.forgotten()
    assert (forgotten.ref, forgotten.kind, [snapshot.step for snapshot in forgotten.snapshots]) == ("best", "tag", [1])
    assert store.tags() == {}
    assert steps(store) == [4, 3, 2, 1]
    store.undo("best")
    assert store.tags() == tagged
    store.pin("job@1", owner="me")
    (forgotten,) = store.forget("job@1", "job@3")
    assert [forgotten.held_by[snapshot.id] for snapshot in forgotten.snapshots] == [("best", "pin:me"), ()], "what else holds it"


@pytest.mark.parametrize("address", ["job~0", "job@4", "root", "job@2"])
def test_where_a_branch_is_cannot_be_forgotten(store: Store, address: str) -> None:
    """Also where it was before, or came again by training that was repeated to the bit."""
    if address == "job@2":
        store.reset("job", "job@2")
    elif address == "job@4":
        store.checkout("job@3")
        store.put_snapshot(state(4), ref="job", step=4, expect=ANY)
    root, before = store.resolve("job").root, steps(store)
    with pytest.raises(ConflictError, match="the head of branch 'job'"):
        store.forget("job@1", root if address == "root" else address)
    assert steps(store) == before, "nothing of it happened"


def test_nothing_to_forget_or_undo(store: Store) -> None:
    head = store.engine.log.sync()
    for address in ("nothing", "job@9", "job~9", "0" * 64, "not an address", ""):
        with pytest.raises(NotFoundError if address and " " not in address else InvalidNameError):
            store.forget("job@1", address)
    assert store.engine.log.sync() == head
    store.forget("job@1")
    for address in ("nothing", "job@9", "job@1x", "ffffffff", ""):
        with pytest.raises(NotFoundError, match="was not forgotten"):
            store.undo(address)
    for address in ("job~1", "fork~1", "job~9"):
        with pytest.raises(NotFoundError):
            store.undo(address)
    assert steps(store) == [4, 3, 2]


def test_addresses_after_forgetting(store: Store) -> None:
    """``~n`` counts parents, whatever histories hold."""
    store.forget("job@3")
    with pytest.raises(NotFoundError):
        store.resolve("job@3")
    assert store.resolve("job~1").step == 3, "still there, until the undo window ends"
    assert store.resolve("job~2").step == 2
    store.gc(AT_ONCE)
    with pytest.raises(NotFoundError, match="no snapshot before it"):
        store.resolve("job~1")
    assert store.resolve("job").parent is not None
    store.put_snapshot(state(5), ref="job", step=5)
    assert steps(store) == [5, 4, 2, 1]


def test_undo_takes_back_the_last_entry_or_an_older_one(store: Store) -> None:
    store.forget("job@1")
    last = store.forget("job@3", "fork")
    before = store.forgotten()
    assert sorted(each.ref for each in store.undo()) == ["fork", "job"]
    assert (steps(store), steps(store, "fork")) == ([4, 3, 2], [2])
    assert store.forgotten() == before[len(last) :]
    store.forget("job@3")
    store.undo("job@1")
    assert steps(store) == [4, 2, 1]
    store.undo()
    assert steps(store) == [4, 3, 2, 1]
    with pytest.raises(NotFoundError, match="nothing was forgotten"):
        store.undo()


@pytest.mark.parametrize("by", ["ref", "ref@step", "ref@0step", "ref~n", "root", "prefix"])
def test_undo_by_address(store: Store, by: str) -> None:
    root = store.resolve("job@1").root
    store.forget("job@1", "job@3")
    store.forget("fork")
    (undone,) = store.undo(
        {"ref": "job", "ref@step": "job@1", "ref@0step": "job@01", "ref~n": "job~3", "root": root, "prefix": root[:8]}[by]
    )
    assert undone.ref == "job"
    assert [snapshot.step for snapshot in undone.snapshots] == ([1, 3] if by == "ref" else [1])
    assert steps(store) == ([4, 3, 2, 1] if by == "ref" else [4, 2, 1])
    assert store.resolve("job@1").root == root
    assert [each.ref for each in store.forgotten()] == (["fork"] if by == "ref" else ["fork", "job"])


def test_a_whole_branch_goes_and_comes_back_even_in_parts(store: Store) -> None:
    head = store.resolve("job")
    (forgotten,) = store.forget("job")
    assert (forgotten.kind, [snapshot.step for snapshot in forgotten.snapshots]) == ("branch", [1, 2, 3, 4])
    assert list(store.branches()) == ["fork"]
    for address in ("job", "job@2"):
        with pytest.raises(NotFoundError):
            store.checkout(address)
    require_sound(store, {"fork": state(2)})
    store.undo("job@2")
    assert (steps(store), store.resolve("job").step) == ([2], 2)
    (undone,) = store.undo("job")
    assert undone.kind == "branch"
    assert store.resolve("job") == head
    assert steps(store) == [4, 3, 2, 1]
    store.checkout("job")
    store.put_snapshot(state(5), ref="job", step=5)
    assert steps(store) == [5, 4, 3, 2, 1]


def test_undo_of_a_branch_that_was_made_again(store: Store) -> None:
    """Its histories become one, and it stays where it is."""
    store.forget("job")
    other = open_store(store.engine.backend)
    put_all(other, "job", [state(11), state(2)])
    store.undo("job")
    assert [snapshot.root for snapshot in store.log("job")][:2] == [snapshot.root for snapshot in other.log("job")][:2]
    assert steps(store) == [2, 1, 4, 3, 2, 1]
    assert store.resolve("job").root == other.resolve("job").root
    assert store.resolve("job@1").root == store.log("job")[1].root, "the newest of that step"
    require_sound(open_store(store.engine.backend), {"job": state(2), "job@1": state(11), "job@4": state(4), "job@3": state(3)})


def test_undo_of_a_branch_that_was_made_and_forgotten_twice(store: Store) -> None:
    first = roots(store)
    store.forget("job")
    other = open_store(store.engine.backend)
    put_all(other, "job", [state(11), state(12)])
    second = roots(store)
    store.forget("job")
    store.undo()
    assert roots(store) == second
    store.undo()
    assert roots(store) == first + second
    assert store.resolve("job").root == second[-1]


def test_undo_where_the_name_was_taken(store: Store) -> None:
    store.forget("fork")
    store.tag("fork", "job@1")
    with pytest.raises(ConflictError, match="'fork' is a tag now"):
        store.undo("fork")
    store.untag("fork")
    assert [each.kind for each in store.undo()] == ["tag"]
    store.forget("fork")
    store.branch("fork", "job@1")
    with pytest.raises(ConflictError, match="'fork' is a branch now"):
        store.undo()
    assert store.resolve("fork").step == 1


def test_undo_ends_with_the_window(store: Store, clock: Clock) -> None:
    root = store.resolve("job@1").root
    store.forget("job@1")
    clock.advance(23 * HOUR)
    store.forget("job@3")
    clock.advance(2 * HOUR)
    store.gc()
    with pytest.raises(NotFoundError, match="gc has ended its undo window"):
        store.undo("job@1")
    with pytest.raises(NotFoundError, match="gc has ended"):
        store.undo(root)
    assert [snapshot.step for each in store.forgotten() for snapshot in each.snapshots] == [3]
    store.undo()
    assert steps(store) == [4, 3, 2]
    with pytest.raises(NotFoundError, match="gc has ended"):
        store.undo()
