"""Ranks that have opened different stores, such as a folder on each host's own disk.

If the stores are copies of one store, nothing is published that lacks a rank's part. If they are not, the ranks never meet, and say why.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.session.group import Group
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool

RANKS = 3
ODD = 2
"""The rank that has a folder of its own."""


def save(folder: str, how: str) -> str:
    rank = dist.get_rank()
    where = f"{folder}/{'copy' if rank == ODD else 'store'}"
    staging = f"{folder}/stage-{rank}" if how == "staged" else None
    with tsck.open(where, cache_dir=f"{folder}/cache-{rank}", staging=staging) as store:
        share = tsck.FlatShard(torch.full((10,), float(rank)), (10 * RANKS,), 10 * rank)
        options = {"ref": "runs/one", "step": 1, "group": GROUPS[RANKS], "timeout_seconds": TIMEOUT_SECONDS}
        try:
            if how == "asynchronous":
                store.put_snapshot_async({"w": share}, **options).wait()
            else:
                store.put_snapshot({"w": share}, **options)
        except tsck.InvalidOptionError as exc:
            return str(exc)
    raise AssertionError("it was published")


@pytest.mark.parametrize("how", ["waited", "asynchronous", pytest.param("staged", marks=pytest.mark.slow)])
def test_a_rank_with_a_store_of_its_own_is_named_by_all(pool: Pool, tmp_path: Path, how: str) -> None:
    tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache").close()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    for said in pool.run(save, str(tmp_path), how, ranks=RANKS):
        assert f"what rank {ODD} wrote" in said
        assert "open one that all hosts share" in said
    for name in ("store", "copy"):
        with tsck.open(tmp_path / name, read_only=True, cache_dir=tmp_path / f"look-{name}") as store:
            assert not store.branches()


def save_elsewhere(folder: str) -> str:
    rank = dist.get_rank()
    with tsck.open(f"{folder}/store-{rank}", create=True, cache_dir=f"{folder}/cache-{rank}") as store:
        try:
            store.put_snapshot({"w": torch.ones(3)}, ref="runs/one", group=GROUPS[2], timeout_seconds=0.5)
        except tsck.SnapshotAbortedError as exc:
            return str(exc)
    raise AssertionError("it was published")


@pytest.mark.slow  # the other rank waits 10 s longer than the first one
def test_ranks_that_never_meet_say_that_they_have_different_stores(pool: Pool, tmp_path: Path) -> None:
    for rank, said in enumerate(pool.run(save_elsewhere, str(tmp_path), ranks=2)):
        assert f"rank {1 - rank} was last in another store, {tmp_path}/store-{1 - rank} on " in said
        assert f"and this rank waits in {tmp_path}/store-{rank} on " in said


def save_after_one_reopened(folder: str) -> list[str]:
    rank, said = dist.get_rank(), list[str]()
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}")
    options: dict[str, Any] = {"ref": "runs/one", "group": GROUPS[2]}
    store.put_snapshot({"w": torch.ones(3)}, step=1, timeout_seconds=TIMEOUT_SECONDS, **options)
    if rank == 1:
        store.close()
        store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Group.begin.__kwdefaults__, "grace", 0.5)  # type: ignore[arg-type]
        for step in (2, 3):
            with pytest.raises(tsck.SnapshotAbortedError) as aborted:
                store.put_snapshot({"w": torch.ones(3)}, step=step, timeout_seconds=0.5, **options)
            said.append(str(aborted.value))
    store.close()
    return said


def test_a_rank_that_opened_the_store_again_alone_is_told_so(pool: Pool, tmp_path: Path) -> None:
    tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache").close()
    _, said = pool.run(save_after_one_reopened, str(tmp_path), ranks=2)
    assert all("rank 0 is late, or has not opened the store again, as this rank has" in each for each in said), said
