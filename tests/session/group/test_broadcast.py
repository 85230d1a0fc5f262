"""broadcast=True: what all ranks restore in full is read once per group, and comes whole to all of them, or to none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.log import RefTable
from tensorstore_ck.session.group.channel import Channel
from tensorstore_ck.session.group.round import GO, OUTCOME
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store

RANKS = 4
ROWS = 1000


def full() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tensors = {f"w{number}": torch.randn(ROWS, 16, generator=generator) for number in range(8)}
    return {**tensors, "half": torch.randn(ROWS, 3, generator=generator).bfloat16(), "empty": torch.empty(0, 5), "bias": torch.ones(3)}


def put(folder: str) -> str:
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}", codec="raw")
    return store.put_snapshot({"model": full(), "step": 3}, ref="job", group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS).root


def target(sharded: bool) -> dict[str, Any]:
    model = {name: torch.full_like(tensor, 9.0) for name, tensor in full().items()}
    model["w1"] = model["w1"].t().contiguous().t()  # not row-major
    if sharded:
        mesh = DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False)
        model["w0"] = distribute_tensor(model["w0"], mesh, [Shard(0)], src_data_rank=None)
        if dist.get_rank() == 2:  # that one rank reads a tensor in part means that it is not broadcast
            del model["w3"]
    return {"model": model, "step": 0}


def restore(folder: str, sharded: bool) -> tuple[int, list[str]]:
    """Bytes read from packs by this rank, and what is wrong."""
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}")
    read = []

    def count(self: LocalBackend, name: str, offset: int, memory: memoryview, original: Any = LocalBackend.read_into) -> None:
        read.append(len(memory) if name.startswith("packs/") else 0)
        original(self, name, offset, memory)

    state = target(sharded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorstore_ck.session.group.group_restore.host_key", bytes)  # so that what is not broadcast is read by each
        patch.setattr(LocalBackend, "read_into", count)
        store.checkout("job", into=state, strict=not sharded, group=GROUPS[RANKS], broadcast=True, timeout_seconds=TIMEOUT_SECONDS)
    wrong = [] if state["step"] == 3 else ["step"]
    for name, tensor in full().items():
        found = state["model"].get(name)
        if (found is not None and not sharded) or name not in ("w0", "w3"):
            wrong += [] if torch.equal(found, tensor.to(found.dtype)) else [name]
    if sharded:
        rows = slice(dist.get_rank() * ROWS // RANKS, (dist.get_rank() + 1) * ROWS // RANKS)
        wrong += [] if torch.equal(state["model"]["w0"].to_local(), full()["w0"][rows]) else ["w0"]
    store.close()
    return sum(read), wrong


@pytest.fixture(scope="module")
def folder(pool_of_all_tests: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broadcast")
    make_store(folder, 1 << 16)
    pool_of_all_tests.resume()
    assert len(set(pool_of_all_tests.run(put, str(folder), ranks=RANKS))) == 1
    return folder


@pytest.mark.slow
def test_each_tensor_is_read_once(pool: Pool, folder: Path) -> None:
    answers = pool.run(restore, str(folder), False, ranks=RANKS)
    assert [wrong for _, wrong in answers] == [[]] * RANKS
    needed = 8 * ROWS * 16 * 4 + ROWS * 3 * 2
    assert needed <= sum(read for read, _ in answers) <= 1.1 * needed
    assert max(read for read, _ in answers) <= 0.3 * needed


def test_what_only_some_want_in_full_is_not_broadcast(pool: Pool, folder: Path) -> None:
    answers = pool.run(restore, str(folder), True, ranks=RANKS)
    assert [wrong for _, wrong in answers] == [[]] * RANKS


def fail(folder: str, damaged: int) -> str:
    """This rank finds damage when it reads."""
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}")

    def refuse(self: LocalBackend, name: str, offset: int, memory: memoryview, original: Any = LocalBackend.read_into) -> None:
        original(self, name, offset, memory)
        if name.startswith("packs/") and len(memory) > 1000 and dist.get_rank() == damaged:
            memory[5] ^= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBackend, "read_into", refuse)
        try:
            store.checkout("job", into=target(False), group=GROUPS[RANKS], broadcast=True, timeout_seconds=TIMEOUT_SECONDS)
        except tsck.StoreError as exc:
            return str(exc)
        finally:
            store.close()
    return ""


@pytest.mark.parametrize("damaged", [0, 3])
def test_one_rank_fails_and_nobody_waits_in_a_collective(pool: Pool, folder: Path, damaged: int) -> None:
    for message in pool.run(fail, str(folder), damaged, ranks=RANKS):
        assert f"rank {damaged}" in message
        assert "does not match its hash" in message
    assert [wrong for _, wrong in pool.run(restore, str(folder), False, ranks=RANKS)] == [[]] * RANKS, "the group goes on"


def miss_the_snapshot(folder: str, late: int) -> str:
    """Rank 1 does not see once what rank 0 has found. Rank `late` looks at rank 0's answer when the outcome is known already."""
    store, left = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}"), [1] if dist.get_rank() == 1 else []

    def snapshot(self: RefTable, ulid: Any, original: Any = RefTable.snapshot) -> Any:
        return None if left and left.pop() else original(self, ulid)

    def wait(self: Channel, keys: Sequence[str], *args: Any, original: Any = Channel.wait, **options: Any) -> Any:
        if dist.get_rank() == late and GO in keys and slow.pop():
            original(self, [OUTCOME], *args, **options)
        return original(self, keys, *args, **options)

    error, slow = "", [False] * 99 + [True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RefTable, "snapshot", snapshot)
        patch.setattr(Channel, "wait", wait)
        try:
            store.checkout("job", into=target(False), group=GROUPS[RANKS], broadcast=True, timeout_seconds=TIMEOUT_SECONDS)
        except tsck.StoreError as exc:
            error = str(exc)
    state = target(False)
    store.checkout("job", into=state, group=GROUPS[RANKS], broadcast=True, timeout_seconds=TIMEOUT_SECONDS)
    store.close()
    assert state["step"] == 3
    return error


@pytest.mark.parametrize("late", [-1, 3])
def test_one_rank_fails_before_it_reads(pool: Pool, folder: Path, late: int) -> None:
    for message in pool.run(miss_the_snapshot, str(folder), late, ranks=RANKS):
        assert "rank 1" in message
        assert "does not see the snapshot" in message


def restore_differently(folder: str, odd: int) -> str:
    """What it raises; a restore after it works."""
    options: dict[str, Any] = {"group": GROUPS[RANKS], "timeout_seconds": TIMEOUT_SECONDS}
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}") as store:
        try:
            store.checkout("job", into=target(False), broadcast=dist.get_rank() == odd, **options)
        except tsck.InvalidOptionError as exc:
            assert store.checkout("job", **options)["step"] == 3
            return str(exc)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_differ_in_it_are_refused(pool: Pool, folder: Path, odd: int) -> None:
    """They would wait for each other until the timeout."""
    for said in pool.run(restore_differently, str(folder), odd, ranks=RANKS):
        assert "the ranks differ in broadcast" in said
        assert f"rank {odd}: True" in said
