"""Several processes and one staged save: it is published once or given up, and never on top of somebody else's work."""

import threading
from pathlib import Path

import pytest

from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import ConflictError, SnapshotAbortedError, SnapshotDroppedError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.session.staging.staged_entries import drop
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import (
    SECONDS,
    UPLOADS,
    Server,
    check,
    ended,
    half_uploaded,
    leave_staged,
    leftovers,
    process,
    published,
    require_all_well,
)

pytestmark = pytest.mark.usefixtures("quick")
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)


def test_two_processes_resume_at_once(server: PieceStore, path: Path) -> None:
    leave_staged(server, path, 1, 2, 3)
    with process(server, path) as one, process(server, path) as two:
        for each in (one, two):
            each.store.finish_staged("job")
            check(each.store, 3, "job")
            assert each.told("failed") == []
    require_all_well(server, path, [0, 1, 2, 3])


def test_a_zombie_learns_what_became_of_its_save(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as zombie:
        connection.refuse(*UPLOADS)
        pending, asleep = zombie.put(1), threading.Event()
        pending.staged.wait(SECONDS)
        zombie.store.on_event(lambda event: asleep.set() if "get log" in str(event.fields.get("error")) else None)
        connection.refuse("get log", "create log")
        assert asleep.wait(SECONDS)
        zombie.lose_claims()
        with process(server, path) as successor:
            check(successor.store, 1, "job")
            successor.put(2).wait(SECONDS)
        connection.refuse()
        assert pending.wait(SECONDS).step == 1
        assert isinstance(zombie.error_of_put(7), ConflictError)
    require_all_well(server, path, [0, 1, 2])


def test_the_ref_moved_meanwhile(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job, process(server, path.with_name("elsewhere")) as other:
        connection.refuse(*UPLOADS)
        pending = job.stage(1)
        assert [pin.owner.partition(":")[0] for pin in other.view.pins()] == ["staged"]
        other.put(9, expect=ANY).wait(SECONDS)
        connection.refuse()
        error = ended(pending)
        assert isinstance(error, ConflictError)
        assert "another store handle, moved it" in str(error)
        assert leftovers(job.folder) == []
        check(job.store, 9, "job")
        assert job.error_of_put(10) is None
    require_all_well(server, path, [0, 9, 10])


def test_an_unread_ref_is_not_taken_for_what_was_left_there(server: PieceStore, path: Path) -> None:
    """A job that forgot to restore must not save on top of what its predecessor staged."""
    leave_staged(server, path, 1)
    with process(server, path) as job:
        assert isinstance(job.error_of_put(0), ConflictError)
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_of_a_chain_is_cancelled(server: PieceStore, path: Path, connection: Server, which: int) -> None:
    connection.refuse(*UPLOADS)
    with process(server, path, store_faults=connection) as job:
        pendings = [job.put(step) for step in range(3)]
        for pending in pendings:
            pending.staged.wait(SECONDS)
        assert pendings[which].cancel()
        connection.refuse()
        errors = [ended(pending) for pending in pendings]
        assert [type(error) for error in errors] == [SnapshotDroppedError if step == which else type(None) for step in range(3)]
        assert job.error_of_put(3) is None
    require_all_well(server, path, [step for step in range(4) if step != which])


def test_one_of_a_chain_is_dropped_while_nobody_runs(server: PieceStore, path: Path) -> None:
    leave_staged(server, path, 1, 2, 3)
    with process(server, path.with_name("elsewhere")) as operator:
        middle = next(txn for txn, info in operator.view.all_staged() if info.step == 2)
        assert drop(operator.store.engine, None, middle) is None
    with process(server, path) as job:
        job.store.finish_staged("job")
        assert [event.fields["error_kind"] for event in job.told("failed")] == [SnapshotAbortedError.kind]
    require_all_well(server, path, [0, 1, 3])


def test_gc_and_forget_between(server: PieceStore, path: Path, connection: Server) -> None:
    """What a staged save shares with published ones is held, whatever becomes of their branch."""
    with published(server, path, connection) as job, process(server, path.with_name("elsewhere")) as other:
        connection.refuse(*UPLOADS)
        job.stage(1, expect=ANY)
        other.store.forget("job")
        other.store.gc(EVERYTHING)
        assert [info.step for info in other.view.snapshots()] == [0]
        connection.refuse()
        job.store.drain()
    with process(server, path) as job:
        assert [info.step for info in job.view.snapshots()] == [1], "the pin went with it"
        job.store.gc(EVERYTHING)
    require_all_well(server, path, [1])


def test_an_earlier_one_is_published_and_forgotten(server: PieceStore, path: Path, connection: Server) -> None:
    """The later one has blocks in its packs: they are held for it."""
    connection.refuse(*UPLOADS)
    with process(server, path, store_faults=connection) as job, process(server, path.with_name("elsewhere")) as other:
        first, second = job.put(0), job.put(1, expect=ANY)
        second.staged.wait(SECONDS)
        job.store.on_event(lambda event: connection.refuse(*UPLOADS) if event.kind == "published" else None)
        connection.refuse()
        first.wait(SECONDS)
        other.store.forget("job")
        other.store.gc(EVERYTHING)
        assert [info.step for info in other.view.snapshots()] == [0]
        connection.refuse()
        assert ended(second) is None
    with process(server, path) as job:
        job.store.gc(EVERYTHING)
    require_all_well(server, path, [1])


def test_what_was_condemned_meanwhile_is_rescued(server: PieceStore, path: Path, connection: Server) -> None:
    """A gc without mercy on what is young finds objects in the store that no entry names yet."""
    with published(server, path, connection) as job, process(server, path.with_name("elsewhere")) as other:
        pending = half_uploaded(job, connection, 1)
        other.store.gc(GcOptions(min_age_seconds=0, grace_seconds=3600, undo_window_seconds=0, max_delete=1))
        assert list(other.view.objects())
        connection.refuse()
        assert ended(pending) is None
        assert not list(other.view.objects())
        other.store.gc(EVERYTHING)
    require_all_well(server, path, [0, 1])


def test_what_was_freed_meanwhile_is_uploaded_again(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job, process(server, path.with_name("elsewhere")) as other:
        pending = half_uploaded(job, connection, 1)
        other.store.gc(EVERYTHING)
        connection.refuse()
        assert ended(pending) is None
        assert job.error_of_put(2) is None
    require_all_well(server, path, [0, 1, 2])
