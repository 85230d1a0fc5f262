"""The folder of an open store vanishes: its disk is unmounted, it is moved, deleted or replaced. No save is reported that is not there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.opening import init_store


def replaced_by_another(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    tsck.open(folder, create=True).close()


def unmounted(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.mkdir()


VANISHES: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("away")),
    "unmounted": unmounted,
    "replaced": replaced_by_another,
}
STATE = {"weights": torch.ones(5000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> tsck.Store:
    store = tsck.open(folder, create=True, cache_dir=tmp_path / "cache")
    store.put_snapshot({"weights": torch.zeros(5000)}, ref="job", step=1)
    return store


@pytest.mark.filterwarnings("ignore::tensorstore_ck.LogChangedWarning")
@pytest.mark.parametrize("vanish", VANISHES)
@pytest.mark.parametrize(("ref", "is_late"), [("job", False), ("new", False), ("new", True)], ids=["known", "new", "during the save"])
def test_nothing_is_published(store: tsck.Store, folder: Path, vanish: str, ref: str, is_late: bool) -> None:
    put = LocalBackend.put

    def vanish_then_put(self: LocalBackend, name: str, data: bytes) -> None:
        put(self, name, data)
        if name.startswith("snapshots/"):
            VANISHES[vanish](folder)

    if not is_late:
        VANISHES[vanish](folder)
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(LocalBackend, "put", vanish_then_put)
        with pytest.raises(tsck.NotAStoreError, match=r"does not hold the store .* any more"):
            store.put_snapshot(STATE, ref=ref, step=2, expect=tsck.ANY)
    assert not any(path.is_file() for path in folder.glob("log/*/*"))
    if (away := folder.with_name("away")).exists():  # mounted again
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)
        store.put_snapshot(STATE, ref=ref, step=2, expect=tsck.ANY)
        assert store.resolve(ref).step == 2


@pytest.mark.parametrize("entries", [1, 5])
def test_another_store_with_snapshots_is_called_another_one(store: tsck.Store, folder: Path, tmp_path: Path, entries: int) -> None:
    for step in (2, 3):
        store.put_snapshot(STATE, ref="job", step=step, unchanged="ok")
    with tsck.open(tmp_path / "other", create=True, cache_dir=tmp_path / "cache") as other:
        for step in range(entries):
            other.put_snapshot(STATE, ref="job", step=step, unchanged="ok")
    folder.rename(tmp_path / "away")
    (tmp_path / "other").rename(folder)
    for call in (
        lambda: store.put_snapshot(STATE, ref="job", step=4),
        lambda: store.checkout("job"),
        store.branches,
        store.gc,
        store.usage,
    ):
        with pytest.raises(tsck.NotAStoreError, match=r"does not hold the store .* any more"):
            call()


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "store")
    with pytest.raises(tsck.NotAStoreError, match=r"link is a link to .*disk/store, which is not there: mount its disk"):
        tsck.open(tmp_path / "link", create=True)
    (tmp_path / "disk" / "store").mkdir(parents=True)
    tsck.open(tmp_path / "link", create=True).close()


def test_relative_folders_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with tsck.open("store", create=True, cache_dir="cache", state_dir="state", staging="staging") as store:
        monkeypatch.chdir("other")
        store.put_snapshot(STATE, ref="job", step=1)
    assert not list((tmp_path / "other").iterdir())


def test_a_checkpointer_raises_at_once(store: tsck.Store, folder: Path) -> None:
    checkpointer = tsck.Checkpointer(store, {"weights": torch.ones(3)}, ref="other", when=tsck.every_steps(1), asynchronous=False)
    checkpointer.step(1)
    unmounted(folder)
    with pytest.raises(tsck.NotAStoreError):
        checkpointer.step(2)


def test_a_store_without_its_store_json_gets_no_new_identity(store: tsck.Store, folder: Path) -> None:
    store.close()
    (folder / "store.json").unlink()
    with pytest.raises(tsck.CorruptObjectError, match="tsck salvage"):
        tsck.open(folder, create=True)
    with pytest.raises(tsck.CorruptObjectError, match="tsck salvage"):
        init_store(LocalBackend(str(folder)))
    assert not (folder / "store.json").exists()
