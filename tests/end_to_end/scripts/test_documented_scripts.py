"""The scripts of the documentation as they are: stopped in the middle and started again, they end as if they had never been stopped."""

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tensorstore_ck as tsck
from examples.demo.compare import differences
from tests import documents
from tests.end_to_end.scripts.launch import Program, launched, torchrun

pytestmark = pytest.mark.slow
RANKS = 2
LINES = 45
"""A script to copy is one that can be read at once."""


def kill(program: Program) -> None:
    program.send(signal.SIGKILL)


def kill_a_rank(program: Program) -> None:
    os.kill(program.workers()[-1], signal.SIGKILL)


def preempt(program: Program) -> None:
    """As a scheduler does, which knows torchrun alone."""
    program.send(signal.SIGTERM)


class Script(NamedTuple):
    name: str
    command: list[str]
    ref: str
    steps: range
    """Those that it saves."""
    stop: Callable[[Program], None]


SCRIPTS = [
    Script("train.py", ["train.py"], "runs/first", range(50, 501, 50), kill),
    Script("train_fsdp2.py", torchrun(RANKS, "train_fsdp2.py"), "runs/fsdp2", range(20, 201, 20), preempt),
    Script("train_dcp.py", torchrun(RANKS, "train_dcp.py"), "runs/dcp", range(20, 201, 20), kill_a_rank),
]


def write(name: str, folder: Path) -> None:
    block = documents.script(name)
    assert block.count("\n") <= LINES
    folder.mkdir()
    (folder / name).write_text(block)


def run(script: Script, folder: Path) -> list[int]:
    """To its end; returns the steps that it printed."""
    with launched(script.command, folder) as program:
        code, told = program.end()
        assert code == 0, program.errors()
    return steps_in(told)


def run_interrupted(script: Script, folder: Path) -> list[int]:
    """Until it has saved a few times; returns the steps that it printed after it was asked to stop."""
    with launched(script.command, folder) as program:
        program.wait_for(rf"step {script.steps[2]}\b")  # not where an epoch ends
        script.stop(program)
        code, told = program.end()
        assert code != 0, "it was through before it was stopped"
    return steps_in(told)


def steps_in(told: str) -> list[int]:
    return [int(step) for step in re.findall(r"\bstep (\d+)", told)]


def state_of(store: tsck.Store, ref: str) -> Any:
    """What all ranks share, and each rank's own; but for generators that these scripts do not seed."""
    state = store.checkout(ref)
    if "ranks" not in state:  # of plain DCP
        return state
    own = [state.pop("rank")] if state["ranks"] == 1 else [store.rank_state(ref, rank) for rank in range(RANKS)]
    for each in own:
        del each["generators"]["python"], each["generators"]["numpy"]
    return state, own


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_stopped_and_started_again_it_ends_the_same(tmp_path: Path, script: Script) -> None:
    folders = [tmp_path / "at once", tmp_path / "in two"]
    for folder in folders:
        write(script.name, folder)
    with ThreadPoolExecutor() as pool:
        at_once = pool.submit(run, script, folders[0])
        after_stop = run_interrupted(script, folders[1])
        resumed = run(script, folders[1])
        at_once.result()
    expected, found = (tsck.open(folder / "ckpt", cache_dir=tmp_path / "cold") for folder in folders)
    with expected, found:
        regular = list(script.steps)
        put = [snapshot.step for snapshot in reversed(found.log(script.ref))]
        assert [snapshot.step for snapshot in reversed(expected.log(script.ref))] == regular
        if script.stop is preempt:
            assert max(after_stop, default=0) > script.steps[2], "no snapshot was put when it was asked to leave"
            assert put == sorted({*regular, after_stop[-1]})
            assert resumed[0] > after_stop[-1]
        else:
            assert put == regular
            assert resumed[0] >= script.steps[2]
        assert differences(state_of(expected, script.ref), state_of(found, script.ref)) == []
        assert found.fsck(read_data=True).ok
