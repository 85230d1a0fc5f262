"""Which callbacks get events, what a callback that raises does, and what the log says."""

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from tensorstore_ck.events import KINDS, LEVELS, Event, Kind, Observers, event_text, log_event
from tests.effort import PATIENCE_SECONDS

VALUES: dict[str, Any] = {
    "root": "9f86d081" * 8,
    "snapshot": "01J0",
    "error": "disk full\n\x1b[31m",
    "error_kind": "no_space",
    "is_waited_for": 0,
    "reason": "skipped",
    "what": "upload of packs/01J0",
    "try_number": 2,
    "dedup_ratio": 0.75,
    "compression_ratio": 1.25,
    "queue_depth": 2,
    "logical_bytes": 1288490189,
    "new_bytes": 322122547,
    "total_seconds": 4.1234,
    "stall_seconds": 0.1234,
}


def make_event(kind: Kind, *, rank: int = 0, step: int | None = 1000, **fields: Any) -> Event:
    """An event with just the fields that its kind has."""
    known = {name: VALUES.get(name, 1024 if name.endswith("_bytes") else 1.5) for name in KINDS[kind]}
    assert fields.keys() <= known.keys()
    return Event(kind, "put-1", "runs/gpt", step, rank, 1_700_000_000_000_000_000, {**known, **fields})


def test_every_callback_gets_events_in_order_until_it_unsubscribes() -> None:
    observers, told = Observers(), []
    end_first = observers.subscribe(lambda event: told.append(("first", event.kind)))
    observers.subscribe(lambda event: told.append(("second", event.kind)))
    observers.emit(make_event("captured"))
    end_first()
    end_first()
    observers.emit(make_event("published"))
    assert told == [("first", "captured"), ("second", "captured"), ("second", "published")]


def test_a_callback_that_subscribed_twice_gets_events_twice_and_unsubscribes_once() -> None:
    observers, told = Observers(), list[Event]()
    callback = told.append
    end = observers.subscribe(callback)
    observers.subscribe(callback)
    end()
    observers.emit(make_event("staged"))
    assert len(told) == 1


def test_a_callback_that_raises_disturbs_nobody_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    observers, told = Observers(), list[Event]()

    def broken(event: Event) -> None:
        told.append(event)
        raise RuntimeError("its own fault")

    observers.subscribe(broken)
    observers.subscribe(told.append)
    for _ in range(3):
        observers.emit(make_event("captured"))
    assert len(told) == 6
    assert [(record.name, record.levelname) for record in caplog.records] == [("tensorstore_ck", "ERROR")]
    assert "Traceback" in caplog.text
    assert "its own fault" in caplog.text


def test_an_event_is_wanted_by_a_callback_and_by_a_log_that_shows_its_level(caplog: pytest.LogCaptureFixture) -> None:
    log, silent = Observers(is_logged=True), Observers()
    for level, wanted in (
        (logging.DEBUG, {"captured", "published", "failed"}),
        (logging.INFO, {"published", "failed"}),
        (logging.CRITICAL, set()),
    ):
        caplog.set_level(level, "tensorstore_ck")
        kinds: tuple[Kind, ...] = ("captured", "published", "failed")
        assert {kind for kind in kinds if log.wants(kind)} == wanted
        for kind in kinds:
            log.emit(make_event(kind))
            assert not silent.wants(kind)
        assert len(caplog.records) == len(wanted)
        caplog.clear()
    end = silent.subscribe(print)
    assert silent.wants("captured")
    end()
    assert not silent.wants("captured")


def test_callbacks_may_subscribe_emit_and_unsubscribe_during_an_event() -> None:
    observers, told = Observers(), list[str]()

    def nested(event: Event) -> None:
        told.append(event.kind)
        if event.kind == "captured":
            observers.subscribe(lambda later: told.append(f"later {later.kind}"))
            observers.emit(make_event("staged"))
            end()

    end = observers.subscribe(nested)
    observers.emit(make_event("captured"))
    observers.emit(make_event("published"))
    assert told == ["captured", "staged", "later staged", "later published"]


def test_callbacks_run_on_the_thread_that_emits() -> None:
    observers, threads = Observers(), list[str]()
    observers.subscribe(lambda _: threads.append(threading.current_thread().name))
    emitter = threading.Thread(target=observers.emit, args=(make_event("staged"),), name="writer")
    emitter.start()
    emitter.join()
    assert threads == ["writer"]


def test_what_the_log_says_of_a_saved_snapshot() -> None:
    assert event_text(make_event("published")) == "saved runs/gpt@1000: 1.2 GiB, 307.2 MiB new, in 4.1 s, training blocked for 0.12 s"
    assert event_text(make_event("published", rank=3, step=None)).startswith("saved runs/gpt (rank 3): ")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_logged_in_a_line_of_its_own_at_its_level(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tensorstore_ck"):
        log_event(make_event(kind))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tensorstore_ck", LEVELS[kind])
    text = record.getMessage()
    assert text.isprintable(), "an error's text never breaks out of its line"
    assert ("runs/gpt@1000" in text) is (kind not in ("waiting", "rank_dead")), "said of a put, or of none"
    assert ("saved" in text) is (kind == "published"), "said of nothing that could still be lost"


@pytest.mark.parametrize("reason", ["skipped", "replaced", "cancelled", "abandoned"])
def test_the_log_says_why_a_snapshot_was_dropped(reason: str) -> None:
    assert event_text(make_event("dropped", reason=reason)).startswith("dropped runs/gpt@1000: ")


def test_nothing_is_worded_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tensorstore_ck"):
        log_event(Event("published", "", "r", None, 0, 0, {}))  # its fields would be missed
    assert not caplog.records


def test_without_logging_a_failure_appears_on_stderr() -> None:
    code = """
from tensorstore_ck.events import Event, log_event
log_event(Event("dropped", "", "runs/gpt", 7, 0, 0, {"reason": "skipped"}))
log_event(Event("published", "", "runs/gpt", 7, 0, 0, {}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    assert (done.stdout, done.stderr) == ("", "dropped runs/gpt@7: no memory was free for it\n")
