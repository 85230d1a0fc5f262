"""Replicas that part while snapshots are staged: warned of on the rank and on the first one, and the other copy is kept."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store


def put_staged(folder: str) -> Any:
    """Rank 1 has another element after the first save."""
    rank = dist.get_rank()
    state = {"w": torch.arange(40_000.0)}
    with (
        warnings.catch_warnings(record=True) as caught,
        tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", staging=tsck.Staging(f"{folder}/disk-{rank}")) as store,
    ):
        warnings.simplefilter("always")
        for step in range(3):
            store.put_snapshot_async(state, ref="job", step=step, group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS).wait(TIMEOUT_SECONDS)
            state["w"][7] = rank
        kept = {name: store.checkout(name)["w"][7].item() for name in store.branches() if name.startswith("drift/")}
        marks = [each.mark for each in store.log("job")]
    return [str(each.message) for each in caught if "drift" in str(each.message)], kept, marks


def test_staged_replicas_that_part(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    (first, kept, marks), (second, *_) = pool.run(put_staged, str(tmp_path), ranks=2)
    assert marks == ["drift", "drift", ""]
    assert len(first) == 2
    assert all("is marked drift: rank 1 had other values than rank 0" in each for each in first)
    assert all(each.startswith("rank 1 no longer has the values of rank 0 in 'w'") for each in second)
    assert len(second) == 2
    assert kept == {"drift/job/rank-1": 1.0}
