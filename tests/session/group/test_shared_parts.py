"""Ranks that need the parts of nearly all ranks read them once together; ranks that need a few read those, and gather nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.session import restoring
from tensorstore_ck.state import shared_parts
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store

RANKS = 8
FEW = 3
"""Parts that a rank reads by itself: twice its share of one, and one more."""
SIZE = 1000


def full(number: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


def state(kind: str) -> dict[str, Any]:
    """This rank's side, as ZeRO 3 cuts it: an equal piece of each tensor; or as ZeRO 2 does: some tensors whole."""
    rank, cut = dist.get_rank(), {}
    for number in range(RANKS):
        start, stop = (rank * SIZE // RANKS, (rank + 1) * SIZE // RANKS) if kind == "zero3" else (0, SIZE if number == rank else 0)
        cut[f"w{number}"] = tsck.FlatShard(full(number)[start:stop].clone(), (SIZE,), start)
    return {"model": cut, "step": 3}


def put(folder: str) -> None:
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}")
    store.put_snapshot(state("zero3"), ref="job", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    store.close()


def checkout(folder: str, kinds: Sequence[str], spoil: str = "") -> tuple[set[str], int, str]:
    """The parts that this rank read from the store, how many were gathered, and the error.

    `kinds`: what each rank restores into; "": it reads all tensors whole.
    """
    rank = dist.get_rank()
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}")
    read: list[str] = []
    gathered: list[memoryview] = []

    def get(self: LocalBackend, name: str, *, max_bytes: int, original: Any = LocalBackend.get) -> bytes:
        data: bytes = original(self, name, max_bytes=max_bytes)
        if name.startswith("parts/"):
            read.append(name)
            if rank == 5 and sharing and spoil == "unreadable":
                raise BackendUnavailableError("no answer", object_id=name)
            if rank == 5 and sharing and spoil == "damaged":
                return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
        return data

    sharing: list[bool] = []

    def read_stored(self: Any, number: int, original: Any = shared_parts.SharedParts._read_stored) -> bytes:
        sharing.append(True)
        try:
            data: bytes = original(self, number)
            return data
        finally:
            sharing.clear()

    def gather(*args: Any, original: Any = shared_parts.gather_bytes) -> Any:
        found = original(*args)
        gathered.extend(data for share in found for data in share)
        return found

    target = state(kinds[rank]) if kinds[rank] else None
    if target is not None:
        for piece in target["model"].values():
            piece.local.zero_()
        if spoil == "misfit" and rank == 2:
            target["model"]["w0"] = torch.zeros(7)
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "SHARED_PARTS", RANKS)
        patch.setattr(shared_parts, "FEW_PARTS", 1)
        patch.setattr(shared_parts, "gather_bytes", gather)
        patch.setattr(shared_parts.SharedParts, "_read_stored", read_stored)
        patch.setattr(LocalBackend, "get", get)
        try:
            found = store.checkout("job", into=target, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
        except tsck.StoreError as exc:
            error = str(exc)
    if not error and target is None:
        assert all(torch.equal(found["model"][f"w{number}"], full(number)) for number in range(RANKS))
    elif not error:
        expected = state(kinds[rank])["model"]
        assert all(torch.equal(piece.local, expected[name].local) for name, piece in target["model"].items())  # type: ignore[index]
    store.close()
    return set(read), len(gathered), error


@pytest.fixture(scope="module")
def folder(pool_of_all_tests: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    make_store(folder, 1 << 16)
    pool_of_all_tests.resume()
    pool_of_all_tests.run(put, str(folder), ranks=RANKS)
    return folder


def test_on_the_layout_of_the_save_each_rank_reads_its_own_part(pool: Pool, folder: Path) -> None:
    for read, gathered, error in pool.run(checkout, str(folder), ["zero3"] * RANKS, ranks=RANKS):
        assert (len(read) <= FEW, gathered, error) == (True, 0, "")


@pytest.mark.parametrize(
    "kinds", [["zero2"] * RANKS, ["zero3"] * (RANKS - 1) + ["zero2"]], ids=["all ranks need many parts", "one rank needs many parts"]
)
def test_on_another_layout_each_part_is_gathered_from_one_rank(pool: Pool, folder: Path, kinds: list[str]) -> None:
    for read, gathered, error in pool.run(checkout, str(folder), kinds, ranks=RANKS):
        assert (len(read) <= FEW + 1, gathered, error) == (True, RANKS, "")


def test_a_rank_that_reads_whole_tensors_takes_part(pool: Pool, folder: Path) -> None:
    answers = pool.run(checkout, str(folder), ["", *["zero2"] * (RANKS - 1)], ranks=RANKS)
    assert [error for *_, error in answers] == [""] * RANKS
    assert max(len(read) for read, *_ in answers[1:]) <= FEW + 1


@pytest.mark.parametrize("spoil", ["unreadable", "damaged"])
def test_a_part_that_does_not_arrive_is_read_by_those_who_need_it(pool: Pool, folder: Path, spoil: str) -> None:
    answers = pool.run(checkout, str(folder), ["zero2"] * RANKS, spoil, ranks=RANKS)
    assert [error for *_, error in answers] == [""] * RANKS


def test_a_rank_that_fails_before_leaves_none_waiting(pool: Pool, folder: Path) -> None:
    for _, gathered, error in pool.run(checkout, str(folder), ["zero2"] * RANKS, "misfit", ranks=RANKS):
        assert gathered == 0
        assert "rank 2" in error
    answers = pool.run(checkout, str(folder), ["zero2"] * RANKS, ranks=RANKS)
    assert [error for *_, error in answers] == [""] * RANKS, "the group goes on"
