"""What each rank of the pool does when a test of many ranks asks it to. Saves stay under way between two requests."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.events import Event
from tests.end_to_end.crash.faulty import FaultyBackend
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS
from tests.session.save.places import MIB, SECONDS, Gate, Stop

ROWS = 1000
"""Of a sharded tensor, which takes 1.5 MiB: a copy of a state takes one piece of the memory for captures, of 2 MiB."""
COPY = 2 * MIB


class Side:
    """This rank's handle, and the saves that it has begun."""

    def __init__(self, folder: str, ranks: int, copies: int | None) -> None:
        self.gate = Gate()
        self.ranks = ranks
        self.store = tsck.open(
            f"{folder}/store", cache_dir=f"{folder}/cache-{dist.get_rank()}", host_memory_bytes=None if copies is None else copies * COPY
        )
        backend = FaultyBackend(self.store.engine.backend, self.gate, atomic_put=False)
        self.store.engine.backend = self.store.engine.log._writer.backend = backend
        self.puts: dict[int, tsck.PendingSnapshot] = {}
        self.stops: list[Stop] = []
        self.events: list[Event] = []
        self.store.on_event(self.events.append)
        self.frozen: DTensor | None = None
        self.held, self.holds = threading.Event(), threading.Event()


SIDES: list[Side] = []
Ending = tuple[str, str]
"""``("published", root)``, or the name of an error's class and its message."""


def full_tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(ROWS, 400, generator=generator), "few": torch.randn(3, 50, generator=generator)}


def state_of(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """A rank's side of the state of a step."""
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
    tensors = {}
    for name, full in full_tensors(step).items():
        chunks = full.chunk(ranks)
        local = chunks[rank].clone() if rank < len(chunks) else full[:0].clone()
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    return {"model": tensors, "same": torch.full((900,), float(step)), "list": [step, {"step": step}]}


def spoil(state: dict[str, Any], own: dict[str, Any]) -> None:
    for value in state["model"].values():
        value.to_local().fill_(-7.0)
    for value in (state["same"], own["rng"]):
        value.fill_(-7)
    state["list"][1]["step"] = -7
    own["seen"][:] = b"spoilt"


def mine(only: int | None) -> bool:
    return only is None or dist.get_rank() == only


# --- requests -----------------------------------------------------------------------------------------------------------


def begin(folder: str, ranks: int, copies: list[int | None]) -> None:
    """Opens the store, with memory for so many copies on this rank."""
    SIDES.append(Side(folder, ranks, copies[dist.get_rank()]))


def end() -> Ending:
    side = SIDES.pop()
    side.held.set()
    side.gate.open()
    side.store.drain()
    return ending(side.store.close)


def stop(prefix: str, only: int | None = None) -> None:
    if mine(only):
        SIDES[-1].stops.append(SIDES[-1].gate.stop(prefix))


def let_go() -> None:
    SIDES[-1].held.set()
    for each in SIDES[-1].stops:
        each.let_go()


def fail(prefix: str, only: int) -> None:
    if mine(only):
        SIDES[-1].gate.fail(prefix, BackendUnavailableError("injected"))


def hold_after(step: int, only: int) -> None:
    """This rank's worker stays at the event that reports that a step is published."""
    side = SIDES[-1]

    def hold(event: Event) -> None:
        if (event.kind, event.step) == ("published", step):
            side.holds.set()
            side.held.wait(SECONDS)

    if mine(only):
        side.store.on_event(hold)


def await_hold(only: int) -> None:
    assert not mine(only) or SIDES[-1].holds.wait(SECONDS)


def save(state: dict[str, Any], step: int, *, waits: bool = False, **options: Any) -> Ending:
    """In the background, or waited for: how the call ended."""
    side = SIDES[-1]
    options = {"ref": "job", "step": step, "group": GROUPS[side.ranks], "timeout_seconds": TIMEOUT_SECONDS, **options}

    def do() -> Any:
        if waits:
            return side.store.put_snapshot(state, **options)
        side.puts[step] = side.store.put_snapshot_async(state, **options)
        return None

    return ending(do)


def put(step: int, odd: int | None = None, **options: Any) -> Ending:
    """Saves, and spoils what was saved."""
    side, rank = SIDES[-1], dist.get_rank()
    state, own = state_of(step, rank, side.ranks), {"rng": torch.tensor([step, rank]), "seen": bytearray([rank] * 100)}
    if rank == odd:
        state["odd"] = object()
    try:
        return save(state, step, rank_state=own, **options)
    finally:
        spoil(state, own)


def put_alone(steps: range, only: int) -> None:
    """This rank saves by itself, each step to a branch of its own."""
    side = SIDES[-1]
    for step in steps if mine(only) else ():
        side.puts[step] = side.store.put_snapshot_async({"step": step}, ref=f"alone/{step}", step=step)


def put_pair(step: int, **options: Any) -> Ending | None:
    """The first two ranks save together."""
    rank = dist.get_rank()
    return save(state_of(step, rank, 2), step, group=GROUPS[2], **options) if rank < 2 else None


def put_now(step: int) -> Ending:
    """Saves, and waits."""
    return put(step, waits=True)


def frozen_shard() -> DTensor:
    """This rank's share of the large tensor of step 1, the same each time."""
    side = SIDES[-1]
    shard = side.frozen = side.frozen if side.frozen is not None else state_of(1, dist.get_rank(), side.ranks)["model"]["w"]
    assert shard is not None
    return shard


def keep(step: int, changes: bool) -> Ending:
    """Saves a state that has the large tensor of step 1, frozen; where it `changes`, on rank 1."""
    rank = dist.get_rank()
    state = state_of(step, rank, SIDES[-1].ranks)
    state["model"]["w"] = frozen_shard()
    if changes and rank == 1:
        frozen_shard().to_local()[0] += 1
    return save(state, step, frozen=["model.w"])


def put_moved(step: int, moves: list[int], options: dict[str, Any]) -> tuple[Ending, list[str]]:
    """Saves, and waits: a tensor of which each rank has a share has moved on these ranks. Also what was warned of."""
    if dist.get_rank() in moves:
        frozen_shard().to_local().add_(1)
    state = {"w": frozen_shard(), "optimizer": {"state": {0: {"step": torch.tensor(float(options.pop("count", step)))}}}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended = save(state, step, waits=True, **options)
    return ended, [str(each.message) for each in caught]


def put_torn(step: int, on: int | None) -> Ending:
    """Saves, and waits; on one rank a tensor changes before its packs are durable."""
    side, rank = SIDES[-1], dist.get_rank()
    state, real = state_of(step, rank, side.ranks), side.gate.call

    def call(what: str, *args: Any, **others: Any) -> Any:
        if what.startswith("close") and rank == on:
            state["model"]["w"].to_local().add_(1)
        return real(what, *args, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side.gate, "call", call)
        return save(state, step, waits=True, verify_capture=1.0)


def cancel(step: int, only: int) -> bool | None:
    return SIDES[-1].puts[step].cancel() if mine(only) else None


def wait(step: int, only: int | None = None) -> Ending | None:
    return ending(lambda: SIDES[-1].puts[step].wait(SECONDS)) if mine(only) else None


def settle() -> None:
    """Until no save is in progress; reports no error."""
    SIDES[-1].store.session.queue.wait_idle()


def await_work_on(step: int, only: int) -> None:
    side = SIDES[-1]
    if mine(only):
        assert side.store.session.queue._changed.wait_for(
            lambda: getattr(side.store.session.queue._save_worker._working, "status", None) is side.puts[step]._status, SECONDS
        )


def restore(address: str) -> tuple[bool, int]:
    """Whether this rank's side is what was saved, and the step of its own state."""
    side = SIDES[-1]
    rank, group = dist.get_rank(), GROUPS[side.ranks]
    found = state_of(0, rank, side.ranks)
    side.store.checkout(address, into=found, group=group, timeout_seconds=TIMEOUT_SECONDS)
    expected = state_of(found["list"][0], rank, side.ranks)
    same = all(torch.equal(found["model"][name].to_local(), value.to_local()) for name, value in expected["model"].items())
    own = side.store.rank_state(address, group=group, timeout_seconds=TIMEOUT_SECONDS)
    return same and torch.equal(found["same"], expected["same"]) and own["seen"] == bytearray([rank] * 100), int(own["rng"][0])


def told(kind: str, field: str = "") -> list[tuple[int | None, Any]]:
    """The steps of the events of a kind, each with a field: its reason or error."""
    events = [event for event in SIDES[-1].events if event.kind == kind]
    return [(event.step, event.fields[field or ("reason" if kind == "dropped" else "error")]) for event in events]


def memory() -> tuple[int, int]:
    """In use, and the limit."""
    arena = SIDES[-1].store.session.queue._memory.arena
    assert arena is not None
    return arena._in_use_bytes, arena.limit_bytes


def ending(action: Callable[[], Any]) -> Ending:
    try:
        found = action()
    except tsck.StoreError as exc:
        return type(exc).__name__, str(exc)
    return "published", found.root if isinstance(found, tsck.Snapshot) else ""
