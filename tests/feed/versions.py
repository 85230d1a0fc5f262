"""A trainer's versions of a state, and a follower's tensors."""

from typing import Any

import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.feed import Feed, FeedVersion
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.gc.stores import open_store

REF = "runs/rl"
State = dict[str, dict[str, torch.Tensor]]


class NotedFaults(Faults):
    """`Faults` that also notes every call."""

    def __init__(self, mode: str = "", at: int = 0) -> None:
        super().__init__(mode, at)
        self.noted: list[str] = []
        self.read_bytes = 0

    def call(self, what: str, effect: Any, tear: Any = None, *, create: bool = False) -> Any:
        self.noted.append(what)
        result = super().call(what, effect, tear, create=create)
        self.read_bytes += len(result) if isinstance(result, bytes) else 0
        return result


class MeteredBackend(FaultyBackend):
    """Also counts the bytes of ranges."""

    def __init__(self, inner: Backend, faults: NotedFaults) -> None:
        super().__init__(inner, faults, atomic_put=True)
        self._noted = faults

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        super().read_into(name, offset, target)
        self._noted.read_bytes += len(target)


def follower(backend: Backend, faults: NotedFaults | None = None) -> tsck.Store:
    """A handle of another host, whose calls `faults` sees."""
    return open_store(MeteredBackend(backend, faults or NotedFaults()))


def first_state(dtype: torch.dtype = torch.bfloat16, layers: int = 3, rows: int = 64) -> State:
    """Weights, of which one is too small to be a block."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{number}": torch.randn(rows, 128, generator=generator).to(dtype) for number in range(layers)}
    return {"model": {**weights, "bias": torch.randn(8, generator=generator).to(dtype)}}


def train(state: State, step: int, share: float = 0.01) -> None:
    """Changes some elements of each tensor, in place."""
    generator = torch.Generator().manual_seed(step)
    for tensor in state["model"].values():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor += (chosen * 0.25 * (1 + step)).to(tensor.dtype)


def copy_of(state: State) -> State:
    return {"model": {name: tensor.clone() for name, tensor in state["model"].items()}}


def zeros(state: State) -> State:
    return {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}


def equal(left: State, right: State) -> bool:
    return left["model"].keys() == right["model"].keys() and all(
        torch.equal(left["model"][name], right["model"][name]) for name in left["model"]
    )


def save(store: tsck.Store, state: State, step: int, *, delta: bool = True) -> tsck.Snapshot:
    return store.put_snapshot(state, ref=REF, step=step, delta=delta)


def update(feed: Feed) -> FeedVersion | None:
    """Polls and swaps."""
    feed.poll()
    return feed.swap()


def step_of(feed: Feed) -> int | None:
    """The step of the version that the tensors are said to be."""
    version = feed.version
    return None if version is None else version.step
