"""Folders of other programs, whose export is killed with -9 at each call that changes a file: whole, or not there."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.gc.stores import open_store
from tests.integrations.exporting.states import small_blocks
from tests.integrations.kill_at import KillAt, forked, kill_at_changes_of

MOMENTS: Final = {"exp_avg": torch.ones(30, 20), "exp_avg_sq": torch.full((30, 20), 2.0), "step": torch.tensor(3.0)}
STATES: Final[dict[str, dict[str, Any]]] = {
    "deepspeed-universal": {
        "model": {"a": torch.zeros(30, 20, dtype=torch.bfloat16), "seen": torch.ones(2)},
        "optimizer": {"state": {"a": {"master": torch.rand(30, 20), **MOMENTS}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]},
        "extra": {"deepspeed": dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), 3)},
    },
    "safetensors": {"a": torch.arange(3000.0), "n": 1},
}
pytestmark = pytest.mark.race

_DRAWN: Final = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture(params=[each if each == "safetensors" else pytest.param(each, marks=pytest.mark.slow) for each in STATES])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def store(kind: str) -> Iterator[tsck.Store]:
    with open_store(small_blocks()) as opened:
        opened.put_snapshot(STATES[kind], ref="run")
        yield opened


def killed_at(number: int, within: Path, export: Callable[[], object]) -> int:
    """In a process of its own: kills it before the call `number` that changes something in a folder; returns how many there were."""
    faults = KillAt(number)
    kill_at_changes_of(within, faults)
    faults.is_counting = True
    export()
    return faults.calls


def contents(folder: Path) -> dict[str, bytes]:
    """Without the number that torch draws for each save."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: _DRAWN.sub(b"", data) for name, data in found.items()}


def test_an_export_that_is_killed_at_any_call(store: tsck.Store, kind: Any, tmp_path: Path) -> None:
    place, out = tmp_path / "place", tmp_path / "place" / "out"
    place.mkdir()

    def export() -> None:
        export_snapshot(store, "run", out, format=kind)

    calls = forked(lambda: killed_at(0, place, export), tmp_path / "whole")
    assert calls is not None
    assert calls > 4
    whole = contents(out)
    assert len(whole) > 1
    os.rename(out, tmp_path / "first")
    ended = 0
    for number in range(1, calls + 1):
        at = tmp_path / "at"
        assert forked(lambda number=number: killed_at(number, place, export), at) is None  # type: ignore[misc]
        if out.exists():  # killed after the rename
            ended += 1
            assert contents(out) == whole
        left = [path for path in place.iterdir() if path != out]
        assert all(path.name.startswith(".out.") and path.name.endswith(".part") for path in left)
        if not out.exists():
            export()  # what is left over is in nobody's way
            assert contents(out) == whole
        assert [path for path in place.iterdir() if path != out] == left
        for path in (out, *left):
            os.rename(path, tmp_path / f"{number}-{path.name}")
    assert ended < calls
