"""A copy of a store's files that is used next to its original: what is said of it, and how it gets an identity of its own."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import Ulid, parse_ulid
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError
from tensorstore_ck.log import LogChangedWarning, Op
from tensorstore_ck.maintenance.salvage import adopt
from tests.end_to_end.crash.faulty import Death
from tests.maintenance.copy_store.places import at_write
from tests.maintenance.fsck.stores import backend_of, begun, build, contents, is_exact, names, read, reopen


def opened(root: Path) -> tsck.Store:
    return tsck.open(root, create=True, no_sync=True, cache_dir=root.parent / "cache", state_dir=root.parent / "state")


def save(store: tsck.Store, step: int) -> None:
    store.put_snapshot({"w": torch.full((9,), float(step))}, ref="runs/a", step=step, expect=tsck.ANY)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A store and a copy of its files, which went on after each other."""
    original, copy = tmp_path / "my store", tmp_path / "copy"
    with opened(original) as store:
        save(store, 1)
    shutil.copytree(original, copy)
    with opened(copy) as store:
        save(store, 2)
        save(store, 3)
    return original, copy


def test_a_copy_is_no_forgery_and_the_warning_has_the_command_that_ends_it(both: tuple[Path, Path]) -> None:
    original, copy = both
    with warnings.catch_warnings(record=True) as warned, opened(original) as store:
        warnings.simplefilter("always")
        save(store, 9)
        report = store.fsck(record=False)
    (message,) = {str(each.message) for each in warned}
    assert f"copy of the one that this user has seen at {copy}" in message
    assert f"`tsck adopt -s '{original}'`" in message
    assert not {"forged", "destroyed", "\n"} & {word for word in ("forged", "destroyed", "\n") if word in message}
    assert report.ok
    assert [(found.kind, found.severity) for found in report.findings if found.kind != "unreferenced"] == [("log_changed", "notice")]
    adopt(LocalBackend(str(copy), sync=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(copy) as store:
            assert [snapshot.step for snapshot in store.log("runs/a")] == [3, 2, 1]
            save(store, 4)
            store.gc(tsck.GcOptions(min_age_seconds=0, max_delete=1))
            assert store.fsck(read_data=True).ok


def test_a_folder_that_was_replaced_by_an_older_copy_is_no_forgery(tmp_path: Path) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    with opened(root) as store:
        save(store, 1)
    shutil.copytree(root, backup)
    with opened(root) as store:
        save(store, 2)
    root.rename(tmp_path / "aside")  # so that the new folder has another number
    shutil.copytree(backup, root)
    with pytest.warns(LogChangedWarning, match="seen here, in another folder"), opened(root) as store:
        assert store.resolve("runs/a").step == 1


def test_two_entries_of_one_number_at_one_place_are_called_forged(tmp_path: Path) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    with opened(root) as store:
        save(store, 1)
    shutil.copytree(root, backup)
    with opened(root) as store:
        save(store, 2)
    entry = next(root.glob("log/*/*2"))
    with tsck.open(backup, cache_dir=tmp_path / "cache2", state_dir=tmp_path / "state2") as store:
        save(store, 3)
    shutil.copyfile(next(backup.glob("log/*/*2")), entry)
    with pytest.warns(LogChangedWarning, match="replaced or forged"), opened(root) as store:
        store.branches()


def test_a_moved_store_says_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        save(store, 1)
    (tmp_path / "store").rename(tmp_path / "moved")
    with opened(tmp_path / "moved") as store:  # warnings are errors here
        save(store, 2)
        assert store.fsck().ok


def test_the_adopted_store_has_everything_under_another_identity() -> None:
    backend = build()
    before, was = contents(backend), reopen(backend)
    refs = {**was.branches(), **was.tags()}
    report = adopt(backend)
    now = reopen(backend)
    assert now.engine.config.uuid != was.engine.config.uuid
    assert report.log == now.engine.config.log != "log"
    assert {ref: snapshot.root for ref, snapshot in {**now.branches(), **now.tags()}.items()} == {
        ref: snapshot.root for ref, snapshot in refs.items()
    }
    for snapshot in now.log():
        assert is_exact(now.checkout(snapshot.root, allow_marked=True), snapshot.step or 0)
    assert now.fsck(read_data=True).ok
    assert before.items() - {("store.json", before["store.json"])} <= contents(backend).items()


def test_a_crash_leaves_the_old_identity() -> None:
    def die() -> None:
        raise Death

    objects = contents(build())
    for at in range(1, 100):
        backend = backend_of(objects)
        watched: Any = at_write(backend, at, die)
        try:
            adopt(watched)
        except Death:
            assert read(backend, "store.json") == objects["store.json"]
            assert reopen(backend).fsck().ok
        else:
            assert at > 3
            return
    raise AssertionError("never came to an end")


def test_a_damaged_store_and_one_with_moved_packs_are_refused() -> None:
    backend = build()
    backend.delete(names(backend, "parts/")[:1])
    with pytest.raises(CorruptObjectError, match="tsck fsck --repair"):
        adopt(backend)
    backend, store = begun(1)
    pack = next(info for info in backend.list("packs/"))
    store.engine.log.append(lambda _: [Op.set_location([Ulid(parse_ulid(pack.name[-26:]) or b"")], "/elsewhere/uuid")])
    before = contents(backend)
    with pytest.raises(InvalidOptionError, match=r"/elsewhere/uuid.*tsck copy"):
        adopt(backend)
    assert contents(backend) == before
