"""Any order of calls on one handle, compared with a simple model: what is acknowledged is there, in order and byte-equal; what was dropped
is not; each error is reported once.

The worker is either idle, or held in the middle of one save: so it is known at each step what is under way.
"""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import BackendUnavailableError, ConflictError, SnapshotDroppedError, WaitTimeoutError
from tensorstore_ck.session.save.save_queue import SaveQueue
from tests.effort import effort
from tests.session.save.places import MIB, SECONDS, Scene, Stop, check, put_beside, state_of

SIZE = 3000
COPY = 2 * MIB
"""What a capture takes."""
COPIES = 3
pytestmark = [pytest.mark.slow, pytest.mark.race]


@dataclass
class Put:
    """What is known of a save."""

    step: int
    pending: tsck.PendingSnapshot
    outcome: str = "under way"
    """Or ``published``, the reason why it was dropped, or the text of its error."""
    dropped: str = ""
    """Why it will be dropped when its turn comes."""

    @property
    def failed(self) -> bool:
        return self.outcome not in ("under way", "published", "skipped", "replaced", "cancelled", "abandoned")


class Machine(RuleBasedStateMachine):
    puts = Bundle("puts")

    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryBackend()
        self.open()
        self.step = 0
        self.published: list[int] = []
        self.held: Put | None = None
        self.stop: Stop | None = None
        self.queue: list[Put] = []
        self.untold: list[Put] = []
        self.injected = 0
        self.is_fenced = False
        self.is_known = False
        """Whether this handle has seen that it is."""

    def open(self) -> None:
        self.place = Scene(self.inner, host_memory_bytes=COPIES * COPY)

    # --- the model ------------------------------------------------------------------------------------------------------

    def run(self, put: Put, error: str = "") -> None:
        """Its turn has come; `error` strikes it where it is held."""
        if error:
            put.outcome = error
        elif put.dropped:
            put.outcome = put.dropped
        elif self.is_fenced:
            put.outcome, self.is_known = "through another store handle, moved it", True
        elif self.injected:
            self.injected -= 1
            put.outcome = "at the record"
        else:
            put.outcome = "published"
            self.published.append(put.step)
        if put.failed:
            self.untold.append(put)

    def let_go(self, error: str = "") -> None:
        """The save that is held and all that wait."""
        if self.held is not None:
            assert self.stop is not None
            self.stop.let_go(BackendUnavailableError(error) if error else None)
            self.run(self.held, error)
            for put in self.queue:
                self.run(put)
            self.held, self.stop, self.queue = None, None, []
        self.place.store.session.queue.wait_idle()

    def memory(self) -> list[Put]:
        return [put for put in (self.held, *self.queue) if put is not None and (put is self.held or not put.dropped)]

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def expect_untold(self, call: Any) -> bool:
        """Whether the call raised the error that was not reported yet, as it must."""
        if not self.untold:
            return False
        first = self.untold.pop(0)
        with pytest.raises((BackendUnavailableError, ConflictError), match=first.outcome) as raised:
            call()
        assert any(f"job@{first.step}" in note for note in raised.value.__notes__)
        return True

    # --- saves -----------------------------------------------------------------------------------------------------------

    @rule(target=puts, on_full=st.sampled_from(["block", "skip", "replace"]))
    def put_async(self, on_full: Any) -> Any:
        step = self.next_step()
        waiting = [put for put in self.queue if not put.dropped]
        is_full = len(self.memory()) == COPIES
        if is_full and not self.untold and (on_full == "block" or (on_full == "replace" and not waiting)):
            self.let_go()
            is_full = False
        if self.expect_untold(lambda: put_beside(self.place.store, step, size_bytes=SIZE, on_full=on_full)):
            return multiple()
        if self.is_known:  # refused at once, by an error to the caller
            with pytest.raises(ConflictError):
                put_beside(self.place.store, step, size_bytes=SIZE, on_full=on_full)
            return multiple()
        if is_full and on_full == "replace":
            waiting[0].dropped = "replaced"
        put = Put(step, put_beside(self.place.store, step, size_bytes=SIZE, on_full=on_full))
        if is_full and on_full == "skip":
            put.outcome = "skipped"
            assert put.pending.done()
        elif self.held is not None:
            self.queue.append(put)
        else:
            self.place.store.session.queue.wait_idle()
            self.run(put)
        return put

    @precondition(lambda self: self.held is None and not self.untold and not self.is_fenced)
    @rule(target=puts)
    def put_and_hold(self) -> Put:
        step = self.next_step()
        self.stop = self.place.gate.stop("put parts/")
        self.held = Put(step, put_beside(self.place.store, step, size_bytes=SIZE))
        self.stop.await_reached()
        return self.held

    @rule()
    def put_and_wait(self) -> None:
        self.let_go()
        step = self.next_step()

        def put() -> tsck.Snapshot:
            return self.place.store.put_snapshot(state_of(step, SIZE), ref="job", step=step)

        if self.expect_untold(put):
            return
        if self.is_fenced:
            with pytest.raises(ConflictError):
                put()
            self.is_known = True
        elif self.injected:
            self.injected -= 1
            with pytest.raises(BackendUnavailableError, match="at the record"):
                put()
        else:
            assert put().step == step
            self.published.append(step)

    # --- faults ---------------------------------------------------------------------------------------------------------

    @rule(fails=st.booleans())
    def go_on(self, fails: bool) -> None:
        self.let_go("at the part" if fails else "")

    @precondition(lambda self: self.injected < 2)
    @rule()
    def inject(self) -> None:
        self.place.gate.fail("put snapshots/", BackendUnavailableError("at the record"))
        self.injected += 1

    @precondition(lambda self: self.published and self.held is None and not self.is_fenced)
    @rule()
    def usurp(self) -> None:
        """Another job takes the ref."""
        step = self.next_step()
        with self.place.other() as other:
            other.checkout("job")
            other.put_snapshot(state_of(step, SIZE), ref="job", step=step)
        self.published.append(step)
        self.is_fenced = True

    # --- what is held of a save ------------------------------------------------------------------------------------------

    @rule(put=puts)
    def wait(self, put: Put) -> None:
        if put.outcome == "published":
            assert put.pending.wait(SECONDS).step == put.step
        elif put.outcome == "under way":
            with pytest.raises(WaitTimeoutError):
                put.pending.wait(0)
        else:
            error = SnapshotDroppedError if not put.failed else (BackendUnavailableError, ConflictError)
            with pytest.raises(error, match=put.outcome):
                put.pending.wait(SECONDS)
            self.untold = [each for each in self.untold if each is not put]

    @rule(put=puts)
    def cancel(self, put: Put) -> None:
        assert put.pending.cancel() == (put.outcome == "under way")
        if put.outcome == "under way":
            put.dropped = put.dropped or "cancelled"

    @rule(put=consumes(puts))
    def let_fall(self, put: Put) -> None:
        """Errors of saves that no code refers to any more are reported too."""

    # --- the handle -----------------------------------------------------------------------------------------------------

    @rule()
    def checkout(self) -> None:
        self.let_go()
        if self.published:
            assert self.place.store.checkout("job")["step"] == self.published[-1]
            self.is_fenced = self.is_known = False

    @rule()
    def drain_in_time(self) -> None:
        self.let_go()
        report = self.place.store.drain()
        assert (report.published, report.dropped, report.under_way) == ((), (), ())

    @precondition(lambda self: self.held is not None)
    @rule()
    def drain_and_give_up(self) -> None:
        under_way = [put for put in (self.held, *self.queue) if put is not None]
        report = self.place.store.drain(0)
        assert [pending.step for pending in report.under_way] == [put.step for put in under_way]
        assert (report.published, report.dropped) == ((), ())
        for put in under_way:
            put.dropped = put.dropped or "abandoned"

    @rule()
    def close_and_open(self) -> None:
        self.let_go()
        self.close()
        self.open()
        for _ in range(self.injected):
            self.place.gate.fail("put snapshots/", BackendUnavailableError("at the record"))
        self.is_fenced, self.is_known = bool(self.published), False

    def close(self) -> None:
        untold, self.untold = self.untold, []
        if untold:
            with pytest.raises((BackendUnavailableError, ConflictError), match=untold[0].outcome) as raised:
                self.place.store.close()
            notes = "\n".join(raised.value.__notes__)
            assert all(put.outcome in notes for put in untold[1:])
        self.place.store.close()

    # --- what must be true ----------------------------------------------------------------------------------------------

    @invariant()
    def what_is_visible_is_what_was_published(self) -> None:
        assert self.place.steps() == self.published

    @invariant()
    def what_is_under_way_is_known(self) -> None:
        under_way = [put for put in (self.held, *self.queue) if put is not None]
        assert [pending.step for pending in self.place.store.pending()] == [put.step for put in under_way]
        assert all(not put.pending.done() for put in under_way)
        assert self.place.in_use_bytes == COPY * len(self.memory())
        assert self.place.allocated_bytes <= COPIES * COPY

    @invariant()
    def what_is_told_by_events(self) -> None:
        ended = [event for event in self.place.events if event.kind in ("published", "failed", "dropped") and event.put]
        assert len({event.put for event in ended}) == len(ended), "a save ended twice"
        seen = [event.step for event in ended if event.kind == "published"]
        assert seen == [step for step in self.published if step in seen]

    def teardown(self) -> None:
        self.let_go()
        self.what_is_visible_is_what_was_published()
        with self.place.other() as other:
            for step in self.published:
                check(other, step, size_bytes=SIZE)
            assert other.fsck(read_data=True).ok
        self.close()


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SaveQueue.drain.__kwdefaults__ is not None
    monkeypatch.setitem(SaveQueue.drain.__kwdefaults__, "give_up_seconds", 0.0)


Machine.TestCase.settings = settings(
    max_examples=effort(20, 100), stateful_step_count=25, suppress_health_check=list(HealthCheck), print_blob=True
)
TestMachine = Machine.TestCase
