"""Runs that go on: on other numbers of ranks, and with asynchronous saves while ranks are apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import tensorstore_ck as tsck
from tests.session.group.pool import TIMEOUT_SECONDS
from tests.training.recipes.dense import Block, adamw
from tests.training.recipes.harness import FLAT, Worlds, difference, gathered, mesh_of, opened, state_of, step, united

pytestmark = pytest.mark.slow

Model = tuple[nn.Module, torch.optim.Optimizer]


def built(seed: int, *, steps: int = 1) -> Model:
    torch.manual_seed(seed)
    model = Block()
    if dist.is_initialized():
        fully_shard(model, mesh=mesh_of(dp=dist.get_world_size()))
    optimizer = adamw(model)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def options() -> dict[str, Any]:
    return {"group": dist.group.WORLD, "timeout_seconds": TIMEOUT_SECONDS} if dist.is_initialized() else {}


def put(store: tsck.Store, ref: str, model: Model, number: int) -> dict[str, Any]:
    """What was saved."""
    state = state_of(*model, step=number)
    expected = gathered(state)
    store.put_snapshot(state, ref=ref, step=number, **options())
    return expected


def resume(store: tsck.Store, address: str) -> tuple[Model, dict[str, Any]]:
    """A model that goes on, and what it then holds."""
    model, optimizer = built(99, steps=2)
    state = state_of(model, optimizer, step=-1)
    store.checkout(address, into=state, **options())
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    return (model, optimizer), gathered(state_of(model, optimizer, step=state["step"]))


# --- 4 -> 2 -> 8 -> 1 ---------------------------------------------------------------------------------------------------


def begin(folder: str, ref: str) -> dict[str, Any]:
    return put(opened(folder), ref, built(1), 1)


def go_on(folder: str, ref: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was restored, and what was saved after another step."""
    model, restored = resume(opened(folder), ref)
    step(*model)
    return restored, put(opened(folder), ref, model, number)


def test_4_then_2_then_8_then_1(worlds: Worlds, recipes_folder: Path) -> None:
    expected = united(worlds.run(4, begin, str(recipes_folder), "chain"))
    for number, ranks in ((2, 2), (3, 8), (4, 1)):
        answers = worlds.run(ranks, go_on, str(recipes_folder), "chain", number)
        for restored, _ in answers:
            assert not difference(restored, expected), ranks
        expected = united([said for _, said in answers])
    with tsck.open(recipes_folder / "store", cache_dir=recipes_folder / "cache") as store:
        assert [snapshot.step for snapshot in store.log("chain")] == [4, 3, 2, 1]
        _, restored = resume(store, "chain")
        assert not difference(restored, expected)
        assert set(gathered(store.checkout("chain"))) == set(expected)


# --- in the background ------------------------------------------------------------------------------------------------


def put_at_unequal_pace(folder: str) -> list[dict[str, Any]]:
    """Rank 3 is still at the first save when rank 0 has gone on: each mutates its state as soon as it may."""
    model, optimizer = built(2)
    store, pending, copies = opened(folder), [], []
    for number in range(1, 5):
        state = state_of(model, optimizer, step=number)
        copies.append(_copied(state))
        pending.append(store.put_snapshot_async(state, ref="unequal-pace", step=number, **options()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # without a collective, which would keep them together
            for _ in range(40 * dist.get_rank()):
                torch.randn(128, 128).mm(torch.randn(128, 128))
    for each in pending:
        each.wait()
    return [gathered(copy) for copy in copies]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def restored_at(folder: str, address: str) -> dict[str, Any]:
    return resume(opened(folder), address)[1]


def test_asynchronous_saves_at_unequal_pace(worlds: Worlds, recipes_folder: Path) -> None:
    sides = worlds.run(4, put_at_unequal_pace, str(recipes_folder))
    with tsck.open(recipes_folder / "store", cache_dir=recipes_folder / "cache") as store:
        for number in range(1, 5):
            expected = united([side[number - 1] for side in sides])
            found = gathered(store.checkout(f"unequal-pace@{number}"))
            assert not difference(found, expected), number
            assert set(found) == set(expected)
    for ranks in (2, 8):
        for found in worlds.run(ranks, restored_at, str(recipes_folder), "unequal-pace@2"):
            assert not difference(found, united([side[1] for side in sides])), ranks
