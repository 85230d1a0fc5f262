"""What gc freed before it was published is published under other names: the bytes are on the staging disk."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import PermissionDeniedError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import SECONDS, UPLOADS, Server, ended, half_uploaded, process, published, require_all_well

pytestmark = pytest.mark.usefixtures("quick")
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)


def leave_uploaded(server: PieceStore, path: Path, *steps: int) -> set[str]:
    """A job published step 0, staged these, and uploaded the first; its log entry was refused. Returns what it uploaded.

    If 0 is one of these, nothing is published.
    """
    connection = Server()
    with process(server, path, store_faults=connection) as job, pytest.MonkeyPatch.context() as patch:
        if 0 not in steps:
            job.put(0).wait(SECONDS)
        before = names(server)
        patch.setattr(StagedUpload, "append", refuse)
        connection.refuse(*UPLOADS)
        pendings = [job.stage(step) for step in steps]
        connection.refuse()
        for pending in pendings:
            assert isinstance(ended(pending), PermissionDeniedError)
    return names(server) - before


def refuse(*_: object) -> None:
    raise PermissionDeniedError("the token has expired")


def names(server: PieceStore) -> set[str]:
    return {info.name for info in server.list("") if info.name.startswith(("packs/", "parts/", "snapshots/"))}


def gc(server: PieceStore, path: Path, options: GcOptions = EVERYTHING) -> None:
    with process(server, path.with_name("elsewhere")) as other:
        other.store.gc(options)


@pytest.mark.parametrize("tombstone_seconds", [86_400, 0])
@pytest.mark.parametrize("steps", [(1,), (1, 2), (0, 1, 2)])
def test_after_days(server: PieceStore, path: Path, steps: tuple[int, ...], tombstone_seconds: int) -> None:
    """The later ones share blocks with the earlier ones, whose packs have other names now; the log may no longer say what was freed."""
    uploaded = leave_uploaded(server, path, *steps)
    gc(server, path, replace(EVERYTHING, tombstone_seconds=tombstone_seconds))
    assert uploaded
    assert not uploaded & names(server)
    with process(server, path) as job:
        job.store.finish_staged("job")
        assert job.told("failed") == []
    require_all_well(server, path, [*sorted({0, *steps})])


def test_gc_between_the_new_upload_and_its_entry(server: PieceStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uploaded(server, path, 1)
    gc(server, path)
    append, left = StagedUpload.append, [1, 1]

    def after_gc(self: StagedUpload, attempt: object) -> object:
        if left:
            left.pop()
            gc(server, path)
        return append(self, attempt)  # type: ignore[arg-type]

    monkeypatch.setattr(StagedUpload, "append", after_gc)
    with process(server, path) as job:
        job.store.finish_staged("job")
        assert left == []
    require_all_well(server, path, [0, 1])


def test_another_object_has_a_name(server: PieceStore, path: Path) -> None:
    """Of each kind: it stays as it is."""
    others = leave_uploaded(server, path, 1)
    assert {name.partition("/")[0] for name in others} == {"packs", "parts", "snapshots"}
    for name in others:
        server.replace(name, b"torn")
    with process(server, path) as job:
        job.store.finish_staged("job")
    assert {server.get(name, max_bytes=99) for name in others} == {b"torn"}
    gc(server, path)
    require_all_well(server, path, [0, 1])


def test_another_process_published_it_under_other_names(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        pending, asleep = half_uploaded(job, connection, 1), threading.Event()
        job.store.on_event(lambda event: asleep.set() if event.fields.get("what") == "publishing" else None)
        connection.refuse("get log", "create log")  # uploads go on
        assert asleep.wait(SECONDS)
        gc(server, path)
        job.lose_claims()
        with process(server, path) as other:
            other.store.finish_staged("job")
            found = other.store.log("job")[0]
        connection.refuse()
        assert pending.wait(SECONDS) == found
        assert job.error_of_put(2) is None
    require_all_well(server, path, [0, 1, 2])


def test_what_it_shares_is_nowhere(server: PieceStore, path: Path, connection: Server) -> None:
    """Somebody removed the pin that held it."""
    with published(server, path, connection) as job, process(server, path.with_name("elsewhere")) as other:
        connection.refuse(*UPLOADS)
        pending = job.stage(1, expect=ANY)
        other.store.forget("job")
        for pin in other.store.pins():
            other.store.unpin(pin.snapshot.root, owner=pin.owner)
        other.store.gc(EVERYTHING)
        connection.refuse()
        assert "gc freed" in str(ended(pending))
        job.put(2, expect=ANY).wait(SECONDS)
    require_all_well(server, path, [2])
