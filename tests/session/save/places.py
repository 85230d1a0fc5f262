"""A store in memory whose backend a test stops, lets go and breaks; and what is saved there."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.events import Event
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend

SECONDS: Final = PATIENCE_SECONDS
MIB: Final = 1 << 20
SIZE: Final = 200_000
NEVER: Final = 0x7F


class Stop:
    """A call that waits until the test lets it go; then it goes on, or fails with `error`."""

    def __init__(self, prefix: str, error: BaseException | None) -> None:
        self.prefix = prefix
        self.error = error
        self.reached = threading.Event()
        self.goes = threading.Event()

    def await_reached(self) -> None:
        assert self.reached.wait(SECONDS), f"nobody came to {self.prefix!r}"

    def let_go(self, error: BaseException | None = None) -> None:
        self.error = error or self.error
        self.goes.set()


class Gate(Faults):
    """Every call of a backend goes through it, by what it does: ``open packs/..``, ``append``, ``close``, ``put parts/..`` and so on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_made: list[str] = []
        self._stops: list[Stop] = []
        self._all: list[Stop] = []
        self._lock = threading.Lock()

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        with self._lock:
            self.calls_made.append(what)
            stop = next((each for each in self._stops if what.startswith(each.prefix)), None)
            if stop is not None:
                self._stops.remove(stop)
        if stop is not None:
            stop.reached.set()
            assert stop.goes.wait(SECONDS), f"the test left {what!r} waiting"
            if stop.error is not None:
                raise stop.error
        return effect()

    def stop(self, prefix: str) -> Stop:
        """The next call of this kind waits."""
        return self._add(Stop(prefix, None))

    def fail(self, prefix: str, error: BaseException) -> None:
        """The next call of this kind fails."""
        self._add(Stop(prefix, error)).let_go()

    def open(self) -> None:
        """Nothing waits or fails any more."""
        with self._lock:
            self._stops.clear()
            for stop in self._all:
                stop.goes.set()

    def _add(self, stop: Stop) -> Stop:
        with self._lock:
            self._stops.append(stop)
            self._all.append(stop)
        return stop


class Scene:
    """A store handle, the gate of its backend, and the events that it emitted."""

    def __init__(self, inner: MemoryBackend | None = None, *, host_memory_bytes: int | None = 64 * MIB) -> None:
        self.gate = Gate()
        self.inner = inner or MemoryBackend()
        self.store = Store(open_engine(self.inner, self.gate), host_memory_bytes=host_memory_bytes)
        self._session = self.store.session
        """For after the store is closed, too."""
        self.events: list[Event] = []
        self.store.on_event(self.events.append)

    def other(self) -> Store:
        """Another handle: what everybody else sees."""
        return Store(open_engine(self.inner, Gate()))

    def hold(self, step: int, *, at: str = "put parts/", **options: Any) -> tuple[Stop, PendingSnapshot]:
        """A save in the background, which has come to this call and waits there."""
        stop = self.gate.stop(at)
        pending = put_beside(self.store, step, **options)
        stop.await_reached()
        return stop, pending

    def steps(self, ref: str = "job") -> list[int | None]:
        """What is visible to everybody else, oldest first."""
        with self.other() as store:
            return [snapshot.step for snapshot in reversed(store.log(ref))] if ref in store.branches() else []

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def in_use_bytes(self) -> int:
        """Of the memory for captures, what is not free."""
        arena = self._session.queue._memory.arena
        return arena._in_use_bytes if arena is not None else 0

    @property
    def allocated_bytes(self) -> int:
        arena = self._session.queue._memory.arena
        return arena.allocated_bytes if arena is not None else 0


@contextmanager
def scene(**options: Any) -> Iterator[Scene]:
    """Ends in order, whatever the test left behind."""
    made = Scene(**options)
    session = made._session
    try:
        yield made
    finally:
        made.gate.open()
        session.queue.drain()
        session.engine.close()


def open_engine(inner: MemoryBackend, gate: Gate) -> Engine:
    config = init_store(inner)
    return make_engine(FaultyBackend(inner, gate, atomic_put=True), config, MemoryTable())


def state_of(step: int, size_bytes: int = SIZE) -> dict[str, Any]:
    """The state of a step: all of its blocks are new."""
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator), "step": step}


def spoil(state: dict[str, Any]) -> None:
    """What an optimizer does to a state once the save has returned."""
    state["w"].fill_(NEVER)
    state["step"] = -1


def put_beside(store: Store, step: int, *, size_bytes: int = SIZE, ref: str = "job", **options: Any) -> PendingSnapshot:
    """Saves the state of a step, and spoils it at once."""
    state = state_of(step, size_bytes)
    pending = store.put_snapshot_async(state, ref=ref, step=step, **options)
    spoil(state)
    return pending


def check(store: Store, step: int, *, size_bytes: int = SIZE, ref: str = "job") -> None:
    """What is stored of a step is what was saved."""
    found, expected = store.checkout(f"{ref}@{step}"), state_of(step, size_bytes)
    assert found["step"] == step
    assert torch.equal(found["w"], expected["w"]), f"step {step} is torn"
