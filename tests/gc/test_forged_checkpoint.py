"""A checkpoint that a writer forged for a true entry: hosts without a cache believe it, but gc frees nothing by it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import BrokenLogError
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.gc import plan
from tensorstore_ck.gc.listing import ListedObject, list_objects
from tensorstore_ck.log import Entry, ObjectKey, Op, RefTable, fold
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.checkpoint import checkpoint_name, decode_checkpoint, dump, load
from tensorstore_ck.log.follow import empty
from tests.gc.stores import AT_ONCE


def open_on(host: Path) -> tsck.Store:
    """On a host with a cache of its own."""
    return tsck.open(host.parent / "ck", create=True, no_sync=True, cache_dir=host, state_dir=host)


def fill_again(store: tsck.Store) -> None:
    """As another process of the host does that finds the cache emptied."""
    with store.engine.log.table.batch() as batch:
        empty(batch)
    with open_on(Path(store.engine.backend.url.removeprefix("file://")).parent / "warm") as other:
        other.branches()


def test_gc_frees_nothing_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_on(tmp_path / "mine") as store:
        for step in range(3):
            store.put_snapshot({"w": torch.full((5000,), float(step))}, ref="r", step=step, expect=tsck.ANY)
        for number in range(70):
            store.tag(f"t{number}", "r@1")
    with open_on(tmp_path / "warm") as store:
        store.engine.log.verify()
    backend = LocalBackend(str(tmp_path / "ck"), sync=False)
    (n,) = (int(path.name) for path in (tmp_path / "ck" / "checkpoint").iterdir())
    true = decode_checkpoint(backend.get(checkpoint_name("log", n), max_bytes=MAX_OBJECT_BYTES), "true")
    table = MemoryTable()
    with table.batch() as batch:
        load(batch, true)
        ops = [Op.expire("r", None), Op.purge(n, "r"), *(Op.untag(tag, RefTable(batch)) for tag in RefTable(batch).tags())]
        fold(Entry(n, true.entry_hash, bytes(16), 0, "", tuple(ops), true.entry_hash, 0), batch)
        forged = dump(batch, n, true.entry_hash)
    assert forged is not None
    backend.replace(checkpoint_name("log", n), forged)
    packs = sorted((tmp_path / "ck" / "packs").rglob("*"))
    calls: list[Callable[[tsck.Store], object]] = [lambda store: store.gc(AT_ONCE), lambda store: store.migrate_tiers()]
    for call in calls:
        with open_on(tmp_path / "cold") as store, pytest.raises(BrokenLogError, match=rf"checkpoint/0*{n} does not match the log"):
            call(store)
    assert sorted((tmp_path / "ck" / "packs").rglob("*")) == packs
    with open_on(tmp_path / "warm") as store, monkeypatch.context() as patched:

        def list_later(backend: Backend) -> dict[ObjectKey, ListedObject]:
            fill_again(store)
            return list_objects(backend)

        patched.setattr(plan, "list_objects", list_later)
        with pytest.raises(BrokenLogError, match="does not match the log"):  # its cache was compared with the log before
            store.gc(AT_ONCE)
    assert sorted((tmp_path / "ck" / "packs").rglob("*")) == packs
    with open_on(tmp_path / "cold") as store:
        assert store.repair().ok
        store.gc(AT_ONCE)
    with open_on(tmp_path / "mine") as store:
        assert [found.step for found in store.log("r")] == [2, 1, 0]
