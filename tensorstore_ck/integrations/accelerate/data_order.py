"""The order of a data loader in the pass that a save interrupts, so that the resumed pass has the same order.

A shuffling sampler draws its order when a pass begins. A resumed script begins that pass again, with `skip_first_batches`, and would draw
another order: the generator is further by then. So each sampler notes its generator's state when a pass begins, and a resumed pass begins
with that state. Beginning a pass also draws from the process's generator, which gets its state back.

accelerate begins the first pass of a `StatefulDataLoader` when it prepares it, so samplers are noted before that.
"""

import random
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.integrations.trainer import persistent_workers

State = dict[str, Any]


class NotedSampler(Sampler[Any]):
    """A sampler that notes its passes. All other attributes are those of the sampler."""

    def __init__(self, sampler: Any) -> None:
        self.noted = sampler
        self.pass_start: torch.Tensor | None = None
        """The state of the generator that the sampler draws from, when the newest pass began."""
        self._replayed: torch.Tensor | None = None
        self._process_state: torch.Tensor | None = None
        self._draws_elsewhere = self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        if name == "noted":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.noted, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generator":  # accelerate gives a sampler one, which the sampler must draw from
            self.noted.generator = value
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self.noted)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.noted, "generator", None) or torch.default_generator
        if self._replayed is not None:
            generator.set_state(self._replayed)
        self.pass_start = generator.get_state()
        before = _other_generators()
        indices = iter(self.noted)
        first = list(islice(indices, 1))  # the order is drawn with it
        self._draws_elsewhere |= _other_generators() != before
        if self._process_state is not None:
            torch.set_rng_state(self._process_state)
        self._replayed = self._process_state = None
        yield from first
        yield from indices

    def replay(self, pass_start: torch.Tensor) -> None:
        """The next pass begins with this state, and ends its draws with the process's generator as it is now."""
        self.pass_start, self._replayed, self._process_state = pass_start, pass_start, torch.get_rng_state()

    def warn_of_lost_order(self) -> None:
        """Warns once, in a pass, if the sampler drew from generators whose states are not noted."""
        if self._draws_elsewhere and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self.noted).__name__} draws from Python's or NumPy's generator: unless it seeds that in each pass, a resume within "
                "this pass has another order, so that some samples repeat and others are left out; draw the order with torch.randperm when "
                "the pass begins",
                stacklevel=user_stacklevel(),
            )


def _other_generators() -> tuple[Any, ...]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position


def note_order(loader: DataLoader[Any]) -> None:
    """Notes the passes of a loader from now on. Samplers that keep their own state are left as they are."""
    holder = _holder_of(loader)
    if holder is not None and not isinstance(holder.sampler, NotedSampler) and not hasattr(holder.sampler, "state_dict"):
        holder.sampler = NotedSampler(holder.sampler)


def sampler_of(loader: DataLoader[Any]) -> NotedSampler | None:
    """The noted sampler of a loader."""
    holder = _holder_of(loader)
    return holder.sampler if holder is not None and isinstance(holder.sampler, NotedSampler) else None


def _holder_of(loader: DataLoader[Any]) -> Any:
    """The batch sampler that has the sampler of indices, below those that share out, or skip, batches."""
    holder: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while getattr(holder, "batch_sampler", None) is not None:
        holder = holder.batch_sampler
    return holder if isinstance(getattr(holder, "sampler", None), Sampler) else None


def capture(loader: Any, active: Any) -> State:
    """The position of a prepared loader's order.

    `active` is the loader that is in the middle of a pass of the same sampler, which `skip_first_batches` may have made; None: no pass.
    """
    sampler = sampler_of(loader)
    is_in_pass = active is not None and not active.end_of_dataloader
    is_drawn = active is None and sampler is not None and sampler.pass_start is not None and getattr(loader, "iteration", 0) == 0
    has_order = is_in_pass or (is_drawn and _is_stateful(loader))  # of the pass that comes next, if none has begun
    if is_in_pass and sampler is not None:
        sampler.warn_of_lost_order()
    generator = getattr(sampler, "generator", None)
    return {
        "loader": _loader_state(loader, sampler, has_order=has_order),
        "iteration": getattr(loader, "iteration", 0) if active is None else active.iteration + (not is_in_pass),
        "pass_start": sampler.pass_start if sampler is not None and has_order else None,
        "sampler": None if generator is None else generator.get_state(),
        "seed": getattr(sampler, "initial_seed", None),
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
    return None if sampler.pass_start is None else {}


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
    generator = getattr(sampler, "generator", None)
    if generator is not None and state["sampler"] is not None:
        generator.set_state(state["sampler"])
    if state["seed"] is not None:
        sampler.noted.initial_seed = state["seed"]
    if state["pass_start"] is not None:
        sampler.replay(state["pass_start"])
    return state["pass_start"] is not None and state["loader"] is None
