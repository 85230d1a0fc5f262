"""The demo, small: it must end well when all is well, and must not when anything differs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from examples.demo.compare import differences, fingerprint
from examples.demo.story import KILLED, UNDISTURBED, compare, plan_kills, run_story
from examples.demo.supervisor import Life
from examples.demo.train import SIZES


@pytest.mark.slow
@pytest.mark.race
def test_killed_in_a_save_and_the_same_to_the_last_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_story(tmp_path, size="tiny", kills=1, seed=1) == 0
    page = capsys.readouterr().out
    assert re.search(r"killed in the save of step \d+, [0-9.]+ [kM]B of its pack written", page)
    assert "Bit-identical" in page
    assert "DIFFERENT" not in page
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cold") as store:
        assert [snapshot.step for snapshot in store.log(KILLED)] == [12, 10, 8, 6, 4, 2]
        assert differences(store.checkout(KILLED), store.checkout(UNDISTURBED)) == []
        assert store.fsck(read_data=True).ok


def make_state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(8.0)}, "rng": (3, (1, 2), None), "losses": [0.1, float("nan")], "step": 2}


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "weight": lambda state: state["model"]["w"].__setitem__(3, torch.nextafter(state["model"]["w"][3], torch.tensor(9.0))),
    "sign of zero": lambda state: state["model"]["w"].__setitem__(0, -0.0),
    "dtype": lambda state: state["model"].update(w=state["model"]["w"].double()),
    "type": lambda state: state.update(rng=(3, [1, 2], None)),
    "loss": lambda state: state["losses"].__setitem__(0, 0.1 + 2**-56),
    "less": lambda state: state.pop("step"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_difference_is_found(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state, other = make_state(), make_state()
    assert differences(state, other) == []
    assert fingerprint(state) == fingerprint(other)
    change(other)
    assert differences(state, other)
    assert fingerprint(state) != fingerprint(other)
    said = {1: "0x1.8p+1", 2: "0x1.4p+1"}
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state, ref=UNDISTURBED, step=2)
        store.put_snapshot(other, ref=KILLED, step=2)
        checks = list(compare(store, [Life(losses=said, fingerprint="a")], Life(losses=said, fingerprint="a")))
    assert {what for what, same, _ in checks if not same} >= {"roots of snapshots"}
    assert len([what for what, same, _ in checks if what.startswith("restored") and not same]) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong"),
    [
        (Life(losses={1: "0x1p+1"}, fingerprint="a"), Life(losses={1: "0x1p+1"}, fingerprint="a"), set()),
        (Life(losses={1: "0x1p+2"}, fingerprint="a"), Life(losses={1: "0x1p+1"}, fingerprint="a"), {"losses as printed"}),
        (Life(losses={1: "0x1p+1"}, fingerprint="b"), Life(losses={1: "0x1p+1"}, fingerprint="a"), {"state in memory"}),
        (Life(losses={1: "0x1p+1"}), Life(losses={1: "0x1p+1"}), {"state in memory"}),
        (Life(fingerprint="a"), Life(losses={1: "0x1p+1"}, fingerprint="a"), {"losses as printed"}),
    ],
)
def test_what_the_processes_said_is_compared(tmp_path: Path, ours: Life, theirs: Life, wrong: set[str]) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for ref in (KILLED, UNDISTURBED):
            store.put_snapshot(make_state(), ref=ref, step=2)
        assert {what for what, same, _ in compare(store, [ours], theirs) if not same} == wrong


def test_the_plan_follows_from_its_seed_and_begins_with_a_save() -> None:
    for size in SIZES.values():
        for seed in range(200):
            moments = plan_kills(size, 5, seed)
            assert moments == plan_kills(size, 5, seed)
            assert moments[0].in_put
            assert all(1 <= moment.step <= size.steps for moment in moments)


@pytest.mark.parametrize("line", ["step 3 0x1.8p", "saved 2", ""])
def test_a_line_that_was_cut_off_counts_for_nothing(line: str) -> None:
    life = Life()
    life.record(line)
    assert life == Life()
