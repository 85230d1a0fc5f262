"""Concurrent syncs, killed syncs, and syncs of a log that was replaced."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.catalog import Catalog, create_tables, row_writer
from tensorstore_ck.errors import BrokenLogError, FormatVersionError
from tensorstore_ck.log.follow import empty
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.store import Store
from tests.catalog.made import dump, publish
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import open_store

ROOT = Path(tsck.__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with tsck.open(tmp_path / "ck", create=True, no_sync=True, cache_dir=tmp_path / "cache") as opened:
        yield opened


def start(store: Store, tmp_path: Path, url: str, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.catalog.sync_process", store.url, str(tmp_path / "cache"), url, *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def require_whole(catalog: Catalog, store: Store, new_url: Callable[[], str]) -> None:
    """It is what a new catalog would be."""
    with Catalog(new_url()) as fresh:
        fresh.sync(store)
        assert dump(catalog, store) == dump(fresh, store)


def test_a_snapshot_is_as_old_as_in_its_store(store: Store, new_url: Callable[[], str]) -> None:
    publish(store, "runs/a", 1, made_ns=5)
    with Catalog(new_url()) as catalog:
        catalog.sync(store)
        assert [found.time_ns for found in catalog.find()] == [found.time_ns for found in store.log()] == [5]


@pytest.mark.race
def test_many_readers_at_once_during_a_writer(store: Store, new_url: Callable[[], str]) -> None:
    url, done = new_url(), threading.Event()

    def sync() -> int:
        with Catalog(url, batch_entries=3) as catalog:
            heads = [catalog.sync(store).head_n]
            while not done.is_set():
                heads.append(catalog.sync(store).head_n)
        assert heads == sorted(heads), "never backwards"
        return heads[-1]

    with ThreadPoolExecutor(3) as pool:
        syncs = [pool.submit(sync) for _ in range(3)]
        try:
            for step in range(40):
                publish(store, f"runs/{step % 3}", step, {"loss": step})
        finally:
            done.set()
        assert all(sync.result() <= 40 for sync in syncs)
    with Catalog(url) as catalog:
        assert catalog.sync(store).head_n == 40
        require_whole(catalog, store, new_url)


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.parametrize("new_url", ["sqlite"], indirect=True)  # to PostgreSQL, the threads above are as far apart
def test_processes_at_once_that_make_the_catalog(store: Store, tmp_path: Path, new_url: Callable[[], str]) -> None:
    for step in range(30):
        publish(store, "runs/a", step, {"loss": step})
    url = new_url()
    processes = [start(store, tmp_path, url) for _ in range(2)]
    for step in range(30, 50):
        publish(store, "runs/b", step, {"loss": step})
    for process in processes:
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, 30 <= int(out) <= 50) == (0, True)
    with Catalog(url) as catalog:
        catalog.sync(store)
        require_whole(catalog, store, new_url)


@pytest.mark.race
def test_two_that_find_no_catalog_make_one(new_schema: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url, both, looked, is_made = new_schema(), threading.Barrier(2, timeout=PATIENCE_SECONDS), threading.local(), create_tables.has_tables

    def look(connection: Connection, shown: str) -> bool:
        found = is_made(connection, shown)
        if not hasattr(looked, "once"):
            looked.once = both.wait()
        return found

    def sync() -> int:
        with Catalog(url) as catalog:
            return catalog.sync(open_store(MemoryBackend())).head_n

    monkeypatch.setattr(create_tables, "has_tables", look)
    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(sync), pool.submit(sync)]] == [0, 0]


@pytest.mark.race
@pytest.mark.parametrize("new_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_killed_in_the_middle_the_next_goes_on(store: Store, tmp_path: Path, new_url: Callable[[], str]) -> None:
    for step in range(23):
        publish(store, "runs/a", step, {"loss": step})
    url = new_url()
    process = start(store, tmp_path, url, "3")
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    with Catalog(url) as catalog:
        assert len(catalog.find()) == 15, "three batches of five were committed, and nothing of the fourth"
        report = catalog.sync(store)
        assert (report.entries, report.snapshots, report.anew) == (8, 8, "")
        require_whole(catalog, store, new_url)


def test_a_log_that_was_replaced(store: Store, tmp_path: Path, new_url: Callable[[], str]) -> None:
    publish(store, "runs/a", 1)
    shutil.copytree(tmp_path / "ck", tmp_path / "copy")
    with Catalog(new_url()) as catalog, tsck.open(tmp_path / "copy", no_sync=True, cache_dir=tmp_path / "other") as copy:
        for step in (2, 3):
            publish(store, "runs/a", step)
            publish(copy, "runs/b", 10 * step)
        assert catalog.sync(store).anew == ""
        report = catalog.sync(copy)
        assert "not the one that was read before" in report.anew
        assert report.entries == 3
        require_whole(catalog, copy, new_url)
        assert [each.step for each in catalog.find()] == [30, 20, 1]


def test_a_log_that_is_shorter_now(store: Store, tmp_path: Path, new_url: Callable[[], str]) -> None:
    publish(store, "runs/a", 1)
    shutil.copytree(tmp_path / "ck", tmp_path / "copy")
    publish(store, "runs/a", 2)
    with Catalog(new_url()) as catalog, tsck.open(tmp_path / "copy", no_sync=True, cache_dir=tmp_path / "other") as copy:
        catalog.sync(store)
        assert catalog.sync(copy).anew
        require_whole(catalog, copy, new_url)


def test_a_salvaged_log(tmp_path: Path, new_url: Callable[[], str]) -> None:
    with tsck.open(tmp_path / "ck", create=True, no_sync=True, cache_dir=tmp_path / "cache") as store:
        for step in range(3):
            store.put_snapshot({"step": step}, ref="runs/a", step=step)
        with Catalog(new_url()) as catalog:
            catalog.sync(store)
            (entry,) = (tmp_path / "ck" / "log").rglob("*2")
            entry.unlink()
            salvage(store.engine.backend)
            with tsck.open(tmp_path / "ck", no_sync=True, cache_dir=tmp_path / "cache") as again:
                assert again.engine.config.log != "log"
                assert catalog.sync(again).anew
                require_whole(catalog, again, new_url)


def test_a_damaged_log_leaves_the_catalog_as_it_is(store: Store, tmp_path: Path, url: str) -> None:
    for step in range(4):
        publish(store, "runs/a", step)
    with Catalog(url) as catalog:
        catalog.sync(store)
        said = dump(catalog, store)
        (entry,) = (tmp_path / "ck" / "log").rglob("*4")
        entry.write_bytes(b"damaged")
        with pytest.raises(BrokenLogError):
            catalog.sync(store)
        with pytest.raises(BrokenLogError):
            catalog.rebuild(store)
        assert dump(catalog, store) == said


@pytest.mark.race
def test_a_cache_that_others_empty_does_not_decide(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(MemoryBackend())
    for step in range(5):
        publish(store, "runs/a", step)
    write = row_writer.RowWriter.write

    def emptied(self: row_writer.RowWriter, *args: object) -> int:
        with store.engine.table.batch() as batch:
            empty(batch)
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(row_writer.RowWriter, "write", emptied)
    with Catalog(url) as catalog:
        assert catalog.sync(store).snapshots == 5
        assert len(catalog.find("state = 'live'")) == 5
        publish(store, "runs/a", 6)
        catalog.sync(store)
        assert len(catalog.find()) == 6


def test_another_version(url: str) -> None:
    stores = [open_store(MemoryBackend()) for _ in range(2)]
    with Catalog(url) as catalog:
        for store in stores:
            publish(store, "runs/a", 1)
            catalog.sync(store)
        with catalog._database.writing() as connection:
            connection.exec_driver_sql("UPDATE catalog_version SET version = 7")
        for ask in (catalog.find, catalog.stores, lambda: catalog.sync(stores[0])):
            with pytest.raises(FormatVersionError, match=r"version 7.*`tsck catalog rebuild STORE --db .*`"):
                ask()
        catalog.rebuild(stores[0])
        assert len(catalog.stores()) == 1


def test_a_log_that_lies(url: str) -> None:
    store = open_store(MemoryBackend())
    for step in (-(1 << 63), (1 << 63) - 1):
        publish(store, "runs/a", step, {"a\0b": 1.0, "a\ufffdb": 2.0}, logical_bytes=(1 << 63) - 1, new_bytes=(1 << 63) - 1)
    with Catalog(url) as catalog:
        catalog.sync(store)
        (job,) = catalog.stores()[0].jobs
        assert job.new_bytes == (1 << 63) - 1
        assert [each.step for each in catalog.find("step > 0")] == [(1 << 63) - 1]
        with catalog._database.reading() as connection:
            assert connection.exec_driver_sql("SELECT new_bytes FROM storage_by_job").scalar_one() > 1.8e19
