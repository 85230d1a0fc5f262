"""A loop of the user's own that reads with workers: the same samples, random augmentation and dropout after a resume at any step."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.nodes import Batcher, Loader, Prefetcher, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, MismatchError
from tests.effort import effort

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SAMPLES = 12
BATCH = 4
STEPS = 6
"""Two epochs."""


class Augmented(Dataset[Any]):
    """Draws from each generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, float, float, float]:
        return number, float(torch.rand(())), random.random(), float(np.random.rand())


class WholeBatches(Augmented):
    """Reads a batch at once."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class Remembering(Augmented):
    """As docs/guides/data-order.md advises for a StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


class Loading(NamedTuple):
    """A loader, and what saves its position."""

    loader: DataLoader[Any]
    position: Any
    advance: Callable[[], None] = lambda: None


def cursor(dataset: Dataset[Any], **workers: Any) -> Loading:
    position = tsck.SampleCursor(SAMPLES, batch_size=BATCH, seed=3)
    return Loading(position.loader(dataset, collate_fn=draw_again, **workers), position, position.advance)


def stateful(dataset: Dataset[Any], *, generator: torch.Generator | None = None, **workers: Any) -> Loading:
    loader = StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, generator=generator, **workers)
    return Loading(loader, loader)


def stateful_with_generator(dataset: Dataset[Any], **workers: Any) -> Loading:
    return stateful(dataset, generator=torch.Generator(), **workers)


def draw_again(batch: list[Any]) -> Any:
    """As mixup does."""
    return *torch.utils.data.default_collate(batch), torch.rand(2)


def run(store: tsck.Store, make: Callable[[], Loading], *, resume_from: str | None = None, save: bool = False) -> list[Any]:
    """The samples, augmentation and dropout of each step. Another process begins with other numbers."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 if resume_from is None else 2)
    loading, found, step = make(), [], 0
    training = tsck.TrainingState(dataloader=loading.position)
    if resume_from is not None:
        restored = training.restore(store, resume_from)
        assert restored is not None
        step = restored.step or 0
    while step < STEPS:
        for batch in loading.loader:
            found.append(([each.tolist() for each in batch], torch.rand(2).tolist()))
            loading.advance()
            step += 1
            if save:
                training.put(store, ref="run", step=step)
    return found


def is_quick(dataset: type[Augmented], workers: tuple[int, bool]) -> bool:
    return workers in {Augmented: [(0, False)], WholeBatches: [(2, True)], Remembering: [(0, False), (2, True)]}[dataset]


EXACT = [(cursor, Augmented), (cursor, WholeBatches), (stateful, Remembering), (stateful_with_generator, Remembering)]
WORKERS = [(0, False), (1, False), (1, True), (2, False), (2, True)]


@pytest.mark.parametrize(
    ("make", "dataset", "workers", "persistent"),
    [
        pytest.param(make, dataset, *workers, marks=() if is_quick(dataset, workers) else pytest.mark.slow)
        for (make, dataset), workers in itertools.product(EXACT, WORKERS)
    ],
)
def test_a_resume_at_any_step_goes_on_exactly(
    store: tsck.Store, make: Callable[..., Loading], dataset: type[Augmented], workers: int, persistent: bool
) -> None:
    def loading() -> Loading:
        return make(dataset(), num_workers=workers, persistent_workers=persistent)

    expected = run(store, loading, save=True)
    assert len({repr(batch) for batch, _ in expected}) == STEPS
    for step in effort([2, 3], [*range(1, STEPS)]) if (workers, persistent) == (2, True) else range(1, STEPS):
        assert run(store, loading, resume_from=f"run@{step}") == expected[step:], step


@pytest.mark.parametrize(("persistent", "generator"), [(False, None), (True, None), (True, torch.Generator())])
def test_a_sampler_that_learns_of_its_epoch_before_each_pass_goes_on_in_it(
    store: tsck.Store, persistent: bool, generator: torch.Generator | None
) -> None:
    """As loops over a DistributedSampler do: `set_epoch` comes after the restore, and before the pass."""

    def epochs(first: int | None) -> list[Any]:
        torch.manual_seed(1 if first is None else 2)
        sampler: Any = DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=5)
        workers: Any = {"num_workers": 1, "persistent_workers": True} if persistent else {}
        loader: Any = StatefulDataLoader(Remembering(), batch_size=BATCH, sampler=sampler, generator=generator, **workers)
        extra = {"epoch": 0}
        training = tsck.TrainingState(dataloader=loader, extra=extra)
        if first is None:
            training.put(store, ref="run", step=0)
        else:
            training.restore(store, f"run@{first}")
        found: list[Any] = []
        for epoch in range(extra["epoch"], 2):
            extra["epoch"] = epoch
            sampler.set_epoch(epoch)
            for batch in loader:
                drawn = torch.rand(2).tolist(), torch.rand(2, generator=generator).tolist()
                found.append(([each.tolist() for each in batch], *drawn))
                if first is None:
                    training.put(store, ref="run", step=len(found))
        return found

    expected = epochs(None)
    assert len(expected) == STEPS
    for step in (0, 2, 4, 5):
        assert epochs(step) == expected[step:], step


def with_epochs(kind: type[DistributedSampler[Any]] = DistributedSampler, **options: Any) -> Any:
    """A loader that begins its pass after `set_epoch`."""
    numbers: Any = range(SAMPLES)
    return StatefulDataLoader(numbers, batch_size=BATCH, sampler=kind(numbers, num_replicas=1, rank=0), **options)


def read(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.fixture
def rest(store: tsck.Store) -> list[Any]:
    """What is left of a pass after the save "pass"."""
    loader = with_epochs()
    batches = iter(loader)
    next(batches)
    tsck.TrainingState(dataloader=loader).put(store, ref="pass", step=1)
    return read(batches)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_restored_loader_continues_the_pass_once(store: tsck.Store, rest: list[Any], make_copy: Callable[[Any], Any]) -> None:
    loader = with_epochs()
    tsck.TrainingState(dataloader=loader).restore(store, "pass")
    copied = make_copy(loader)
    assert read(copied) == rest
    assert [len(read(each)) for each in (copied, copied)] == [SAMPLES // BATCH] * 2
    assert make_copy is copy.copy or read(loader) == rest  # a shallow copy has the same iterator
    assert len(read(loader)) == SAMPLES // BATCH


def test_a_loader_that_has_not_read_since_its_restore_is_saved_as_it_was(store: tsck.Store, rest: list[Any]) -> None:
    for ref, again in (("pass", "again"), ("again", "third")):
        loader = with_epochs()
        training = tsck.TrainingState(dataloader=loader)
        training.restore(store, ref)
        training.put(store, ref=again, step=1)
        assert read(loader) == rest


def test_a_loader_with_other_workers_is_refused_by_the_restore(store: tsck.Store, rest: list[Any]) -> None:
    with pytest.raises(MismatchError, match=r"dataloader has num_workers=1, and the saved one had 0: create it with num_workers=0"):
        tsck.TrainingState(dataloader=with_epochs(num_workers=1)).restore(store, "pass")
    plain: Any = StatefulDataLoader(range(SAMPLES), batch_size=BATCH, num_workers=1)
    with pytest.raises(MismatchError, match="dataloader does not take its state"):
        tsck.TrainingState(dataloader=plain).restore(store, "pass")


def test_a_loader_that_cannot_continue_begins_no_other_pass(store: tsck.Store, rest: list[Any]) -> None:
    class Failing(DistributedSampler[Any]):
        fails = True

        def __iter__(self) -> Any:
            if self.fails:
                raise ValueError("no order yet")
            return super().__iter__()

    loader = with_epochs(Failing)
    tsck.TrainingState(dataloader=loader).restore(store, "pass")
    for _ in range(2):
        with pytest.raises(MismatchError, match="no order yet"):
            iter(loader)
    loader.sampler.fails = False
    batches = iter(loader)
    assert len(batches) == SAMPLES // BATCH  # as only the loader's own iterator has it
    assert read(batches) == rest


@pytest.mark.parametrize("saved", range(1, 6))
def test_a_sampler_that_saves_its_epoch_says_it_after_the_restore(store: tsck.Store, saved: int) -> None:
    class Epochs(Sampler[int]):
        epoch = at = 0

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Any:
            order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            while self.at < 6:
                self.at += 1
                yield order[self.at - 1]
            self.at = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def state_dict(self) -> dict[str, int]:
            return {"epoch": self.epoch, "at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch, self.at = state["epoch"], state["at"]

    def train(resume_from: str | None) -> list[Any]:
        sampler = Epochs()
        loader: Any = StatefulDataLoader(range(6), batch_size=2, sampler=sampler)
        training, batches = tsck.TrainingState(dataloader=loader), []
        if resume_from is not None:
            training.restore(store, resume_from)
        for epoch in range(sampler.epoch, 2):
            sampler.set_epoch(epoch)
            for batch in loader:
                batches.append((epoch, batch.tolist()))
                if resume_from is None:
                    training.put(store, ref="run", step=len(batches))
        return batches

    assert train(None)[saved:] == train(f"run@{saved}")


def test_without_set_epoch_the_pass_begins_in_the_restore(store: tsck.Store) -> None:
    """Another thread may read: what this thread has drawn meanwhile is not undone."""

    class Drawing(Sampler[int]):
        drawn: list[float] | None = None

        def __len__(self) -> int:
            return SAMPLES

        def __iter__(self) -> Any:
            for number in range(SAMPLES):
                if self.drawn is not None:
                    self.drawn.append(torch.rand(1).item())
                yield number

    sampler = Drawing()
    loader: Any = StatefulDataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler)
    training = tsck.TrainingState(dataloader=loader)
    next(iter(loader))
    training.put(store, ref="run", step=1)
    training.restore(store, "run")
    sampler.drawn = []
    read(loader)
    assert len(set(sampler.drawn)) == len(sampler.drawn)


def test_the_numbers_of_a_sample_follow_from_seed_and_epoch_and_not_from_workers_or_ranks() -> None:
    def epochs(ranks: int, workers: int, **options: Any) -> list[Any]:
        position = tsck.SampleCursor(SAMPLES, batch_size=BATCH, **options)
        loaders = [position.loader(Augmented(), rank, ranks, num_workers=workers) for rank in range(ranks)]
        found: list[Any] = []
        while position.epoch < 2:
            for shares in zip(*loaders, strict=True):
                found += [tuple(row) for share in shares for row in zip(*(each.tolist() for each in share), strict=True)]
                position.advance()
        return found

    alone = epochs(1, 0)
    assert len({row[1] for row in alone}) == 2 * SAMPLES, "each epoch draws again"
    assert epochs(2, 1) == epochs(4, 0) == alone
    assert {row[1] for row in epochs(1, 0, seed=1)}.isdisjoint(row[1] for row in alone)


def test_reading_moves_no_generator_of_the_process() -> None:
    position = tsck.SampleCursor(SAMPLES, batch_size=BATCH)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    list(position.loader(Augmented()))
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_a_dataset_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="the dataset has 12 samples, and the cursor 13"):
        tsck.SampleCursor(SAMPLES + 1, batch_size=BATCH).loader(Augmented())


def test_a_loader_that_skips_what_the_cursor_has_skipped_is_refused() -> None:
    position = tsck.SampleCursor(SAMPLES, batch_size=BATCH)
    loader: Any = StatefulDataLoader(Augmented(), batch_sampler=position.batches())
    with pytest.raises(InvalidOptionError, match=r"dataloader\.loader has the batches of a SampleCursor.* pass the cursor alone"):
        tsck.TrainingState(dataloader={"cursor": position, "loader": loader})


@pytest.mark.parametrize(
    ("sampler", "advice"),
    [
        (RandomSampler(range(SAMPLES)), "pass shuffle=True instead"),
        (WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), "pass a sampler with state_dict"),
        (BatchSampler(SubsetRandomSampler(range(SAMPLES)), BATCH, drop_last=False), "SubsetRandomSampler, whose generator"),
    ],
)
def test_an_order_that_a_loader_does_not_save_is_warned_of(sampler: Any, advice: str) -> None:
    given: dict[str, Any] = {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler}
    with pytest.warns(UserWarning, match=f"dataloader has a .*{advice}"):
        tsck.TrainingState(dataloader=StatefulDataLoader(Augmented(), **given))


def test_an_order_that_nodes_do_not_save_is_warned_of() -> None:
    drawn = SamplerWrapper(RandomSampler(range(SAMPLES)))
    with pytest.warns(
        UserWarning, match=r"dataloader has a RandomSampler, whose generator a Loader does not save: .* a sampler with state_dict"
    ):
        tsck.TrainingState(dataloader=Loader(Prefetcher(Batcher(drawn, batch_size=BATCH), prefetch_factor=2)))
