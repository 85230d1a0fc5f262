"""What is advised follows from the history and the costs."""

from collections.abc import Iterator
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.maintenance.optimal_interval import SaveCosts, best, ettr
from tests.gc.stores import Clock, open_store, state


@pytest.fixture
def store() -> Iterator[tsck.Store]:
    """Ten snapshots, 602 s apart."""
    clock = Clock()
    with open_store(clock=clock) as store:
        for step in range(10):
            store.put_snapshot(state(step), ref="run", step=step)
            clock.advance(602)
        yield store


def test_what_it_goes_by(store: tsck.Store) -> None:
    found = store.advise("run", stall_seconds=2.0, restart_seconds=60.0)
    assert found.costs == SaveCosts(2.0, 0.0, 60.0, 4 * 3600.0)
    assert found.sources == {"stall": "given", "lag": "assumed", "restart": "given", "mtbf": "assumed"}
    assert found.interval == pytest.approx(600)
    assert found.best_interval == pytest.approx(best(found.costs))
    assert found.ettr_now == pytest.approx(ettr(600, found.costs))
    assert found.best_ettr >= max(share for _, share in found.curve)
    assert 5000 < found.bytes_per_snapshot < 8000
    assert found.snapshots == 10
    assert any("the failure rate is an assumption" in each for each in found.advice)


def test_failures_are_counted_where_they_were_noted() -> None:
    clock = Clock()
    with open_store(clock=clock) as store:
        store.set_policy("run", keep_last=2)  # which must not make the run look shorter
        began_ns = clock()
        for step in range(4):
            note: dict[str, Any] = {"began_ns": began_ns, "resumes": step, "epoch": None}
            store.put_snapshot(state(step), ref="run", step=step, metadata={"checkpointer": note})
            clock.advance(1000)
        found = store.advise("run", stall_seconds=1.0)
        assert (found.costs.mtbf, found.sources["mtbf"]) == (1000.0, "measured")
        with pytest.raises(InvalidOptionError, match=r"give stall_seconds= .*Checkpointer"):
            store.advise("run")
        note["costs"] = {"stall": 3.0, "restart": 40.0}
        store.put_snapshot(state(9), ref="run", step=9, metadata={"checkpointer": note})
        found = store.advise("run", restart_seconds=50.0)
    assert found.costs[:3] == (3.0, 0.0, 50.0)
    assert (found.sources["stall"], found.sources["lag"], found.sources["restart"]) == ("measured", "assumed", "given")


def test_what_is_advised_and_bad_input_is_refused(store: tsck.Store) -> None:
    advice: list[tuple[str, dict[str, Any]]] = [
        ("save every 119 s of training instead of every 10 min", {"mtbf_seconds": 3600.0}),
        ("save every 0.346 s of training instead of every 10 min", {"mtbf_seconds": 60.0, "stall_seconds": 0.001, "restart_seconds": 0.01}),
        ("keep saving every", {"mtbf_seconds": 90_000.0}),
        ("the store is too slow for a snapshot every", {"bandwidth": 1.0}),
        ("times the allowed bytes per day", {"bytes_per_day": 10_000}),
        ("the stall of a save", {"stall_seconds": 300.0, "mtbf_seconds": 3600.0, "restart_seconds": 1.0}),
        ("the restart", {"stall_seconds": 0.1, "mtbf_seconds": 3600.0, "restart_seconds": 1800.0}),
    ]
    for said, options in advice:
        found = store.advise("run", **{"stall_seconds": 2.0, **options})
        assert any(said in each for each in found.advice), found.advice
    with pytest.raises(NotFoundError):
        store.advise("none", stall_seconds=1.0)
    for options in (
        {"stall_seconds": -1.0},
        {"stall_seconds": 1.0, "mtbf_seconds": -5.0},
        {"stall_seconds": 1.0, "bandwidth": 0.0},
        {"stall_seconds": float("nan")},
    ):
        with pytest.raises(InvalidOptionError):
            store.advise("run", **options)
