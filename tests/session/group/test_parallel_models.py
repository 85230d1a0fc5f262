"""Models and optimizers under FSDP2, HSDP, FSDP2 over tensor parallelism, FSDP1 and DDP: what one saves the others restore."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tensorstore_ck as tsck
from tests.effort import effort
from tests.session.group.pool import GROUPS, RANKS, TIMEOUT_SECONDS, Pool, opened

pytestmark = pytest.mark.slow


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 10))  # 10 rows for 8 ranks: uneven


def fsdp2(model: nn.Sequential) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def hsdp(model: nn.Sequential) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    return model


def fsdp2_over_tp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def ddp(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: nn.Sequential) -> nn.Module:
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    options = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT, *options)
    return wrapped


KINDS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "fsdp2 over tp": fsdp2_over_tp,
    "ddp": ddp,
    "fsdp1": fsdp1,
}


def training(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step, so that there are moments."""
    model = KINDS[kind](model_of(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, parameter in enumerate(model.parameters()):  # without a backward pass: gloo does not do all that FSDP1 asks for
        parameter.grad = torch.full_like(parameter, 0.5 + number + seed)
    optimizer.step()
    return model, optimizer


def side_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def gathered(value: Any) -> Any:
    """The whole of it, on rank 0 at least."""
    if isinstance(value, dict):
        return {name: gathered(item) for name, item in value.items()}
    if isinstance(value, list):
        return [gathered(item) for item in value]
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, ShardedTensor):
        full = torch.zeros(value.size())
        value.gather(0, full if dist.get_rank() == 0 else None)
        return full
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def put(folder: str, kind: str) -> tuple[str, Any]:
    """Its root, and what it holds, as torch gathers it."""
    state = side_of(*training(kind, 1))
    expected: dict[str, type] = {"ddp": torch.Tensor, "fsdp1": ShardedTensor}
    assert isinstance(state["model"]["0.weight"], expected.get(kind, DTensor))
    group = GROUPS[RANKS]
    root = opened(folder, RANKS).put_snapshot(state, ref=kind.replace(" ", "-"), group=group, timeout_seconds=TIMEOUT_SECONDS).root
    return root, gathered(state)


def restore(folder: str, root: str, kind: str) -> Any:
    """What it then holds, as torch gathers it."""
    model, optimizer = training(kind, 2)
    state = side_of(model, optimizer)
    opened(folder, RANKS).checkout(root, into=state, group=GROUPS[RANKS], timeout_seconds=TIMEOUT_SECONDS)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return gathered(side_of(model, optimizer))


def require_same(found: Any, expected: Any) -> None:
    """Whatever the order of the names."""
    if isinstance(found, dict):
        assert set(found) == set(expected)
        for name, item in found.items():
            require_same(item, expected[name])
    elif isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(found, list) and found and isinstance(found[0], str):
        assert sorted(found) == sorted(expected)
    elif isinstance(found, list):
        for one, two in zip(found, expected, strict=True):
            require_same(one, two)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_saves_the_others_restore(pool: Pool, folder: Path, kind: str) -> None:
    root, expected = pool.run(put, str(folder), kind)[0]
    assert expected["optim"]["state"]["0.weight"]["exp_avg"].any()
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        require_same(store.checkout(root), expected)
    kinds = list(KINDS)
    for other in effort([kind, kinds[kinds.index(kind) - 1]], kinds):
        require_same(pool.run(restore, str(folder), root, other)[0], expected)
