"""Reads in the background: how many are kept, and what ends one."""

import threading
import time

import pytest

from tensorstore_ck.ui import background
from tensorstore_ck.ui.background import Background, Progress
from tests.effort import PATIENCE_SECONDS


def test_only_the_results_that_were_looked_at_last_are_kept() -> None:
    reads = Background(2)
    for kind in ("a", "b", "c", "d"):
        reads.start("store", kind, lambda _, kind=kind: kind, PATIENCE_SECONDS)  # type: ignore[misc]
        reads.read("store", "a")
    assert [reads.read("store", kind).result for kind in ("a", "d")] == ["a", "d"]
    assert reads.read("store", "b").result is None


@pytest.mark.race
def test_a_read_that_no_page_asks_for_ends() -> None:
    reads = Background(2, abandon_seconds=0)
    ended = threading.Event()

    def work(progress: Progress) -> None:
        try:
            while True:
                progress("reading", 0, 0)
        finally:
            ended.set()

    reads.start("store", "long", work, 0)
    assert ended.wait(PATIENCE_SECONDS)
    assert reads.close(PATIENCE_SECONDS)
    assert reads.read("store", "long").error == "no page asked for it any more"


@pytest.mark.race
def test_one_large_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LOOK_SECONDS", 0.01)
    reads = Background()
    is_inside, goes_on, inside = threading.Event(), threading.Event(), list[int]()

    def work(progress: Progress) -> None:
        with reads.alone(progress):
            inside.append(1)
            is_inside.set()
            assert goes_on.wait(PATIENCE_SECONDS)

    reads.start("store", "a", work, 0)
    reads.start("store", "b", work, 0)
    assert is_inside.wait(PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while [reads.read("store", kind).what for kind in ("a", "b")].count("waiting for another read") == 0:
        assert len(inside) == 1
        assert time.monotonic() < deadline
    assert len(inside) == 1
    goes_on.set()
    for kind in ("a", "b"):
        reads.start("store", kind, work, PATIENCE_SECONDS)
    assert len(inside) >= 2
    assert reads.close(PATIENCE_SECONDS)
