"""`SampleCursor`: one order for all ranks, continued exactly by any number of them."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorstore_ck as tsck
from tests.effort import effort


def epoch_of(cursor: tsck.SampleCursor, world_size: int = 1) -> Iterator[list[int]]:
    """The batches that are left of an epoch, each as all ranks together have it."""
    shares = [iter(cursor.batches(rank, world_size)) for rank in range(world_size)]
    return (list(itertools.chain(*batch)) for batch in zip(*shares, strict=True))


def order_of(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    cursor = tsck.SampleCursor(size, batch_size=size, seed=seed)
    for _ in range(epoch):
        cursor.advance()
    return next(epoch_of(cursor))


# --- the order ----------------------------------------------------------------------------------------------------------


def test_the_order_never_changes() -> None:
    """What snapshots rely on: these numbers must stay on every platform and with every version of numpy."""
    assert order_of(20, seed=1) == ORDER_20
    assert order_of(20, seed=1, epoch=1) == ORDER_20_NEXT
    big = tsck.SampleCursor(10**15, batch_size=3, seed=(1 << 64) - 1)
    assert next(iter(big.batches())) == ORDER_BIG


@given(st.integers(1, 3000), st.integers(0, (1 << 64) - 1), st.integers(0, 3))
def test_every_sample_comes_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order_of(size, seed=seed, epoch=epoch)) == list(range(size))


@pytest.mark.parametrize("size", effort([4], [3, 4, 5]))
def test_all_orders_come_equally_often(size: int) -> None:
    orders = math.factorial(size)
    expected = 40
    cursor = tsck.SampleCursor(size, batch_size=size, seed=7)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(orders * expected):
        seen[tuple(next(iter(cursor.batches())))] += 1
        cursor.advance()
    chi = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(size)))
    assert abs(chi - (orders - 1)) < 4 * math.sqrt(2 * (orders - 1))


def test_neighbours_are_far_apart() -> None:
    """Distances between samples that follow each other are spread evenly over all."""
    size, epochs = 101, 60
    orders = np.array([order_of(size, seed=seed) for seed in range(epochs)])
    counts = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    expected = counts.sum() / (size - 1)
    assert abs(((counts - expected) ** 2 / expected).sum() - (size - 2)) < 4 * math.sqrt(2 * (size - 2))


def test_without_shuffling_samples_come_as_they_lie() -> None:
    cursor = tsck.SampleCursor(7, batch_size=3, shuffle=False, drop_last=False)
    assert list(cursor.batches()) == [[0, 1, 2], [3, 4, 5], [6]]


# --- going on -----------------------------------------------------------------------------------------------------------


@settings(max_examples=effort(25, 200))
@given(st.data())
def test_any_number_of_ranks_goes_on_exactly(data: st.DataObject) -> None:
    """Interrupted anywhere, again and again, with other numbers of ranks and other batch sizes: each epoch has each sample once."""
    size = data.draw(st.integers(1, 60), "size")
    seed = data.draw(st.integers(0, 5), "seed")
    consumed: dict[int, list[int]] = {}
    state: dict[str, Any] | None = None
    for _ in range(data.draw(st.integers(1, 5), "runs")):
        batch_size = data.draw(st.integers(1, 70), "batch size")
        cursor = tsck.SampleCursor(size, batch_size=batch_size, seed=seed, drop_last=False)
        if state is not None:
            cursor.load_state_dict(state)
        tail = (size - cursor.position) % batch_size or batch_size
        world_size = data.draw(st.integers(1, min(8, tail, size % batch_size or batch_size, batch_size)), "ranks")
        steps = data.draw(st.integers(0, 20), "steps")
        while steps:
            epoch = cursor.epoch
            for batch in itertools.islice(epoch_of(cursor, world_size), steps):
                consumed.setdefault(epoch, []).extend(batch)
                cursor.advance()
                steps -= 1
        state = cursor.state_dict()
    for epoch, samples in consumed.items():
        order = order_of(size, seed=seed, epoch=epoch)
        assert samples == order[: len(samples)]
        assert len(samples) == (size if epoch < cursor.epoch else cursor.position)


@settings(max_examples=effort(40, 200))
@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 20), st.integers(1, 9))
def test_all_ranks_have_about_the_same(size: int, batch_size: int, steps: int, world_size: int) -> None:
    batch_size, world_size = min(batch_size, size), min(world_size, batch_size, size)
    cursor = tsck.SampleCursor(size, batch_size=batch_size)
    for _ in range(steps):
        cursor.advance()
    shares = [list(itertools.islice(cursor.batches(rank, world_size), 5)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {min(5, len(cursor.batches()))}
    for batch in zip(*shares, strict=True):
        lengths = {len(share) for share in batch}
        assert sum(map(len, batch)) == batch_size
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) > 0


def test_batches_that_do_not_fill_are_dropped() -> None:
    cursor = tsck.SampleCursor(10, batch_size=4, seed=3)
    found = []
    for _ in range(3):
        found.append((cursor.epoch, cursor.position, len(cursor.batches())))
        cursor.advance()
    assert found == [(0, 0, 2), (0, 4, 1), (1, 0, 2)]
    larger = tsck.SampleCursor(10, batch_size=8, seed=3)  # of which the rest of the epoch fills none
    larger.load_state_dict(cursor.state_dict())
    assert (larger.epoch, larger.position) == (2, 0)


def test_a_loader_that_reads_ahead_moves_nothing() -> None:
    """Workers have fetched the whole epoch when training stops after two batches; the next job goes on with the third."""
    dataset = torch.arange(24)

    def loader(cursor: tsck.SampleCursor, rank: int = 0, world_size: int = 1) -> "torch.utils.data.DataLoader[Any]":
        workers = {} if rank else {"num_workers": 1, "prefetch_factor": 8}
        return torch.utils.data.DataLoader(dataset, batch_sampler=cursor.batches(rank, world_size), **workers)  # type: ignore[arg-type]

    cursor = tsck.SampleCursor(24, batch_size=4, seed=5)
    consumed: list[int] = []
    for batch in loader(cursor):
        consumed += batch.tolist()
        cursor.advance()
        if len(consumed) == 8:
            break
    after = tsck.SampleCursor(24, batch_size=4, seed=5)
    after.load_state_dict(cursor.state_dict())
    shares = [[batch.tolist() for batch in loader(after, rank, 2)] for rank in range(2)]
    for first, second in zip(*shares, strict=True):
        consumed += first + second
    assert consumed == order_of(24, seed=5)


def test_a_loader_goes_on_from_epoch_to_epoch() -> None:
    cursor = tsck.SampleCursor(6, batch_size=2, seed=5)
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(torch.arange(6), batch_sampler=cursor.batches())  # type: ignore[arg-type]
    epochs: list[list[int]] = []
    while cursor.epoch < 3:
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            cursor.advance()
    assert epochs == [order_of(6, seed=5, epoch=epoch) for epoch in range(3)]


# --- refused ------------------------------------------------------------------------------------------------------------


def test_another_state_is_refused() -> None:
    """One of another order of samples, and what is no state of a cursor."""
    state = tsck.SampleCursor(100, batch_size=8, seed=1).state_dict()
    cursor = tsck.SampleCursor(100, batch_size=8, seed=1)
    for change, said in (
        ({"dataset_size": 101}, "dataset_size 101, and this one has 100"),
        ({"seed": 2}, "seed 2"),
        ({"order": "in order"}, "order 'in order'"),
        ({"position": -1}, "not a state"),
        ({"position": 101}, "not a state"),
        ({"position": 1.0}, "not a state"),
        ({"position": True}, "not a state"),
        ({"epoch": None}, "not a state"),
        ({"epoch": -1}, "not a state"),
    ):
        with pytest.raises(tsck.MismatchError, match=said):
            cursor.load_state_dict({**state, **change})
    with pytest.raises(tsck.MismatchError):
        cursor.load_state_dict({})
    assert (cursor.epoch, cursor.position) == (0, 0)
    in_order = tsck.SampleCursor(100, batch_size=8, seed=1, shuffle=False)
    with pytest.raises(tsck.MismatchError, match="order 'shuffle-v1'"):
        in_order.load_state_dict(state)


def test_unusable_options() -> None:
    wrong: dict[str, list[Any]] = {"dataset_size": [0, 7.5], "batch_size": [0, 11, True], "seed": [-1, 1 << 64, "x"]}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(tsck.InvalidOptionError):
            tsck.SampleCursor(**({"dataset_size": 10, "batch_size": 4} | {name: value}))
    for rank, world_size in ((-1, 2), (2, 2), (0, 0), (0, 5)):
        with pytest.raises(tsck.InvalidOptionError):
            tsck.SampleCursor(10, batch_size=4).batches(rank, world_size)


def test_no_rank_gets_an_empty_batch() -> None:
    """All ranks step together, so a rank without a sample would have nothing to step with: said before the epoch begins."""
    cursor = tsck.SampleCursor(9, batch_size=4, drop_last=False)
    with pytest.raises(tsck.InvalidOptionError, match="the last batch of epoch 0 has 1 samples for 2 ranks: pass drop_last=True"):
        iter(cursor.batches(0, 2))
    assert len(list(cursor.batches())) == 3


ORDER_20 = [13, 12, 19, 6, 2, 4, 16, 11, 10, 18, 0, 8, 15, 1, 14, 7, 9, 17, 5, 3]
ORDER_20_NEXT = [18, 19, 13, 11, 5, 15, 0, 7, 2, 3, 14, 17, 4, 9, 8, 16, 6, 1, 12, 10]
ORDER_BIG = [828936664643252, 363274773970822, 951131046842694]
