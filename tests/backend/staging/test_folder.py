"""What lies in a staging folder: bounded, evicted oldest first, and moved without being lost."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging import StagingFolder, Uploader
from tensorstore_ck.backend.staging import folder as folder_module
from tensorstore_ck.backend.staging.upload_journal import JournalEntry
from tensorstore_ck.errors import InvalidOptionError, MissingObjectError, NoSpaceError
from tests.backend.staging.places import PACK, PART, UUID, held, journals, staging, unsent
from tests.end_to_end.crash.faulty import Death, Faults

KIB = 1 << 10
NAMES = [f"packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0{last}" for last in "ABCDEF"]


def published(path: Path, count: int, *, capacity_bytes: int = 1 << 30) -> StagingFolder:
    """Copies of 64 KiB each, the first one oldest, whatever the order of their names."""
    folder = staging(path, {name: bytes(64 * KIB) for name in NAMES[:count]}, capacity_bytes=capacity_bytes)
    for age, name in enumerate(reversed(NAMES[:count])):
        folder.publish([name])
        os.utime(Path(folder.path, folder.copies.path(name)), ns=(0, 10**18 + age * 10**9))
    return folder


def copies(folder: StagingFolder) -> list[str]:
    return [name for name in NAMES if folder.copies.size(name)]


# --- space ----------------------------------------------------------------------------------------------------------


def test_copies_are_evicted_oldest_first_and_no_more_than_needed(tmp_path: Path) -> None:
    folder = published(tmp_path, 4, capacity_bytes=320 * KIB)
    folder.unsent.put(PART, bytes(64 * KIB))
    assert folder.used_bytes() == 320 * KIB
    assert folder.evict(0) == 0
    assert folder.evict(100 * KIB) == 128 * KIB
    assert copies(folder) == NAMES[:2]
    assert folder.evict(100 * KIB) == 0
    assert folder.used_bytes() == 192 * KIB


def test_what_is_not_published_is_never_evicted(tmp_path: Path) -> None:
    folder = published(tmp_path, 2, capacity_bytes=200 * KIB)
    folder.unsent.put(PART, bytes(64 * KIB))
    with pytest.raises(NoSpaceError, match=r"150\.0 KiB more .* 64\.0 KiB of its 200\.0 KiB wait .* 128\.0 KiB of copies"):
        folder.evict(150 * KIB)
    assert copies(folder) == NAMES[:2], "in vain, so not at all"
    assert unsent(folder) == {PART}


def test_a_disk_that_is_fuller_than_the_capacity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path, 2)
    space = folder._root.space()
    assert space is not None
    monkeypatch.setattr(folder._root, "space", lambda: space._replace(free_bytes=10 * KIB))
    assert folder.evict(20 * KIB) == 64 * KIB
    with pytest.raises(NoSpaceError, match=r"its disk has 10\.0 KiB free"):
        folder.evict(1 << 20)


def test_a_sparse_copy_takes_what_it_holds(tmp_path: Path) -> None:
    folder = staging(tmp_path, {})
    folder.copies.keep_range(PACK, 1 << 30, 1 << 20, memoryview(bytes(128 * KIB)))
    assert folder.used_bytes() == 128 * KIB


def test_what_an_interrupted_process_left_is_evicted(tmp_path: Path) -> None:
    folder = published(tmp_path, 1, capacity_bytes=128 * KIB)
    leftover = Path(folder.path) / "copies/packs/.tmp-01ARZ3NDEKTSV4RRFFQ69G5F0A"
    leftover.write_bytes(bytes(64 * KIB))
    os.utime(leftover, ns=(0, 0))
    folder.evict(64 * KIB)
    assert not leftover.exists()
    assert copies(folder) == NAMES[:1]


def test_a_full_disk_frees_space_for_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = published(tmp_path, 1)
    folder.unsent.put(PART, b"part")
    space = folder._root.space()
    assert space is not None
    write = folder.journal.write

    def write_if_there_is_room(entry: JournalEntry) -> None:
        if copies(folder):
            raise NoSpaceError("no space left on device")
        write(entry)

    monkeypatch.setattr(folder.journal, "write", write_if_there_is_room)
    monkeypatch.setattr(folder._root, "space", lambda: space._replace(free_bytes=(1 << 20) - 1))
    store = MemoryBackend()
    Uploader(folder, store).upload([PART])
    assert held(store) == {PART: b"part"}


# --- opening --------------------------------------------------------------------------------------------------------


def test_a_folder_that_can_serve(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path / "not" / "there" / "yet", UUID, 1 << 20)
    assert folder.used_bytes() == 0
    folder.check()
    folder.check()
    assert folder.copies.keeps_ranges


def test_a_folder_that_another_process_begins_to_use_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It deletes what interrupted processes left, with the file by which this one tries the folder."""
    other = StagingFolder(tmp_path, UUID, 1 << 20)
    other.check()
    open_file, tried = os.open, list[str]()

    def sweep_after(path: Any, *args: Any, **options: Any) -> int:
        fd = open_file(path, *args, **options)
        if ".tmp-" in str(path):
            tried.append(str(path))
            other.drop_temporaries()
        return fd

    monkeypatch.setattr(os, "open", sweep_after)
    StagingFolder(tmp_path, UUID, 1 << 20).check()
    assert len(tried) == 1


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError, match=r"may use 1\.0 EiB, .* GiB are free: free space there, or lower its capacity"):
        StagingFolder(tmp_path, UUID, 1 << 60).check()


def test_a_network_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "filesystem_of", lambda _: "nfs4")
    with pytest.raises(InvalidOptionError, match="nfs4 filesystem, and must be on a disk of this host"):
        StagingFolder(tmp_path, UUID, 1 << 20).check()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOptionError, match="the staging folder"):
        StagingFolder(tmp_path / "file", UUID, 1 << 20).check()


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_capacity(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(InvalidOptionError, match="more than 0 bytes"):
        StagingFolder(tmp_path, UUID, capacity)


def test_stores_do_not_meet(tmp_path: Path) -> None:
    one, other = staging(tmp_path, {PART: b"one"}), StagingFolder(tmp_path, UUID.replace("0", "1"), 1 << 20)
    assert not unsent(other)
    assert other.used_bytes() == 0
    assert one.used_bytes() > 0


# --- objects --------------------------------------------------------------------------------------------------------


def test_publish_moves_and_forgets_the_upload(tmp_path: Path) -> None:
    data = {PACK: random.Random(1).randbytes(1000), PART: b"part"}
    folder = staging(tmp_path, data)
    Uploader(folder, MemoryBackend()).upload(data)
    assert len(journals(folder)) == 2
    os.utime(Path(folder.path) / "unsent" / PACK, ns=(0, 0))
    for _ in range(2):
        folder.publish(data)
        assert not unsent(folder)
        assert not journals(folder)
        assert {name: folder.copies.get(name) for name in data} == data
    assert min(file.modified_ns for file in folder.copies.files()) > 0, "what counts is when it was published"
    folder.publish([NAMES[3]])  # evicted long ago


def test_publish_replaces_a_sparse_copy(tmp_path: Path) -> None:
    folder = staging(tmp_path, {PACK: b"x" * 200_000})
    folder.copies.keep_range(PACK, 200_000, 0, memoryview(b"x" * 65536))
    folder.publish([PACK])
    assert folder.copies.get(PACK) == b"x" * 200_000


@pytest.mark.race
@pytest.mark.parametrize("mode", ["die-before", "die-after"])
def test_an_object_has_its_journal_until_it_is_published(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an upload would start over, under a name that others read."""
    for at in range(1, 20):
        folder = staging(tmp_path / str(at), {PACK: b"pack", PART: b"part"})
        for name in (PACK, PART):
            folder.journal.write(JournalEntry(name, is_complete=True))
        faults = Faults(mode, at)
        with monkeypatch.context() as patch:
            for call in ("utime", "rename", "unlink", "fsync"):
                patch.setattr(os, call, struck_by(faults, getattr(os, call)))
            try:
                folder.publish([PACK, PART])
                assert not faults.dead
            except Death:
                pass
        assert {name.rpartition("/")[2] for name in unsent(folder)} <= {name.rpartition("/")[2] for name in journals(folder)}
        folder.publish([PACK, PART])
        assert not unsent(folder)
        assert not journals(folder)
        assert (folder.copies.get(PACK), folder.copies.get(PART)) == (b"pack", b"part")
        if not faults.dead:
            assert at > 6
            return
    raise AssertionError("endless")


def struck_by(faults: Faults, call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **more: faults.call(call.__name__, lambda: call(*arguments, **more))


def test_manifests(tmp_path: Path) -> None:
    folder = StagingFolder(tmp_path, UUID, 1 << 20)
    assert folder.list_manifests() == []
    for key in ("01B-1", "01A-0", "01A-10"):
        folder.write_manifest(key, b"first")
        folder.write_manifest(key, key.encode())
    assert folder.list_manifests() == ["01A-0", "01A-10", "01B-1"]
    assert StagingFolder(tmp_path, UUID, 1 << 20).read_manifest("01A-0") == b"01A-0"
    for _ in range(2):
        folder.delete_manifest("01A-0")
    with pytest.raises(MissingObjectError):
        folder.read_manifest("01A-0")
    assert folder.list_manifests() == ["01A-10", "01B-1"]


def test_a_folder_that_was_deleted_while_in_use_is_made_again_with_its_lock(tmp_path: Path) -> None:
    folder, swept = staging(tmp_path, {}), list[str]()
    folder.enter(lambda: swept.append("first"))
    shutil.rmtree(folder.path)
    folder.unsent.put(PACK, b"new")
    other = staging(tmp_path, {})
    other.enter(lambda: swept.append("beside it"))
    other.leave()
    assert swept == ["first"]
    folder.leave()
    other.enter(lambda: swept.append("after it"))
    other.leave()
    assert swept == ["first", "after it"]
