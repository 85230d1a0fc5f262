"""An error of one rank is an error of the same class on all of them, by real ranks; and what is refused is reported before a save."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.errors import BackendUnavailableError
from tests.session.group.pool import GROUPS, RANKS, TIMEOUT_SECONDS, Pool, opened

SIZE = 3


def whole(seed: int = 0) -> torch.Tensor:
    return torch.randn(12, 3000, generator=torch.Generator().manual_seed(seed))


def sharded(full: torch.Tensor, ranks: int) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def put(folder: str, ref: str, step: int = 1, **changes: Any) -> str:
    """Sharded and replicated tensors; `changes`: of rank 1's state."""
    state = {"model": {"w": sharded(whole(), SIZE), "norm": torch.ones(2000)}, "lr": 0.1}
    if dist.get_rank() == 1:
        state |= changes
    return opened(folder, SIZE).put_snapshot(state, ref=ref, step=step, group=GROUPS[SIZE], timeout_seconds=TIMEOUT_SECONDS).root


def require_all(errors: list[Any], kind: type[tsck.StoreError], *words: str) -> None:
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    for error in errors:
        for word in words:
            assert word in str(error)
        assert ("try again" in str(error)) == issubclass(kind, tsck.RetryableError)


def test_what_one_rank_cannot_store(pool: Pool, folder: Path) -> None:
    errors = pool.ask(put_generator, str(folder), ranks=SIZE)
    require_all(errors, tsck.UnsupportedValueError, "rank 1: ", "data.loader")
    assert {error.object_id for error in errors} == {"data.loader"}
    assert len(set(pool.run(put, str(folder), "generator", ranks=SIZE))) == 1, "all are together again"


def put_generator(folder: str) -> str:
    return put(folder, "generator", data={"loader": (number for number in range(3))})


def test_metrics_and_metadata_that_differ_are_reported_by_key(pool: Pool, folder: Path) -> None:
    errors = pool.ask(put_told, str(folder), ranks=SIZE)
    said = "the ranks differ in metadata.optim.lr: ranks 0, 2: 0.1; rank 1: 0.2; metrics.loss: rank 0: 0.0; rank 1: 1.0; rank 2: 2.0: pass"
    require_all(errors, tsck.InvalidOptionError, said)
    assert errors[0].object_id == "metadata.optim.lr"


def put_told(folder: str) -> None:
    rank = dist.get_rank()
    metadata = {"optim": {"lr": 0.2 if rank == 1 else 0.1, "name": "sgd"}, "long": "x" * 100_000}
    options: dict[str, Any] = {"metadata": metadata, "metrics": {"loss": float(rank)}}
    opened(folder, SIZE).put_snapshot({}, ref="told", group=GROUPS[SIZE], timeout_seconds=TIMEOUT_SECONDS, **options)


# --- restores ---------------------------------------------------------------------------------------------------------


def restore(folder: str, address: str, fault: str = "") -> torch.Tensor:
    """`fault`: what befalls rank 1."""
    store, is_hit = opened(folder, SIZE), dist.get_rank() == 1
    rows = 13 if fault == "misfit" and is_hit else 12
    into = {"model": {"w": sharded(torch.zeros(12, 3000), SIZE), "norm": torch.zeros(2000)}, "lr": 0.0}
    if rows != 12:
        into["model"]["norm"] = torch.zeros(2001)  # type: ignore[index]
    plain = LocalBackend.read_into

    def read_into(self: Any, name: str, offset: int, memory: memoryview) -> None:
        if fault == "unavailable" and name.startswith("packs/"):
            raise BackendUnavailableError("injected: gone")
        plain(self, name, offset, memory)
        if fault == "damage" and name.startswith("packs/") and len(memory) > 1000:
            memory[100] ^= 1

    if is_hit:
        LocalBackend.read_into = read_into  # type: ignore[method-assign, assignment]
    try:
        store.checkout(address, into=into, group=GROUPS[SIZE], timeout_seconds=TIMEOUT_SECONDS)
    finally:
        LocalBackend.read_into = plain  # type: ignore[method-assign]
    return into["model"]["w"].to_local()  # type: ignore[index, no-any-return]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("misfit", tsck.MismatchError, "rank 1: MismatchError: the snapshot does not fit `into`; 1 do not match: model.norm"),
        ("damage", tsck.CorruptObjectError, "rank 1: CorruptObjectError: "),
        ("unavailable", tsck.SnapshotAbortedError, "rank 1: BackendUnavailableError: injected: gone"),
    ],
)
def test_a_restore_fails_alike_on_all_ranks(pool: Pool, folder: Path, fault: str, kind: type[tsck.StoreError], said: str) -> None:
    root = pool.run(put, str(folder), f"restored-{fault}", ranks=SIZE)[0]
    require_all(pool.ask(restore, str(folder), root, fault, ranks=SIZE), kind, said)
    shares = pool.run(restore, str(folder), root, ranks=SIZE)
    assert torch.equal(torch.cat(shares), whole())
    require_all(pool.ask(restore, str(folder), "no/such/ref", ranks=SIZE), tsck.NotFoundError, "no/such/ref")


# --- groups -----------------------------------------------------------------------------------------------------------


def in_a_group_of_the_last(folder: str) -> str:
    """Ranks 5 to 7 save; the middle one cannot."""
    group: Any = dist.new_group([5, 6, 7])
    rank = dist.get_rank()
    if rank < 5:
        return ""
    state = {"a": torch.ones(3), "b": object() if rank == 6 else None}
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/last-{rank}") as store:
        store.put_snapshot(state, ref="last", group=group, timeout_seconds=TIMEOUT_SECONDS)
    return ""


def test_messages_have_the_ranks_of_the_job(pool: Pool, folder: Path) -> None:
    errors = pool.ask(in_a_group_of_the_last, str(folder), ranks=RANKS)[5:]
    require_all(errors, tsck.UnsupportedValueError, "rank 6: ")


def with_meshes(folder: str) -> dict[str, Any]:
    """What comes of each thing that is passed as ``group=``."""
    line = DeviceMesh("cpu", torch.arange(4))
    square = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    other = DeviceMesh("cpu", torch.tensor([4, 5]))
    store = opened(folder, 4)
    said: dict[str, Any] = {}
    state = {"w": distribute_tensor(whole(), square, [Replicate(), Shard(0)], src_data_rank=None)}
    groups: dict[str, Any] = {"square": square, "other": other, "nothing": dist.GroupMember.NON_GROUP_MEMBER, "line": line}
    for name, group in groups.items():
        try:
            said[name] = store.put_snapshot(state, ref="mesh", step=1, group=group, timeout_seconds=TIMEOUT_SECONDS).root
        except tsck.InvalidOptionError as exc:
            said[name] = str(exc)
    into = {"w": torch.zeros(12, 3000)}
    store.checkout("mesh", into=into, group=line, timeout_seconds=TIMEOUT_SECONDS)
    said["restored"] = torch.equal(into["w"], whole())
    torch.manual_seed(0)  # what other tests left of it differs between the ranks
    training = tsck.TrainingState(model=torch.nn.Linear(2, 2))
    training.put_async(store, ref="mesh-training", step=1, group=line, timeout_seconds=TIMEOUT_SECONDS).wait()
    when = tsck.every_steps(1)
    checkpointer = tsck.Checkpointer(store, training, ref="mesh-training", when=when, group=line, timeout_seconds=TIMEOUT_SECONDS)
    found = checkpointer.resume()
    said["resumed"] = found and found.step
    return said


def all_with_meshes(folder: str) -> dict[str, Any]:
    if dist.get_rank() >= 4:  # a mesh is made by all
        for ranks in (torch.arange(4), torch.arange(4).view(2, 2), torch.tensor([4, 5])):
            DeviceMesh("cpu", ranks)
        return {}
    return with_meshes(folder)


def test_a_mesh_of_one_dim_is_a_group(pool: Pool, folder: Path) -> None:
    told = pool.run(all_with_meshes, str(folder), ranks=RANKS)[:4]
    assert len({said["line"] for said in told}) == 1
    for said in told:
        assert len(said["line"]) == 64
        assert said["restored"]
        assert said["resumed"] == 1
        assert "a DeviceMesh of 2 dims ('dp', 'tp')" in said["square"]
        assert "that this rank is not in" in said["other"]
        assert "must be a process group that this rank is in" in said["nothing"]


def without_group(folder: str, *, in_rank_state: bool) -> None:
    share = {"w": sharded(whole(), SIZE)}
    options: dict[str, Any] = {"group": GROUPS[SIZE], "rank_state": share, "timeout_seconds": TIMEOUT_SECONDS} if in_rank_state else {}
    opened(folder, SIZE).put_snapshot({} if in_rank_state else share, ref="forgotten", **options)


@pytest.mark.parametrize("in_rank_state", [False, True])
def test_a_forgotten_group(pool: Pool, folder: Path, in_rank_state: bool) -> None:
    for error in pool.ask(partial(without_group, in_rank_state=in_rank_state), str(folder), ranks=SIZE):
        assert type(error) is tsck.UnsupportedValueError
        assert "pass group=" in str(error)
        assert "to_local" not in str(error)


# --- check ------------------------------------------------------------------------------------------------------------


def check(folder: str, odd: str) -> tuple[bool, list[str], int, str]:
    """Of a state of which rank 1 has something odd; and how the save of it ends."""
    state: dict[str, Any] = {"w": sharded(whole(), SIZE), "norm": torch.ones(2000), "lr": 0.1}
    own: dict[str, Any] = {"rank": dist.get_rank()}
    if dist.get_rank() == 1:
        oddities: dict[str, dict[str, Any]] = {"value": {"lr": 0.2}, "tensor": {"norm": torch.zeros(2000)}, "type": {"lr": object()}}
        state |= oddities.get(odd, {})
        own |= {"loader": object()} if odd == "own" else {}
    store, options = opened(folder, SIZE), {"group": GROUPS[SIZE], "rank_state": own, "timeout_seconds": TIMEOUT_SECONDS}
    found = store.check(state, **options)
    try:
        ending = store.put_snapshot(state, ref=f"check-{odd}", **options).root
    except tsck.InputError as exc:
        ending = str(exc)
    return found.ok, [problem.message for problem in found.problems], found.tensor_bytes, ending


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("value", "the ranks cannot save 'lr' together: rank 0: 0.1; rank 1: 0.2"),
        ("tensor", "rank 0 and rank 1 differ in 'norm'"),
        ("type", "lr"),
        ("own", "loader"),
    ],
)
def test_check_foresees_what_a_save_refuses(pool: Pool, folder: Path, odd: str, said: str) -> None:
    told = pool.run(check, str(folder), odd, ranks=SIZE)
    for ok, problems, _, ending in told:
        assert not ok
        assert said in problems[0]
        assert said in ending
        assert "rank 1" in ending
    if odd in ("type", "own"):
        assert all("rank 1: " in problems[0] for _, problems, _, _ in (told[0], told[2]))


def test_check_of_what_can_be_saved(pool: Pool, folder: Path) -> None:
    names = set(os.listdir(folder / "store" / "snapshots")) if (folder / "store" / "snapshots").exists() else set()
    told = pool.run(check, str(folder), "", ranks=SIZE)
    size = whole().nbytes + 2000 * 4
    assert [(ok, problems, found) for ok, problems, found, _ in told] == [(True, [], size)] * SIZE
    assert len(set(os.listdir(folder / "store" / "snapshots")) - names) == 1, "of the save alone"


# --- retrying ---------------------------------------------------------------------------------------------------------


def retry(folder: str, kind: str) -> tuple[str, int]:
    """Rank 1's backend fails at first, or what it has does not fit."""
    store, calls = opened(folder, SIZE), 0
    plain = LocalBackend.put

    def call() -> tsck.Snapshot:
        nonlocal calls
        calls += 1
        is_hit = dist.get_rank() == 1 and calls == 1

        def unavailable(self: LocalBackend, name: str, data: Any) -> None:
            raise BackendUnavailableError("injected: gone")

        if is_hit and kind == "unavailable":
            LocalBackend.put = unavailable  # type: ignore[method-assign]
        state = {"w": sharded(whole(), SIZE), "lr": object() if is_hit and kind == "input" else 0.1}
        try:
            return store.put_snapshot(state, ref=f"retry-{kind}", step=1, group=GROUPS[SIZE], timeout_seconds=TIMEOUT_SECONDS)
        finally:
            LocalBackend.put = plain  # type: ignore[method-assign]

    try:
        return store.retrying(call, pause_seconds=0.0).root, calls
    except tsck.StoreError as exc:
        return type(exc).__name__, calls


def test_ranks_try_again_together_or_not_at_all(pool: Pool, folder: Path) -> None:
    told = pool.run(retry, str(folder), "unavailable", ranks=SIZE)
    assert len(set(told)) == 1
    assert told[0][1] == 2
    assert len(told[0][0]) == 64
    assert pool.run(retry, str(folder), "input", ranks=SIZE) == [("UnsupportedValueError", 1)] * SIZE
