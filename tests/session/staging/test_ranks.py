"""Staged saves of many ranks, by real processes: found again by the same ranks, fewer or more, as far as their disks are there."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.cli import main
from tensorstore_ck.session.save.publish_rounds import TRIES
from tests.session.group.pool import Pool, make_store
from tests.session.staging import jobs

OWN = ("disk-0", "disk-1", "disk-2")
SHARED = ("disk", "disk", "disk")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path)
    return tmp_path


def require_clean(folder: Path, steps: list[int | None], *disks: str) -> None:
    """Nothing is pinned or staged any more, all is well, and the disks have copies alone."""
    with tsck.open(folder / "store", cache_dir=folder / "cache-elsewhere") as store:
        assert [snapshot.step for snapshot in reversed(store.log("job"))] == steps
        assert [pin.owner for pin in store.pins()] == []
        assert list(store.engine.log.view().all_staged()) == []
        assert store.fsck(read_data=True).ok
    for disk in disks:
        found = [info.name for info in LocalBackend(str(folder / disk)).list("")]
        assert [name for name in found if not name.endswith("/users") and "/copies/" not in name] == [], disk


def test_the_same_ranks_go_on(pool: Pool, folder: Path) -> None:
    assert pool.run(jobs.leave_staged, str(folder), 2, OWN, (1, 2), ranks=2) == [[1, 2], [1, 2]]
    found = pool.run(jobs.restore_both, str(folder), 2, OWN, 3, ranks=2)
    assert found == [(2, 2, 3, [0, 1, 2, 3])] * 2
    require_clean(folder, [0, 1, 2, 3], "disk-0", "disk-1")


@pytest.mark.parametrize(("ranks", "disks"), [(2, OWN[1::-1]), (3, OWN)], ids=["moved", "more"])
def test_other_ranks_restore_what_is_staged(pool: Pool, folder: Path, ranks: int, disks: tuple[str, ...]) -> None:
    """By packs on the disks of each other's hosts, none of which is in the store."""
    pool.run(jobs.leave_packs_staged, str(folder), 2, OWN, ranks=2)
    assert pool.run(jobs.restore_both, str(folder), ranks, disks, 2, ranks=ranks) == [(1, 1, 2, [0, 1, 2])] * ranks
    require_clean(folder, [0, 1, 2], *disks[:ranks])


@pytest.mark.parametrize("eager", [0, 1])
def test_ranks_that_end_when_some_have_begun_to_publish(pool: Pool, folder: Path, eager: int) -> None:
    assert pool.run(jobs.leave_while_one_publishes, str(folder), 2, OWN, eager, ranks=2) == [(1, [])] * 2
    found = pool.run(jobs.restore_both, str(folder), 2, OWN, 2, ranks=2)
    assert found == [(1, 1, 2, [0, 1, 2])] * 2
    require_clean(folder, [0, 1, 2], "disk-0", "disk-1")


@pytest.mark.parametrize(("eager", "tombstone_seconds"), [(0, 86_400), (1, 0)])
def test_ranks_publish_what_gc_freed_under_new_names(pool: Pool, folder: Path, eager: int, tombstone_seconds: int) -> None:
    assert pool.run(jobs.leave_while_one_publishes, str(folder), 2, OWN, eager, ranks=2) == [(1, [])] * 2
    with tsck.open(folder / "store", cache_dir=folder / "cache-gc") as store:
        assert store.gc(tsck.GcOptions(min_age_seconds=0, max_delete=1, tombstone_seconds=tombstone_seconds)).deleted_bytes > 0
    assert pool.run(jobs.resume, str(folder), 2, OWN, ranks=2) == [(1, [0, 1], "")] * 2
    require_clean(folder, [0, 1], "disk-0", "disk-1")


@pytest.mark.parametrize(("ranks", "disks"), [(1, SHARED), (3, OWN)], ids=["fewer of one host", "more of several hosts"])
def test_other_ranks_go_on(pool: Pool, folder: Path, ranks: int, disks: tuple[str, ...]) -> None:
    pool.run(jobs.leave_staged, str(folder), 2, disks, (1, 2), ranks=2)
    for step, steps, _ in pool.run(jobs.resume, str(folder), ranks, disks, ranks=ranks):
        assert (step, steps) == (2, [0, 1, 2])
    require_clean(folder, [0, 1, 2], *disks[:ranks])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_read_the_log_costs_one_call(pool: Pool, folder: Path, failing: int) -> None:
    pool.run(jobs.leave_staged, str(folder), 2, OWN, (1, 2), ranks=2)
    for error, *found, kinds in pool.run(jobs.resume_twice, str(folder), 2, OWN, failing, ranks=2):
        assert f"rank {failing}: BackendUnavailableError" in error
        assert found == [2, [0, 1, 2]]
        assert kinds.count("published") == 2  # by no rank twice
        assert "retried" not in kinds
    require_clean(folder, [0, 1, 2], "disk-0", "disk-1")


def test_a_missing_host_is_waited_for(pool: Pool, folder: Path) -> None:
    pool.run(jobs.leave_staged, str(folder), 2, OWN, (1,), ranks=2)
    found = pool.run(jobs.resume, str(folder), 2, ("disk-0", "disk-2"), ranks=2)
    assert [each[:2] for each in found] == [(0, [0])] * 2
    assert "no host here has the files of rank 1" in found[0][2]
    with tsck.open(folder / "store", cache_dir=folder / "cache-elsewhere") as store:
        assert [snapshot.step for snapshot in store.log("job")] == [0]
        assert [info.step for _, info in store.engine.log.view().all_staged()] == [1]
    for step, steps, _ in pool.run(jobs.resume, str(folder), 2, OWN, ranks=2):
        assert (step, steps) == (1, [0, 1])
    require_clean(folder, [0, 1], *OWN[:2])


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_damaged_disk(pool: Pool, folder: Path, damaged: int, copies: int) -> None:
    """A pack is taken from another host that has a copy of it; without one the save is lost, by name, and the next one is not."""
    pool.run(jobs.leave_packs_staged, str(folder), 2, OWN, ranks=2)
    (own,), (other,) = (list((folder / disk).iterdir()) for disk in (OWN[damaged], OWN[1 - damaged]))
    packs = [pack.relative_to(own) for pack in own.glob("unsent/packs/*/*")]
    (manifest,) = own.glob(f"staged/*-{damaged}")
    if copies:
        shutil.copy(manifest, other / "staged")
        for pack in packs:
            (other / pack.parent).mkdir(exist_ok=True)
            shutil.copy(own / pack, other / pack)
    for pack in packs:
        for path in (own / pack, other / pack) if copies == 2 else (own / pack,):
            os.truncate(path, path.stat().st_size - 1)
    found = pool.run(jobs.resume_and_put, str(folder), 2, OWN, 2, ranks=2)
    if copies == 1:
        assert [steps for steps, _ in found] == [[0, 1, 2]] * 2
    else:
        assert [steps for steps, _ in found] == [[0, 2]] * 2
        for _, told in found:
            assert f"the staging disk damaged {packs[0].relative_to('unsent')} in {folder}" in told
    require_clean(folder, found[0][0], *OWN[:2])


@pytest.mark.parametrize("canceller", [0, 1])
def test_cancelled_on_one_rank(pool: Pool, folder: Path, canceller: int) -> None:
    found = pool.run(jobs.cancel, str(folder), 2, OWN, canceller, ranks=2)
    assert found[canceller] == ("SnapshotDroppedError", 2)
    assert found[1 - canceller] == ("SnapshotAbortedError", 2)
    require_clean(folder, [0, 2], *OWN[:2])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_during_its_upload(pool: Pool, folder: Path, failing: int) -> None:
    for error, kinds, steps in pool.run(jobs.refuse_uploads, str(folder), 2, OWN, failing, 1, ranks=2):
        assert (error, steps) == ("", [0, 1, 2])
        assert "retried" in kinds
        assert kinds[-1] == "published"
    require_clean(folder, [0, 1, 2], *OWN[:2])


@pytest.mark.parametrize("failing", [0, 1])
def test_no_save_overtakes_one_that_failed_at_each_try(pool: Pool, folder: Path, failing: int) -> None:
    for error, _, steps in pool.run(jobs.refuse_uploads, str(folder), 2, OWN, failing, TRIES, ranks=2):
        assert (error, steps) == ("PermissionDeniedError", [0, 1, 2])
    require_clean(folder, [0, 1, 2], *OWN[:2])


def test_ranks_that_die_before_the_log_knows(pool: Pool, folder: Path) -> None:
    pool.ask(jobs.die_before_the_log_knows, str(folder), 2, OWN, ranks=2)
    for stale_seconds in (jobs.DAY_SECONDS, 0):
        assert list((folder / "disk-0").glob("*/staged/*")), "somebody may still be at it"
        for step, steps, _ in pool.run(jobs.resume, str(folder), 2, OWN, stale_seconds, ranks=2):
            assert (step, steps) == (0, [0])
    require_clean(folder, [0], *OWN[:2])


def test_a_rank_that_does_not_know_whether_it_is_staged_keeps_it(pool: Pool, folder: Path) -> None:
    assert pool.run(jobs.lose_the_log, str(folder), 2, OWN, ranks=2) == ["", "UndecidedError"]
    for step, steps, _ in pool.run(jobs.resume, str(folder), 2, OWN, ranks=2):
        assert (step, steps) == (1, [0, 1])
    require_clean(folder, [0, 1], *OWN[:2])


def test_a_rank_that_does_not_see_what_was_published(pool: Pool, folder: Path) -> None:
    assert pool.run(jobs.miss_what_was_published, str(folder), 2, OWN, ranks=2) == ["", "BackendUnavailableError"]


def test_one_process_publishes_what_lies_on_its_disk_in_full(pool: Pool, folder: Path) -> None:
    pool.run(jobs.leave_staged, str(folder), 2, SHARED, (1, 2), ranks=2)
    (shown, listed) = (tsck_staging(folder, *more) for more in ((), ("--json",)))
    assert [line.split()[4] for line in shown.splitlines()[1:]] == ["2/2", "2/2"]
    assert [put["problems"] for put in json.loads(listed)] == [[], []]
    assert tsck_staging(folder, "resume").count("published job at") == 2
    require_clean(folder, [0, 1, 2], "disk")


def test_one_process_cannot_publish_what_lies_on_several_disks(pool: Pool, folder: Path) -> None:
    pool.run(jobs.leave_staged, str(folder), 2, OWN, (1,), ranks=2)
    assert "what rank 1 staged is not on this disk" in tsck_staging(folder, "resume", disk="disk-0")
    assert "what rank 0 staged is not on this disk" in tsck_staging(folder, disk="disk-1")
    tsck_staging(folder, "drop", "--all", "--yes", disk="disk-1")
    for step, steps, _ in pool.run(jobs.resume, str(folder), 2, OWN, ranks=2):
        assert (step, steps) == (0, [0])
    require_clean(folder, [0], *OWN[:2])


def tsck_staging(folder: Path, *arguments: str, disk: str = "disk") -> str:
    options = ["-s", str(folder / "store"), "--cache-dir", str(folder / "cache-cli"), "--staging", str(folder / disk)]
    result = CliRunner().invoke(main, ["staging", *arguments, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout
