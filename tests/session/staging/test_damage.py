"""What a staging disk does wrong: bytes that are not what was written, no space, no folder. Never wrong bytes, never silence."""

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.staging import Uploader
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError, NoSpaceError
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import (
    KIB,
    PIECE_BYTES,
    SECONDS,
    UPLOADS,
    Process,
    Server,
    check,
    ended,
    folder_of,
    half_uploaded,
    leave_staged,
    leftovers,
    process,
    published,
    require_all_well,
    state_of,
)

pytestmark = pytest.mark.usefixtures("quick")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def one_of(job: Process, pattern: str) -> Path:
    (found,) = Path(job.folder.path).glob(pattern)
    return found


KINDS = ["packs", "parts", "snapshots"]
how_damaged = pytest.mark.parametrize("how", [damage, cut])


@how_damaged
@pytest.mark.parametrize("kind", KINDS)
def test_before_the_upload(server: PieceStore, path: Path, connection: Server, kind: str, how: Callable[[Path], None]) -> None:
    """The save is lost by name, and so is the next one if it relies on the damaged pack; others are published."""
    connection.refuse(*UPLOADS)
    with process(server, path, store_faults=connection) as job:
        first = job.stage(0)
        damaged = one_of(job, f"unsent/{kind}/*/*")
        second = job.stage(1)
        how(damaged)
        connection.refuse()
        error, next_error = ended(first), ended(second)
        assert job.error_of_put(2) is None
    lost = {"packs": [0, 1], "parts": [0], "snapshots": []}[kind]
    assert [isinstance(each, CorruptObjectError) for each in (error, next_error)] == [0 in lost, 1 in lost]
    if lost:
        for part in ("job@0", f"{kind}/{damaged.parent.name}/{damaged.name}", str(path)):
            assert part in str(error)
    require_all_well(server, path, [step for step in range(3) if step not in lost])


@how_damaged
@pytest.mark.parametrize("kind", KINDS)
def test_before_the_next_process(server: PieceStore, path: Path, kind: str, how: Callable[[Path], None]) -> None:
    leave_staged(server, path, 1, 2)
    how(min(Path(folder_of(server, path).path).glob(f"unsent/{kind}/*/*"), key=lambda file: file.name))
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1, 2] if kind == "snapshots" else [0, 2])


def one_piece(call: Callable[..., Any], sent: list[str], what: str, *args: Any, **options: Any) -> Any:
    """Takes one piece of a large object, and no more."""
    if what.startswith("upload_part"):
        if sent:
            raise BackendUnavailableError("injected")
        sent.append(what)
    return call(what, *args, **options)


def wait_for_retry(job: Process, what: str) -> threading.Event:
    """Set when something is tried again."""
    reached = threading.Event()
    job.store.on_event(lambda event: reached.set() if event.fields.get("what") == what else None)
    return reached


@pytest.mark.parametrize("piece", range(3))
def test_between_two_processes_that_upload_it(
    server: PieceStore, path: Path, connection: Server, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """The store has the first piece, which that process verified: it is not completed with a damaged one."""
    with published(server, path, connection) as job:
        retried = wait_for_retry(job, "an upload")
        monkeypatch.setattr(connection, "call", partial(one_piece, connection.call, []))
        job.put(1)
        assert retried.wait(SECONDS)
        pack = one_of(job, "unsent/packs/*/*")
    data = bytearray(pack.read_bytes())
    data[piece * PIECE_BYTES + 100] ^= 1
    pack.write_bytes(data)
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_uploaded_and_then_damaged(server: PieceStore, path: Path, connection: Server, kind: str) -> None:
    """The store has it, whole: it is published."""
    with published(server, path, connection) as job:
        connection.refuse(*UPLOADS)
        retried = wait_for_retry(job, "publishing")
        job.stage(1)
        connection.refuse("create log")
        assert retried.wait(SECONDS)
        damaged = one_of(job, f"unsent/{kind}/*/*")
    cut(damaged)
    with process(server, path) as job:
        job.store.finish_staged("job")
    require_all_well(server, path, [0, 1])


def test_a_save_that_is_waited_for_is_staged_again(server: PieceStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is still there."""
    upload = Uploader.upload
    damaged: list[Path] = []

    def damage_and_upload(self: Uploader, names: Iterable[str], **options: Any) -> None:
        if not damaged:
            damaged.extend(Path(path).glob("*/unsent/packs/*/*"))
            damage(damaged[0])
        upload(self, names, **options)

    monkeypatch.setattr(Uploader, "upload", damage_and_upload)
    with process(server, path) as job:
        assert job.store.put_snapshot(state_of(0), ref="job", step=0).step == 0
    assert damaged
    require_all_well(server, path, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_after_publication(server: PieceStore, path: Path, kind: str) -> None:
    """Read from the store, and the copy is gone."""
    with published(server, path):
        pass
    with process(server, path) as job:
        copy = one_of(job, f"copies/{kind}/*/*")
        damage(copy)
        check(job.store, 0)
        assert not copy.exists() or LocalBackend(job.folder.path).get(str(copy.relative_to(job.folder.path)), max_bytes=1 << 30)
    with process(server, path) as job:
        check(job.store, 0)
    require_all_well(server, path, [0])


def test_a_damaged_manifest(server: PieceStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reported, and left where it is with all that it may name, for a person to decide."""
    leave_staged(server, path, 1)
    with process(server, path.with_name("elsewhere")) as other:
        assert [info.step for _, info in other.view.all_staged()] == [1]
    (manifest,) = Path(folder_of(server, path).path).glob("staged/*")
    before = leftovers(folder_of(server, path))
    damage(manifest)
    with process(server, path) as job:
        check(job.store, 0, "job")
        assert "does not match its hash" in caplog.text
        assert "tsck staging" in caplog.text
        job.put(2).wait(SECONDS)
    assert leftovers(folder_of(server, path)) == before


def test_no_space_until_an_upload_has_ended(server: PieceStore, path: Path, connection: Server) -> None:
    with process(server, path, store_faults=connection, capacity_bytes=600 * KIB) as job:
        connection.refuse(*UPLOADS)
        first, second = job.put(0), job.put(1)
        first.staged.wait(SECONDS)
        third = job.put(2)
        second.staged.wait(SECONDS)
        assert not third.staged.reached()
        assert not third.done()
        connection.refuse()
        assert [ended(pending) for pending in (first, second, third)] == [None, None, None]
        assert job.folder.used_bytes() <= 600 * KIB
    require_all_well(server, path, [0, 1, 2])


def test_no_space_at_all(server: PieceStore, path: Path) -> None:
    with process(server, path, capacity_bytes=200 * KIB) as job:
        error = ended(job.put(0))
        assert isinstance(error, NoSpaceError)
        assert "raise the capacity" in str(error)
        assert leftovers(job.folder) == []
    with process(server, path) as job:
        assert job.error_of_put(0) is None
    require_all_well(server, path, [0])


@pytest.mark.parametrize("when", ["staged", "half uploaded"])
def test_the_folder_is_deleted(server: PieceStore, path: Path, connection: Server, when: str) -> None:
    with published(server, path, connection) as job:
        if when == "staged":
            connection.refuse("get log")
            pending = job.stage(1)
        else:
            pending = half_uploaded(job, connection, 1)
        shutil.rmtree(path)
        connection.refuse()
        error = ended(pending)
        if when == "staged":
            assert isinstance(error, MissingObjectError)
            assert "neither on the staging disk nor in the store" in str(error)
        else:
            assert error is None, "what is open is not lost"
        assert job.error_of_put(2) is None
    require_all_well(server, path, [0, 2] if when == "staged" else [0, 1, 2])
