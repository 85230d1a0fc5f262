"""What a staging disk does wrong: bytes that are not what was written, no space, no folder. Never wrong bytes, never silence."""

import shutil
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import CorruptObjectError, DamageError, MissingObjectError, NoSpaceError
from tests.backend.staging.places import PieceStore
from tests.session.staging.places import (
    KIB,
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
)

pytestmark = pytest.mark.usefixtures("quick")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_of(job: Process, pattern: str) -> Path:
    (found,) = Path(job.folder.path).glob(pattern)
    return found


@pytest.mark.parametrize("kind", ["packs", "parts", "snapshots"])
def test_before_publication(server: PieceStore, path: Path, connection: Server, kind: str) -> None:
    """The only bytes that there are: an error for every reader, at any time."""
    connection.refuse(*UPLOADS)
    with process(server, path, store_faults=connection) as job:
        pending = job.stage(0)
        damage(one_of(job, f"unsent/{kind}/*/*"))
        job.store.engine._parts.clear()
        with pytest.raises(CorruptObjectError, match=kind):
            job.store.checkout("job^staged")
        connection.refuse()
        ended(pending)
    with process(server, path.with_name("elsewhere")) as other:
        if "job" in other.store.branches():
            with pytest.raises(DamageError):
                other.store.checkout("job")
            assert not other.store.fsck(read_data=True).ok


@pytest.mark.parametrize("kind", ["packs", "parts", "snapshots"])
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
