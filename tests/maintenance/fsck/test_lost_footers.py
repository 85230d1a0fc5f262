"""Repair of packs with a damaged footer: parts alone say then where blocks are, and what they are differences to."""

from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck


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
