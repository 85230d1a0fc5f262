"""What lost data in other stores, one schedule each. The complete cases of the other files hold these too; here they have names."""

import pytest

from tensorstore_ck.errors import NotFoundError, SnapshotExpiredError
from tests.gc.interleavings.invariant import root_names
from tests.gc.interleavings.scenes import FAILED, Scene, collector, reader, user
from tests.gc.interleavings.schedule import FAULTS, drive
from tests.gc.interleavings.test_gc import dying, saver, settler, sparse
from tests.gc.interleavings.test_writers import writers

pytestmark = pytest.mark.race


@pytest.mark.parametrize("stop", ["put packs/", "put parts/", "put snapshots/", "create log/"])
def test_writer_stopped_past_any_time_out(stop: str) -> None:
    """restic #2715, and rustic under SIGSTOP: a backup slept longer than its lock lived, prune deleted what it relied on."""
    scene, host = dying()
    gcs = (collector(name, table=host, settle=True) for name in "GH")
    contents, ended = drive(scene.case(*gcs, saver(host, "x q")), f"A until {stop}", "G", "H", "A")
    assert ended["A"].error is None, "it wrote again what was gone"
    assert "other" in root_names(contents)


def test_two_gcs_that_know_nothing_of_each_other() -> None:
    """kopia #1087: maintenance by two clients deleted blobs that one of them had just begun to use."""
    scene, host = sparse()
    gcs = [collector(name, table=host, compact=True) for name in "GH"]
    for stop in ("put packs/", "put moved/", "create log/", "delete "):
        contents, ended = drive(scene.case(*gcs, saver(host, "x y")), f"G until {stop}", "A until create log/", "H", "A", "G")
        assert not any(outcome.error for outcome in ended.values())
        assert {"job", "other"} <= set(root_names(contents))


def test_name_that_rises_again() -> None:
    """What xet's nonce prevents: the same content is stored again under the name that a late delete will remove."""
    scene, host = dying()
    case = scene.case(collector("G", table=host), saver(host, "x y"))._replace(faults=FAULTS, max_faults=1)
    contents, ended = drive(case, "G until delete packs/", "G:again", "G", "A")
    assert ended["A"].error is None
    new = {name for name in contents.objects if name.startswith("packs/")} - set(case.start.objects)
    assert len(new) == 1, "the blocks are there again, in a pack of another name: the second delete finds nothing"


def test_reply_that_was_lost() -> None:
    """icechunk #2099: a commit that had succeeded was reported as a conflict, because its retry found itself."""
    case = writers("A", "B")
    contents, ended = drive(case, "A until create log/", "A:lost", "B", "A")
    assert ended["A"].error is None
    assert ended["B"].error is not None
    assert contents.log_end == case.start.log_end + 1


def test_commits_of_two_local_processes() -> None:
    """icechunk #804: two processes on one file system both made the same commit."""
    _, ended = drive(writers("A", "B"), "A until create log/", "B until create log/", "A", "B")
    assert sorted(outcome.error is None for outcome in ended.values()) == [False, True]


@pytest.mark.parametrize("stop", ["list packs/", "create log/00000000000000000/00000000000000000006", "delete "])
def test_tag_of_a_root_that_is_being_swept(stop: str) -> None:
    """icechunk design 011: a branch or tag made from a snapshot about which gc has decided already."""
    scene = Scene()
    info = scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    scene.forget("job@0")
    scene.purge()
    host = scene.host()
    root = info.root.hex()
    tagger = user("U", lambda store: store.tag("t", root), table=host, may_raise=(*FAILED, SnapshotExpiredError, NotFoundError))
    contents, ended = drive(scene.case(collector("G", table=host), tagger), f"G until {stop}", "U", "G")
    assert ("t" in root_names(contents)) is (ended["U"].error is None)


def test_undo_against_sweep() -> None:
    scene = Scene()
    scene.put("job", "x y", step=0)
    scene.put("job", "y z", step=1)
    scene.forget("job@0")
    host = scene.host()
    undoer = user("U", lambda store: store.undo("job@0"), table=host, may_raise=(*FAILED, NotFoundError))
    case = scene.case(collector("G", table=host, compact=True), undoer)
    _, ended = drive(case, "G until create log/", "U", "G")
    assert ended["U"].error is None, "it came first"
    _, ended = drive(case, "U until create log/", "G", "U")
    assert isinstance(ended["U"].error, NotFoundError), "it is told that it came too late"


def test_reader_across_compaction() -> None:
    """It opened the snapshot before, and reads its blocks after the pack is gone."""
    scene, host = sparse()
    case = scene.case(collector("G", table=host, compact=True), reader("R", "job", table=host))
    for stop in ("get snapshots/", "get parts/", "read packs/"):
        contents, ended = drive(case, f"R until {stop}", "G", "R")
        assert ended["R"].error is None
        assert any(name.startswith("moved/") for name in contents.objects)


def test_host_that_jumps_over_forgotten_tombstones() -> None:
    """Its index has blocks whose pack went, and so did the tombstone, before it looked again."""
    scene, host = dying()
    case = scene.case(collector("G", table=host), settler(host), saver(host, "x q"))
    contents, ended = drive(case, "G until delete ", "S", "A", "G")
    assert ended["A"].error is None
    assert "other" in root_names(contents)
