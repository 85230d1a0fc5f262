"""The order of a data loader in the pass that a save interrupts, so that the resumed pass has the same order.

A shuffling sampler draws its order when a pass begins. A resumed script begins that pass again, with `skip_first_batches`, and would draw
another order: the generators are further by then. So each sampler notes their states when a pass begins, and a resumed pass begins with
these. Beginning a pass also draws from the process's generators, which get their states back.

accelerate begins the first pass of a `StatefulDataLoader` when it prepares it, so samplers are noted before that.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from tensorstore_ck.integrations.trainer import persistent_workers
from tensorstore_ck.training import random_generators

State = dict[str, Any]


class NotedSampler(Sampler[Any]):
    """A sampler, of indices or of batches, that notes its passes. All other attributes are those of the sampler."""

    def __init__(self, sampler: Any) -> None:
        self.noted = sampler
        self.start: State | None = None
        """What the order was drawn from when the newest pass began."""
        self._replayed: State | None = None
        self._kept: State = {}

    def __getattr__(self, name: str) -> Any:
        if name == "noted":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.noted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("generator", "sampler"):  # accelerate gives a sampler another one, which the sampler must draw from
            setattr(self.noted, name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self.noted)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        start = self._now()
        indices = iter(self.noted)
        draws_later = _is_same(start, self._now())
        if not draws_later:
            self.start = start
        return self._drawn(indices, draws_later=draws_later)

    def _drawn(self, indices: Iterator[Any], *, draws_later: bool) -> Iterator[Any]:
        """`draws_later`: most samplers draw the order with its first index, when the loader has drawn a seed for its workers."""
        if draws_later:
            self._begin()
            self.start = self._now()
        first = list(islice(indices, 1))
        if self._replayed is not None:
            random_generators.set_host_states(self._kept)
        self._replayed = None
        yield from first
        yield from indices

    def replay(self, start: State) -> None:
        """The next pass begins there, and ends its draws with the process's generators as they are now."""
        self.start = self._replayed = start
        self._kept = random_generators.get_host_states()

    def _now(self) -> State:
        generator = own_generator(self)
        own = None if generator is None else generator.get_state()
        return {**random_generators.get_host_states(), "own": own, "epoch": getattr(_seeded(self), "epoch", None)}

    def _begin(self) -> None:
        if self._replayed is None:
            return
        random_generators.set_host_states({**random_generators.get_host_states(), **self._replayed})
        generator, seeded = own_generator(self), _seeded(self)
        if generator is not None and self._replayed["own"] is not None:
            generator.set_state(self._replayed["own"])
        if seeded is not None and self._replayed["epoch"] is not None:
            seeded.epoch = self._replayed["epoch"]


def _is_same(one: State, other: State) -> bool:
    pairs = ((state, other[name]) for name, state in one.items())
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b for a, b in pairs)


def own_generator(sampler: NotedSampler) -> torch.Generator | None:
    """The generator of the sampler, or of one below; None: it draws from the process's."""
    return next(iter(persistent_workers.generators_of(sampler)), None)


def _seeded(sampler: NotedSampler) -> Any:
    """The sampler of accelerate that takes its order from a seed; None: there is none."""
    return next((below for below in persistent_workers.samplers_of(sampler.noted) if hasattr(below, "initial_seed")), None)


def note_order(loader: DataLoader[Any]) -> None:
    """Notes the passes of a loader from now on. Samplers that keep their own state are left as they are."""
    found = _place_of(loader)
    if found is not None:
        sampler = getattr(*found)
        if not isinstance(sampler, NotedSampler) and not hasattr(sampler, "state_dict"):
            _put(*found, NotedSampler(sampler))


def share_order(loader: DataLoader[Any], skipped: DataLoader[Any]) -> None:
    """Lets the `skipped` rest of a loader's pass have its sampler: over an `IterableDataset` accelerate makes another one."""
    sampler, found = sampler_of(loader), _place_of(skipped)
    if sampler is not None and found is not None and sampler_of(skipped) is None:
        _put(*found, sampler)


def sampler_of(loader: DataLoader[Any]) -> NotedSampler | None:
    """The noted sampler of a loader."""
    found = _place_of(loader)
    sampler = None if found is None else getattr(*found)
    return sampler if isinstance(sampler, NotedSampler) else None


def _place_of(loader: Any) -> tuple[Any, str] | None:
    """The object, and its attribute, that has what the order comes from, below those that share out, or skip, batches.

    That is torch's own batch sampler with a sampler of indices, or another batch sampler, which may draw numbers itself.
    """
    holder, name = loader, "sampler" if getattr(loader, "batch_sampler", None) is None else "batch_sampler"
    while not isinstance(sampler := getattr(holder, name, None), NotedSampler):
        if getattr(sampler, "batch_sampler", None) is not None:
            holder, name = sampler, "batch_sampler"
        elif type(sampler) is BatchSampler:
            holder, name = sampler, "sampler"
        else:
            break
    return None if sampler is None else (holder, name)


def _put(holder: Any, name: str, sampler: NotedSampler) -> None:
    vars(getattr(holder, "base_dataloader", holder))[name] = sampler  # a loader refuses to set it


def draws_order(loader: Any) -> bool:
    """Whether its order depends on generators, and not on a seed and the number of the pass alone."""
    sampler = sampler_of(loader)
    if sampler is None or isinstance(sampler.noted, SequentialSampler) or isinstance(loader.dataset, IterableDataset):
        return False
    return _seeded(sampler) is not sampler.noted


def capture(loader: Any, running: Iterable[Any]) -> State:
    """The position of a prepared loader's order.

    `running` are the loaders that are in the middle of a pass. That of `loader` may be another one, which `skip_first_batches` has made.
    """
    sampler = sampler_of(loader)
    same = (other for other in running if other is loader or (other is not None and sampler is not None and sampler_of(other) is sampler))
    active = next(same, None)
    is_in_pass = active is not None and not active.end_of_dataloader
    is_drawn = active is None and sampler is not None and sampler.start is not None and getattr(loader, "iteration", 0) == 0
    has_order = is_in_pass or (is_drawn and _is_stateful(loader))  # of the pass that comes next, if none has begun
    generator = None if sampler is None else own_generator(sampler)
    start = sampler.start if sampler is not None and has_order else None
    return {
        "loader": _loader_state(loader, sampler, has_order=has_order),
        "iteration": getattr(loader, "iteration", 0) if active is None else active.iteration + (not is_in_pass),
        "start": start,
        "pass_start": None if start is None else start["torch"] if start["own"] is None else start["own"],  # for older versions
        "sampler": None if generator is None else generator.get_state(),
        "seed": None if sampler is None else getattr(_seeded(sampler), "initial_seed", None),
        "has_begun": persistent_workers.has_begun(loader),
    }


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _loader_state(loader: Any, sampler: NotedSampler | None, *, has_order: bool) -> State | None:
    """The state of a `StatefulDataLoader`: its position in its pass; ``{}``: it begins another pass; None: it keeps its state.

    From the state of a pass that ended it would begin that pass again, and draw from the process's generator once more.
    """
    if not _is_stateful(loader):
        return None
    if has_order or sampler is None:
        state: State = loader.state_dict()
        return state
    return None if sampler.start is None else {}


def restore(loader: Any, state: State) -> bool:
    """Restores it, after the process's generators. Returns whether the next pass continues an interrupted one and skips its batches."""
    loader.iteration = state["iteration"]
    if state["loader"] is not None:
        loader.load_state_dict(state["loader"])
    if state.get("has_begun") and not state["loader"]:  # a StatefulDataLoader makes its iterator where it continues
        persistent_workers.begin(loader)
    sampler = sampler_of(loader)
    if sampler is None:
        return False
    generator = own_generator(sampler)
    if generator is not None and state["sampler"] is not None:
        generator.set_state(state["sampler"])
    if state["seed"] is not None and (seeded := _seeded(sampler)) is not None:
        seeded.initial_seed = state["seed"]
    start = state.get("start")
    if start is None and state["pass_start"] is not None:  # an older version's, of one generator
        start = {"torch" if generator is None else "own": state["pass_start"]}
    if start is not None:
        sampler.replay({"own": None, "epoch": None, **start})
    return start is not None and state["loader"] is None
