"""After each acknowledged write, each folder on the way to the object was synced after the entry that leads there was made."""

import errno
import os
import random
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import Created, durable_folders
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import BackendUnavailableError


class Disk:
    """Notes what each fsync of a folder made durable: the entries that it had then, by their inodes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.syncs = Counter[str]()
        self.meanwhile: Callable[[], object] = lambda: None
        """Called when an fsync of a folder ends: what it does comes too late for that."""
        self.fails: Callable[[str], bool] = lambda path: False
        """Whether the fsync of a folder fails."""
        self._durable: dict[str, set[tuple[str, int]]] = {}
        patch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.syncs[path] += 1
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            if self.fails(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._durable[path] = {(entry.name, entry.inode()) for entry in os.scandir(path)}
            self.meanwhile()

    def lost(self, path: Path, above: Path) -> list[Path]:
        """The entries on the way to `path` that a power failure may take; `above` is known to be durable."""
        way = [path, *path.parents[: len(path.relative_to(above).parts) - 1]]
        return [each for each in way if (each.name, os.stat(each).st_ino) not in self._durable.get(str(each.parent), ())]


@pytest.mark.parametrize("failing_share", [0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_random_writes_beside_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, failing_share: float) -> None:
    """One sync after another, so that the seed decides all that happens."""
    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: False)
    disk, chance, root = Disk(monkeypatch), random.Random(seed), tmp_path / "store"
    removes = seed % 2 == 1  # a handle does not know that another one made a removed folder again
    ours = [LocalBackend(str(root)) for _ in range(1 if removes else 2)]

    def make_folder() -> None:
        """As another process does that dies before it syncs it."""
        (root / chance.choice("ab") / chance.choice("uvwxyz")).mkdir(parents=True, exist_ok=True)

    def make_folder_sometimes() -> None:
        if chance.random() < 0.5:
            make_folder()

    disk.meanwhile, disk.fails = make_folder_sometimes, lambda path: chance.random() < failing_share
    for number in range(60):
        folder, backend = f"{chance.choice('ab')}/{chance.choice('uvwxyz')}", chance.choice(ours)
        name = chance.choice([f"{folder}/{number}", f"{number}"])
        match chance.randrange(6):
            case 0:
                make_folder()
                continue
            case 1:
                ours[0].make_folders(["a", "b"])
                continue
            case 2 if removes:  # somebody removes it, and this process makes it again
                shutil.rmtree(root / folder, ignore_errors=True)
                name = f"{folder}/{number}"
        try:
            outcome = chance.choice([backend.create, backend.put, backend.replace])(name, b"x")
        except BackendUnavailableError:
            continue
        if outcome is not Created.UNKNOWN:
            assert disk.lost(root / name, tmp_path) == []


def test_folders_that_are_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_folders, "is_disk_of_this_host", lambda _: True)
    disk, root = Disk(monkeypatch), tmp_path / "store"
    backend = LocalBackend(str(root))
    for name in ("a/u/1", "a/u/2", "a/v/3", "b/4", "5", "a/u/6"):
        backend.put(name, b"x")
        assert disk.lost(root / name, tmp_path) == []
    assert disk.syncs[str(root)] == 3


def test_a_new_store_whose_own_entry_is_synced_at_the_second_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, root = Disk(monkeypatch), tmp_path / "store"
    disk.fails = lambda path: path == str(tmp_path) and disk.syncs[path] == 1
    with tsck.open(root, create=True, cache_dir=tmp_path / "cache"):
        assert disk.lost(root / "store.json", tmp_path) == []
    assert disk.syncs[str(tmp_path)] > 1


def test_a_new_store_and_its_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, root = Disk(monkeypatch), tmp_path / "new" / "folders" / "store"
    with tsck.open(root, create=True, cache_dir=tmp_path / "cache") as store:
        assert disk.lost(root / "store.json", tmp_path) == []
        assert sum(disk.syncs.values()) == 5  # two for the folders above; store.json, its entry and the store's
        store.put_snapshot({"w": torch.ones(3)}, ref="job")
        files = [path for folder in ("log", "packs", "parts", "snapshots") for path in (root / folder).rglob("*") if path.is_file()]
        assert len(files) == 4
        assert all(disk.lost(path, tmp_path) == [] for path in files)
        assert disk.syncs[str(root)] == 1
