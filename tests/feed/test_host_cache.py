"""Followers of one host that share a folder read each version from the store once."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.feed import Feed, host_cache
from tests.effort import PATIENCE_SECONDS
from tests.feed.versions import REF, NotedFaults, State, equal, first_state, follower, save, train, update, zeros
from tests.gc.stores import open_store

COUNT = 4


class Host:
    """Several followers with one folder, and what they read."""

    def __init__(self, backend: MemoryBackend, state: State, folder: Path | None) -> None:
        backend.is_local = False
        self.faults = [NotedFaults() for _ in range(COUNT)]
        self.tensors = [zeros(state) for _ in range(COUNT)]
        self.feeds: list[Feed] = [
            follower(backend, faults).follow(REF, into=mine, host_cache=folder)
            for faults, mine in zip(self.faults, self.tensors, strict=True)
        ]

    def update(self) -> int:
        """All at the same time; returns how often they read a record, a part or a pack."""
        for faults in self.faults:
            faults.noted.clear()
        with ThreadPoolExecutor(COUNT) as pool:
            list(pool.map(update, self.feeds))
        noted = [what for faults in self.faults for what in faults.noted]
        return sum(what.startswith(("get snapshots/", "get parts/", "read packs/")) for what in noted)


@pytest.fixture
def trainer() -> Callable[[], Any]:
    backend, state, step = MemoryBackend(), first_state(rows=512), 0
    store = open_store(backend)

    def publish() -> tuple[MemoryBackend, State]:
        nonlocal step
        save(store, state, step)
        step += 1
        train(state, step)
        save(store, state, step)
        return backend, state

    return publish


def test_they_read_what_one_of_them_would_read(trainer: Callable[[], Any], tmp_path: Path) -> None:
    backend, state = trainer()
    alone, together = Host(backend, state, None), Host(backend, state, tmp_path / "shared")
    for _ in range(3):
        reads, shared = alone.update(), together.update()
        assert 0 < shared <= reads / COUNT
        assert all(equal(mine, state) for mine in together.tensors)
        trainer()
    for number, feed in enumerate(together.feeds):
        together.faults[number].noted.clear()
        update(feed)
        assert number == 0 or {what.partition("/")[0] for what in together.faults[number].noted} == {"get log"}
    assert oct(os.stat(tmp_path / "shared").st_mode & 0o777) == "0o700"


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    """As a process that was killed in the middle of the write left it."""
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [damage, cut, os.unlink])
def test_files_that_are_not_whole_are_read_from_the_store(
    trainer: Callable[[], Any], tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    backend, state = trainer()
    first, second, third = (Host(backend, state, tmp_path) for _ in range(3))
    reads = first.update()
    for file in tmp_path.iterdir():
        spoil(file)
    assert second.update() == reads
    assert third.update() == 0
    assert all(equal(mine, state) for mine in second.tensors + third.tensors)


@pytest.mark.parametrize("failing", ["os.pwritev", "fcntl.flock", "os.open", "os.statvfs"])
def test_a_folder_that_cannot_be_used_fails_nothing(
    trainer: Callable[[], Any], tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    backend, state = trainer()
    host = Host(backend, state, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(failing, fail)
        host.update()
    assert all(equal(mine, state) for mine in host.tensors)


def test_it_stays_within_its_share_and_forgets_what_nobody_uses(
    trainer: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, state = trainer()
    monkeypatch.setattr(host_cache, "SHARE", 0)
    assert Host(backend, state, tmp_path).update() > 0
    assert [*tmp_path.iterdir()] == []
    monkeypatch.undo()
    host = Host(backend, state, tmp_path)
    host.update()
    old = [*tmp_path.iterdir()]
    for file in old:
        os.utime(file, (0, 0))
    trainer()
    update(host.feeds[0])
    assert not any(file.exists() for file in old)
    used = [*tmp_path.iterdir()]
    for file in used:
        os.utime(file, (0, 0))
    trainer()
    update(Host(backend, state, tmp_path).feeds[0])
    used = [file for file in used if file.exists()]
    assert used, "the one that joins needs the differences before, too"
    assert all(file.stat().st_mtime > 0 for file in used)


def test_a_reader_that_is_stuck_is_not_waited_for_without_end(
    trainer: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, state = trainer()
    monkeypatch.setattr(host_cache, "WAIT_SECONDS", 0)
    stuck, other = Host(backend, state, tmp_path), Host(backend, state, tmp_path)
    arrived, goes_on = threading.Event(), threading.Event()
    call = stuck.faults[0].call

    def wait(what: str, effect: Any, tear: Any = None, *, create: bool = False) -> Any:
        if what.startswith("read packs/"):
            arrived.set()
            goes_on.wait(PATIENCE_SECONDS)
        return call(what, effect, tear, create=create)

    stuck.faults[0].call = wait  # type: ignore[method-assign]
    reading = threading.Thread(target=stuck.feeds[0].poll)
    reading.start()
    try:
        assert arrived.wait(PATIENCE_SECONDS)
        assert other.update() > 0
        assert all(equal(mine, state) for mine in other.tensors)
    finally:
        goes_on.set()
        reading.join(PATIENCE_SECONDS)


def test_errors_of_the_store_reach_the_caller(trainer: Callable[[], Any], tmp_path: Path) -> None:
    backend, state = trainer()
    host = Host(backend, state, tmp_path)
    read, backend.read_into = backend.read_into, missing
    with pytest.raises(tsck.errors.BackendUnavailableError):
        host.feeds[0].poll()
    assert [path.name for path in tmp_path.iterdir() if not path.match("*-whole.range")] == []  # the record and the part came
    backend.read_into = read
    host.update()
    assert all(equal(mine, state) for mine in host.tensors)


def test_bytes_that_came_wrong_are_read_again(trainer: Callable[[], Any], tmp_path: Path) -> None:
    """Else one bad transfer would stop all followers of the host, as a file's hash is that of the bytes that came."""
    backend, state = trainer()
    host, wrong, read = Host(backend, state, tmp_path), list[str](), backend.read_into

    def flip_one_bit(name: str, offset: int, target: memoryview) -> None:
        read(name, offset, target)
        if name.startswith("packs/") and not wrong:
            wrong.append(name)
            target[0] ^= 1

    backend.read_into = flip_one_bit
    host.update()
    assert len(wrong) == 1
    assert all(equal(mine, state) for mine in host.tensors)


@pytest.mark.parametrize("kind", ["snapshots/", "parts/"])
def test_an_object_that_does_not_come_leaves_no_file(trainer: Callable[[], Any], tmp_path: Path, kind: str) -> None:
    backend, state = trainer()
    host, get = Host(backend, state, tmp_path), backend.get
    backend.get = lambda name, *, max_bytes: missing(name) if name.startswith(kind) else get(name, max_bytes=max_bytes)
    with pytest.raises(tsck.errors.BackendUnavailableError):
        host.feeds[0].poll()
    assert len([*tmp_path.iterdir()]) == (kind == "parts/")  # the record
    backend.get = get
    host.update()
    assert all(equal(mine, state) for mine in host.tensors)


@pytest.mark.parametrize("kind", ["snapshots/", "parts/"])
def test_an_object_that_came_wrong_is_read_again(trainer: Callable[[], Any], tmp_path: Path, kind: str) -> None:
    backend, state = trainer()
    host, wrong, get = Host(backend, state, tmp_path), list[str](), backend.get

    def flip_one_bit(name: str, *, max_bytes: int) -> bytes:
        data = bytearray(get(name, max_bytes=max_bytes))
        if name.startswith(kind) and not wrong:
            wrong.append(name)
            data[-1] ^= 1
        return bytes(data)

    backend.get = flip_one_bit
    host.update()
    assert len(wrong) == 1
    assert all(equal(mine, state) for mine in host.tensors)


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("make", [open_to_all, link])
def test_a_folder_that_others_may_change_is_closed_or_refused(
    trainer: Callable[[], Any], tmp_path: Path, make: Callable[[Path], None]
) -> None:
    backend, state = trainer()
    folder = tmp_path / "shared"
    make(folder)
    if make is link:
        with pytest.raises(tsck.errors.PermissionDeniedError, match="a folder of its own"):
            Host(backend, state, folder)
    else:
        Host(backend, state, folder).update()
        assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_a_file_with_a_second_name_is_left_alone(trainer: Callable[[], Any], tmp_path: Path) -> None:
    backend, state = trainer()
    Host(backend, state, tmp_path / "shared").update()
    names = [file.name for file in (tmp_path / "shared").iterdir()]
    for name in names:
        (tmp_path / name).write_text("somebody's")
        (tmp_path / "shared" / name).unlink()
        os.link(tmp_path / name, tmp_path / "shared" / name)
    with pytest.raises(tsck.errors.PermissionDeniedError, match="hard links"):
        Host(backend, state, tmp_path / "shared")
    assert {(tmp_path / name).read_text() for name in names} == {"somebody's"}


def test_a_child_that_was_forked_during_a_read_holds_no_lock(trainer: Callable[[], Any], tmp_path: Path) -> None:
    backend, state = trainer()
    first, second, read = Host(backend, state, tmp_path), Host(backend, state, tmp_path), backend.read_into
    reached, children = os.pipe(), list[int]()

    def fork_once(name: str, offset: int, target: memoryview) -> None:
        if name.startswith("packs/") and not children:
            children.append(os.fork())
            if children == [0]:
                os.read(reached[0], 1)
                os._exit(0)
        read(name, offset, target)

    backend.read_into = fork_once
    first.feeds[0].poll()
    backend.read_into = read
    try:
        second.feeds[0].poll()
        assert second.faults[0].noted == [] or not any(what.startswith("read packs/") for what in second.faults[0].noted)
    finally:
        os.write(reached[1], b"x")
        os.waitpid(children[0], 0)
        for fd in reached:
            os.close(fd)


def missing(*_: Any) -> None:
    raise tsck.errors.BackendUnavailableError("no route to the store")
