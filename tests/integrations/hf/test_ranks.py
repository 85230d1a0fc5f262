"""transformers' Trainer on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.end_to_end.scripts.launch import launched, torchrun
from tests.integrations.hf.runs import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REF = "runs/ranks"


def _run(folder: Path, *arguments: str, kill: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """What the ranks said; `kill`: a rank, and the step after which it is killed."""
    said = []
    command = torchrun(2, "-m", "tests.integrations.hf.rank_job", str(folder), *arguments)
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = _ends(_run(whole, REF))
    assert len(expected) == 2
    _run(cut, REF, kill=(rank, 7))
    resumed = _run(cut, REF, "True")
    assert _ends(resumed) == expected
    with tsck.open(cut / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert store.resolve(REF).step == STEPS
        report = tsck.export_snapshot(store, REF, tmp_path / "model", format="hf")
        assert report.notes[0].startswith("tried: GPT2LMHeadModel.from_pretrained loads it, with every weight")
