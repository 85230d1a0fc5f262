"""What another program keeps where a store is: nothing reads it, and no store is made in between."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import ObjectInfo
from tensorstore_ck.errors import AlreadyExistsError, NotAStoreError
from tensorstore_ck.maintenance.fsck import run_repair
from tensorstore_ck.maintenance.salvage import salvage
from tests.maintenance.fsck.stores import begun, names, reopen

AT_ONCE = tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
FOREIGN = ("lost+found", ".snapshot", ".Trash-1000", "logs", "data")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a disk: nobody may list the folders of others there."""
    root = tmp_path / "disk"
    for name in FOREIGN:
        (root / name).mkdir(parents=True)
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        named = os.path.normpath(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path)
        if os.path.dirname(named) == str(root) and os.path.basename(named) in FOREIGN:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    return root


def test_a_store_at_the_root_of_a_disk(root: Path, tmp_path: Path) -> None:
    with tsck.open(root, create=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state") as store:
        store.put_snapshot({"w": torch.ones(9)}, ref="runs/a", step=1)
        assert store.usage().snapshots == 1
        store.gc(AT_ONCE)
        assert store.fsck(read_data=True).findings == ()
        assert run_repair(store.engine.of_store()).ok
        (first,) = root.glob("log/*/*01")
        backend = store.engine.of_store().backend
        first.unlink()
        assert salvage(backend).kept == 1
    assert {*FOREIGN} <= {*os.listdir(root)}


class Root(MemoryBackend):
    """The root of a bucket, which nobody may list as a whole."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        assert prefix.partition("/")[0] not in {"", *FOREIGN}
        return super().list(prefix)


def test_a_store_at_the_root_of_a_bucket() -> None:
    objects, _ = begun(1, 2)
    backend = Root()
    backend._objects = objects._objects | {f"{name}/object": (b"foreign", 0) for name in FOREIGN}
    store = reopen(backend)
    upload = backend._begin_upload("data/foreign")
    assert store.usage().snapshots == 2
    assert not any(upload == finding.object for finding in store.fsck(read_data=True).findings)
    assert store.gc(AT_ONCE).refused is None
    assert run_repair(store.engine.of_store()).ok
    backend.delete([names(backend, "log/")[0]])
    assert salvage(backend).kept == 2


@pytest.mark.parametrize("name", ["log/train.log", "snapshots/model_1.pt", "checkpoint/model.pt", "packs/a/b.zip"])
def test_no_store_is_made_among_the_files_of_another_program(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("foreign")
    with pytest.raises(AlreadyExistsError, match=rf"holds {name}.*for example .*/run/store"):
        tsck.open(tmp_path / "run", create=True)
    with pytest.raises(NotAStoreError):
        tsck.open(tmp_path / "run")
    assert [found for found in (tmp_path / "run").rglob("*") if found.is_file()] == [file]
    with tsck.open(tmp_path / "run/store", create=True):
        pass


def test_hidden_files_and_empty_folders_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/.DS_Store").touch()
    (tmp_path / "snapshots").mkdir()
    with tsck.open(tmp_path, create=True) as store:
        store.put_snapshot({"w": torch.ones(9)}, ref="runs/a", step=1)
        assert store.fsck(read_data=True).ok
