"""Every kind of tensor on a device, through every door: the bits that come back are those that the state had."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.gpu.kinds import clones, different, flat, kinds, random_tensor, zeros_like
from tests.group_of_one import group_of_one

REF = "runs/kinds"


def put_sync(store: tsck.Store, state: Any) -> None:
    store.put_snapshot(state, ref=REF, step=1)


def put_async(store: tsck.Store, state: Any) -> None:
    store.put_snapshot_async(state, ref=REF, step=1).wait()


def put_group(store: tsck.Store, state: Any) -> None:
    with group_of_one():
        store.put_snapshot(state, ref=REF, step=1, group=dist.group.WORLD)


def put_group_async(store: tsck.Store, state: Any) -> None:
    with group_of_one():
        store.put_snapshot_async(state, ref=REF, step=1, group=dist.group.WORLD).wait()


PUTS = [put_sync, put_async, put_group, put_group_async]


@pytest.mark.parametrize("put", PUTS, ids=lambda put: put.__name__)
def test_every_kind_comes_back(device: torch.device, store: tsck.Store, put: Callable[[tsck.Store, Any], None]) -> None:
    state = kinds(device)
    expected = clones(state)
    put(store, state)
    for onto in {torch.device("cpu"), device}:
        assert different(store.checkout(REF, device=onto), expected) == [], onto
    target = zeros_like(state)
    store.checkout(REF, into=target)
    assert different(target, expected) == []


def test_roots_do_not_depend_on_the_device_or_the_door(device: torch.device, store: tsck.Store) -> None:
    state = {name: tensor for name, tensor in kinds(device).items() if isinstance(tensor, torch.Tensor)}
    dense = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in state.items() if name != "alias"}
    doors = [store.put_snapshot, lambda *args, **options: store.put_snapshot_async(*args, **options).wait()]
    roots = set()
    for number, (put, onto) in enumerate(product(doors, (torch.device("cpu"), device))):
        moved = {name: tensor.to(onto, copy=True) for name, tensor in dense.items()}
        roots.add(put(moved, ref=f"roots/{number}", step=1).root)
    assert len(roots) == 1


def test_values_are_converted_on_the_way_into_a_device(device: torch.device, store: tsck.Store) -> None:
    weights = random_tensor(device, 3000, 700)
    store.put_snapshot({"w": weights}, ref=REF, step=1)
    target = {"w": torch.zeros_like(weights, dtype=torch.bfloat16)}
    store.checkout(REF, into=target, dtype=torch.bfloat16)
    assert torch.equal(target["w"], weights.bfloat16())
    strided = torch.zeros(700, 3000, device=device).t()
    store.checkout(REF, into={"w": strided})
    assert torch.equal(strided, weights)


def test_dcp(device: torch.device, tmp_path: Path) -> None:
    state = {f"t{name}": tensor.detach() for name, tensor in flat(kinds(device)) if tensor.numel() and ".tiny" not in name}
    expected = clones(state)
    with group_of_one():
        dcp.save(state, storage_writer=Writer(tmp_path / "store", ref=REF, cache_dir=tmp_path / "cache"), checkpoint_id="step-1")
        target = zeros_like(state)
        dcp.load(target, storage_reader=Reader(tmp_path / "store", REF, cache_dir=tmp_path / "cache2"))
    assert different(target, expected) == []


def test_statistics_diff_and_lazy_reads(device: torch.device, store: tsck.Store) -> None:
    weights = random_tensor(device, 3000, 700)
    store.put_snapshot({"w": weights, "neg": torch.complex(weights, weights).conj().imag}, ref=REF, step=1)
    weights[2000, 3] = 0
    store.put_snapshot({"w": weights, "neg": torch.complex(weights, weights).conj().imag}, ref=REF, step=2)
    assert [found.zeros for found in store.statistics(REF)] == [1, 1]
    assert len(store.diff(f"{REF}@1", REF).tensors) == 2
    with store.open_snapshot(REF) as lazy:
        assert torch.equal(lazy["w"][10:20], weights[10:20].cpu())


def test_frozen_tensors(device: torch.device, store: tsck.Store) -> None:
    state = {"base": random_tensor(device, 5 << 20), "head": random_tensor(device, 5 << 18)}
    for step in range(4):
        state["head"].add_(1)
        store.put_snapshot(state, ref=REF, step=step, frozen=["base"])
        assert different(store.checkout(REF), clones(state)) == []


def test_staging_disk(device: torch.device, tmp_path: Path) -> None:
    state = kinds(device)
    expected = clones(state)
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", staging=tmp_path / "staging") as store:
        store.put_snapshot_async(state, ref=REF, step=1).wait()
        assert different(store.checkout(REF, device=device), expected) == []
