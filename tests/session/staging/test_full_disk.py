"""The staging disk has no space, for one write or from one write on: what was acknowledged as staged is published, in order."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.errors import NoSpaceError, PermissionDeniedError, SnapshotDroppedError
from tensorstore_ck.session.save.save_queue import SaveQueue
from tensorstore_ck.session.save.staged_save import StagedSave
from tests.backend.staging.places import PieceStore
from tests.end_to_end.crash.faulty import Faults
from tests.group_of_one import group_of_one
from tests.session.staging.places import (
    KIB,
    SECONDS,
    UPLOADS,
    Acknowledged,
    Full,
    Process,
    Server,
    ended,
    process,
    published,
    refused_uploads,
    require_all_well,
    require_nothing_lost,
)

pytestmark = pytest.mark.usefixtures("quick")


EACH = pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
"""Some of all writes, or all."""


@pytest.mark.race
@EACH
def test_full_from_each_write_on(tmp_path: Path, stride: int) -> None:
    """The disk is full for the rest of one process, and for all of the next one, which saves as well; then it has space."""
    for at in range(1, 1000, stride):
        server, path, told, full = PieceStore(), tmp_path / str(at) / "stage", Acknowledged(), Full("no-space", persistent=True)
        with process(server, path, disk_faults=full) as job:
            told.put(job, 0)
            job.put_at(full, at, told, 1, 2, 3)
        with process(server, path, disk_faults=Full("no-space", 1, persistent=True)) as job:
            job.store.finish_staged("job")
            job.store.checkout("job")
            assert job.error_of_put(4) is not None
        require_nothing_lost(server, path, told)
        if not full.struck:
            assert told.published == {0, 1, 2, 3}
            return
    raise AssertionError("the enumeration did not end")


@pytest.mark.race
@EACH
def test_full_for_each_write(tmp_path: Path, stride: int) -> None:
    """One write fails; the saves that follow in the same process publish what it left."""
    struck: set[str] = set()
    for at in range(1, 1000, stride):
        server, path, told, full = PieceStore(), tmp_path / str(at) / "stage", Acknowledged(), Full("no-space")
        with process(server, path, disk_faults=full) as job:
            told.put(job, 0)
            job.put_at(full, at, told, 1, 2)
            full.at = 0
            told.put(job, 3)
            assert 3 in told.published
            assert told.staged <= {snapshot.step for snapshot in job.store.log("job")}, f"left by a later save: {full.struck}"
        require_nothing_lost(server, path, told)
        if not full.struck:
            assert stride > 1 or {"open", "append", "close", "put", "replace", "rename"} <= struck
            return
        struck.add(full.struck.split()[0])
    raise AssertionError("the enumeration did not end")


def refused_put(job: Process, step: int) -> tsck.PendingSnapshot:
    """A save that is staged, and whose upload the store refuses for now."""
    with refused_uploads("the token has expired"):
        pending = job.put(step)
        error = ended(pending)
    assert isinstance(error, PermissionDeniedError)
    assert "it stays on the staging disk" in "".join(error.__notes__)
    assert pending.staged.reached()
    return pending


def test_a_save_waits_behind_one_that_still_fails(server: PieceStore, path: Path) -> None:
    with published(server, path) as job:
        refused_put(job, 1)
        refused = refused_put(job, 2)
        assert "job@1 was staged before job@2" in "".join(refused.error.__notes__)  # type: ignore[union-attr]
        assert [snapshot.step for snapshot in job.store.log("job")] == [0]
        job.put(3).wait(SECONDS)
    require_all_well(server, path, [0, 1, 2, 3])


def test_a_save_that_waits_may_be_cancelled(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        refused_put(job, 1)
        connection.refuse(*UPLOADS)
        tried = threading.Event()
        job.store.on_event(lambda event: tried.set() if event.kind == "retried" and event.step == 1 else None)
        pending = job.put(2)
        assert tried.wait(SECONDS)
        pending.cancel()
        assert isinstance(ended(pending), SnapshotDroppedError)
        connection.refuse()
        job.put(3).wait(SECONDS)
    require_all_well(server, path, [0, 1, 3])


def test_space_that_a_failed_save_uses(server: PieceStore, path: Path) -> None:
    """The next save does not fit in addition, so it is published first."""
    with process(server, path, capacity_bytes=450 * KIB) as job:
        refused_put(job, 0)
        assert job.error_of_put(1) is None
    require_all_well(server, path, [0, 1])


def test_what_can_never_be_published_is_named(server: PieceStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files are gone meanwhile: the next save says so, and goes on."""
    with published(server, path) as job:
        refused_put(job, 1)
        for pack in Path(job.folder.path).glob("unsent/packs/*/*"):
            pack.unlink()
        job.put(2).wait(SECONDS)
        assert "job@1 was staged, and will not be published: the staged packs/" in caplog.text
    require_all_well(server, path, [0, 2])


def test_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """What was staged later has an earlier time: it is published later all the same."""
    server, path, refusing = PieceStore(), tmp_path / "stage", Server()
    with process(server, path, store_faults=refusing) as job:
        job.put(0).wait(SECONDS)
        refusing.refuse(*UPLOADS)
        job.stage(1)
        clock = job.store.engine.clock
        job.store.engine.clock = lambda: clock() - 3_600_000_000_000
        job.stage(2)
        job.store.drain(0)
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1, 2])


class NoCopies(Faults):
    """Nothing becomes a copy."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        return super().call(what, effect, tear, create=create) if what.startswith(("rename", "makedirs", "delete")) else effect()


@pytest.mark.parametrize("mode", ["no-space", "unavailable"])
def test_what_is_published_stays_published_when_the_disk_fails_then(server: PieceStore, path: Path, mode: str) -> None:
    with process(server, path, disk_faults=NoCopies(mode, 1, persistent=True)) as job:
        job.put(0).wait(SECONDS)
        job.put(1).wait(SECONDS)
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


@pytest.mark.parametrize("ends_before_the_wait", [False, True])
def test_a_save_of_ranks_waits_for_space_that_one_has_whose_copies_go_to_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_before_the_wait: bool
) -> None:
    server, lacks_space, evict, queues = PieceStore(), threading.Event(), StagingFolder.evict, list[SaveQueue]()

    def watched(self: StagingFolder, needed_bytes: int) -> None:
        try:
            evict(self, needed_bytes)
        except NoSpaceError:
            lacks_space.set()
            is_over = not ends_before_the_wait or queues[0]._changed.wait_for(
                lambda: not queues[0]._queued(queues[0]._replicate_worker, queues[0]._publish_worker), SECONDS
            )
            assert is_over
            raise

    monkeypatch.setattr(StagingFolder, "evict", watched)
    monkeypatch.setattr(StagedSave, "replicate", lambda *_: lacks_space.wait(SECONDS))
    with group_of_one(), process(server, tmp_path / "stage", capacity_bytes=450 * KIB) as job:
        queues.append(job.store.session.queue)
        pendings = [job.put(step, group=dist.group.WORLD) for step in (0, 1)]
        assert [pending.wait(SECONDS).step for pending in pendings] == [0, 1]
        assert lacks_space.is_set()
    require_all_well(server, tmp_path / "stage", [0, 1])
