"""`tsck bisect`: its three tests, what it prints, and how it ends."""

import math
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tensorstore_ck
from tensorstore_ck.cli.options import StoreChoice
from tests.cli.conftest import Tsck


@pytest.fixture
def diverging(tsck: Tsck) -> Tsck:
    """Steps 1 to 8; loss from 3 on, which is high from 5 on; a tensor has an infinity from 6 on."""
    with tensorstore_ck.open("ck", create=True, cache_dir="cache") as store:
        for step in range(1, 9):
            state = {"model.w": torch.ones(10) * step, "other": torch.tensor([1.0, math.inf if step >= 6 else step])}
            metrics = {"loss": 9.0 if step >= 5 else 1.0} if step >= 3 else {}
            with warnings.catch_warnings(action="ignore", category=tensorstore_ck.SuspiciousSaveWarning):
                store.put_snapshot(state, ref="runs/gpt", step=step, metrics=metrics)
    return tsck


def program(code: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def test_nan_names_the_tensor_and_the_next_command_works(diverging: Tsck) -> None:
    done = diverging("bisect", "runs/gpt", "--nan", "-s", "ck")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["good", "bad"]
    assert lines[1].endswith(", step 8  in other")
    assert "last good: " in lines[-3]
    assert lines[-3].endswith(", step 5")
    assert lines[-2].endswith(", step 6")
    assert "first bad: " in lines[-2]
    command = lines[-1].split("`")[1]
    assert command.endswith(" --stats -s ck")
    shown = diverging(*command.split()[1:], store=None)
    assert shown.code == 0
    assert "by how much the numbers changed" in shown.out
    assert "no pins" in diverging("pin").out


def test_include_narrows_what_is_read(diverging: Tsck) -> None:
    done = diverging("bisect", "runs/gpt", "--nan", "--include", "model.*")
    assert done.code == 25
    assert "no bad snapshot of 'runs/gpt' was found" in done.err
    assert diverging("bisect", "runs/gpt", "--nan", "--include", "nothing.*").code == 27


def test_metric_skips_snapshots_without_it_and_changes_nothing(diverging: Tsck) -> None:
    before = sorted(Path("ck").rglob("*"))
    document = diverging("bisect", "runs/gpt", "--metric", "loss > 5", "--json").json
    assert [document[name]["step"] for name in ("last_good", "first_bad")] == [4, 5]
    assert [(each["snapshot"]["step"], each["verdict"], each["why"]) for each in document["tested"]][:4] == [
        (1, "skip", "no loss"),
        (2, "skip", "no loss"),
        (3, "good", "loss=1"),
        (8, "bad", "loss=9"),
    ]
    assert document["next"] == f"tsck diff {document['last_good']['root'][:12]} {document['first_bad']['root'][:12]} --stats"
    assert sorted(Path("ck").rglob("*")) == before
    assert diverging("bisect", "runs/gpt", "--metric", "step >= 4").out.splitlines()[-2].endswith("step 4")
    assert diverging("bisect", "runs/gpt", "--metric", "loss >").code == 22
    found = diverging("bisect", "runs/gpt", "--nan", "--good", "runs/gpt@4", "--bad", "runs/gpt@7", "--json").json
    assert [each["snapshot"]["step"] for each in found["tested"]] == [4, 7, 6, 5]


def test_exec_has_gits_exit_codes_and_answers_with_a_range(diverging: Tsck, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; s = int(os.environ['TSCK_STEP']); print('says', s, os.environ['TSCK_STORE'], os.environ['TSCK_ROOT'] == '{root}')\n"
    code += "exit(125 if s in (3, 4) else 0 if s < 4 else 127 if s == 8 else 1)"
    done = diverging("bisect", "runs/gpt", "--exec", program(code))
    assert "says 8 ck True" in capfd.readouterr().out
    assert "not tested: " in done.out
    assert ": the first bad snapshot is one of these, or\n" in done.out
    assert any(line.startswith("skip") and line.endswith("step 4  exit code 125") for line in done.out.splitlines())
    document = diverging("bisect", "runs/gpt", "--exec", program(code), "--json").json
    assert [document[name]["step"] for name in ("last_good", "first_bad")] == [2, 5]
    assert [each["step"] for each in document["skipped"]] == [3, 4]
    assert "says 8 ck True" in capfd.readouterr().err


def test_other_exit_codes_end_the_search(diverging: Tsck) -> None:
    done = diverging("bisect", "runs/gpt", "--exec", program("exit(128)"))
    assert done.code == 22
    assert "ended with 128 for step 1, which ends the search" in done.err
    killed = diverging("bisect", "runs/gpt", "--exec", program("import os; os.kill(os.getpid(), 9)"))
    assert "ended with -9" in killed.err
    assert "could not be run" in diverging("bisect", "runs/gpt", "--exec", "./nothing-there").err
    assert "{root}, {step}, {ref} and {store} are filled in, and {{ is a brace" in diverging("bisect", "x", "--exec", "a {b}").err
    assert "no pins" in diverging("pin").out


def test_a_store_that_cannot_be_written_to(diverging: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = StoreChoice.open
    monkeypatch.setattr(StoreChoice, "open", lambda self, bar=None, **_: opened(self, bar, read_only=True))
    refused = diverging("bisect", "runs/gpt", "--nan")
    assert refused.code == 33
    assert "unpinned_unsafe" in refused.err
    assert diverging("bisect", "runs/gpt", "--nan", "--unpinned-unsafe").code == 0
