"""Positions of training data loaders. Lightning saves none, so that a run that it resumes within an epoch reads the first batches again.

A loader's order depends on the random numbers that it draws when an iteration begins. A snapshot has the generators of that moment; after a
resume the loader begins from them once more, the batches that were trained on are read and dropped, and the generators get their values
back. That happens when the first batch is asked for: Lightning has set the epoch of the sampler by then, but has not when it makes the
iterator. Loaders that save their own position (StatefulDataLoader) get it back from Lightning, but not always their order: with several
ranks Lightning wraps their sampler in one that shows no state, so that a run that it resumes has another order: there they are treated as
the others.

Lightning fetches one batch in advance if a loader has no length. That batch is fetched again, with the generators of that moment.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from tensorstore_ck.integrations.trainer import persistent_workers
from tensorstore_ck.training import random_generators

LOADERS: Final = "_tsck_train_loaders"
"""Attribute of a Strategy."""
GOES: Final = "goes_by_itself"
"""Whether a loader goes to its position; None if it cannot; false if Lightning's wrapper of its sampler hides where that was."""
POSITION: Final = "_tsck_position"
"""Attribute of a loader."""
KNOWS_POSITION: Final = "_tsck_knows_position"
"""Attribute of a class of loaders."""
State = dict[str, Any]


def require_replays(stored: list[State], fit_loop: State) -> None:
    """Keeps Lightning from loading positions into loaders that would have another order there, lack a batch, or are at their end."""
    epochs = fit_loop["epoch_progress"]["current"]
    is_ended = 0 < epochs["ready"] <= epochs["processed"] and fit_loop["epoch_loop.batch_progress"]["is_last_batch"]
    if is_ended or any(position[GOES] is False or position["prefetched"] for position in stored):
        fit_loop["state_dict"].pop("combined_loader", None)
        for position in stored:
            position[GOES] = None


def has_ended(loop: Any) -> bool:
    """Whether a FitLoop that was loaded is at the end of an epoch; where a former `max_steps` ended one, Lightning goes on within it."""
    epochs = loop.epoch_progress.current
    ended: bool = 0 < epochs.ready <= epochs.processed and (not loop.restarting or loop.epoch_loop._num_ready_batches_reached())
    return ended


class LoaderPosition:
    """The position of one loader in its present iteration."""

    def __init__(self, trainer: Any, loader: Any, stored: State | None) -> None:
        self._trainer, self._loader, self._stored = trainer, loader, stored
        self._at_iteration: State | None = None
        self._at_first_batch: State | None = None
        self._at_fetch: State | None = None
        self._fetched = 0
        self._had_begun = False
        """Whether persistent workers were running when the iteration began."""
        self._follows_another = False
        """Whether the process that saved had begun an iteration."""

    def state(self) -> State:
        """For a snapshot."""
        is_stateful = callable(getattr(self._loader, "load_state_dict", None))
        goes = None if not is_stateful else not any(map(persistent_workers.is_wrapper, persistent_workers.samplers_of(self._loader)))
        at = {"at_iteration": self._at_iteration, "at_first_batch": self._at_first_batch, "at_fetch": self._at_fetch}
        return {**at, "fetched": self._fetched, "had_begun": self._had_begun, GOES: goes}

    def iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterates; the first time after a resume from the stored position on."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self._follows_another = stored["at_iteration"] is not None
            return self._counted(lambda: self._resume(stored, begin))
        if self._follows_another:
            persistent_workers.begin(self._loader)
        self._had_begun = persistent_workers.has_begun(self._loader)
        self._at_iteration, self._at_first_batch, self._fetched = self._generators(), None, 0
        begun = begin()
        return self._counted(lambda: self._note_first_batch(begun))

    def _counted(self, first: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        inner = first()
        while True:
            if self._trainer.fit_loop._data_fetcher.length is None:
                self._at_fetch = self._generators()
            try:
                batch = next(inner)
            except StopIteration:
                return
            self._fetched += 1
            yield batch

    def _note_first_batch(self, begun: Iterator[Any]) -> Iterator[Any]:
        self._at_first_batch = self._generators()
        return begun

    def _resume(self, stored: State, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begins where a snapshot was saved. At the end of an epoch Lightning asks once more when the next one begins."""
        loop = self._trainer.fit_loop
        ready = loop.epoch_loop.batch_progress.current.ready
        if has_ended(loop):
            return iter(())
        self._had_begun = stored.get("had_begun", False)
        if self._had_begun and not stored[GOES]:
            persistent_workers.begin(self._loader)
        if not ready or stored["at_iteration"] is None:
            self._at_iteration = self._generators()
            return self._note_first_batch(begin())
        kept = self._generators()
        self._at_iteration, self._at_first_batch = stored["at_iteration"], stored["at_first_batch"]
        self._fetched = max(0, stored["fetched"] - stored["prefetched"] - (stored["ready"] - ready))
        self._set_generators(self._at_iteration)
        begun = begin()
        if not stored[GOES]:
            self._set_generators(self._at_first_batch or self._at_iteration)
            for _ in islice(begun, self._fetched):
                pass
        if stored["prefetched"]:
            self._set_generators(stored["at_fetch"])
            begun = chain(list(islice(begun, 1)), begun)
        self._set_generators(kept)
        return begun

    def _generators(self) -> State:
        """The states of the process's generators, and of those that the loader and its samplers hold."""
        own = [random_generators.get_state(generator) for generator in self.held_generators()]
        return {"process": random_generators.get_process_states(), "own": own}

    def _set_generators(self, states: State) -> None:
        random_generators.set_process_states(states["process"], None)
        for generator, state in zip(self.held_generators(), states["own"], strict=False):
            random_generators.set_state(generator, state)

    def held_generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers, also of those below Lightning's wrapper."""
        return persistent_workers.generators_of(self._loader)


def _positioned_class(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """A class of loaders that know their position. With another base or slots, an object of `kind` could not change to it."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - the method of the class
        position: LoaderPosition = getattr(self, POSITION)
        return position.iterate(lambda: kind.__iter__(self))

    return type(kind.__name__, (kind,), {"__iter__": __iter__, "__slots__": (), KNOWS_POSITION: True})


class TrainLoaders:
    """The training data loaders of a Trainer, as its Strategy gets them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stored: list[State] = []
        self._changed: list[tuple[Any, type]] = []
        process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = lambda dataloader: self._positioned(process(dataloader))

    @classmethod
    def of(cls, trainer: Any) -> "TrainLoaders":
        """The loaders of this Trainer."""
        loaders: TrainLoaders | None = getattr(trainer.strategy, LOADERS, None)
        if loaders is None:
            loaders = cls(trainer)
            setattr(trainer.strategy, LOADERS, loaders)
        return loaders

    def end(self) -> None:
        """Leaves the Strategy and the loaders as they were, since they may be pickled."""
        strategy = self._trainer.strategy
        if getattr(strategy, LOADERS, None) is self:
            delattr(strategy, LOADERS)
            del strategy.process_dataloader
        for loader, kind in self._changed:
            loader.__class__ = kind
            delattr(loader, POSITION)
        self._changed = []

    def resume(self, stored: list[State]) -> None:
        """The loaders that are made from now on begin there; with an empty list, at their beginning."""
        self._stored = list(stored)

    def state(self) -> list[State]:
        """The positions, for a snapshot."""
        loop = self._trainer.fit_loop
        prefetched = len(getattr(loop._data_fetcher, "batches", ()))
        here = {"prefetched": prefetched, "ready": loop.epoch_loop.batch_progress.current.ready}
        nowhere = {"at_iteration": None, "at_first_batch": None, "at_fetch": None, "fetched": 0, "had_begun": False, GOES: None}
        return [{**(nowhere if position is None else position.state()), **here} for position in self._positions()]

    def generators(self) -> list[Any]:
        """The states of generators that loaders hold."""
        return [[random_generators.get_state(generator) for generator in held] for held in self._held_generators()]

    def set_generators(self, states: list[Any]) -> None:
        """Restores them."""
        for held, own in zip(self._held_generators(), states, strict=False):
            for generator, state in zip(held, own, strict=False):
                random_generators.set_state(generator, state)

    def _positions(self) -> list[LoaderPosition | None]:
        combined = self._trainer.fit_loop._combined_loader
        return [getattr(loader, POSITION, None) for loader in (() if combined is None else combined.flattened)]

    def _held_generators(self) -> list[list[torch.Generator]]:
        return [[] if position is None else position.held_generators() for position in self._positions()]

    def _positioned(self, loader: Any) -> Any:
        if not self._trainer.training or not isinstance(loader, DataLoader):
            return loader
        stored = self._stored.pop(0) if self._stored else None
        setattr(loader, POSITION, LoaderPosition(self._trainer, loader, stored))
        if not hasattr(loader, KNOWS_POSITION):
            self._changed.append((loader, type(loader)))
            loader.__class__ = _positioned_class(type(loader))
        return loader
