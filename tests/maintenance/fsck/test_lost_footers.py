"""Repair of packs with a damaged footer: parts alone say then where blocks are, and what they are differences to."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.engine import reachability
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.part import Part
from tensorstore_ck.maintenance.fsck import check_bases, check_snapshot, repairable


def saved(folder: Path) -> tuple[tsck.Store, dict[str, torch.Tensor], Path]:
    """A store; its second state; and the pack with a difference and two whole blocks of that state."""
    store = tsck.open(folder, create=True, delta=True)
    state = {name: torch.randn(100_000) for name in ("first", "second", "third")}
    store.put_snapshot(state, ref="run", step=1)
    before = {*folder.glob("packs/*/*")}
    state = {name: torch.randn(100_000) for name in state} | {"second": state["second"].clone()}
    state["second"][7] = 7.0
    store.put_snapshot(state, ref="run", step=2)
    (pack,) = {*folder.glob("packs/*/*")} - before
    return store, state, pack


def flip(file: Path, *positions: int) -> None:
    data = bytearray(file.read_bytes())
    for position in positions:
        data[position] ^= 1
    mode = file.stat().st_mode
    file.unlink()
    file.write_bytes(data)
    file.chmod(mode)


def test_what_differences_need_is_known_without_a_footer(tmp_path: Path) -> None:
    store, state, pack = saved(tmp_path)
    flip(pack, -5)
    report = store.repair(read_data=True)
    assert (report.ok, report.marked) == (True, ())
    assert [repaired.how for repaired in report.mended] == ["3 blocks are in a new pack"]
    pack.unlink()
    restored = store.checkout("run")
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("mode", [None, 0o600], ids=["same mode", "another mode"])
def test_what_stays_damaged_is_marked_and_what_is_good_moved_at_once(tmp_path: Path, mode: int | None) -> None:
    store, state, pack = saved(tmp_path)
    flip(pack, -5, 200_000)
    if mode is not None:
        pack.chmod(mode)
    report = store.repair(read_data=True)
    assert list(report.marked) == [store.resolve("run").root]
    assert [one.how for one in report.mended if "mode" not in one.how] == ["2 blocks are in a new pack; 1 blocks have no good copy"]
    assert [finding.message for finding in report.before.findings if finding.kind == "mode" and "blocks" in finding.message] == []
    again = store.repair(read_data=True)
    assert (again.marked, again.unmarked, again.mended) == ((), (), ())
    with pytest.raises(tsck.SnapshotMarkedBadError):
        store.checkout("run")
    with pytest.raises(tsck.DamageError):
        store.checkout("run", allow_marked=True)
    assert torch.equal(store.checkout("run", allow_marked=True, select="second")["second"], state["second"])


def test_a_difference_is_moved_whose_base_comes_from_another_store(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = tsck.open(folder, create=True, delta=True)
    states = [{name: torch.randn(100_000) for name in ("first", "second")}]
    store.put_snapshot(states[0], ref="run", step=1)
    (base,) = folder.glob("packs/*/*")
    shutil.copytree(folder, tmp_path / "copy")
    states.append({"first": torch.randn(100_000), "second": states[0]["second"].clone()})
    states[1]["second"][7] = 7.0
    store.put_snapshot(states[1], ref="run", step=2)
    (pack,) = {*folder.glob("packs/*/*")} - {base}
    flip(pack, -5)
    flip(base, *range(1000, base.stat().st_size - 3000, 5000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tsck.LogChangedWarning)
        report = store.repair(read_data=True, other=tsck.open(tmp_path / "copy"))
    assert (report.ok, report.marked) == (True, ())
    for step, state in enumerate(states, start=1):
        restored = store.checkout(f"run@{step}")
        assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


def test_a_part_with_wrong_bases_does_not_end_the_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, state, pack = saved(tmp_path)
    flip(pack, -5)
    located = reachability.location_of

    def location_of(part: Part, packs: Any, extents: Any, row: int, depth: int = 0) -> Any:
        if extents["base"][row] != -1:
            raise CorruptObjectError("a part names a block there with invalid delta bases", object_id="packs")
        return located(part, packs, extents, row, depth)

    for module in (check_bases, check_snapshot, repairable):
        monkeypatch.setattr(module, "location_of", location_of)
    report = store.repair(read_data=True)
    assert list(report.marked) == [store.resolve("run").root]
    assert [one.how for one in report.mended] == ["2 blocks are in a new pack; 1 blocks have no good copy"]
    assert torch.equal(store.checkout("run", allow_marked=True, select="first")["first"], state["first"])
