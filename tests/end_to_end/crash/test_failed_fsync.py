"""At every fsync of a folder: it fails once, and then the kernel reports success without writing, unless the folder was changed since."""

import errno
import os
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import Created, durable_folders
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import BackendUnavailableError, UndecidedError
from tests.effort import PATIENCE_SECONDS

CODES: Final = (errno.EIO, errno.ESTALE)
SAVES: Final = 3


class Disk:
    """Makes one fsync of a folder fail. `forgotten`: entries that a later fsync acknowledged, though the kernel dropped them.

    `within`: of the folders that this function gives this name, the `at`-th fsync fails, whatever other threads do meanwhile.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, at: int, code: int, *, within: str = "", name_of: Callable[[str], str] = lambda folder: ""
    ) -> None:
        self.failed, self.forgotten = "", ""
        self.calls = Counter[str]()
        self._at, self._code, self._within, self._name_of, self._is_changed = at, code, within, name_of, False
        self._lock = threading.Lock()
        self._fsync, self._open = os.fsync, os.open
        patch.setattr(os, "fsync", self.fsync)
        patch.setattr(os, "open", self.open)

    def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = self._open(path, flags, mode, dir_fd=dir_fd)
        self._is_changed |= bool(flags & os.O_CREAT) and os.path.dirname(os.readlink(f"/proc/self/fd/{fd}")) == self.failed
        return fd

    def fsync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            return
        folder = os.readlink(f"/proc/self/fd/{fd}")
        name = self._name_of(folder)
        with self._lock:
            self.calls[name] += 1
            number = self.calls[name]
        if name == self._within and number == self._at:
            self.failed = folder
            raise OSError(self._code, os.strerror(self._code))
        if folder == self.failed and not self._is_changed:
            self.forgotten = folder


@pytest.fixture(params=[True, False], ids=["disk", "no disk"])
def on_both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All syncs of an object run at once, as on a disk of this host, or one after another."""
    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: request.param)


@pytest.mark.usefixtures("on_both")
def test_a_failed_fsync_of_a_folder_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(str(tmp_path / "store"))
    backend.create("log/0", b"x")
    disk = Disk(monkeypatch, 1, errno.EIO)
    assert backend.create("log/1", b"x") is Created.UNKNOWN
    backend.sync_folders("log/1")
    assert disk.failed == str(tmp_path / "store/log")
    assert not disk.forgotten
    assert list(backend.list_uploads()) == []


@pytest.mark.usefixtures("on_both")
@pytest.mark.parametrize("within", ["store", "store/parts"])
def test_another_thread_does_not_rely_on_a_folder_whose_fsync_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    backend = LocalBackend(str(tmp_path / "store"))
    backend.put("packs/x", b"x")
    other = threading.Thread(target=lambda: backend.put("parts/y" if within == "store/parts" else "snapshots/y", b"y"))

    is_written, has_failed = threading.Event(), threading.Event()

    class Slow(Disk):
        def open(self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            fd = super().open(path, flags, mode, dir_fd=dir_fd)
            if path.endswith("/y"):
                is_written.set()
            return fd

        def fsync(self, fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / within):
                if other.ident is None:
                    other.start()
                    assert is_written.wait(PATIENCE_SECONDS)
                else:
                    assert has_failed.wait(PATIENCE_SECONDS)
            try:
                super().fsync(fd)
            except OSError:
                has_failed.set()
                other.join(0.2)  # it waits, or its fsync succeeds before this process knows of the failure
                raise

    disk = Slow(monkeypatch, 1, errno.EIO, within=str(tmp_path / within), name_of=str)
    with pytest.raises(BackendUnavailableError):
        backend.put("parts/x", b"x")
    other.join()
    assert disk.failed
    assert not disk.forgotten


def opened(folder: Path) -> tsck.Store:
    for is_last in (False, True):
        with suppress(BackendUnavailableError) if not is_last else nullcontext():
            return tsck.open(folder / "store", create=True, cache_dir=folder / "cache", state_dir=folder / "state")
    raise AssertionError("unreachable")


@pytest.mark.race
@pytest.mark.usefixtures("on_both")
def test_the_same_call_succeeds_when_it_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, at: int, within: str) -> Disk:
        with monkeypatch.context() as patch:
            disk = Disk(patch, at, CODES[at % 2], within=within, name_of=partial(top_folder, folder))
            with opened(folder) as store:
                disk.forgotten = ""  # a new handle cannot know what failed before it
                for step in (1, 2):
                    state = {"w": torch.full((100,), float(step))}
                    store.retrying(partial(store.put_snapshot, state, ref="job", step=step), pause_seconds=0)
                assert [snapshot.step for snapshot in store.log("job")] == [2, 1], f"fsync {at} of {within}"
        return disk

    calls, failed = run(tmp_path / "counted", 0, "").calls, set[str]()
    for within, at in [(name, at) for name, number in calls.items() for at in range(1, number + 1)]:
        disk = run(tmp_path / f"{within} {at}", at, within)
        failed |= {within} if disk.failed else set()  # a run may sync once less: its two parts' random ids share a folder
        assert not disk.forgotten, f"fsync {at} of {within}"
    assert failed >= {".", "store", "log", "packs", "parts", "snapshots"}


def top_folder(root: Path, folder: str) -> str:
    """The store's folder of objects that `folder` is in; or itself, if it is the store's or above it."""
    return os.path.relpath(folder, root).removeprefix("store/").split("/")[0]


@pytest.mark.race
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "c", state_dir=tmp_path / "s") as store:
        for at in range(1, 7):
            state = {"w": torch.zeros(100)}
            with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
                disk = Disk(patch, at, errno.EIO)
                with tsck.Checkpointer(store, state, ref=f"run{at}", when=tsck.every_steps(1), asynchronous=asynchronous) as ckpt:
                    ckpt.resume()
                    for step in range(1, SAVES + 1):
                        ckpt.step(step)
                        store.drain()
            assert disk.failed
            assert not disk.forgotten
            saved = [snapshot.step for snapshot in store.log(f"run{at}")]
            assert SAVES in saved
            assert len(saved) >= SAVES - 1


def test_a_single_writer_must_open_the_store_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its undecided entry could arrive late, and overwrite a later one."""
    with tsck.open(tmp_path / "store", create=True, single_writer_unsafe=True, cache_dir=tmp_path / "c", state_dir=tmp_path / "s") as store:
        monkeypatch.setattr(store.engine.log._writer, "sleep", lambda _: None)
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "create", lambda *_: Created.UNKNOWN)
            with pytest.raises(UndecidedError, match="open the store again") as caught:
                store.put_snapshot({"w": torch.ones(2)}, ref="job")
        assert caught.value.retry == "after_reopen"
        with pytest.raises(UndecidedError, match="open the store again"):
            store.put_snapshot({"w": torch.ones(2)}, ref="job")
