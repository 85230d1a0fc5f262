"""An error is raised once: by the next wait, or else by the next save, or else by close. It never kills what comes after it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, NoSpaceError, UnsupportedValueError
from tests.session.save.places import SECONDS, Scene, check, put_beside, scene, state_of


class OddError(Exception):
    """Nothing that a store raises."""


def broken() -> BackendUnavailableError:
    return BackendUnavailableError("injected")


def fail(place: Scene, step: int, error: BaseException | None = None) -> tsck.PendingSnapshot:
    """A save that fails in the background, before anybody waits for it."""
    place.gate.fail("put parts/", error or broken())
    pending = put_beside(place.store, step)
    settle(place)
    assert pending.done()
    return pending


def settle(place: Scene) -> None:
    """Until no save is in progress, and no error was reported."""
    place.store.session.queue.wait_idle()


def require_silence(place: Scene, step: int, **options: Any) -> None:
    """A save takes place, and the end says nothing."""
    put_beside(place.store, step, **options).wait()
    assert place.steps()[-1] == step
    check(place.store, step)
    place.store.close()


# --- which call raises it ---------------------------------------------------------------------------------------------


def test_by_the_waits_and_then_by_nobody_else(place: Scene) -> None:
    """By one that was there before, by those that come later, and by those for milestones that it has not passed."""
    stop, pending = place.hold(1)
    threading.Timer(0, stop.let_go, [broken()]).start()
    for wait in (pending.wait, pending.wait, pending.staged.wait, pending.published.wait):
        with pytest.raises(BackendUnavailableError, match="injected"):
            wait(SECONDS)
    pending.captured.wait(0)
    require_silence(place, 2)


def put_again(store: tsck.Store) -> None:
    state = state_of(2)
    store.put_snapshot(state, ref="job", step=2)


@pytest.mark.parametrize("again", [lambda store: put_beside(store, 2), put_again], ids=["beside", "waited for"])
def test_the_next_save_reports_it_and_does_not_start(place: Scene, again: Callable[[tsck.Store], object]) -> None:
    pending = fail(place, 1)
    with pytest.raises(BackendUnavailableError, match="injected") as raised:
        again(place.store)
    assert any("job@1" in note for note in raised.value.__notes__)
    settle(place)
    assert place.steps() == []
    assert place.in_use_bytes == 0
    require_silence(place, 3)
    assert place.steps() == [3]
    with pytest.raises(BackendUnavailableError):
        pending.wait()  # who asks is answered


@contextmanager
def three_failed() -> Iterator[tuple[Scene, list[tsck.PendingSnapshot]]]:
    """Of saves that were under way at once, one after the other."""
    with scene() as place:
        stop = place.gate.stop("put parts/")
        puts = [put_beside(place.store, 1)]
        stop.await_reached()
        puts += [put_beside(place.store, step) for step in (2, 3)]
        for error in ("two", "three"):
            place.gate.fail("put parts/", BackendUnavailableError(error))
        stop.let_go(BackendUnavailableError("one"))
        settle(place)
        yield place, puts


def test_each_of_several_by_one_save_in_their_order() -> None:
    with three_failed() as (place, puts):
        with pytest.raises(BackendUnavailableError, match="two"):
            puts[1].wait()
        for step, error in ((5, "one"), (6, "three")):
            with pytest.raises(BackendUnavailableError, match=error):
                put_beside(place.store, step)
        require_silence(place, 7)
        assert place.steps() == [7]


def test_close_reports_those_that_no_wait_did() -> None:
    with three_failed() as (place, puts):
        with pytest.raises(BackendUnavailableError, match="one"):
            puts[0].wait()
        with pytest.raises(BackendUnavailableError, match="two") as raised:
            place.store.close()
        assert any("three" in note for note in raised.value.__notes__), "an error is lost"
        place.store.close()


def test_by_the_end_of_a_block(place: Scene) -> None:
    place.gate.fail("put parts/", broken())
    with pytest.raises(BackendUnavailableError), put_beside(place.store, 1):
        pass
    require_silence(place, 2)


def test_a_block_that_fails_itself_says_so_and_leaves_the_rest_to_the_next_save(place: Scene) -> None:
    stop = place.gate.stop("put parts/")
    with pytest.raises(ZeroDivisionError), put_beside(place.store, 1) as pending:
        raise ZeroDivisionError
    assert not pending.done()
    stop.let_go(broken())
    settle(place)
    with pytest.raises(BackendUnavailableError):
        put_beside(place.store, 2)


def test_not_by_what_only_looks(place: Scene) -> None:
    put_beside(place.store, 0).wait()
    pending = fail(place, 1)
    assert (pending.done(), pending.snapshot, pending.published.reached()) == (True, None, False)
    assert isinstance(pending.error, BackendUnavailableError)
    assert [found.step for found in place.store.log("job")] == [0]
    check(place.store, 0)
    assert not place.store.pending()
    assert place.store.drain().dropped == ()
    with pytest.raises(BackendUnavailableError):
        put_beside(place.store, 2)


# --- what goes on -----------------------------------------------------------------------------------------------------


AT = ["open packs/", "append", "close", "put snapshots/", "get log/"]
ERRORS = [BackendUnavailableError, OddError, MemoryError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize(("at", "error"), [*((at, NoSpaceError) for at in AT), *(("put parts/", error) for error in ERRORS)])
def test_later_saves_are_not_hurt(place: Scene, at: str, error: type[BaseException]) -> None:
    """Also by what no store should raise: the worker lives."""
    put_beside(place.store, 0).wait()
    stop, failed = place.hold(1, at=at)
    later = put_beside(place.store, 2)
    stop.let_go(error("injected"))
    with pytest.raises(NoSpaceError if error is MemoryError else error, match="injected"):
        failed.wait(SECONDS)
    assert later.wait(SECONDS).step == 2
    assert place.steps() == [0, 2]
    assert place.in_use_bytes == 0
    require_silence(place, 3)


def test_a_failed_save_is_reported_by_an_event_and_an_error_in_the_log(place: Scene, caplog: pytest.LogCaptureFixture) -> None:
    pending = fail(place, 1, OddError("odd"))
    (event,) = place.told("failed")
    assert (event.put, event.step) == (pending.id, 1)
    assert (event.fields["error"], event.fields["error_kind"], event.fields["is_waited_for"]) == ("odd", "OddError", 0)
    assert [record.levelname for record in caplog.records if "saving job@1 failed" in record.getMessage()] == ["ERROR"]
    with pytest.raises(OddError):
        pending.wait()


def usurp(place: Scene) -> None:
    """A successor moves the ref from step 1 to step 2."""
    with place.other() as successor:
        successor.checkout("job")
        successor.put_snapshot(state_of(2), ref="job", step=2)


@pytest.mark.parametrize("at", ["get log/", "put parts/"], ids=["before it looks", "between capture and commit"])
def test_a_job_that_was_given_up_for_dead(place: Scene, at: str) -> None:
    """Its successor has moved the ref: nothing of it becomes visible, before it looks at the ref again."""
    put_beside(place.store, 1).wait()
    stop = place.gate.stop(at)
    first, second = put_beside(place.store, 10), put_beside(place.store, 11)
    stop.await_reached()
    usurp(place)
    stop.let_go()
    for pending in (first, second):
        with pytest.raises(ConflictError, match="moved it"):
            pending.wait()
    assert place.steps() == [1, 2]
    place.store.checkout("job")
    require_silence(place, 3)
    assert place.steps() == [1, 2, 3]


def test_a_ref_that_is_known_to_be_elsewhere_is_refused_at_once_but_earlier_errors_come_first(place: Scene) -> None:
    put_beside(place.store, 1).wait()
    usurp(place)
    with pytest.raises(ConflictError):
        put_beside(place.store, 10).wait()
    settle(place)
    with pytest.raises(ConflictError):
        put_beside(place.store, 11)
    place.gate.fail("put parts/", NoSpaceError("injected"))
    put_beside(place.store, 12, expect=tsck.ANY)
    settle(place)
    with pytest.raises(NoSpaceError, match="injected"):
        put_beside(place.store, 13)
    with pytest.raises(ConflictError):
        put_beside(place.store, 14)
    assert place.steps() == [1, 2]
    require_silence(place, 16, expect=tsck.ANY)


def test_what_cannot_be_stored_is_refused_at_once_and_hurts_nobody(place: Scene) -> None:
    stop, first = place.hold(1)
    with pytest.raises(UnsupportedValueError, match=r"model\.odd"):
        place.store.put_snapshot_async({"model": {"odd": object()}, "w": torch.zeros(9)}, ref="job", step=2)
    with pytest.raises(tsck.errors.InvalidNameError):
        place.store.put_snapshot_async({}, ref="../job")
    with pytest.raises(tsck.errors.InvalidOptionError):
        place.store.put_snapshot_async({}, ref="job", rank_state={})
    assert [pending.step for pending in place.store.pending()] == [1]
    stop.let_go()
    first.wait()
    require_silence(place, 3)


def test_callbacks_that_fail_or_want_to_end_the_process_disturb_nobody(place: Scene, caplog: pytest.LogCaptureFixture) -> None:

    def leave(_: object) -> None:
        raise SystemExit(3)

    ends = [place.store.on_event(lambda event: 1 // 0), place.store.on_event(leave)]
    told: list[Any] = []
    stop, pending = place.hold(1)
    for callback in (lambda _: 1 // 0, leave, told.append):
        pending.published.on_settled(callback)
    stop.let_go()
    assert pending.wait(SECONDS).step == 1
    settle(place)
    assert told == [pending]
    pending.published.on_settled(lambda _: 1 // 0)  # at once
    assert sum("a callback of a save failed" in record.getMessage() for record in caplog.records) == 3
    assert put_beside(place.store, 2).wait(SECONDS).step == 2
    assert any("raised on the event" in record.getMessage() for record in caplog.records)
    for end in ends:
        end()
    require_silence(place, 3)


def test_a_callback_may_use_the_store(place: Scene) -> None:
    said: list[Any] = []

    def use(pending: tsck.PendingSnapshot) -> None:
        said.append(place.store.checkout("job")["step"])
        said.append(place.store.tag("first", "job").step)
        said.append(place.store.drain(1.0).safe)
        said.append(place.store.put_snapshot({}, ref="other", step=9).step)

    stop, pending = place.hold(1)
    pending.published.on_settled(use)
    stop.let_go()
    settle(place)
    assert said == [1, 1, pending.snapshot, 9]
    require_silence(place, 2)


def test_a_thread_that_cannot_be_started(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the limit of processes: the thread that saves stores it, and the next save tries again."""
    with monkeypatch.context() as patch:
        plain = threading.Thread.start

        def start(self: threading.Thread) -> None:
            if self.name.startswith("tsck-save"):
                raise RuntimeError("can't start new thread")
            plain(self)

        patch.setattr(threading.Thread, "start", start)
        pending = put_beside(place.store, 1)
        assert pending.snapshot is not None
    assert place.in_use_bytes == 0
    assert not place.store.pending()
    require_silence(place, 2)
