"""Which put may move a ref, and what the new snapshot continues: a job that was given up for dead cannot overwrite its successor's work."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck

CHILD_SECONDS = 60


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[], tsck.Store]]:
    """Opens the store as one more process would."""
    opened: list[tsck.Store] = []

    def open_one() -> tsck.Store:
        opened.append(tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / f"cache-{len(opened)}"))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[[], tsck.Store]) -> tsck.Store:
    return open_store()


def state(number: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((5000,), number)}


def put(store: tsck.Store, number: int, **options: object) -> tsck.Snapshot:
    return store.put_snapshot(state(number), ref="job", step=number, **options)  # type: ignore[arg-type]


def steps(store: tsck.Store) -> list[int | None]:
    return [snapshot.step for snapshot in store.log("job")]


def files(folder: Path) -> dict[str, bytes]:
    """Without writer records, which no put waits for."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.parent.name != "writers"}


def test_a_job_that_wakes_up_loses(store: tsck.Store, open_store: Callable[[], tsck.Store], tmp_path: Path) -> None:
    put(store, 1)
    successor = open_store()
    assert successor.checkout("job")["weights"][0] == 1
    put(successor, 2)
    before = files(tmp_path / "store")
    for _ in range(2):
        with pytest.raises(tsck.ConflictError, match=r"another process moved it.*checkout") as caught:
            put(store, 2)
        assert caught.value.object_id == "job"
    assert files(tmp_path / "store") == before
    third = put(successor, 3)
    assert steps(store) == [3, 2, 1]
    assert store.resolve("job").root == third.root


def test_who_has_not_restored_the_ref_may_not_move_it(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    put(store, 1)
    with pytest.raises(tsck.ConflictError, match="has not restored it"):
        put(open_store(), 1)


def test_expecting_a_root(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, other = put(store, 1), open_store()
    second = put(other, 2, expect=first.root)
    assert second.parent == first.root
    for stale in (first, first.root, "job~1"):
        with pytest.raises(tsck.ConflictError, match="another process moved it"):
            put(store, 3, expect=stale)
    assert put(store, 3, expect=second).entry > second.entry
    assert steps(store) == [3, 2, 1]


def test_expecting_anything(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first = put(store, 1)
    put(open_store(), 2, expect=tsck.ANY)
    third = put(store, 3, expect=tsck.ANY)
    assert third.parent == first.root, "the state continues what this handle had, not what lay in between"
    assert steps(store) == [3, 2, 1]


def test_expecting_nothing(store: tsck.Store) -> None:
    put(store, 1, expect=None)
    with pytest.raises(tsck.ConflictError):
        put(store, 2, expect=None)
    with pytest.raises(tsck.ConflictError, match="does not exist"):
        store.put_snapshot(state(1), ref="other", expect=store.resolve("job"))
    assert list(store.branches()) == ["job"]


@pytest.mark.parametrize("same_handle", [True, False])
def test_a_put_after_a_rollback_continues_what_was_restored(
    store: tsck.Store, open_store: Callable[[], tsck.Store], same_handle: bool
) -> None:
    first, second = put(store, 1), put(store, 2)
    third = put(store, 3)
    resumed = store if same_handle else open_store()
    resumed.checkout("job@2")
    again = put(resumed, 4)
    assert again.parent == second.root
    assert steps(resumed) == [4, 3, 2, 1], "the ref keeps the history of where it was"
    assert resumed.resolve("job~1").root == second.root, "and ~ follows parents"
    assert resumed.resolve("job@3").root == third.root
    assert resumed.resolve("job~2").root == first.root
    assert put(resumed, 5).parent == again.root


def test_a_checkout_by_root_does_not_take_the_ref_over(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first = put(store, 1)
    other = open_store()
    other.checkout(first.root)
    with pytest.raises(tsck.ConflictError):
        put(other, 2)
    forked = other.put_snapshot(state(2), ref="fork")
    assert forked.parent == first.root


def test_reset_fences_others(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, _ = put(store, 1), put(store, 2)
    operator = open_store()
    assert operator.reset("job", to="job@1").root == first.root
    with pytest.raises(tsck.ConflictError):
        put(store, 3)
    assert operator.checkout("job")["weights"][0] == 1
    assert put(operator, 3).parent == first.root
    assert steps(store) == [3, 1, 2, 1]
    with pytest.raises(tsck.NotFoundError):
        operator.reset("nothing", to="job")


def test_a_branch_begins_a_ref(store: tsck.Store, open_store: Callable[[], tsck.Store]) -> None:
    first, _ = put(store, 1), put(store, 2)
    assert store.branch("exp", at="job@1").root == first.root
    new = store.put_snapshot(state(9), ref="exp", step=9)
    assert new.parent == first.root
    assert steps(store) == [2, 1]
    with pytest.raises(tsck.StoreError, match="exp"):
        open_store().branch("exp", at="job")


def run_in_child(work: Callable[[], str]) -> str:
    """What `work` returns, or the kind of the error of ours that it raises, in a forked child; fails if the child hangs."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except tsck.StoreError as exc:
            said = exc.kind
        except BaseException as exc:  # noqa: BLE001 - the parent tells
            said = repr(exc)
        os.write(write_fd, said.encode())
        os._exit(0)
    os.close(write_fd)
    answered, _, _ = select.select([read_fd], [], [], CHILD_SECONDS)
    if not answered:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = os.read(read_fd, 1 << 16).decode()
    os.close(read_fd)
    return said or "the child hung"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_the_store(store: tsck.Store, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
    put(store, 1)

    def inherited() -> str:
        assert store.checkout("job")["weights"][0] == 1
        return str(put(store, 2).step)

    def opened_anew() -> str:
        with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as own:
            own.checkout("job")
            return str(put(own, 3).step)

    assert run_in_child(inherited) == "2"
    with pytest.raises(tsck.ConflictError):
        put(store, 2)
    assert run_in_child(opened_anew) == "3"
    assert store.checkout("job")["weights"][0] == 3
    assert put(store, 4).step == 4
    assert steps(store) == [4, 3, 2, 1]
    assert store.fsck(read_data=True).ok
