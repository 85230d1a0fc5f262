"""What a save has is the state at the call, whatever the device does before and after: streams, graphs, freed memory, threads."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

import tensorstore_ck as tsck
from tests.gpu.kinds import clones, different, random_tensor

REF = "runs/order"
State = dict[str, torch.Tensor]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def values_of(tensor: torch.Tensor) -> list[float]:
    """The different values of its elements."""
    found: list[float] = torch.unique(tensor).tolist()
    return found


def change(state: State) -> None:
    for tensor in state.values():
        tensor.mul_(1.0001).add_(0.5)


def change_on_other_stream(state: State) -> None:
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        change(state)
    torch.cuda.current_stream().wait_stream(stream)


def graph_of_change(state: State) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        change(state)
    return graph.replay


@pytest.mark.parametrize("how", ["in place", "on another stream", "by a graph"])
def test_changes_right_after_an_asynchronous_put(cuda: torch.device, store: tsck.Store, how: str) -> None:
    state = {f"w{number}": random_tensor(cuda, 1 << 20, seed=number) for number in range(12)}
    state["strided"] = random_tensor(cuda, 1500, 900).t()
    changed: Callable[[], None] = partial(change_on_other_stream if how == "on another stream" else change, state)
    if how == "by a graph":
        changed = graph_of_change(state)
    expected, pending = [], []
    for step in range(8):
        expected.append({name: tensor.clone() for name, tensor in state.items()})
        pending.append(store.put_snapshot_async(state, ref=REF, step=step))
        changed()
    for put in pending:
        put.wait()
    for step, values in enumerate(expected):
        assert different(store.checkout(f"{REF}@{step}"), clones({name: values[name] for name in state})) == []


def test_changes_between_synchronous_puts(cuda: torch.device, store: tsck.Store) -> None:
    """Some blocks change, and some do not: each snapshot has the values of its time."""
    state = {f"w{number}": random_tensor(cuda, 3 << 20, seed=number) for number in range(8)}
    expected = []
    for step in range(8):
        state[f"w{step}"][step * 400_000] += 1
        state["w0"].view(torch.int32)[-1 - step] ^= 1 << step
        store.put_snapshot(state, ref=REF, step=step)
        expected.append(clones(state))
    for step, values in enumerate(expected):
        assert different(store.checkout(f"{REF}@{step}"), {f".{name}": values[f".{name}"] for name in state}) == []


def test_memory_that_is_freed_and_reused_after_an_asynchronous_put(cuda: torch.device, store: tsck.Store) -> None:
    expected, pending = [], []
    for step in range(12):
        state = {f"w{number}": random_tensor(cuda, 1 << 18, seed=step * 20 + number) for number in range(8)}
        expected.append(clones(state))
        pending.append(store.put_snapshot_async(state, ref=REF, step=step))
        del state
        junk = [torch.full((1 << 18,), 7.0, device=cuda) for _ in range(40)]
        del junk
    for step, put in enumerate(pending):
        put.wait()
        assert different(store.checkout(f"{REF}@{step}"), expected[step]) == []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_put_under_a_side_stream(cuda: torch.device, store: tsck.Store, is_waited_for: bool) -> None:
    """The work that the state comes from is queued on the stream that is current at the call."""
    stream = new_stream()
    with torch.cuda.stream(stream):
        values = torch.zeros(1 << 24, device=cuda)
        for step in (1, 2):
            for _ in range(200):
                values.add_(1)
            if is_waited_for:
                store.put_snapshot({"a": values}, ref=REF, step=step)
            else:
                store.put_snapshot_async({"a": values}, ref=REF, step=step)
    assert [values_of(store.checkout(f"{REF}@{step}")["a"]) for step in (1, 2)] == [[200], [400]]


def test_a_put_from_another_thread(cuda: torch.device, store: tsck.Store) -> None:
    values = torch.zeros(1 << 26, device=cuda)
    for _ in range(300):
        values.add_(1)
    thread = threading.Thread(target=lambda: store.put_snapshot({"a": values}, ref=REF, step=1))
    thread.start()
    thread.join()
    assert values_of(store.checkout(REF)["a"]) == [300]


def test_a_checkout_into_tensors_that_queued_work_still_reads(cuda: torch.device, store: tsck.Store) -> None:
    """Work queued before the checkout sees the old values, work queued after it the new ones, on the stream that is current."""
    store.put_snapshot({"a": torch.full((1 << 24,), 5.0, device=cuda)}, ref=REF, step=1)
    for stream in (torch.cuda.current_stream(), new_stream()):
        with torch.cuda.stream(stream):
            values = torch.ones(1 << 24, device=cuda)
            total = torch.zeros(1 << 24, device=cuda)
            for _ in range(200):
                total.add_(values)
            store.checkout(REF, into={"a": values})
            after = values.clone()
        torch.cuda.synchronize()
        assert [values_of(total), values_of(after)] == [[200], [5]]


@pytest.mark.parametrize("few", [True, False])
def test_a_swap_of_a_follower_comes_between_what_the_current_stream_does_before_and_after(
    cuda: torch.device, store: tsck.Store, few: bool
) -> None:
    saved, mine, stream = torch.zeros(1 << 20, device=cuda), torch.zeros(1 << 20, device=cuda), new_stream()
    feed = store.follow(REF, into={"w": mine})
    for step in range(1, 4):
        saved[: 100 if few else None] = step
        store.put_snapshot({"w": saved}, ref=REF, step=step)
        with torch.cuda.stream(new_stream()):  # it reads after the swap before, which is queued on other streams
            feed.poll()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            before = mine[:100].clone()
            feed.swap()
            after = mine[:100].clone()
        stream.synchronize()
        assert values_of(before) == [step - 1]
        assert values_of(after) == [step]
