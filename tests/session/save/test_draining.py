"""The end of a job in order: what can be durable in time, what is given up, and which snapshot is safe."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, SnapshotDroppedError
from tensorstore_ck.session.save import DrainReport, save_queue
from tests.session.save.places import SECONDS, Scene, Stop, check, put_beside, scene, state_of


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is not waited for as long as in a job."""
    monkeypatch.setattr(save_queue, "GIVE_UP_SECONDS", 0.05)
    assert save_queue.SaveQueue.drain.__kwdefaults__ is not None
    monkeypatch.setitem(save_queue.SaveQueue.drain.__kwdefaults__, "give_up_seconds", 0.05)


@contextmanager
def hanging(at: str = "put parts/") -> Iterator[tuple[Scene, Stop, list[tsck.PendingSnapshot]]]:
    """Step 1 is published, step 2 hangs in the backend, step 3 waits for its turn."""
    with scene() as place:
        put_beside(place.store, 1).wait()
        stop = place.gate.stop(at)
        puts = [put_beside(place.store, step) for step in (2, 3)]
        stop.await_reached()
        yield place, stop, puts


def drain_and_let_go(place: Scene, stop: Stop, error: BaseException | None = None) -> DrainReport:
    """What is held goes on when the drain has seen what is under way."""
    found = place.store.session.queue._queued

    def look() -> Any:
        items = found()
        stop.let_go(error)
        return items

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.store.session.queue, "_queued", look)
        return place.store.drain(SECONDS)


def test_nothing_to_wait_for(place: Scene) -> None:
    """Of the saves before, the last one is safe: whether it had a step, and was waited for, or not."""
    report = place.store.drain()
    assert (report.published, report.staged, report.dropped, report.under_way, report.safe) == ((), (), (), (), None)
    assert str(report) == "nothing was published"
    puts: list[Callable[[], tsck.Snapshot]] = [
        put_beside(place.store, 1).wait,
        lambda: place.store.put_snapshot(state_of(2), ref="job", step=2),
    ]
    for put in puts:
        snapshot = put()
        report = place.store.drain(0)
        assert (report.published, report.safe) == ((), snapshot)
        assert str(report) == f"job@{snapshot.step} ({snapshot.root[:16]}) is safe"
    root = place.store.put_snapshot_async({}, ref="job").wait().root
    stop = place.gate.stop("put parts/")
    place.store.put_snapshot_async({}, ref="job")
    stop.await_reached()
    assert str(place.store.drain(0)) == f"job ({root[:16]}) is safe; given up: job"
    stop.let_go()


def test_everything_is_finished_in_time(place: Scene) -> None:
    stop, _ = place.hold(1)
    puts = [put_beside(place.store, step) for step in (2, 3)]
    report = drain_and_let_go(place, stop)
    assert [snapshot.step for snapshot in report.published] == [1, 2, 3]
    assert report.safe == puts[1].snapshot
    assert (report.dropped, report.under_way) == ((), ())
    assert place.steps() == [1, 2, 3]


def test_a_backend_that_hangs_is_given_up() -> None:
    with hanging() as (place, stop, (second, third)):
        safe = place.store.log("job")[0]
        report = place.store.drain(0.1)
        assert (report.published, report.dropped, report.staged) == ((), (), ())
        assert [pending.step for pending in report.under_way] == [2, 3]
        assert report.safe == safe
        assert str(report) == f"job@1 ({safe.root[:16]}) is safe; given up: job@2, job@3"
        assert place.steps() == [1]
        later = put_beside(place.store, 4)  # waits for its turn
        assert not later.done()
        stop.let_go()
        for pending in (second, third):
            with pytest.raises(SnapshotDroppedError, match="abandoned"):
                pending.wait(SECONDS)
        assert [(event.step, event.fields["reason"]) for event in place.told("dropped")] == [(2, "abandoned"), (3, "abandoned")]
        assert later.wait(SECONDS).parent == safe.root
        assert place.steps() == [1, 4]
        check(place.store, 4)
        assert place.in_use_bytes == 0
        place.store.close()


def test_what_gives_up_in_time_is_reported_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(save_queue.SaveQueue.drain.__kwdefaults__ or {}, "give_up_seconds", SECONDS)
    with hanging() as (place, stop, (second, third)):
        second._status.on_drop = stop.let_go
        report = place.store.drain(0)
        assert [pending.step for pending in report.dropped] == [2, 3]
        assert not report.under_way
        for pending in (second, third):
            with pytest.raises(SnapshotDroppedError):
                pending.wait(0)


def test_an_outcome_in_the_log_is_first_reported_as_running_and_then_as_it_is() -> None:
    """Nobody may say that it is dropped: it is not."""
    with hanging("create log/") as (place, stop, (second, third)):
        report = place.store.drain(0.05)
        assert [pending.step for pending in report.under_way] == [2, 3]
        assert not report.dropped
        stop.let_go()
        assert second.wait(SECONDS).step == 2
        with pytest.raises(SnapshotDroppedError):
            third.wait(SECONDS)
        assert place.steps() == [1, 2]
        assert place.store.drain().safe == second.snapshot


def test_what_was_given_up_is_not_waited_for_again() -> None:
    """Neither by another drain nor by the end of a `with` block: a job that got the signal to end must end."""
    with hanging() as (place, stop, _):
        place.store.drain(0)
        assert [pending.step for pending in place.store.drain().under_way] == [2, 3]
        place.store.close()
        stop.let_go()


def test_a_save_that_failed_before_is_not_lost_by_a_drain(place: Scene) -> None:
    stop, failed = place.hold(1)
    report = drain_and_let_go(place, stop, BackendUnavailableError("injected"))
    assert [pending.id for pending in report.dropped] == [failed.id]
    with pytest.raises(BackendUnavailableError):
        place.store.close()


def test_close_waits_for_what_is_under_way(place: Scene) -> None:
    stop = place.gate.stop("put parts/")
    puts = [put_beside(place.store, step) for step in (1, 2)]
    closing = threading.Thread(target=place.store.close)
    closing.start()
    assert not puts[0].done()
    stop.let_go()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert [pending.wait(0).step for pending in puts] == [1, 2]
    assert place.allocated_bytes == 0
    place.store.close()


# --- preemption; see test_processes for processes that end by it ----------------------------------------------------------


@pytest.fixture
def former() -> Iterator[list[int]]:
    """Signals that a handler of the user's own got, which was there before."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGUSR2, before)


def signal_myself() -> None:
    signal.raise_signal(signal.SIGUSR2)  # in this thread: handled before the call returns


def test_the_signal_takes_its_former_course_at_the_deadline(
    former: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scene() as place:
        queue, came_again = place.store.session.queue, threading.Event()
        drain = queue.drain

        def drain_then(*args: Any, **options: Any) -> DrainReport:
            assert came_again.wait(SECONDS)
            return drain(*args, **options)

        monkeypatch.setattr(queue, "drain", drain_then)
        put_beside(place.store, 1).wait()
        stop = place.gate.stop("put parts/")
        put_beside(place.store, 2)
        preemption = place.store.on_preemption(signal.SIGUSR2, deadline_seconds=0.2)
        assert (preemption.requested, preemption.seconds_left) == (False, 0.2)
        signal_myself()
        assert preemption.requested
        assert not former
        signal_myself()  # again: it is known
        came_again.set()
        deadline = time.monotonic() + SECONDS
        while not former:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert former == [signal.SIGUSR2]
        assert preemption.seconds_left == 0
        (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("preempted")]
        assert ") is safe; given up: job@2" in line
        signal_myself()
        assert former == [signal.SIGUSR2] * 2
        stop.let_go()


def test_a_job_that_has_finished_is_left_to_end_itself(place: Scene, former: list[int]) -> None:
    preemption = place.store.on_preemption(signal.SIGUSR2, deadline_seconds=SECONDS)
    signal_myself()
    put_beside(place.store, 1)
    report = preemption.finish()
    assert report.safe is not None
    assert report.safe.step == 1
    assert not former
    signal_myself()  # a user who sends it again does not want to wait any longer
    assert former == [signal.SIGUSR2]


def test_a_preemption_that_is_called_off(place: Scene, former: list[int]) -> None:
    preemption = place.store.on_preemption(signal.SIGUSR2, deadline_seconds=SECONDS)
    preemption.cancel()
    signal_myself()
    assert former == [signal.SIGUSR2]
    assert not preemption.requested


def test_where_and_how_a_preemption_can_be_asked_for() -> None:
    with scene() as place, ThreadPoolExecutor(1) as other_thread:
        for seconds in (0, -1):
            with pytest.raises(InvalidOptionError, match="deadline_seconds must be more than 0"):
                place.store.on_preemption(signal.SIGUSR2, deadline_seconds=seconds)
        with pytest.raises(InvalidOptionError, match="main thread"):
            other_thread.submit(place.store.on_preemption, signal.SIGUSR2, deadline_seconds=1).result()
