"""Which errors end a staged save, over every class of errors; and who may take one over."""

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tensorstore_ck import errors
from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.session.save.staged_upload import StagedUpload
from tensorstore_ck.session.staging.outcome import can_never_be_published
from tests.backend.staging.places import PACK, PART, UUID, PieceStore
from tests.session.staging.places import SECONDS, UPLOADS, Server, check, ended, process, published, require_all_well, state_of

KEY = "01ARZ3NDEKTSV4RRFFQ69G5F0C-0"
FINAL = {
    errors.ConflictError: "the branch has another history",
    errors.SnapshotAbortedError: "the log says so",
    errors.SnapshotExpiredError: "blocks that it shares are nowhere",
    errors.CorruptObjectError: "its bytes are damaged on the disk",
    errors.MissingObjectError: "its bytes are nowhere",
}


@pytest.mark.parametrize("kind", errors.BY_KIND.values(), ids=lambda kind: kind.__name__)
def test_every_error_is_final_or_not(kind: type[errors.StoreError]) -> None:
    assert can_never_be_published(kind("injected", object_id=PACK), {PACK}) == (kind in FINAL)
    is_damage = kind in (errors.CorruptObjectError, errors.MissingObjectError)
    assert can_never_be_published(kind("injected", object_id=PART), {PACK}) == (kind in FINAL and not is_damage)


# --- claims -----------------------------------------------------------------------------------------------------------


def folder_at(path: Path) -> StagingFolder:
    return StagingFolder(path, UUID, 1 << 20)


@contextmanager
def living(work: Callable[[Callable[[], object]], object]) -> Iterator[Callable[[], None]]:
    """A process that does it and lives until the yielded call; a child that waits by the argument of `work` lives until the block ends."""
    (told, tells), (waits, ends) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ends)
            kept = work(lambda: os.read(waits, 1))
            os.write(tells, b"1")
            os.read(waits, 1)
            del kept
        finally:
            os._exit(0)
    alive = [pid]

    def kill() -> None:
        os.kill(alive[0], signal.SIGKILL)
        os.waitpid(alive.pop(), 0)

    try:
        os.close(tells)
        assert os.read(told, 1) == b"1"
        yield kill
    finally:
        if alive:
            kill()
        for end in (told, waits, ends):
            os.close(end)


def stage(path: Path) -> StagingFolder:
    folder = folder_at(path)
    folder.write_manifest(KEY, b"manifest")
    return folder


def test_what_a_living_process_stages_is_left_to_it(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    with living(lambda _: stage(tmp_path)) as kill:
        assert not folder.claim(KEY)
        kill()
        assert folder.claim(KEY)
    assert not folder.claim(KEY), "this process is at it already"
    assert not folder_at(tmp_path).claim(KEY), "another handle of this process has it"
    folder.delete_manifest(KEY)
    assert list(Path(folder.path).glob("claims/*")) == []


def test_a_child_of_a_dead_process_does_not_keep_its_claim(tmp_path: Path) -> None:
    """As a worker of a data loader, which lives on for a while."""

    def stage_and_fork(wait: Callable[[], object]) -> StagingFolder:
        folder = stage(tmp_path)
        if os.fork() == 0:
            wait()
            os._exit(0)
        return folder

    with living(stage_and_fork) as kill:
        assert not folder_at(tmp_path).claim(KEY)
        kill()
        assert folder_at(tmp_path).claim(KEY)


@pytest.mark.usefixtures("quick")
def test_a_second_process_leaves_a_save_to_the_living_one(server: PieceStore, path: Path, connection: Server) -> None:
    with published(server, path, connection) as job:
        connection.refuse(*UPLOADS)
        pending = job.stage(1)
        with process(server, path) as other:
            other.store.finish_staged("job")
            check(other.store, 0, "job")
            assert other.events == []
        connection.refuse()
        assert ended(pending) is None
    require_all_well(server, path, [0, 1])


@pytest.mark.usefixtures("quick")
def test_a_waited_save_that_stays_on_the_disk_does_not_keep_its_state(
    server: PieceStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise errors.PermissionDeniedError("the token has expired")

    with process(server, path) as job:
        job.put(0).wait(SECONDS)
        memory = state_of(1)["moving"].numpy().copy()
        state, is_alive = {**state_of(1), "moving": torch.from_numpy(memory)}, weakref.ref(memory)
        with monkeypatch.context() as patch, suppress(errors.PermissionDeniedError):
            patch.setattr(StagedUpload, "append", refuse)
            job.store.put_snapshot(state, ref="job", step=1)
        del state, memory
        gc.collect()
        assert is_alive() is None
        job.store.put_snapshot(state_of(2), ref="job", step=2)
    require_all_well(server, path, [0, 1, 2])
