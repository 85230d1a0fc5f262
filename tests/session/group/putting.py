"""Ranks of a simulation that save with the real code, over one backend in memory: every call to it or to the channel is a step.

A rank opens its store once and saves one thing after the other, as a training process does; each save follows what this rank knows.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.engine.write.request import Expected, SaveRequest
from tensorstore_ck.engine.write.write_and_commit import StoreDestination
from tensorstore_ck.errors import (
    BackendUnavailableError,
    ConflictError,
    DamageError,
    InputError,
    SnapshotAbortedError,
    UndecidedError,
)
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.group import Group, Participant
from tensorstore_ck.session.group.rank_save import RankSave
from tensorstore_ck.session.group.save_plan import Memory
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.session.group.simulation import TIMEOUT, Actor, DiedError, Simulation
from tests.session.group.states import Spreading, captured, sharded, whole

START: Final = 2_000_000_000
"""When simulations begin, in seconds since 1970."""
BEFORE: Final = -(1 << 60)
"""The number of the first step, so that the save to which faults belong can begin at step 0."""


@dataclass(frozen=True)
class Put:
    """What one rank saves."""

    step: int
    take_apart: Callable[[], CapturedState]
    ref: str = "job"
    parent: Digest | str | None = "last seen"
    expect: Expected | str = "last seen"
    metadata: bytes = field(default_factory=lambda: encode_metadata({}))
    metrics: dict[str, float] = field(default_factory=dict)
    before: Callable[[], object] = lambda: None
    """Done by this rank before it begins."""

    def but(self, **changes: Any) -> "Put":
        """The same with other fields."""
        return replace(self, **changes)


class Ending(NamedTuple):
    """How one save ended for one rank."""

    info: SnapshotRow | None
    error: BaseException | None
    seconds: float


class SteppedFaults(Faults):
    """Two steps of the rank at each call of the backend, and the faults of `Faults`."""

    def __init__(self, mode: str = "", at: int = 0, *, error: Exception | None = None, what: str = "", persistent: bool = False) -> None:
        """`error` is raised by every call whose description begins with `what`."""
        super().__init__(mode, at, persistent=persistent)
        self.actor: Actor | None = None
        self.armed = False
        self._error = error
        self._what = what

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        assert self.actor is not None
        gone = BackendUnavailableError(f"injected: {what}")
        self.actor.step(gone)
        if not self.armed:
            return effect()
        if self._error is not None and what.startswith(self._what):
            self.struck = self.struck or what
            raise self._error
        try:
            result = super().call(what, effect, tear, create=create)
        except Death:
            self.actor.dead = True
            raise DiedError from None
        self.actor.step(gone)
        return result


class PutRank:
    """A rank, and how its saves ended."""

    def __init__(self, simulation: Simulation, backend: Backend, rank: int, ranks: int, puts: Sequence[Put], *, faulty: int) -> None:
        self.puts = list(puts)
        self.endings: list[Ending] = []
        self.faults = SteppedFaults()
        self.start = 0.0
        self.steps_of_faulty = 1 << 60
        """How many steps the save took that faults belong to; more than it ever takes, as long as it has not ended."""
        self.rank = rank
        self._ranks = ranks
        self._backend = backend
        self._faulty = faulty
        self._simulation = simulation
        self.engine: Engine
        self.actor = simulation.spawn(self._run, rank)

    def _run(self, actor: Actor) -> None:
        actor.steps = BEFORE
        self.faults.actor = actor
        actor.sleep(self.start)
        new_id = ids_of(actor.simulation)
        self.engine = open_engine(self._simulation, FaultyBackend(self._backend, self.faults, atomic_put=True), actor.sleep)
        group = Group(actor, rank=actor.rank, ranks=self._ranks, scope="s", clock=actor.clock, sleep=actor.sleep, new_id=new_id)
        memory: Memory = {}
        root: Digest | None = None
        for number, put in enumerate(self.puts):
            put.before()
            if number == self._faulty:
                actor.steps, self.faults.calls = 0, 0
            self.faults.armed = number == self._faulty
            parent = root if isinstance(put.parent, str) else put.parent
            expect = root if isinstance(put.expect, str) else put.expect
            request = SaveRequest(put.ref, put.step, parent, expect, put.metadata, put.metrics, nearest=parent)
            started = actor.clock()
            info, error = None, None
            try:
                info = put_ranks(
                    self.engine,
                    group,
                    lambda put=put, request=request: (request, put.take_apart()),  # type: ignore[misc]
                    ref=put.ref,
                    memory=memory,
                    timeout=TIMEOUT,
                )
                root = info.root
            except DiedError:
                raise
            except BaseException as exc:  # noqa: BLE001 - tests look at it
                error = exc
                if isinstance(exc, BackendUnavailableError | UndecidedError):  # only the log knows
                    self.faults.armed = False
                    self.engine.log.sync()
                    branch = self.engine.log.view().branch(put.ref)
                    root = branch.root if branch else None
            self.endings.append(Ending(info, error, actor.clock() - started))
            if number == self._faulty:
                self.faults.armed = False
                self.steps_of_faulty = actor.steps


def put_ranks(
    engine: Engine, group: Group, prepare: Callable[[], tuple[SaveRequest, CapturedState]], *, ref: str, memory: Memory, timeout: float
) -> SnapshotRow:
    """One rank's side of a save, without a session."""
    attempt = group.begin(f"the save to {ref!r}", object_id=ref, timeout=timeout)
    with StoreDestination(engine, group.rank) as destination:
        side = RankSave(destination.engine, group, attempt, memory=memory, destination=destination)
        outcome = attempt.run(Participant(lambda: side.propose(*prepare()), side.write, side.resolve, side.compare, side.commit))
        info = side.published(outcome)
        side.keep(info, outcome)
    return info


def open_engine(simulation: Simulation, backend: Backend, sleep: Callable[[float], object] = lambda _: None) -> Engine:
    """A handle of a host of its own."""
    config = read_config(backend)
    assert config is not None
    return make_engine(
        backend, config, MemoryTable(), clock=lambda: int((START + simulation.now) * 1e9), new_id=ids_of(simulation), sleep=sleep
    )


def new_backend() -> MemoryBackend:
    """With an empty store in it."""
    backend = MemoryBackend()
    init_store(backend)
    return backend


def ids_of(simulation: Simulation) -> Callable[[], Ulid]:
    """ULIDs that a seed repeats."""
    draw = simulation.random
    return lambda: Ulid(int((START + simulation.now) * 1e3).to_bytes(6, "big") + draw.randbytes(10))


def putting_ranks(
    simulation: Simulation,
    backend: Backend,
    ranks: int,
    steps: Iterable[int],
    *,
    faulty: int = 0,
    only: Collection[int] | None = None,
    **options: Any,
) -> list[PutRank]:
    """All ranks of a group, or `only` some, which save when the simulation runs. Faults belong to save number `faulty`."""
    tellers = {step: teller(step, ranks, **options) for step in steps}
    return [
        PutRank(
            simulation,
            backend,
            rank,
            ranks,
            [Put(step, lambda tell=tell, rank=rank: tell(rank)) for step, tell in tellers.items()],  # type: ignore[misc]
            faulty=faulty,
        )
        for rank in (range(ranks) if only is None else sorted(only))
    ]


def tensors_of(step: int, ranks: int, rows: int = 0) -> dict[str, Spreading]:
    """The state of a step: a sharded tensor that changes and one that stays, one that all ranks hold, and a small one."""
    rows = rows or 4 * ranks - 1
    return {
        "sharded": Spreading(whole((rows, 350), step), sharded(0, Shard(0))),
        "frozen": Spreading(whole((ranks, 1500)), sharded(0, Shard(0))),
        "replicated": Spreading(whole((1500,), 10_000 + step), None),
        "small": Spreading(np.array([step], "<i4"), None),
    }


def teller(step: int, ranks: int, *, rows: int = 0, with_own: bool = True) -> Callable[[int], CapturedState]:
    """What each rank takes apart at a step."""
    tensors, meshes = tensors_of(step, ranks, rows), [Mesh((ranks,), tuple(range(ranks)))]

    def tell(rank: int) -> CapturedState:
        shared = captured(tensors, meshes, rank, ranks, ["text", step])
        return shared._replace(own=own_of(step, rank) if with_own else None)

    return tell


def teller_of_kinds(step: int, ranks: int) -> Callable[[int], CapturedState]:
    """As `teller`; besides, each rank has a tensor that no other has, and one a value."""
    tensors, meshes = tensors_of(step, ranks), [Mesh((ranks,), tuple(range(ranks)))]

    def tell(rank: int) -> CapturedState:
        mine = {**tensors, f"of {rank}": Spreading(whole((1100,), 100 * step + rank), None)}
        return captured(mine, meshes, rank, ranks, ["text", step, *["of one"] * (rank == 2)], named=True)._replace(own=own_of(step, rank))

    return tell


def own_of(step: int, rank: int) -> Any:
    """What is a rank's alone."""
    return captured({"rng": Spreading(np.array([step, rank] * 2, "<i4"), None)}, [], 0, 1, [rank])


def require_agreement(group: Sequence[PutRank], engine: Engine, *, gone: frozenset[int] = frozenset()) -> None:
    """Every ending says what the log says; a step that is in the log is there once, and comes from one attempt. `gone`: forgotten."""
    engine.log.sync()
    roots = {info.root: info for info in engine.log.view().snapshots()}
    steps = [info.step for info in roots.values()]
    assert len(steps) == len(set(steps)), "a step was published twice"
    for rank in group:
        for put, ending in zip(rank.puts, rank.endings, strict=False):
            if put.step in gone:
                continue
            if ending.info is not None:
                assert roots[ending.info.root].step == put.step
            elif isinstance(ending.error, SnapshotAbortedError | InputError | DamageError | ConflictError):
                assert put.step not in steps, (rank.rank, ending.error)
            else:  # it could not ask the log
                assert isinstance(ending.error, BackendUnavailableError | UndecidedError), ending.error
    for attempt in range(max(len(rank.puts) for rank in group)):
        found = {rank.endings[attempt].info.root for rank in group if len(rank.endings) > attempt and rank.endings[attempt].info}  # type: ignore[union-attr]
        assert len(found) <= 1
