"""Ranks that make different calls all learn which, at once, and make the next one together: they stay in step."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

RANKS = 2


def training() -> tsck.TrainingState:
    torch.manual_seed(1)
    return tsck.TrainingState(model=torch.nn.Linear(2, 2))


def save(store: tsck.Store, **options: Any) -> object:
    return store.put_snapshot({"w": torch.ones(3)}, **options)


def save_in_the_background(store: tsck.Store, **options: Any) -> object:
    return store.put_snapshot_async({"w": torch.ones(3)}, **options).wait()


def save_training(store: tsck.Store, **options: Any) -> object:
    return training().put(store, **options)


def restore_training(store: tsck.Store, *, ref: str, step: int, **options: Any) -> object:
    return training().restore(store, ref, **options)


def check(store: tsck.Store, *, ref: str, step: int, **options: Any) -> object:
    """It returns what it finds."""
    raise tsck.InvalidOptionError(store.check({"w": torch.ones(3)}, **options).problems[0].message)


Call = Callable[..., object]
PAIRS: list[tuple[Call, Call]] = [
    (save, save_in_the_background),
    (save, save_training),
    (save_training, restore_training),
    (save_in_the_background, check),
]


def call_both(folder: str, ref: str, calls: tuple[Call, Call]) -> tuple[str, int | None]:
    """What the different calls raise here; and the step of the save after them."""
    store = opened(folder, RANKS)
    options: dict[str, Any] = {"group": GROUPS[RANKS], "timeout_seconds": TIMEOUT_SECONDS}
    try:
        calls[dist.get_rank()](store, ref=ref, step=1, **options)
    except tsck.InvalidOptionError as exc:
        return str(exc), store.put_snapshot({"w": torch.ones(3)}, ref=ref, step=2, **options).step
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("is_swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
def test_ranks_that_make_different_calls(pool: Pool, folder: Path, pair: tuple[Call, Call], *, is_swapped: bool) -> None:
    one, two = reversed(pair) if is_swapped else pair
    ref = f"{one.__name__}-{two.__name__}"
    for said, step in pool.run(call_both, str(folder), ref, (one, two), ranks=RANKS):
        assert "the ranks make different calls: rank 0: " in said
        assert "; rank 1: " in said
        assert step == 2


def save_where_one_stages(folder: str, rank: int) -> str:
    own = dist.get_rank()
    staging = f"{folder}/disk" if own == rank else None
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/staging-cache-{own}", staging=staging)
    with pytest.raises(tsck.InvalidOptionError) as refused:
        save_in_the_background(store, ref="job", step=1, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    with suppress(tsck.InvalidOptionError):  # on the rank that does not belong to the group; the others have it among their problems
        assert not store.check({"step": 1}, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS).ok
    store.close()
    return str(refused.value)


@pytest.mark.parametrize("rank", range(RANKS))
def test_ranks_of_which_one_stages(pool: Pool, folder: Path, rank: int) -> None:
    """Some hosts lack the disk: the save fails at once on all ranks, and the error says why."""
    said, others = ("with staging=", "without staging=") if rank else ("without staging=", "with staging=")
    for reason in pool.run(save_where_one_stages, str(folder), rank, ranks=RANKS):
        assert f"rank 1: it opened the store {said}, and rank 0 {others}: open it in the same way on all ranks" in reason
