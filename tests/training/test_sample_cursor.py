"""`SampleCursor`: one order for all ranks, continued exactly by any number of them."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import tensorstore_ck as tsck


def epoch_of(cursor: tsck.SampleCursor, world_size: int = 1) -> list[list[int]]:
    """The batches that are left of an epoch, each as all ranks together have it."""
    shares = [list(cursor.batches(rank, world_size)) for rank in range(world_size)]
    return [list(itertools.chain(*batch)) for batch in zip(*shares, strict=True)]


def order_of(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    cursor = tsck.SampleCursor(size, batch_size=size, seed=seed)
    for _ in range(epoch):
        cursor.advance()
    return epoch_of(cursor)[0]


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


@pytest.mark.parametrize("size", [3, 4, 5])
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
        steps = data.draw(st.integers(0, 40), "steps")
        while steps:
            epoch = cursor.epoch
            for batch in epoch_of(cursor, world_size)[:steps]:
                consumed.setdefault(epoch, []).extend(batch)
                cursor.advance()
                steps -= 1
        state = cursor.state_dict()
    for epoch, samples in consumed.items():
        order = order_of(size, seed=seed, epoch=epoch)
        assert samples == order[: len(samples)]
        assert len(samples) == (size if epoch < cursor.epoch else cursor.position)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 20), st.integers(1, 9))
def test_all_ranks_have_about_the_same(size: int, batch_size: int, steps: int, world_size: int) -> None:
    batch_size, world_size = min(batch_size, size), min(world_size, batch_size, size)
    cursor = tsck.SampleCursor(size, batch_size=batch_size)
    for _ in range(steps):
        cursor.advance()
    shares = [list(cursor.batches(rank, world_size)) for rank in range(world_size)]
    assert {len(share) for share in shares} == {len(cursor.batches())}
    for batch in zip(*shares, strict=True):
        lengths = {len(share) for share in batch}
        assert sum(map(len, batch)) == batch_size
        assert max(lengths) - min(lengths) <= 1
        assert min(lengths) > 0


def test_batches_that_do_not_fill_are_dropped() -> None:
    cursor = tsck.SampleCursor(10, batch_size=4, seed=3)
    assert len(cursor.batches()) == 2
    cursor.advance()
    assert (cursor.epoch, cursor.position, len(cursor.batches())) == (0, 4, 1)
    cursor.advance()
    assert (cursor.epoch, cursor.position, len(cursor.batches())) == (1, 0, 2)


def test_with_a_larger_batch_size_the_rest_of_an_epoch_may_fill_none() -> None:
    cursor = tsck.SampleCursor(10, batch_size=4)
    cursor.advance()
    larger = tsck.SampleCursor(10, batch_size=8)
    larger.load_state_dict(cursor.state_dict())
    assert (larger.epoch, larger.position) == (1, 0)


def test_a_loader_that_reads_ahead_moves_nothing() -> None:
    """Workers have fetched the whole epoch when training stops after two batches; the next job goes on with the third."""
    dataset = torch.arange(24)

    def loader(cursor: tsck.SampleCursor, rank: int = 0, world_size: int = 1) -> "torch.utils.data.DataLoader[Any]":
        workers = {"num_workers": 2, "prefetch_factor": 8}
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


def test_it_goes_with_the_state(tmp_path: Any) -> None:
    cursor = tsck.SampleCursor(100, batch_size=8, seed=1)
    cursor.advance()
    with tsck.open(str(tmp_path / "store"), create=True, cache_dir=str(tmp_path / "cache")) as store:
        store.put_snapshot({"data": cursor.state_dict()}, ref="job")
        after = tsck.SampleCursor(100, batch_size=10, seed=1)
        after.load_state_dict(store.checkout("job")["data"])
    assert (after.epoch, after.position) == (0, 8)


# --- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset_size": 101}, "dataset_size 100, and this one has 101"),
        ({"seed": 2}, "seed 1"),
        ({"shuffle": False}, "order 'shuffle-v1'"),
    ],
)
def test_another_order_is_refused(options: dict[str, Any], said: str) -> None:
    state = tsck.SampleCursor(100, batch_size=8, seed=1).state_dict()
    other = tsck.SampleCursor(**({"dataset_size": 100, "batch_size": 8, "seed": 1} | options))
    with pytest.raises(tsck.MismatchError, match=said):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [{"position": -1}, {"position": 101}, {"position": 1.0}, {"epoch": None}, {"epoch": -1}, {"position": True}, {"order": "shuffle-v2"}],
)
def test_no_state_of_a_cursor(change: dict[str, Any]) -> None:
    cursor = tsck.SampleCursor(100, batch_size=8)
    with pytest.raises(tsck.MismatchError):
        cursor.load_state_dict(cursor.state_dict() | change)
    with pytest.raises(tsck.MismatchError):
        cursor.load_state_dict({})
    assert (cursor.epoch, cursor.position) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset_size": 0},
        {"dataset_size": 7.5},
        {"batch_size": 0},
        {"batch_size": 11},
        {"batch_size": True},
        {"seed": -1},
        {"seed": 1 << 64},
        {"seed": "x"},
    ],
)
def test_unusable_options(options: dict[str, Any]) -> None:
    with pytest.raises(tsck.InvalidOptionError):
        tsck.SampleCursor(**({"dataset_size": 10, "batch_size": 4} | options))


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, 5)])
def test_ranks_that_cannot_be(rank: int, world_size: int) -> None:
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
