"""Saves and restores where the device has almost no memory left, and how much of it they take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tests.gpu.kinds import clones, different, random_tensor

REF = "runs/pressure"
MIB = 1 << 20
LEFT_BYTES = 300 * MIB
"""What is left of this process's share of the device."""


@contextmanager
def full_device(cuda: torch.device) -> Iterator[None]:
    """This process may allocate almost no more memory. Other processes on the device are not affected."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LEFT_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def extra_bytes(work: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_little_device_memory_is_used_beside_the_state(cuda: torch.device, store: tsck.Store, is_waited_for: bool) -> None:
    state = {f"w{number}": random_tensor(cuda, 16 * MIB, seed=number) for number in range(8)}

    def put(step: int) -> None:
        if is_waited_for:
            store.put_snapshot(state, ref=REF, step=step)
        else:
            store.put_snapshot_async(state, ref=REF, step=step).wait()

    assert extra_bytes(lambda: put(1)) <= 64 * MIB
    state["w3"].add_(1)
    assert extra_bytes(lambda: put(2)) <= 64 * MIB
    assert extra_bytes(lambda: store.checkout(REF, into=state)) <= 64 * MIB


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_full_device(cuda: torch.device, store: tsck.Store, is_waited_for: bool) -> None:
    base = random_tensor(cuda, 1 << 26).view(1 << 13, 1 << 13)
    expected = clones({"base": base, "transposed": base.t()})
    state = {"base": base, "transposed": base.t()}
    with full_device(cuda):
        put = store.put_snapshot if is_waited_for else lambda *a, **k: store.put_snapshot_async(*a, **k).wait()
        put({"base": base}, ref="contiguous", step=1)
        try:
            put(state, ref=REF, step=1)
        except torch.OutOfMemoryError:  # the whole state, or an error: never other values
            assert not is_waited_for
        else:
            assert different(store.checkout(REF), expected) == []
        put({"base": base}, ref="contiguous", step=2, unchanged="ok")
        assert different(store.checkout("contiguous", into={"base": base}), {".base": expected[".base"]}) == []


def test_out_of_memory_on_restore_names_the_cause_and_the_store_goes_on(cuda: torch.device, store: tsck.Store) -> None:
    state = {"a": random_tensor(cuda, 1 << 27)}
    expected = clones(state)
    store.put_snapshot(state, ref=REF, step=1)
    state.clear()
    with full_device(cuda), pytest.raises((torch.OutOfMemoryError, tsck.errors.StoreError)):
        store.checkout(REF, device=cuda)
    assert different(store.checkout(REF, device=cuda), expected) == []
