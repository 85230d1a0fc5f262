"""A store.json that names another log, or none that is there: the store is no empty one, and nothing of it is freed."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import BrokenLogError, GcRefusedError
from tensorstore_ck.format.store_config import StoreConfig, decode_config
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE

CALLS: dict[str, Callable[[tsck.Store], object]] = {
    "gc": lambda store: store.gc(AT_ONCE),
    "gc dry run": lambda store: store.gc(AT_ONCE, dry_run=True),
    "tier": lambda store: store.migrate_tiers(),
    "put": lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="r"),
    "forget": lambda store: store.forget("r"),
    "checkout": lambda store: store.checkout("r"),
    "log": lambda store: store.log(),
}


class Swapped:
    """A store, whose store.json somebody replaces."""

    def __init__(self, folder: Path) -> None:
        self.store, self._folder, self._hosts = folder / "ck", folder, 0
        with self.open(create=True) as store:
            for step in range(3):
                store.put_snapshot({"w": torch.full((5000,), float(step))}, ref="r", step=step, expect=tsck.ANY)
            store.tag("kept", "r@1")

    def open(self, **options: Any) -> tsck.Store:
        """On a host that has never seen it."""
        self._hosts += 1
        host = self._folder / f"host{self._hosts}"
        opened: tsck.Store = tsck.open(self.store, **{"no_sync": True, "cache_dir": host, "state_dir": host, **options})
        return opened

    def swap(self, **changed: Any) -> None:
        config = decode_config((self.store / "store.json").read_bytes(), "here")
        LocalBackend(str(self.store), sync=False).replace("store.json", replace(config, **changed).encode())

    def config(self) -> StoreConfig:
        return decode_config((self.store / "store.json").read_bytes(), "here")

    def files(self) -> set[str]:
        folders = ("packs", "parts", "snapshots", "log")
        return {str(path) for folder in folders for path in (self.store / folder).rglob("*") if path.is_file()}


@pytest.fixture
def swapped(tmp_path: Path) -> Swapped:
    return Swapped(tmp_path)


@pytest.mark.parametrize("call", CALLS)
def test_a_log_that_is_not_there_is_no_new_store(swapped: Swapped, call: str) -> None:
    before = swapped.files()
    swapped.swap(log="log-evil")
    with swapped.open() as store, pytest.raises(BrokenLogError, match=r"another log \(log\); store.json may be wrong"):
        CALLS[call](store)
    assert before <= swapped.files()
    assert not (swapped.store / "log-evil").exists()
    swapped.swap(log="log")
    with swapped.open() as store:
        assert [found.step for found in store.log("r")] == [2, 1, 0]


def test_other_objects_next_to_an_empty_log_are_left_alone(tmp_path: Path) -> None:
    with tsck.open(tmp_path, create=True, no_sync=True, cache_dir=tmp_path / "host", state_dir=tmp_path / "host") as store:
        (tmp_path / "log-tensorboard" / "run").mkdir(parents=True)
        (tmp_path / "log-tensorboard" / "run" / "events").write_bytes(b"")
        store.put_snapshot({"w": torch.ones(9)}, ref="r")


def test_another_uuid_is_noticed_behind_a_checkpoint(swapped: Swapped) -> None:
    with swapped.open() as store:
        for number in range(70):
            store.tag(f"t{number}", "r")
    assert any((swapped.store / "checkpoint").iterdir())
    own = swapped.config().uuid
    swapped.swap(uuid=str(uuid.uuid4()))
    with swapped.open() as store, pytest.raises(BrokenLogError):
        store.log()
    swapped.swap(uuid=own)
    with swapped.open() as store:
        assert len(store.tags()) == 71


def test_gc_frees_nothing_where_the_log_was_deleted(swapped: Swapped) -> None:
    shutil.rmtree(swapped.store / "log")
    before = swapped.files()
    with swapped.open() as store:
        assert "`tsck salvage` makes a new one" in (store.gc(AT_ONCE, dry_run=True).refused or "")
        with pytest.raises(GcRefusedError, match=r"the log of .* is empty, but there are 3 snapshot records"):
            store.gc(AT_ONCE)
    assert swapped.files() == before


def test_salvage_goes_by_the_log_that_is_there(swapped: Swapped) -> None:
    swapped.swap(log="log-evil")
    report = salvage(LocalBackend(str(swapped.store), sync=False))
    assert (report.kept, report.tags) == (3, ("kept",))
    with swapped.open() as store:
        assert [found.step for found in store.log("r")] == [2, 1, 0]
