"""Every command does its work whatever becomes of its output, and its exit code says whether the output arrived."""

import atexit
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

import tensorstore_ck
from tests.cli.conftest import made_history
from tests.cli.everycommand import runs
from tests.effort import PATIENCE_SECONDS, effort

pytestmark = pytest.mark.slow
ROOT: Final = str(Path(tensorstore_ck.__file__).parents[1])
DRIVER: Final = """
import json, os, sys, traceback
import torch, tensorstore_ck.store
from tensorstore_ck.cli import main

def end(how, number):
    out = os.open(f"out {number}", os.O_WRONLY | os.O_CREAT)
    if how == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    elif how == "no reader":
        reader, out = os.pipe()
        os.close(reader)
    os.dup2(out, 1)
    os.dup2(os.open(f"err {number}", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if how == "no stdout":
        os.close(1)
        sys.stdout = sys.__stdout__ = None
    if how == "no stderr":
        os.close(2)
        sys.stderr = sys.__stderr__ = None

codes = []
for number, (command, variables) in enumerate(json.load(sys.stdin)):
    pid = os.fork()
    if not pid:
        code = 99
        try:
            end(sys.argv[1], number)
            os.environ.update(variables)
            main(command)
        except SystemExit as exc:
            code = exc.code or 0
        except BaseException:
            if sys.stderr is not None:
                traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, AttributeError, ValueError):
                pass
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""
"""Runs the commands of stdin one after another, each with its variables, with the streams that the argument says."""
LOST: Final = {"full": 34, "no reader": 1}
"""The exit codes of commands that could not print."""
ENVIRONMENTS: Final = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "dumb": {"TERM": "dumb"},
    "no colour": {"NO_COLOR": "1"},
    "narrow": {"COLUMNS": "40"},
}
IN_TURNS: Final = "environments in turns"
TERMINALS: Final = ("dumb", "no colour", "narrow")
"""Each command has one of these where they take turns."""


@cache
def _usual() -> tuple[Path, list[int]]:
    """Where all commands ran with files as streams, and their exit codes."""
    made = TemporaryDirectory(prefix="tsck-streams-")
    atexit.register(made.cleanup)
    folder = copied(Path(made.name) / "usual")
    return folder, run_all(folder, "usual")


def copied(folder: Path) -> Path:
    """The store `ck` with its files in a new folder."""
    shutil.copytree(made_history().name, folder, ignore=shutil.ignore_patterns("cache"))
    return folder


def run_all(folder: Path, how: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "TSCK_STORE": "ck", **ENVIRONMENTS.get(how, {})}
    environment |= {f"XDG_{name}_HOME": str(folder / name) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
    turns = [ENVIRONMENTS[name] for name in TERMINALS] if how == IN_TURNS else [{}]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, how],
        input=json.dumps([(command, turns[number % len(turns)]) for number, command in enumerate(runs())]),
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=10 * PATIENCE_SECONDS,
        check=True,
    )
    codes: list[int] = json.loads(done.stdout)
    return codes


def work_done(folder: Path) -> dict[str, Any]:
    """What the commands have changed in the store, and the files that they made."""
    with tensorstore_ck.open(folder / "ck", cache_dir=folder / "looked") as store:
        found = {
            "refs": sorted((*store.branches(), *store.tags())),
            "steps": [(each.ref, each.step, each.mark, sorted(each.metrics)) for each in store.log()],
            "pins": [pin.owner for pin in store.pins()],
            "policies": sorted(store.policies()),
            "quotas": sorted(store.quotas()),
        }
    made = {path.name for path in folder.iterdir()} - {"looked"}
    return {**found, "files": sorted(name for name in made if not name.startswith(("out ", "err ")))}


@pytest.mark.parametrize("how", ["no stdout", "no stderr", *LOST, "latin-1", *effort((IN_TURNS,), TERMINALS)])
def test_every_command(tmp_path: Path, how: str) -> None:
    """The same is done as with files for streams."""
    usual, expected = _usual()
    odd = tmp_path / "odd"
    codes = run_all(copied(odd), how)
    assert 99 not in expected
    for number, (command, code, lost) in enumerate(zip(runs(), expected, codes, strict=True)):
        printed = (usual / f"out {number}").read_text()
        said = (odd / f"err {number}").read_text()
        assert lost == (LOST.get(how, code) if printed and not code else code), (command, said)
        assert "Traceback" not in said, (command, said)
    assert work_done(odd) == work_done(usual)
