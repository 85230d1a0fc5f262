"""What users hold of a save under way: its milestones, its progress, and giving it up in each phase."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, SnapshotDroppedError, WaitTimeoutError
from tensorstore_ck.session.save.queued_save import Worker
from tensorstore_ck.session.save.save import Save
from tests.session.save.places import MIB, SECONDS, Scene, check, put_beside

IN_WORK = ["get log/", "open packs/", "append", "close", "put parts/"]
"""Calls of a save that come before its last look at whether it was given up."""


# --- cancel -----------------------------------------------------------------------------------------------------------


def require_cancelled(place: Scene, pending: tsck.PendingSnapshot) -> None:
    """Only its wait reports it, and nothing is left of it."""
    with pytest.raises(SnapshotDroppedError, match=rf"job@{pending.step} was cancelled; nothing of it is visible"):
        pending.wait(SECONDS)
    assert [event.fields["reason"] for event in place.told("dropped") if event.put == pending.id] == ["cancelled"]
    assert not place.told("failed")
    assert not pending.cancel()
    put_beside(place.store, 9).wait()
    assert pending.step not in place.steps()
    assert place.in_use_bytes == 0
    place.store.close()


def test_cancel_of_what_waits_for_its_turn(place: Scene) -> None:
    stop = place.gate.stop("put parts/")
    first, cancelled, third = (put_beside(place.store, step) for step in (1, 2, 3))
    assert cancelled.cancel()
    assert cancelled.cancel()
    stop.let_go()
    assert third.wait().parent == first.wait().root
    require_cancelled(place, cancelled)
    assert place.steps() == [1, 3, 9]


@pytest.mark.parametrize("at", IN_WORK)
def test_cancel_of_what_is_in_work(place: Scene, at: str) -> None:
    put_beside(place.store, 1).wait()
    stop = place.gate.stop(at)
    cancelled, third = put_beside(place.store, 2), put_beside(place.store, 3)
    stop.await_reached()
    assert cancelled.cancel()
    stop.let_go()
    assert third.wait().parent == place.store.log("job~1")[0].root
    require_cancelled(place, cancelled)
    assert place.steps() == [1, 3, 9]


def test_cancel_between_the_blocks_of_a_state(place: Scene) -> None:
    """Long before the end: most of it is neither read nor written."""
    put_beside(place.store, 1).wait()
    stop = place.gate.stop("append")
    place.store.put_snapshot_async({str(n): torch.full((4 * MIB,), n, dtype=torch.uint8) for n in range(12)}, ref="job", step=2)
    (cancelled,) = place.store.pending()
    stop.await_reached()
    before = len(place.gate.calls_made)
    cancelled.cancel()
    stop.let_go()
    place.store.drain()
    assert sum(call == "append" for call in place.gate.calls_made[before:]) < 6
    require_cancelled(place, cancelled)
    assert not list(place.inner.list_uploads())


def test_cancel_that_comes_too_late(place: Scene) -> None:
    """Once the entry may be in the log, a save is published whatever was asked: `wait` says so, and so do all others."""
    stop, pending = place.hold(1, at="create log/")
    assert pending.cancel()
    stop.let_go()
    assert pending.wait().step == 1
    assert not pending.cancel()
    assert not place.told("dropped")
    check(place.store, 1)
    put_beside(place.store, 2).wait()
    assert place.steps() == [1, 2]


def test_cancel_of_what_has_ended(place: Scene) -> None:
    pending = put_beside(place.store, 1)
    pending.wait()
    assert not pending.cancel()
    assert pending.wait().step == 1
    place.gate.fail("put parts/", BackendUnavailableError("injected"))
    failed = put_beside(place.store, 2)
    with pytest.raises(BackendUnavailableError):
        failed.wait()
    assert not failed.cancel()
    with pytest.raises(BackendUnavailableError):
        failed.wait()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_wait_that_is_too_short(place: Scene) -> None:
    stop, pending = place.hold(1)
    for wait, milestone, seconds in ((pending.wait, "published", 0), (pending.staged.wait, "staged", 0.05)):
        with pytest.raises(WaitTimeoutError, match=f"job@1 is not {milestone} after {seconds:g} s; the save continues") as raised:
            wait(seconds)
        assert raised.value.object_id == "job"
    assert not pending.done()
    assert pending.error is None
    stop.let_go()
    assert pending.wait().step == 1
    with put_beside(place.store, 2) as at_its_end:
        pass
    assert at_its_end.published.reached()


def test_many_threads_wait_for_one(place: Scene) -> None:
    stop, pending = place.hold(1)
    found: list[tsck.Snapshot] = []
    threads = [threading.Thread(target=lambda: found.append(pending.wait(SECONDS))) for _ in range(20)]
    for thread in threads:
        thread.start()
    stop.let_go()
    for thread in threads:
        thread.join()
    assert found == [pending.snapshot] * 20


# --- milestones -------------------------------------------------------------------------------------------------------


def milestones(pending: tsck.PendingSnapshot) -> list[bool]:
    return [milestone.reached() for milestone in (pending.captured, pending.staged, pending.published)]


def test_what_is_said_at_each_milestone(place: Scene) -> None:
    stop, pending = place.hold(1, at="create log/")
    assert milestones(pending) == [True, False, False]
    pending.captured.wait(0)
    assert repr(pending) == "<PendingSnapshot job@1: under way>"
    assert [repr(pending.captured), repr(pending.published)] == ["<captured: reached>", "<published: not yet>"]
    assert (pending.ref, pending.step, pending.snapshot, pending.done()) == ("job", 1, None, False)
    assert place.steps() == []
    assert not place.told("published")
    stop.let_go()
    snapshot = pending.wait()
    assert milestones(pending) == [True, True, True]
    assert (pending.snapshot, pending.done(), pending.error) == (snapshot, True, None)
    assert repr(pending) == "<PendingSnapshot job@1: published>"
    (event,) = place.told("published")
    assert (event.put, event.fields["root"], event.fields["snapshot"]) == (pending.id, snapshot.root, snapshot.id)


def test_nothing_is_called_saved_before_others_can_see_it(place: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Not in an event, not in the log, not by a milestone."""
    caplog.set_level("DEBUG", "tensorstore_ck")
    seen: list[list[int | None]] = []
    place.store.on_event(lambda event: seen.append(place.steps()) if event.kind == "published" else None)
    stop, pending = place.hold(1, at="create log/")
    pending.published.on_settled(lambda _: seen.append(place.steps()))
    assert not any("saved" in record.getMessage() for record in caplog.records)
    stop.let_go()
    pending.wait()
    place.store.drain()
    assert seen == [[1], [1]]
    assert sum("saved job@1" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("error", [None, BackendUnavailableError("injected")], ids=["published", "failed"])
def test_callbacks_before_and_after_each_milestone(place: Scene, error: Exception | None) -> None:
    told: list[tuple[str, str, bool, bool]] = []

    def note(when: str, name: str) -> Callable[[tsck.PendingSnapshot], None]:
        def called(pending: tsck.PendingSnapshot) -> None:
            assert pending is held[0]
            assert name != "published" or error is not None or pending.wait(0) == pending.snapshot
            told.append((when, name, pending.done(), threading.current_thread() is threading.main_thread()))

        return called

    stop, pending = place.hold(1)
    held = [pending]
    for name in ("captured", "staged", "published"):
        getattr(pending, name).on_settled(note("before", name))
    assert told == [("before", "captured", False, True)]  # which it has passed
    stop.let_go(error)
    place.store.session.queue.wait_idle()
    assert told[1:] == [("before", "staged", True, False), ("before", "published", True, False)]
    for name in ("captured", "staged", "published"):
        getattr(pending, name).on_settled(note("after", name))
    assert [(when, name) for when, name, _, _ in told[3:]] == [("after", name) for name in ("captured", "staged", "published")]
    assert pending.error is error
    assert milestones(pending) == [True, error is None, error is None]
    if error is not None:
        with pytest.raises(BackendUnavailableError):
            place.store.close()


def test_what_is_held_of_a_save_does_not_hold_its_state(place: Scene) -> None:
    """Nor do the tracebacks of reported errors: what a loop collects costs no memory."""
    stop = place.gate.stop("put parts/")
    puts = [put_beside(place.store, step) for step in (1, 2, 3, 4)]
    stop.await_reached()
    states = [weakref.ref(queued.save) for queued in place.store.session.queue._queued()]
    assert len(states) == 4
    puts[1].cancel()
    place.gate.fail("put snapshots/", BackendUnavailableError("injected"))
    stop.let_go()
    place.store.session.queue.wait_idle()
    with pytest.raises(BackendUnavailableError):
        puts[0].wait()
    put_beside(place.store, 5).wait()
    place.store.session.queue.wait_idle()
    assert [pending.done() for pending in puts] == [True] * 4
    gc.collect()
    assert [state() for state in states] == [None] * 4


def test_a_waited_save_is_gone_before_its_end_is_told(place: Scene) -> None:
    """Its captured values may be large, and whoever catches the error may keep its frames."""
    alive: dict[str, int] = {}
    place.store.on_event(lambda event: alive.update({event.kind: sum(type(one) is Save for one in gc.get_objects())}))
    place.store.put_snapshot({"w": torch.ones(3)}, ref="job")
    with pytest.raises(ConflictError):
        place.store.put_snapshot({"w": torch.ones(3)}, ref="job", expect=None)
    assert alive == {"published": 0, "failed": 0}


# --- progress and what is under way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moves", [*itertools.combinations_with_replacement(range(4), 2)])
def test_a_save_that_is_handed_over_meanwhile_is_under_way(place: Scene, monkeypatch: pytest.MonkeyPatch, moves: tuple[int, int]) -> None:
    """From the thread that stores to that which copies, and to that which uploads: before these looks at the threads."""
    queue, looks = place.store.session.queue, itertools.count()
    workers = queue._save_worker, queue._replicate_worker, queue._publish_worker

    def thread(worker: Worker[object]) -> object:
        look = next(looks)
        return worker if worker is workers[sum(move <= look for move in moves)] else None

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "thread", property(thread), raising=False)
        assert not queue.is_quiet()
    assert queue.is_quiet()


def test_progress_moves_and_knows_its_end(place: Scene) -> None:
    size = 12 * MIB
    first, blocker = place.hold(0)
    opening = place.gate.stop("open packs/")
    pending = put_beside(place.store, 1, size_bytes=size)
    now = pending.progress()
    assert (now.stage, now.fraction) == ("queued", 0.0)
    assert now.stage_bytes["capture"] == size
    assert now.stage_seconds["capture"] > 0
    first.let_go()
    blocker.wait()
    opening.await_reached()
    begun = pending.progress()
    assert begun.total_bytes == size
    assert begun.stage in ("hash", "encode", "write")
    assert begun.stage_bytes["write"] < size
    stop = place.gate.stop("put snapshots/")
    opening.let_go()
    stop.await_reached()
    last = pending.progress()
    assert last.stage == "commit"
    assert (last.done_bytes, last.total_bytes, last.fraction) == (size, size, 1.0)
    assert last.stage_bytes["write"] >= size
    stop.let_go()
    pending.wait()
    assert pending.progress().stage_seconds["commit"] > 0
    fields = place.told("published")[-1].fields
    assert fields["logical_bytes"] == size
    assert int(fields["hashed_bytes"]) >= size


def test_events_show_a_save_from_its_capture_to_its_end(place: Scene) -> None:
    puts = [put_beside(place.store, step, size_bytes=1000) for step in range(30)]
    place.store.drain()
    for pending in puts:
        events = sorted((event for event in place.events if event.put == pending.id), key=lambda event: event.kind)
        assert [event.kind for event in events if event.kind != "stalled"] == ["captured", "published"]
        assert {(event.ref, event.step, event.rank) for event in events} == {("job", pending.step, 0)}
        captured, published = events[:2]
        assert captured.fields["captured_bytes"] == 1024
        assert published.fields["queue_depth"] == 0 or pending is not puts[-1]
