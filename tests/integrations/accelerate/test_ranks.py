"""An `Accelerator` on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.effort import effort
from tests.end_to_end.scripts.launch import launched, torchrun
from tests.integrations.accelerate import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _run(folder: Path, *arguments: str, ranks: int = 2, kill: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """What the ranks said; `kill`: a rank, and the step after which it is killed."""
    said = []
    command = torchrun(ranks, "-m", "tests.integrations.accelerate.rank_job", str(folder), *arguments)
    with launched(command, folder, seconds=400.0) as program:
        for line in program.lines():
            if not line.startswith('{"rank"'):
                continue
            said.append(json.loads(line))
            if kill is not None and (said[-1]["rank"], said[-1].get("step")) == kill:
                os.kill(said[-1]["pid"], signal.SIGKILL)
        code, _ = program.end()
        assert (code != 0) == (kill is not None), program.errors()
    return said


def _ends(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((each for each in said if "losses" in each), key=lambda each: int(each["rank"]))


EVERY = [("ddp", 0), ("ddp", 1), ("fsdp", 1)]


@pytest.mark.parametrize(("kind", "rank"), effort(EVERY[1:], EVERY))
def test_a_killed_rank(tmp_path: Path, kind: str, rank: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = _ends(_run(whole, kind))
    assert len(expected) == 2
    _run(cut, kind, kill=(rank, 8))
    resumed = _ends(_run(cut, kind, "newest"))
    for mine, full in zip(resumed, expected, strict=True):
        done = len(full["losses"]) - len(mine["losses"])
        assert 3 <= done <= 6
        assert mine["batches"] == full["batches"][done:]
        assert mine["losses"] == full["losses"][done:]
        assert [mine[name] for name in ("weights", "average", "drawn")] == [full[name] for name in ("weights", "average", "drawn")]


def test_fewer_ranks(tmp_path: Path) -> None:
    """The same weights, and the same number of saves; other generators, of which a warning tells."""
    _run(tmp_path, "fsdp")
    with tsck.open(tmp_path / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        saved = {name: tensor.tolist() for name, tensor in store.checkout(f"{runs.REF}@3")["model"].items()}
    alone = _run(tmp_path, "ddp", f"{runs.REF}@3", ranks=1)
    assert [each["loaded"] for each in alone if "loaded" in each] == [saved]
    assert len(_ends(alone)) == 1
