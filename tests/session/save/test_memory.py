"""The memory of captures is a hard budget; an option says what happens when it is used up, and every dropped save is reported."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, SnapshotDroppedError
from tensorstore_ck.session.save.capture_budget import CaptureMemory
from tensorstore_ck.session.save.queued_save import Admission
from tensorstore_ck.session.save.save import Alone
from tests.session.save.places import MIB, SECONDS, Scene, Stop, check, put_beside, scene

PutInAThread = Callable[..., "Future[tsck.PendingSnapshot]"]
COPY = 2 * MIB
"""What memory is taken in."""


@contextmanager
def stalled_backend(copies: int) -> Iterator[tuple[Scene, Stop, tsck.PendingSnapshot]]:
    """Memory for so many copies; step 1 is being stored, and goes on when it is let go."""
    with scene(host_memory_bytes=copies * COPY) as place:
        stop, first = place.hold(1, size_bytes=COPY)
        yield place, stop, first


@pytest.fixture
def put_in_a_thread() -> Iterator[PutInAThread]:
    """A save that may have to wait."""
    with ThreadPoolExecutor(1) as other:
        yield lambda store, step, **options: other.submit(put_beside, store, step, **{"size_bytes": COPY, **options})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a save begins to wait for memory."""
    event, plain = threading.Event(), CaptureMemory.wait

    def wait(self: CaptureMemory, item: Any, save: Any, under_way: int) -> bool:
        event.set()
        return plain(self, item, save, under_way)

    monkeypatch.setattr(CaptureMemory, "wait", wait)
    return event


def require_dropped(place: Scene, pending: tsck.PendingSnapshot, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The wait, an event and the log report it; and nothing of it is visible."""
    assert pending.done()
    for _ in range(2):
        with pytest.raises(SnapshotDroppedError, match=rf"job@{pending.step} was {reason}"):
            pending.wait(0)
    assert isinstance(pending.error, SnapshotDroppedError)
    assert pending.snapshot is None
    assert not pending.published.reached()
    events = [event for event in place.told("dropped") if event.put == pending.id]
    assert [(event.step, event.fields["reason"]) for event in events] == [(pending.step, reason)]
    lines = [record for record in caplog.records if record.getMessage().startswith(f"dropped job@{pending.step}: ")]
    assert [record.levelno for record in lines] == [logging.WARNING]
    assert not [event for event in place.told("failed") if event.put == pending.id]
    assert pending.step not in place.steps()


# --- skip -------------------------------------------------------------------------------------------------------------


def test_skip_leaves_alone_what_is_in_work_and_what_waits_for_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    with stalled_backend(2) as (place, stop, first):
        second = put_beside(place.store, 2, size_bytes=COPY, on_full="skip")
        skipped = put_beside(place.store, 3, size_bytes=COPY, on_full="skip")
        assert not first.done()
        assert not skipped.captured.reached()
        assert not [event for event in place.told("captured") if event.step == 3]
        require_dropped(place, skipped, "skipped", caplog)
        assert [pending.step for pending in place.store.pending()] == [1, 2]
        stop.let_go()
        second.wait()
        put_beside(place.store, 4, size_bytes=COPY, on_full="skip").wait()  # and raises nothing of step 3
        assert place.steps() == [1, 2, 4]
        check(place.store, 4, size_bytes=COPY)


# --- replace ----------------------------------------------------------------------------------------------------------


def test_replace_drops_the_oldest_that_wait_and_never_the_one_in_work(caplog: pytest.LogCaptureFixture) -> None:
    """As many as it needs; their callbacks learn of it."""
    with stalled_backend(3) as (place, stop, first):
        waiting = [put_beside(place.store, step, size_bytes=COPY, on_full="replace") for step in (2, 3, 4)]
        told: list[tsck.PendingSnapshot] = []
        waiting[1].published.on_settled(told.append)
        assert [pending.step for pending in place.store.pending() if pending.step != 2] == [1, 3, 4]
        last = put_beside(place.store, 5, size_bytes=2 * COPY, on_full="replace")
        stop.let_go()
        place.store.drain()
        for pending in waiting:
            require_dropped(place, pending, "replaced", caplog)
        assert told == [waiting[1]]
        assert [pending.wait().step for pending in (first, last)] == [1, 5]
        assert place.steps() == [1, 5]
        for step, size_bytes in ((1, COPY), (5, 2 * COPY)):
            check(place.store, step, size_bytes=size_bytes)
        put_beside(place.store, 6).wait()  # nothing is left to be reported


def test_replace_waits_where_only_the_one_in_work_is_left(put_in_a_thread: PutInAThread, waits: threading.Event) -> None:
    with stalled_backend(1) as (place, stop, first):
        put = put_in_a_thread(place.store, 2, on_full="replace")
        assert waits.wait(SECONDS)
        assert not first.done()
        stop.let_go()
        assert put.result(SECONDS).wait(SECONDS).step == 2
        assert first.wait().step == 1
        assert not place.told("dropped")
        assert [event.step for event in place.told("stalled")] == [2]
        assert place.steps() == [1, 2]


def test_what_was_dropped_as_it_was_asked_for_is_no_error_of_the_next_save() -> None:
    """Though nobody waited for it."""
    with stalled_backend(3) as (place, stop, _):
        for step in (2, 3):
            put_beside(place.store, step, size_bytes=COPY)
        put_beside(place.store, 4, size_bytes=COPY, on_full="replace")
        put_beside(place.store, 5, size_bytes=COPY, on_full="skip")
        assert place.store.pending()[2].cancel()
        stop.let_go()
        place.store.drain()
        put_beside(place.store, 6).wait()
        assert place.steps() == [1, 4, 6]
        place.store.close()


# --- block ------------------------------------------------------------------------------------------------------------


def test_block_stalls_and_says_so_once(put_in_a_thread: PutInAThread, waits: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    with stalled_backend(2) as (place, stop, first):
        second = put_beside(place.store, 2, size_bytes=COPY)
        third = put_in_a_thread(place.store, 3, size_bytes=2 * COPY)  # which needs the memory of both
        assert waits.wait(SECONDS)
        stop.let_go()
        pendings = [first, second, third.result(SECONDS)]
        assert [pending.wait(SECONDS).step for pending in pendings] == [1, 2, 3]
        (stalled,) = place.told("stalled")
        assert (stalled.step, stalled.put, stalled.fields["queue_depth"]) == (3, pendings[2].id, 2)  # which it waited for
        assert float(stalled.fields["stall_seconds"]) > 0
        captured = next(event for event in place.told("captured") if event.step == 3)
        assert float(captured.fields["stall_seconds"]) >= float(stalled.fields["stall_seconds"])
        assert [record.levelno for record in caplog.records if "job@3 could be captured" in record.getMessage()] == [logging.WARNING]
        assert not place.told("dropped")
        assert place.steps() == [1, 2, 3]
        for step, size in ((1, COPY), (2, COPY), (3, 2 * COPY)):
            check(place.store, step, size_bytes=size)


def test_a_callback_of_a_stall_may_ask_what_is_under_way(put_in_a_thread: PutInAThread, waits: threading.Event) -> None:
    """From another thread, even: nothing is locked while callbacks run."""
    with stalled_backend(1) as (place, stop, _):
        answers: list[bool] = []

        def ask(event: Any) -> None:
            if event.kind == "stalled":
                other = threading.Thread(target=place.store.pending)
                other.start()
                other.join(SECONDS / 10)
                answers.append(not other.is_alive())

        place.store.on_event(ask)
        put = put_in_a_thread(place.store, 2)
        assert waits.wait(SECONDS)
        stop.let_go()
        put.result(SECONDS).wait(SECONDS)
        assert answers == [True]


def test_memory_is_free_before_callbacks_run(put_in_a_thread: PutInAThread, waits: threading.Event) -> None:
    """Who waits for it does not wait for the callbacks of the save that had it."""
    with scene(host_memory_bytes=COPY) as place:
        holds, goes = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            holds.set()
            goes.wait(SECONDS)

        stop, first = place.hold(1, size_bytes=COPY)
        first.published.on_settled(hold)
        put = put_in_a_thread(place.store, 2)
        assert waits.wait(SECONDS)
        stop.let_go()
        assert holds.wait(SECONDS)
        assert put.result(SECONDS).captured.reached()
        goes.set()
        assert put.result(SECONDS).wait(SECONDS).step == 2


@pytest.mark.parametrize("on_full", ["block", "skip", "replace"])
def test_the_limit_is_never_passed(on_full: Any) -> None:
    limit, most = 3 * COPY, 0
    with scene(host_memory_bytes=limit) as place:

        def look(_: object) -> None:
            nonlocal most
            most = max(most, place.allocated_bytes)
            assert place.in_use_bytes <= place.allocated_bytes

        place.store.on_event(look)
        sizes = [COPY, 3 * COPY, 100, 2 * COPY, 2_500_000, COPY, 0]
        pendings = [put_beside(place.store, step, size_bytes=size, on_full=on_full) for step, size in enumerate(sizes)]
        place.store.drain()
        look(None)
        assert place.in_use_bytes == 0
        assert COPY <= most <= limit
        published = [step for step, pending in enumerate(pendings) if pending.snapshot is not None]
        assert place.steps() == published
        assert published == list(range(len(sizes))) or on_full != "block"
        for step in published:
            check(place.store, step, size_bytes=sizes[step])


@pytest.mark.parametrize("on_full", ["block", "skip", "replace"])
def test_a_state_that_does_not_fit_at_all(on_full: Any) -> None:
    with stalled_backend(1) as (place, stop, first):
        state = {"w": torch.zeros(2 * COPY, dtype=torch.uint8), "b": torch.zeros(5)}
        with pytest.raises(NoSpaceError, match=r"job@2 needs 4\.0 MiB of host memory .* host_memory_bytes is 2\.0 MiB: raise it") as raised:
            place.store.put_snapshot_async(state, ref="job", step=2, on_full=on_full)
        assert raised.value.object_id == "host_memory_bytes"
        assert [pending.step for pending in place.store.pending()] == [1]
        stop.let_go()
        first.wait()
        put_beside(place.store, 3, size_bytes=COPY).wait()
        assert place.store.put_snapshot(state, ref="job", step=4).step == 4  # which copies nothing
        assert place.steps() == [1, 3, 4]
        assert place.in_use_bytes == 0


def test_a_bad_value_says_which_are_good(place: Scene) -> None:
    with pytest.raises(InvalidOptionError, match="'block', 'skip', 'replace' or 'newest', not 'drop'"):
        place.store.put_snapshot_async({}, ref="job", on_full="drop")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="more than 0"):
        tsck.open("memory://never", create=True, host_memory_bytes=0)


def raised_in_a_capture(*_: object, **__: object) -> None:
    raise MemoryError


def interrupted_once_it_has_memory(_: Alone, admit: Callable[[], Admission]) -> Admission:
    """As when the other ranks cannot be reached, or by Ctrl-C."""
    assert admit().admitted
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "fails", "error"),
    [
        ("save.copy_captured", raised_in_a_capture, NoSpaceError),
        ("save.Alone.decide", interrupted_once_it_has_memory, KeyboardInterrupt),
    ],
)
def test_a_save_that_fails_once_it_has_memory_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, where: str, fails: object, error: type[BaseException]
) -> None:
    with scene(host_memory_bytes=COPY) as place:
        with monkeypatch.context() as patch:
            patch.setattr(f"tensorstore_ck.session.save.{where}", fails)
            with pytest.raises(error):
                put_beside(place.store, 1, size_bytes=COPY)
        assert place.in_use_bytes == 0
        assert not place.store.pending()
        put_beside(place.store, 2, size_bytes=COPY).wait(SECONDS)
        assert place.steps() == [2]


def test_the_memory_of_a_cancelled_save_that_waits_is_taken(put_in_a_thread: PutInAThread) -> None:
    """It needs it no more than one that was replaced."""
    with stalled_backend(2) as (place, stop, _):
        cancelled = put_beside(place.store, 2, size_bytes=COPY)
        assert cancelled.cancel()
        third = put_in_a_thread(place.store, 3).result(SECONDS)
        stop.let_go()
        third.wait(SECONDS)
        with pytest.raises(SnapshotDroppedError, match="cancelled"):
            cancelled.wait(SECONDS)
        assert place.steps() == [1, 3]
