"""An object that the disk does not return (EIO) is unreadable, not damaged: at every object that fsck, gc, tier and a restore read."""

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import local_io
from tensorstore_ck.errors import BackendUnavailableError, DamageError, UnreadableError
from tensorstore_ck.maintenance.fsck import Finding, FsckOptions, run_repair
from tensorstore_ck.store import ReadOnlyStore
from tests.cli.conftest import run_tsck

AT_ONCE = tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1)


class Disk:
    """At read number `at`, counted from 1, the file that it reads becomes unreadable; with `once`, only that read fails.

    `of`: of this object alone, whatever the threads read before it.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, root: Path, at: int, *, of: str = "", once: bool = False, also: Path | None = None
    ) -> None:
        self.name = ""
        """The unreadable object; empty if there were fewer reads."""
        self.reads = Counter[str]()
        self._root, self._at, self._of, self._once = f"{root}/", at, of, once
        self._lock = threading.Lock()
        self._roots = (self._root, f"{also or root}/")
        patch.setattr(os, "pread", self._failing(os.pread))
        patch.setattr(os, "preadv", self._failing(os.preadv))

    def _failing(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *args: object) -> Any:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(self._roots):
                name = path.removeprefix(self._root)
                with self._lock:
                    self.reads[name] += 1
                    is_struck = (self.reads[name] if self._of else self.reads.total()) == self._at and self._of in ("", name)
                    self.name = name if is_struck else self.name
                if is_struck or (not self._once and name == self.name):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, *args)

        return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a shared block in a relocated pack, and a snapshot that only an undo window holds."""
    with opened(tmp_path / "store") as store:
        same = torch.arange(3000.0)
        for step in (1, 2, 3):
            own = [torch.full((3000,), float(10 * step + number)) for number in range(8)]
            store.put_snapshot({"same": same, "own": own}, ref="job", step=step, codec="raw")
        store.forget("job@1")
        store.gc(AT_ONCE)
        store.put_snapshot({"other": torch.ones(3000)}, ref="other", codec="raw")
        store.forget("other")
    return tmp_path / "store"


def opened(root: Path, **options: Any) -> tsck.Store:
    return tsck.open(root, create=True, no_sync=True, cache_dir=root.parent / "cache", state_dir=root.parent / "state", **options)


def opened_copy(copy: Path) -> ReadOnlyStore:
    """It has the same UUID, so it needs a cache of its own."""
    return tsck.open(copy, read_only=True, cache_dir=copy.parent / "copy_cache", state_dir=copy.parent / "copy_state")


def at_every_read(root: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[tsck.Store, Disk], object]) -> set[str]:
    """The folders of the objects that became unreadable while `act` ran: each object, at each of its reads."""
    folders = set[str]()
    copy = root.parent / "counted" / "store"  # which `act` may change
    shutil.copytree(root, copy)
    with opened(copy) as store, monkeypatch.context() as patch:
        act(store, untouched := Disk(patch, copy, 0))
    for name, at in [(name, at) for name, reads in untouched.reads.items() for at in range(1, reads + 1)]:
        with opened(root) as store, monkeypatch.context() as patch:
            act(store, disk := Disk(patch, root, at, of=name))
        folders |= {disk.name.partition("/")[0]} - {""}
    return folders


def require_unreadable(findings: Sequence[Finding], name: str) -> None:
    for finding in findings:
        if finding.severity == "error":
            assert (finding.kind, finding.object, finding.repairable) == ("unreadable", name, False), finding
            assert "check the disk" in finding.message
        assert "salvage" not in finding.message
        assert "--repair" not in finding.message


@pytest.mark.parametrize("repair", [False, True])
def test_fsck(root: Path, monkeypatch: pytest.MonkeyPatch, repair: bool) -> None:
    def check(store: tsck.Store, disk: Disk) -> None:
        with suppress(BackendUnavailableError, UnreadableError):  # store.json: nothing can be told; or a repair that stops
            if repair:
                repaired = run_repair(store.engine.of_store(), FsckOptions(read_data=True))
                assert (repaired.mended, repaired.marked) == ((), ())
                report = repaired.after
            else:
                report = store.fsck(read_data=True, record=False)
                assert not disk.name or any(finding.object == disk.name for finding in report.findings), disk.name
            require_unreadable(report.findings, disk.name)

    assert at_every_read(root, monkeypatch, check) >= {"store.json", "log", "packs", "parts", "snapshots", "moved"} & {*os.listdir(root)}
    with opened(root) as store:
        assert store.fsck(read_data=True).ok


def test_a_network_folder_that_loses_its_handle_while_modes_are_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, walk = [errno.ESTALE, errno.ESTALE], os.fwalk

    def fwalk(*args: Any, **options: Any) -> Any:
        if left:
            raise OSError(left.pop(), "injected")
        return walk(*args, **options)

    monkeypatch.setattr(os, "fwalk", fwalk)
    monkeypatch.setattr(local_io, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    with opened(root) as store:
        assert store.fsck(record=False).ok
        left += [errno.EIO] * 9
        with pytest.raises(BackendUnavailableError, match="modes"):
            store.fsck(record=False)


@pytest.mark.slow
def test_a_read_that_fails_once_costs_no_snapshot(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair from a copy, whose reads and those of the store fail one by one, marks nothing; the next one repairs everything."""
    copy, lost = tmp_path / "copy", max((file for file in root.rglob("packs/*/*")), key=lambda file: file.stat().st_size)
    shutil.copytree(root, copy)
    damaged = bytearray(lost.read_bytes())
    damaged[200] ^= 1
    lost.write_bytes(damaged)
    before, stopped = tmp_path / "before", 0
    shutil.copytree(root, before)
    for at in count(1):
        for folder in (root, tmp_path / "cache", tmp_path / "state"):
            shutil.rmtree(folder)
        shutil.copytree(before, root)
        with opened(root) as store, opened_copy(copy) as other, monkeypatch.context() as patch:
            disk = Disk(patch, root, at, once=True, also=copy)
            try:
                assert run_repair(store.engine.of_store(), FsckOptions(read_data=True), other=other.engine.of_store()).marked == (), (
                    disk.name
                )
            except (BackendUnavailableError, UnreadableError):
                stopped += 1
            patch.undo()
            assert store.resolve("job@2").mark == store.resolve("job@3").mark == ""
        if not disk.name:
            break
    assert stopped > 20
    with opened(root) as store:
        assert store.fsck(read_data=True).ok


def test_a_copy_that_another_user_may_not_read_costs_no_snapshot(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, lost = tmp_path / "copy", max((file for file in root.rglob("packs/*/*")), key=lambda file: file.stat().st_size)
    shutil.copytree(root, copy)
    lost.unlink()
    with opened(root) as store, opened_copy(copy) as other, monkeypatch.context() as patch:
        denied, open_file = str(copy / lost.relative_to(root)), os.open

        def refuse(path: str, *args: Any, **options: Any) -> int:
            if path == denied:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return open_file(path, *args, **options)

        patch.setattr(os, "open", refuse)
        with pytest.raises(UnreadableError, match=rf"{lost.name}.*for user {os.geteuid()} \(it is user {os.geteuid()}'s, mode -rw"):
            run_repair(store.engine.of_store(), other=other.engine.of_store())
        assert store.resolve("job@3").mark == ""


def test_the_exit_code_tells_unreadable_from_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, kept, *_ = root.rglob("packs/*/*")
    with monkeypatch.context() as patch:
        Disk(patch, root, 0).name = str(kept.relative_to(root))
        assert run_tsck(root.parent, "fsck", "--repair", "--read-data", store=str(root)).code == UnreadableError.exit_code
        lost.unlink()
        assert run_tsck(root.parent, "fsck", "--read-data", store=str(root)).code == DamageError.exit_code


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda store: store.checkout("job"), id="checkout"),
        pytest.param(lambda store: store.gc(AT_ONCE), id="gc"),
        pytest.param(lambda store: store.migrate_tiers(), id="tier"),
    ],
)
def test_what_reads_says_that_it_cannot(root: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[tsck.Store], object]) -> None:
    def run(store: tsck.Store, disk: Disk) -> None:
        message = ""
        try:
            act(store)
        except (BackendUnavailableError, UnreadableError) as exc:
            message = str(exc)
        assert message == "" or (disk.name and disk.name in message), message
        assert "salvage" not in message

    assert at_every_read(root, monkeypatch, run)
    with opened(root) as store:
        assert store.fsck(read_data=True).ok
        assert torch.equal(store.checkout("job")["own"][7], torch.full((3000,), 37.0))
