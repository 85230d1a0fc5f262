"""Objects that anybody can create in a log: they end writing, and neither reading nor salvage; what is printed helps."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import Digest, new_ulid
from tensorstore_ck.errors import BrokenLogError, FormatVersionError
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import record_name
from tensorstore_ck.format.sealed import seal
from tensorstore_ck.log import Op
from tensorstore_ck.log.entry import entry_name
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.forged import forge
from tests.gc.stores import AT_ONCE


class Attacked:
    """A store of three saves and a tag; each handle is a host's of its own."""

    def __init__(self, folder: Path) -> None:
        self.url, self._folder, self._hosts = folder / "ck", folder, 0
        self.backend = LocalBackend(str(self.url), sync=False)
        with self.open(create=True) as store:
            for step in range(3):
                store.put_snapshot({"w": torch.full((5000,), float(step))}, ref="r", step=step, expect=tsck.ANY)
            store.tag("kept", "r@1")
            self.head = store.engine.log.sync()

    def open(self, **options: Any) -> tsck.Store:
        self._hosts += 1
        host = self._folder / f"host{self._hosts}"
        opened: tsck.Store = tsck.open(self.url, **{"no_sync": True, "cache_dir": host, "state_dir": host, **options})
        return opened

    def add_entry(self, ops: list[dict[str, Any]], **changed: Any) -> None:
        body = {"n": self.head.n + 1, "prev": self.head.hash, "write_id": bytes(16), "time_ns": 1, "actor": "mallory", "ops": ops}
        self.backend.create(entry_name("log", self.head.n + 1), seal("log", {**body, "signatures": [], **changed}))

    def require_salvaged(self) -> None:
        with self.open() as store:
            assert [found.step for found in store.log("r")] == [2, 1, 0]
            assert float(store.checkout("kept")["w"][0]) == 1
            store.put_snapshot({"w": torch.ones(9)}, ref="r", step=3, expect=tsck.ANY)
            store.gc(AT_ONCE)
            assert store.fsck(read_data=True).ok


@pytest.fixture
def attacked(tmp_path: Path) -> Attacked:
    return Attacked(tmp_path)


JUNK: dict[str, Callable[[Attacked], object]] = {
    "junk": lambda store: store.backend.create(entry_name("log", store.head.n + 1), b"junk"),
    "an invalid operation": lambda store: store.add_entry([{"op": "tag", "critical": True, "name": "a b", "root": bytes(32)}]),
    "another chain": lambda store: store.add_entry([], prev=bytes(32)),
    "a gap": lambda store: store.backend.create(entry_name("log", store.head.n + 2), b"junk"),
}


WRITES: list[Callable[[tsck.Store], object]] = [lambda store: store.put_snapshot({}, ref="q"), lambda store: store.gc(AT_ONCE)]


@pytest.mark.parametrize("how", JUNK)
def test_readers_go_on_writers_are_shown_the_way_out_and_it_works(attacked: Attacked, how: str) -> None:
    with attacked.open() as warm:
        warm.log()
        JUNK[how](attacked)
        for store in [attacked.open(), *([warm] if how != "a gap" else [])]:  # who follows sees no gap
            with pytest.warns(tsck.BrokenLogWarning, match=r"are read as of log entry 4, .* nothing can be written: .*`tsck salvage"):
                assert float(store.checkout("kept")["w"][0]) == 1
            with warnings.catch_warnings(action="ignore", category=tsck.BrokenLogWarning):
                assert [found.step for found in store.log("r")] == [2, 1, 0]
                assert list(store.tags()) == ["kept"]
            for write in WRITES:
                with pytest.raises(BrokenLogError, match="`tsck salvage"), warnings.catch_warnings(action="ignore"):
                    write(store)
            report = store.fsck()
            assert not report.ok
            assert "tsck salvage" in report.findings[0].message
    salvage(attacked.backend)
    attacked.require_salvaged()


def test_readers_go_on_behind_a_checkpoint_whose_entries_are_gone(attacked: Attacked) -> None:
    with attacked.open() as store:
        for number in range(70):
            store.tag(f"t{number}", "r@0")
    assert any((attacked.url / "checkpoint").iterdir())
    for path in (attacked.url / "log").rglob("0*"):
        if path.is_file():
            path.unlink()
    with attacked.open() as store, pytest.warns(tsck.BrokenLogWarning):
        assert float(store.checkout("kept")["w"][0]) == 1


UNPUBLISHABLE = {
    "a long name": {"m" * 257: 1.0},
    "many metrics": {str(number): 1.0 for number in range(20_000)},
    "more than an entry may have": {f"{number:04}" + "\N{GRINNING FACE}" * 252: 1.0 for number in range(1024)},
}


@pytest.mark.parametrize("what", UNPUBLISHABLE)
def test_salvage_sets_a_record_aside_that_no_entry_can_publish_and_names_it(attacked: Attacked, what: str) -> None:
    with attacked.open() as store:
        info = store.engine.log.newest_view().by_root(bytes.fromhex(store.resolve("r").root))
        assert info is not None
        record = store.engine.read_record(info)
    name = record_name(new_ulid())
    attacked.backend.put(name, record._replace(metrics=UNPUBLISHABLE[what]).encode())
    JUNK["junk"](attacked)
    report = salvage(attacked.backend)
    assert [(lost.id, name in lost.note) for lost in report.lost] == [(name[-26:], True)]
    attacked.require_salvaged()


def test_an_unknown_critical_operation_names_its_author_and_the_ways_out(attacked: Attacked) -> None:
    attacked.add_entry([{"op": "zzz", "critical": True}])
    with attacked.open() as store:
        with pytest.raises(
            FormatVersionError, match=r"entry log/.*5 by mallory has .*'zzz'.*from that entry on it may read .*--leave-out-unknown"
        ):
            store.put_snapshot({}, ref="q")
        assert float(store.checkout("kept")["w"][0]) == 1
    with pytest.raises(FormatVersionError, match=r"entry 5 of log holds the operation 'zzz'.*`tsck salvage --leave-out-unknown"):
        salvage(attacked.backend)
    salvage(attacked.backend, leave_out_unknown=True)
    attacked.require_salvaged()


@pytest.mark.parametrize("how", ["no record", "no part"])
def test_a_second_put_of_a_known_root_hides_nothing_and_stops_no_gc(attacked: Attacked, how: str) -> None:
    with attacked.open() as store:
        view = store.engine.log.newest_view()
        info = view.by_root(view.tag("kept") or b"")
        assert info is not None
        record = store.engine.read_record(info)
        ulid = new_ulid()
        put = Op.put("mallory", ulid, record, record.encode(), anchor=0, txn=new_ulid())
        if how == "no part":
            attacked.backend.put(record_name(ulid), record._replace(parts=[new_ulid()]).encode())
        forge(store.engine, lambda _: [put])
    root = Digest(info.root).hex()
    with attacked.open() as store:
        for address in ("kept", root, "r@1", "r~1"):
            assert float(store.checkout(address)["w"][0]) == 1
        store.tag("again", root)
        store.gc(AT_ONCE)
        store.untag("kept")
        store.forget("r@1")
        store.gc(AT_ONCE)
        assert float(store.checkout("again")["w"][0]) == 1


@pytest.mark.parametrize("field", ["raw", "offset"])
def test_a_save_shares_no_blocks_with_a_later_put_of_its_parents_root(attacked: Attacked, field: str) -> None:
    """Its part has the right id, which does not cover where blocks are."""
    with attacked.open() as store:
        engine = store.engine
        info = engine.log.newest_view().by_root(bytes.fromhex(store.resolve("kept").root))
        assert info is not None
        record = engine.read_record(info)
        part = engine.read_part(record, 0)
        extents = part.extents.copy()
        extents[field] += 4
        ulid = new_ulid()
        attacked.backend.put(part_name(ulid), part._replace(extents=extents).encode())
        forged, snapshot = record._replace(parts=[ulid]), new_ulid()
        attacked.backend.put(record_name(snapshot), forged.encode())
        forge(engine, lambda _: [Op.put("mallory", snapshot, forged, forged.encode(), anchor=0, txn=new_ulid())])
    with attacked.open() as store:
        state = store.checkout("r@1")
        store.put_snapshot({"w": state["w"] + 8}, ref="r", step=9, expect=tsck.ANY)
    with attacked.open() as store:
        assert float(store.checkout("r@9")["w"][0]) == 9
        assert store.fsck(read_data=True).ok is False  # what was forged is named
        packs = len(store.show("r@1").packs)
        repaired = store.repair(read_data=True)
        assert len(repaired.mended) == packs  # once, not until the rounds of a repair are over
        assert float(store.checkout("kept")["w"][0]) == 1
