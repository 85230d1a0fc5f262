"""The store does not answer: staging goes on, and all is published in order when it is back; or by the next process."""

import threading
from pathlib import Path

import pytest

from tensorstore_ck.errors import WaitTimeoutError
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import (
    SECONDS,
    UPLOADS,
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


def test_it_goes_away_while_a_save_is_staged(server: PieceStore, path: Path, connection: Server) -> None:
    """What is shared with the store cannot be pinned then, so it is staged as well."""
    with published(server, path, connection) as job:
        connection.refuse("create log")
        job.store.engine.log._writer._sleep = lambda _: None
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
