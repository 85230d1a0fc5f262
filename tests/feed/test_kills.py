"""A trainer and a follower, each a process, are killed with -9 at every call: no mixed version, and both go on from the same branch."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_io import write_at
from tensorstore_ck.feed import host_cache
from tensorstore_ck.integrations.exporting import FollowedFolder
from tensorstore_ck.integrations.exporting.followed_folder import LOCK
from tests.feed.versions import REF, State, copy_of, equal, first_state, save, step_of, train, update, zeros
from tests.integrations.exporting.test_followed_folder import read
from tests.integrations.kill_at import KillAt, forked, kill_at_changes_of, open_killable

pytestmark = [pytest.mark.race, pytest.mark.slow]


def versions() -> list[State]:
    """The same in every process."""
    made = [first_state()]
    for step in (1, 2):
        made.append(copy_of(made[-1]))
        train(made[-1], step)
    return made


def saved(path: Path, *, count: int) -> None:
    """In a process of its own: a store with the first versions."""

    def run() -> None:
        with open_killable(path, KillAt()) as store:
            for step, state in enumerate(versions()[:count]):
                save(store, state, step)

    forked(run, path.parent)


def trained_on(path: Path, faults: KillAt) -> int:
    """The trainer: resumes from the branch, and saves the next version; returns the calls of that."""
    store = open_killable(path, faults)
    state = zeros(first_state())
    store.checkout(REF, into=state)
    step = store.resolve(REF).step
    assert step is not None
    assert equal(state, versions()[step])
    train(state, step + 1)
    faults.is_counting = True
    save(store, state, step + 1)
    faults.call("the end", lambda: None)
    return faults.calls


def digests(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).digest() for file in path.rglob("*") if file.is_file()}


def every_kill(tmp_path: Path, run: Callable[[Path, KillAt], int], count: int, check: Callable[[Path], None]) -> None:
    """Runs `run` on copies of a store with `count` versions, killed at each call; then `check`s what is left."""
    saved(tmp_path / "first", count=count)
    shutil.copytree(tmp_path / "first", tmp_path / "whole")
    calls = forked(lambda: run(tmp_path / "whole", KillAt()), tmp_path)
    assert calls is not None
    assert calls >= 4
    for at in range(1, calls + 1):
        path = tmp_path / f"store-{at}"
        shutil.copytree(tmp_path / "first", path)
        assert forked(partial(run, path, KillAt(at, torn=at % 2 == 0)), tmp_path) is None
        check(path)
        shutil.rmtree(path)


def test_a_trainer_is_killed_at_every_call_of_a_save(tmp_path: Path) -> None:
    found = set[int | None]()

    def check(path: Path) -> None:
        mine = zeros(first_state())
        with open_killable(path, KillAt()) as store, store.follow(REF, into=mine) as feed:
            update(feed)
            step = step_of(feed)
            assert step is not None
            assert equal(mine, versions()[step])
            found.add(step)
            if step == 0:
                assert forked(lambda: trained_on(path, KillAt()), tmp_path)
                update(feed)
                assert step_of(feed) == 1
                assert equal(mine, versions()[1])

    every_kill(tmp_path, trained_on, count=1, check=check)
    assert found == {0, 1}


def followed(path: Path, faults: KillAt) -> int:
    """The follower: takes version 0, then 1; returns the calls of the latter."""
    mine = zeros(first_state())
    with open_killable(path, faults) as store, store.follow(REF, into=mine) as feed:
        feed.poll(f"{REF}@0")
        feed.swap()
        faults.is_counting = True
        update(feed)
        assert equal(mine, versions()[1])
        faults.call("the end", lambda: None)
    return faults.calls


def test_a_follower_is_killed_at_every_call_and_leaves_no_trace(tmp_path: Path) -> None:
    first: dict[str, bytes] = {}

    def check(path: Path) -> None:
        first.update(first or digests(tmp_path / "first"))
        assert digests(path) == first

    every_kill(tmp_path, followed, count=2, check=check)
    assert forked(lambda: trained_on(tmp_path / "first", KillAt()), tmp_path)
    mine = zeros(first_state())
    with open_killable(tmp_path / "first", KillAt()) as store, store.follow(REF, into=mine) as feed:
        update(feed)
        assert equal(mine, versions()[2])


def followed_together(path: Path, faults: KillAt, *, count: int = 2) -> int:
    """As `followed`, by way of the folder that a host's followers share, from a store that counts as remote; also the folder's writes."""

    def write(fd: int, views: Sequence[memoryview], offset: int) -> None:
        def half() -> None:
            write_at(fd, [views[0][: len(views[0]) // 2]], offset)

        faults.call("write", lambda: write_at(fd, views, offset), half)

    vars(host_cache)["write_at"] = write
    LocalBackend.is_local = False  # of this process, as the line before
    mine = zeros(first_state())
    with open_killable(path, faults) as store, store.follow(REF, into=mine, host_cache=path.with_name(f"{path.name} cache")) as feed:
        faults.is_counting = True
        update(feed)
        assert equal(mine, versions()[count - 1])
        faults.call("the end", lambda: None)
    return faults.calls


def test_a_follower_is_killed_at_every_call_and_the_others_of_its_host_take_the_version(tmp_path: Path) -> None:
    left = set[bool]()

    def check(path: Path) -> None:
        files = [*path.with_name(f"{path.name} cache").iterdir()]
        left.add(any(file.stat().st_size for file in files))
        assert forked(lambda: followed_together(path, KillAt()), tmp_path)
        assert forked(lambda: trained_on(path, KillAt()), tmp_path)
        assert forked(lambda: followed_together(path, KillAt(), count=3), tmp_path)

    every_kill(tmp_path, followed_together, count=2, check=check)
    assert left == {False, True}


def updated_folder(path: Path, faults: KillAt) -> int:
    """`tsck follow --to`: `served` is at version 0, and takes 1; returns the calls of the store, and those that change the folder."""
    served = path.parent / "served"
    with FollowedFolder(open_killable(path, faults), REF, str(served)) as folder:
        kill_at_changes_of(served, faults)
        faults.is_counting = True
        folder.update()
        faults.call("the end", lambda: None)
    return faults.calls


def test_a_followed_folder_is_whole_wherever_its_process_is_killed(tmp_path: Path) -> None:
    served, steps = tmp_path / "served", set[int]()

    def run(path: Path, faults: KillAt) -> int:
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(tmp_path / "at 0", served, symlinks=True)
        return updated_folder(path, faults)

    def check(path: Path) -> None:
        states = versions()
        step = next(number for number, state in enumerate(states) if equal(read(served), state))
        steps.add(step)
        with open_killable(path, KillAt()) as store, FollowedFolder(store, REF, str(served)) as folder:
            assert folder.root == store.resolve(f"{REF}@{step}").root
            folder.update()
        assert equal(read(served), states[1])
        assert len({*served.iterdir()} - {served / LOCK}) <= 3, "what a killed process left over is as large as the model"

    (tmp_path / "at first").mkdir()
    saved(tmp_path / "at first" / "store", count=1)
    with open_killable(tmp_path / "at first" / "store", KillAt()) as store:
        FollowedFolder(store, REF, str(tmp_path / "at 0")).update()
    every_kill(tmp_path, run, count=2, check=check)
    assert steps == {0, 1}
