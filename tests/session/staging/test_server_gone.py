"""The store does not answer: staging goes on, and all is published in order when it is back; or by the next process."""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tensorstore_ck.errors import BackendUnavailableError, WaitTimeoutError
from tensorstore_ck.session.save.save_queue import SaveQueue
from tensorstore_ck.session.staging.store_contact import StoreContact
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import (
    SECONDS,
    UPLOADS,
    Hanging,
    Process,
    Server,
    check,
    leave_staged,
    leftovers,
    process,
    published,
    refused_uploads,
    require_all_well,
)

pytestmark = pytest.mark.usefixtures("quick")
ALL = ("",)


def test_staging_goes_on_and_all_is_published_in_order(server: PieceStore, path: Path, connection: Server) -> None:
    retried = threading.Event()
    with process(server, path, store_faults=connection) as job:
        job.store.on_event(lambda event: retried.set() if event.kind == "retried" else None)
        job.put(0).wait(SECONDS)
        connection.refuse(*ALL)
        pendings = [job.put(step) for step in (1, 2, 3)]
        for pending in pendings:
            pending.staged.wait(SECONDS)
        with pytest.raises(WaitTimeoutError):
            pendings[0].published.wait(0.0)
        assert retried.wait(SECONDS)
        connection.refuse()
        roots = [pending.wait(SECONDS) for pending in pendings]
        assert [each.parent for each in roots[1:]] == [each.root for each in roots[:-1]]
        assert {"injected: " in str(event.fields["error"]) for event in job.told("retried")} == {True}
        assert [event.step for event in job.told("published")] == [0, 1, 2, 3]
        assert job.error_of_put(4) is None, "what was learned meanwhile is right"
    require_all_well(server, path, [0, 1, 2, 3, 4])


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """A connection to a server that can fall silent."""
    connection = Hanging()
    yield connection
    connection.answers.set()


def test_a_server_that_hangs_delays_no_save(server: PieceStore, path: Path, hanging: Hanging) -> None:
    with published(server, path, hanging) as job:
        contact = job.store._session.context.contact = StoreContact(0.0)
        hanging.answers.clear()
        pendings = [job.stage(step) for step in (1, 2, 3)]
        assert contact._is_silent
        hanging.answers.set()
        assert [pending.wait(SECONDS).step for pending in pendings] == [1, 2, 3]
    require_all_well(server, path, [0, 1, 2, 3])


def test_a_server_that_hangs_keeps_no_job_from_ending(
    server: PieceStore, path: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is staged stays on the disk, and the message says how to publish it."""
    assert SaveQueue.drain.__kwdefaults__ is not None
    monkeypatch.setitem(SaveQueue.drain.__kwdefaults__, "give_up_seconds", 0.0)
    job = Process(server, path, store_faults=hanging)
    job.put(0).wait(SECONDS)
    minutes = count()
    job.store._session.context.contact = StoreContact(0.0, clock=lambda: 60.0 * next(minutes))
    hanging.answers.clear()
    job.stage(1)
    job.store.close()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "staged on this host: job@1" in message
    assert f"`tsck staging resume --staging {path} -s memory:` publishes" in message
    hanging.answers.set()
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


def test_a_server_that_answers_but_takes_no_upload_keeps_no_process_from_ending(
    server: PieceStore, path: Path, connection: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Callable[[], object]] = []
    monkeypatch.setattr(threading, "_register_atexit", ends.append)
    minutes, failed = count(), threading.Event()
    job = Process(server, path, store_faults=connection)
    job.put(0).wait(SECONDS)
    job.store._session.context.contact = StoreContact(clock=lambda: 60.0 * next(minutes))
    job.store.on_event(lambda event: failed.set() if event.kind == "retried" else None)
    connection.refuse(*UPLOADS)
    job.stage(1)
    assert failed.wait(SECONDS)
    ends[-1]()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "staged on this host: job@1; `tsck staging resume" in message
    job.store.close()
    connection.refuse()
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


def test_an_upload_that_moves_is_waited_for() -> None:
    now = 0.0
    contact = StoreContact(clock=lambda: now)
    for has_failed, seconds, is_gone in ((False, 999.0, False), (True, 59.0, False), (True, 60.0, True)):
        contact.upload_moved()
        if has_failed:
            contact.upload_failed()
        now += seconds
        assert contact.is_gone(lambda: None) == is_gone
    contact.upload_moved()
    assert not contact.is_gone(lambda: None)


def test_what_is_asked_after_an_answer_is_waited_for_again() -> None:
    contact, answers = StoreContact(0.0), threading.Event()
    with pytest.raises(BackendUnavailableError, match="has not answered"):
        contact.ask(lambda: answers.wait(SECONDS))
    with pytest.raises(BackendUnavailableError, match="has not answered"):
        contact.ask(lambda: pytest.fail("the store is asked once, until it answers"))
    (asking,) = contact._asking
    answers.set()
    asking.join(SECONDS)
    contact._patience_seconds = SECONDS
    assert contact.ask(lambda: 7) == 7


def test_it_goes_away_while_a_save_is_staged(server: PieceStore, path: Path, connection: Server) -> None:
    """What is shared with the store cannot be pinned then, so it is staged as well."""
    with published(server, path, connection) as job:
        connection.refuse("create log")
        job.store.engine.log._writer.sleep = lambda _: None
        pending = job.stage(1)
        named = {name for name in leftovers(job.folder) if name.startswith("unsent/packs/")}
        assert len(named) == 1
        assert job.folder.unsent_bytes() > 200_000, "all of the state, not only what is new"
        connection.refuse()
        pending.wait(SECONDS)
    require_all_well(server, path, [0, 1])


def test_drain_says_what_is_staged_and_the_next_process_publishes_it(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        connection.refuse(*ALL)
        for step in (1, 2):
            job.stage(step)
        report = job.store.drain(0)
        assert [pending.step for pending in report.staged] == [1, 2]
        assert (report.published, report.dropped, report.under_way) == ((), (), ())
        assert report.safe is not None
        assert report.safe.step == 0
        assert "staged on this host: job@1, job@2" in str(report)
    with process(server, path) as job:
        check(job.store, 2, "job")
        assert job.error_of_put(3) is None
    require_all_well(server, path, [0, 1, 2, 3])


def test_close_waits_for_what_this_process_staged_and_leaves_what_others_did(server: PieceStore, path: Path, connection: Server) -> None:
    connection.refuse(*UPLOADS)
    job = Process(server, path.with_name("own"), store_faults=connection)
    pending = job.stage(7, "own")
    closing = threading.Thread(target=job.store.close)
    closing.start()
    connection.refuse()
    closing.join(SECONDS)
    assert pending.published.reached()
    leave_staged(server, path, 1)
    job = Process(server, path, store_faults=Server(*UPLOADS))
    job.store.close()
    assert any(name.startswith("staged/") for name in leftovers(job.folder))
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


def test_a_reader_may_open_a_store_with_leftovers(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        connection.refuse(*ALL)  # so the log does not know yet
        job.stage(1)
        job.store.drain(0)
    with refused_uploads("you may only read", "create"), process(server, path) as reader:
        check(reader.store, 0, "job")
        assert [event.fields["error"] for event in reader.told("failed")] in ([], ["you may only read"])
    with process(server, path) as job:
        check(job.store, 1, "job")
    require_all_well(server, path, [0, 1])
