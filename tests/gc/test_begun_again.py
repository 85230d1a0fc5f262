"""A log that was deleted: nothing begins anew over what it named, and what began anew frees nothing of that."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import BrokenLogError, GcRefusedError
from tensorstore_ck.format.record import record_name
from tensorstore_ck.maintenance.salvage import salvage
from tests.gc.stores import AT_ONCE, contents
from tests.gc.test_lost_log import Swapped

SIGNS = importlib.import_module("tensorstore_ck.log.lost_log")


@pytest.fixture
def lost(tmp_path: Path) -> Swapped:
    """A store of three saves without its log."""
    swapped = Swapped(tmp_path)
    shutil.rmtree(swapped.store / "log")
    return swapped


FIRST: dict[str, Callable[[tsck.Store], object]] = {
    "put": lambda store: store.put_snapshot({"w": torch.ones(9)}, ref="new"),
    "policy": lambda store: store.set_policy("*", keep_last=1),
}


@pytest.mark.parametrize("first", FIRST)
def test_no_log_begins_over_snapshots(lost: Swapped, first: str) -> None:
    before = lost.files()
    with lost.open() as store, pytest.raises(BrokenLogError, match=r"has the parent .* it was lost.*`tsck salvage"):
        FIRST[first](store)
    assert before <= lost.files()
    assert not (lost.store / "log").exists()


def test_a_checkpoint_and_what_this_user_saw_are_signs_too(tmp_path: Path) -> None:
    for sign in ("checkpoint", "seen"):
        store = Swapped(tmp_path / sign)
        with store.open(state_dir=tmp_path / sign / "seen") as opened:
            opened.log()
        shutil.rmtree(store.store / "log")
        shutil.rmtree(store.store / "snapshots")
        (store.store / "checkpoint").mkdir(exist_ok=True)
        if sign == "checkpoint":
            (store.store / "checkpoint" / f"{4:020d}").write_bytes(b"any")
            match = "checkpoint/00000000000000000004 was made from it"
        else:
            match = r"this user has seen its entry 4 \(`tsck accept-log"
        with (
            store.open(state_dir=tmp_path / sign / ("seen" if sign == "seen" else "other")) as opened,
            pytest.raises(BrokenLogError, match=match),
            catch_warnings(action="ignore", category=tsck.LogChangedWarning),
        ):
            FIRST["put"](opened)


def test_a_first_save_that_died_or_runs_is_no_sign(tmp_path: Path) -> None:
    """FORMAT.md, "Commits", steps 3 to 5: its record is there, and no entry."""
    with tsck.open(tmp_path / "ck", create=True, no_sync=True, cache_dir=tmp_path / "h", state_dir=tmp_path / "h") as store:
        store.put_snapshot({"w": torch.ones(9)}, ref="r")
    shutil.rmtree(tmp_path / "ck" / "log")
    with tsck.open(tmp_path / "ck", no_sync=True, cache_dir=tmp_path / "i", state_dir=tmp_path / "i") as store:
        store.put_snapshot({"w": torch.zeros(9)}, ref="r")
        assert len(store.log("r")) == 1


def test_a_save_after_a_first_one_of_another_process_is_no_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"no_sync": True, "cache_dir": tmp_path / "h", "state_dir": tmp_path / "h"}
    real = SIGNS.child_records
    with tsck.open(tmp_path / "ck", create=True, **options) as slow, tsck.open(tmp_path / "ck", **options) as fast:

        def others_save(*arguments: object) -> object:
            monkeypatch.setattr(SIGNS, "child_records", real)
            for step in (1, 2):
                fast.put_snapshot({"w": torch.full((9,), float(step))}, ref="fast", step=step)
            names = [info.name for info in LocalBackend(str(tmp_path / "ck"), sync=False).list("snapshots/")]
            return real(fast.engine.backend, [parse_ulid(name[-26:]) for name in names])

        monkeypatch.setattr(SIGNS, "child_records", others_save)
        slow.put_snapshot({"w": torch.zeros(9)}, ref="slow")
        assert (len(slow.log("fast")), len(slow.log("slow"))) == (2, 1)


def test_fsck_says_so_and_no_hint_frees_anything(lost: Swapped) -> None:
    with lost.open() as store:
        report = store.fsck()
        text = " ".join(finding.message for finding in report.findings)
        assert not report.ok
        assert "it was lost" in text
        assert "--min-age" not in text
        assert store.usage().freeable.describe() == ["gc can free: nothing now"]


def begun_again(lost: Swapped) -> None:
    """Another build's first save took number 1, and five more followed."""
    aside = lost.store / "aside"
    (lost.store / "snapshots").rename(aside)
    with lost.open() as store:
        for step in range(6):
            store.put_snapshot({"w": torch.full((5000,), 10.0 + step)}, ref="r", step=10 + step, expect=tsck.ANY)
    shutil.copytree(aside, lost.store / "snapshots", dirs_exist_ok=True)
    shutil.rmtree(aside)


def test_gc_refuses_where_it_began_again_and_salvage_brings_back_what_there_was(lost: Swapped) -> None:
    begun_again(lost)
    before = lost.files()
    with lost.open() as store:
        assert "began again" in (store.gc(AT_ONCE, dry_run=True).refused or "")
        assert "--max-delete" not in "".join(store.usage().freeable.describe())
        with pytest.raises(GcRefusedError, match=r"the parents of 2 snapshot records, such as snapshots/.*`tsck salvage"):
            store.gc(AT_ONCE)
    assert before <= lost.files()
    salvage(LocalBackend(str(lost.store), sync=False))
    with lost.open() as store:
        assert {found.step for found in store.log("r")} == {0, 1, 2, *range(10, 16)}
        assert store.resolve("r").step == 15
        assert float(store.checkout("r@1")["w"][0]) == 1
        store.gc(AT_ONCE)
        assert store.fsck(read_data=True).ok


def test_gc_frees_it_where_the_records_were_deleted(lost: Swapped) -> None:
    begun_again(lost)
    with lost.open() as store:
        held = {record_name(info.ulid) for info in store.engine.log.newest_view().snapshots()}
        backend = LocalBackend(str(lost.store), sync=False)
        backend.delete(sorted(set(contents(backend, "snapshots/")) - held))
        assert store.gc(AT_ONCE).deleted["pack"] == 3
