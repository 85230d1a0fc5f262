"""What one operation passes through, and how many lines an area has: a number rises only with a reason in the commit that raises it.

A call is an entry of a Python frame of this package, on any thread. Python 3.12 and later count fewer, since comprehensions have no frame
there.
"""

import ast
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS

PACKAGE = Path(tsck.__file__).parent
TOPS = tuple(str(path.resolve()) for path in (PACKAGE, PACKAGE / "gc", PACKAGE / "chunker"))


class Weight(NamedTuple):
    """What an operation passes through."""

    files: int
    functions: int
    calls: int


HEAVIEST = {
    "put_snapshot": Weight(61, 388, 1150),
    "put_snapshot_async": Weight(65, 450, 1265),
    "checkout": Weight(41, 250, 1390),
    "checkout into": Weight(49, 305, 2180),
}
"""For four linear layers and their optimizer, on CPython 3.11. Functions and calls are rounded up: threads that meet take a few more.

A checkout passes one file less, `common/waiting.py`, where no thread has to wait for another one."""
ASYNC_SHARE = 1.15
"""How many times the calls of `put_snapshot` an asynchronous one may take."""

MOST_LINES = {
    "backend": 6300,
    "catalog": 2300,
    "chunker": 100,
    "cli": 6000,
    "common": 3300,
    "engine": 5200,
    "errors": 400,
    "events": 300,
    "feed": 1700,
    "format": 5300,
    "gc": 3700,
    "integrations": 19900,
    "log": 7100,
    "maintenance": 7800,
    "redaction": 200,
    "session": 11400,
    "state": 7500,
    "store": 1800,
    "training": 5100,
    "ui": 4000,
}
"""Of the Python files of each area, rounded up to hundreds."""
MOST_LINES_A_FILE = 399
LONGER = {"store/read_only_store.py", "store/store.py", "standalone/tsck_read.py"}
"""Two classes that are mostly docstrings, and a program of one file."""
MOST_POSITIONAL = 4
MOST_LONG_CALLS = 120
"""Calls with more positional arguments than that: of torch, numpy, struct, SQLAlchemy and the like, whose parameters have no names here; in
`integrations` also 85 of this package's own functions."""


class Tracer:
    """Counts the calls of this package's functions."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str, int]] = set()
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(TOPS):
            self.calls += 1
            self.seen.add((code.co_filename, code.co_name, code.co_firstlineno))

    def weight(self) -> Weight:
        return Weight(len({file for file, _, _ in self.seen}), len(self.seen), self.calls)


def weight_of(operation: Callable[[], object]) -> Weight:
    tracer = Tracer()
    former = sys.getprofile()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        operation()
    finally:
        sys.setprofile(former)
        threading.setprofile(former)
    return tracer.weight()


@contextmanager
def trained(tmp_path: Path) -> Iterator[tuple[tsck.Store, Callable[[], Any]]]:
    """A store with two snapshots on two branches; and what trains the state one step further and returns it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> Any:
        model(torch.randn(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state") as store:
        for number in (1, 2):
            state = step()
            store.put_snapshot(state, ref="waited", step=number)
            store.put_snapshot_async(state, ref="async", step=number, unchanged="ok").wait(PATIENCE_SECONDS)
            store.checkout("waited")
        yield store, step


def test_no_operation_takes_more_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})  # neither the number of cores nor the filesystem makes a difference
    monkeypatch.setattr("tensorstore_ck.backend.local.use_direct", lambda _: False)
    monkeypatch.setattr("tensorstore_ck.backend.durable_folders.is_disk_of_this_host", lambda _: False)
    monkeypatch.setattr("tensorstore_ck.log.watermark.SAVE_SECONDS", float("inf"))  # nor does how long it takes
    with trained(tmp_path) as (store, step):
        state = step()
        waited = weight_of(lambda: store.put_snapshot(state, ref="waited", step=3))
        next_state = step()  # the same work for both: tensors that the store does not have
        found = {
            "put_snapshot": waited,
            "put_snapshot_async": weight_of(lambda: store.put_snapshot_async(next_state, ref="waited", step=4).wait(PATIENCE_SECONDS)),
            "checkout": weight_of(lambda: store.checkout("waited")),
            "checkout into": weight_of(lambda: store.checkout("waited", into=next_state)),
        }
    heavier = {name: weight for name, weight in found.items() if any(map(int.__gt__, weight, HEAVIEST[name]))}
    assert heavier == {}, f"of at most {HEAVIEST}"
    assert found["put_snapshot_async"].calls <= ASYNC_SHARE * found["put_snapshot"].calls


def lines_of(area: str) -> int:
    path = PACKAGE / area
    files = [path.with_suffix(".py")] if not path.is_dir() else [*path.resolve().rglob("*.py")]
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("area", MOST_LINES)
def test_no_area_grows(area: str) -> None:
    assert lines_of(area) <= MOST_LINES[area]


def test_every_area_has_a_number() -> None:
    areas = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"}
    assert areas - {"__init__", "__main__", "standalone"} == MOST_LINES.keys()


def python_files() -> Iterator[Path]:
    yield from PACKAGE.rglob("*.py")


def test_no_file_has_more_lines() -> None:
    longer = {path.relative_to(PACKAGE).as_posix() for path in python_files() if len(path.read_text().splitlines()) > MOST_LINES_A_FILE}
    assert longer <= LONGER


def test_arguments_have_names_where_there_are_many() -> None:
    calls = (node for path in python_files() for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    count = sum(sum(not isinstance(argument, ast.Starred) for argument in call.args) > MOST_POSITIONAL for call in calls)
    assert count <= MOST_LONG_CALLS, f"name the arguments from the {MOST_POSITIONAL + 1}th on, or all"
