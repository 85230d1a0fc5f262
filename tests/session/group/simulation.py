"""Ranks as greenlets, of which one runs at a time, on a clock that jumps: any run is exact, and takes no real time.

Every call of a rank to the channel or the log costs it two steps, before and after the effect. At any step it can die (it has no
effect from there on), stall (it is suspended, and goes on after all others have ended), be slow for as long, or get an error.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from tensorstore_ck.common.ids import Ulid, new_ulid
from tensorstore_ck.errors import InputError, SnapshotAbortedError
from tensorstore_ck.format.sealed import Body
from tensorstore_ck.session.group import Group, KeyValue, Participant, Round, mismatches

T = TypeVar("T")

STALL: Final = 10_000.0
TIMEOUT: Final = 10.0
GRACE: Final = 1.0
"""Small: each poll of each rank until then is a change of greenlets."""


class DiedError(BaseException):
    """This rank is gone."""


class FakeStore:
    """A store in memory that never waits, and counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.last_set: dict[str, bytes] = {}
        self.calls = 0
        self.bytes = 0

    def set(self, key: str, value: bytes, /) -> None:
        self._count(value)
        self.values[key] = value
        self.last_set = {key: value}

    def multi_set(self, keys: list[str], values: list[bytes], /) -> None:
        self._count(*values)
        self.values |= zip(keys, values, strict=True)

    def get(self, key: str, /) -> bytes:
        self._count(self.values[key])  # a KeyError here is a wait without an end
        return self.values[key]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._count(*(self.values[key] for key in keys))
        return [self.values[key] for key in keys]

    def check(self, keys: list[str], /) -> bool:
        self._count()
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes, /) -> bytes:
        self._count(desired)
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return self.values[key]

    def delete_key(self, key: str, /) -> bool:
        self._count()
        return self.values.pop(key, None) is not None

    def _count(self, *values: bytes) -> None:
        self.calls += 1
        self.bytes += sum(map(len, values))


class Fault(NamedTuple):
    """What befalls a rank at one of its steps."""

    rank: int
    step: int
    kind: str
    """``die``, ``stall``, ``slow``, ``error``."""


class Simulation:
    """Virtual time, and the ranks that live in it."""

    def __init__(
        self, seed: int = 0, *, faults: tuple[Fault, ...] = (), max_delay: float = 0.0, duplicates: float = 0.0, stall: float = STALL
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.store = FakeStore()
        self.log: dict[bytes, Body | None] = {}
        """By transaction: the record that was saved, or None for an abort."""
        self.faults = {(fault.rank, fault.step): fault.kind for fault in faults}
        self.max_delay = max_delay
        self.duplicates = duplicates
        self.stall = stall
        self._events: list[tuple[float, float, int, Actor | Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._going_on = 0
        self.main = getcurrent()

    def at(self, when: float, event: "Actor | Callable[[], None]") -> None:
        """Gives an actor the turn at that time, or calls a function; what is due at the same time comes in random order."""
        heapq.heappush(self._events, (when, self.random.random(), next(self._numbers), event))

    def while_any_goes_on(self, seconds: float, action: Callable[[], None]) -> None:
        """Now and every so many seconds."""

        def again() -> None:
            if self._going_on:
                action()
                self.at(self.now + seconds, again)

        again()

    def spawn(self, body: Callable[["Actor"], None], rank: int) -> "Actor":
        """An actor that begins when the simulation runs."""

        def live() -> None:
            try:
                body(actor)
            except DiedError:
                pass
            finally:
                self._going_on -= 1

        actor = Actor(self, rank, live)
        self._going_on += 1
        self.at(self.now, actor)
        return actor

    def run(self) -> None:
        """Runs until nothing is left to happen. An actor's error ends it."""
        self.main = getcurrent()
        while self._events:
            when, _, _, event = heapq.heappop(self._events)
            self.now = max(self.now, when)
            if not isinstance(event, Actor):
                event()
            elif event.suspended_until > self.now:
                self.at(event.suspended_until, event)
            else:
                event.greenlet.switch()


class Actor:
    """One rank's way to the world; a `Runner`."""

    def __init__(self, simulation: Simulation, rank: int, live: Callable[[], None]) -> None:
        self.simulation = simulation
        self.rank = rank
        self.greenlet = greenlet(live)
        self.steps = 0
        self.calls = 0
        """To the store."""
        self.bytes = 0
        """Of values to and from the store."""
        self.dead = False
        self.suspended_until = 0.0
        self.beats = 0
        self.struck: tuple[float, int] | None = None
        """When the fault befell it, and how often it had said before that it lives."""

    def beat(self, name: str, seconds: float) -> None:
        """Says that it lives, as `Heartbeat` does."""

        def raise_counter() -> None:
            if not self.dead and self.suspended_until <= self.simulation.now:
                self.beats += 1
                self.simulation.store.values[name] = f"{self.beats} host-{self.rank}".encode()

        self.simulation.while_any_goes_on(seconds, raise_counter)

    def suspend(self, start: float, seconds: float) -> None:
        """It does nothing for a while, and does not know it."""

        def begin() -> None:
            self.suspended_until = start + seconds

        self.simulation.at(start, begin)

    def clock(self) -> float:
        return self.simulation.now

    def sleep(self, seconds: float) -> None:
        """Lets all others go first that are due before."""
        self.simulation.at(self.simulation.now + seconds, self)
        self.simulation.main.switch()

    def __call__(self, action: Callable[[KeyValue], T], seconds: float) -> T:
        """A call to the store."""

        def send() -> T:
            store = self.simulation.store
            store.last_set = {}
            calls, size = store.calls, store.bytes
            result = action(store)
            self.calls += store.calls - calls
            self.bytes += store.bytes - size
            if self.simulation.random.random() < self.simulation.duplicates:
                again = self.simulation.store.last_set  # what it has set is set once more, later
                self.simulation.at(
                    self.simulation.now + self.simulation.random.uniform(0, TIMEOUT), lambda: self.simulation.store.values.update(again)
                )
            return result

        return self.effect(send, RuntimeError("Connection reset by peer"))

    def effect(self, action: Callable[[], T], error: Exception) -> T:
        """Something that others see."""
        self.step(error)
        result = action()
        self.step(error)
        return result

    def step(self, error: Exception) -> None:
        number, self.steps = self.steps, self.steps + 1
        fault = self.simulation.faults.get((self.rank, number))
        if fault is not None:
            self.struck = self.simulation.now, self.beats
        if fault == "die":
            self.dead = True
        if self.dead:
            raise DiedError
        if fault == "error":
            raise error
        delay = self.simulation.random.uniform(0, self.simulation.max_delay) if self.simulation.max_delay else 0.0
        if fault == "stall":
            self.suspended_until = self.simulation.now + self.simulation.stall
        if fault in ("stall", "slow") or delay:
            self.sleep(self.simulation.stall if fault in ("stall", "slow") else delay)


class Ending(NamedTuple):
    """How one attempt ended for one rank."""

    txn: Ulid
    put: Body | None
    error: BaseException | None
    seconds: float


class Rank:
    """Runs attempts one after the other, and keeps how each ended."""

    def __init__(
        self,
        simulation: Simulation,
        rank: int,
        ranks: int,
        *,
        attempts: int = 1,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        with_log: bool = True,
        dead_after: float | None = None,
    ) -> None:
        """With `dead_after` the ranks say that they live."""
        self.endings: list[Ending] = []
        self.works: list[Body] = []
        self.dead_ranks: list[tuple[int, str, float]] = []
        """What it reported of the ranks that it gave up."""
        self._ranks = ranks
        self._attempts = attempts
        self._timeout = timeout
        self._grace = grace
        self.start = 0.0
        self._with_log = with_log
        self._dead_after = dead_after
        self.starts: dict[int, float] = {}
        """Number of an attempt, from 0 -> when it is begun, if the one before has ended."""
        self.proposal: dict[str, Any] = {"step": 1000}
        self.work_error: BaseException | None = None
        self.work_seconds = 0.0
        self.log_error: Exception | None = None
        self.actor = simulation.spawn(self._run, rank)

    def _run(self, actor: Actor) -> None:
        actor.sleep(self.start)
        clock, new_id = actor.clock, new_ulid
        alive: dict[str, Any] = {"on_dead": lambda *dead: self.dead_ranks.append(dead)}
        alive |= {} if self._dead_after is None else {"dead_after": self._dead_after, "beat": actor.beat}
        group = Group(actor, rank=actor.rank, ranks=self._ranks, scope="s", clock=clock, sleep=actor.sleep, new_id=new_id, **alive)
        for number in range(self._attempts):
            if self.starts.get(number, 0.0) > actor.clock():
                actor.sleep(self.starts[number] - actor.clock())
            started = actor.clock()
            try:
                attempt = group.begin("the save to 'main'", object_id="main", timeout=self._timeout, grace=self._grace)
            except SnapshotAbortedError as exc:
                self.endings.append(Ending(Ulid(b""), None, exc, actor.clock() - started))
                continue
            put, error = None, None
            try:
                put = attempt.run(self._participant(actor, attempt))
            except DiedError:
                raise
            except BaseException as exc:  # noqa: BLE001 - tests look at it
                error = exc
            self.endings.append(Ending(attempt.txn, put, error, actor.clock() - started))

    def _participant(self, actor: Actor, attempt: Round) -> Participant:
        log, txn = actor.simulation.log, attempt.txn

        def effect(action: Callable[[], T]) -> T:
            return actor.effect(action, OSError("the backend is gone"))

        def judge(record: Body | None) -> Body | None:
            if self.log_error is not None:
                raise self.log_error
            return effect(lambda: log.setdefault(txn, record))

        def execute(go: Body) -> Body:
            self.works.append(go)
            effect(lambda: None)
            if self.work_seconds:
                actor.sleep(self.work_seconds)
            if self.work_error is not None:
                raise self.work_error
            return {"part": actor.rank, "go": go}

        def resolve() -> Body | None:
            return judge(None)

        def compare(proposals: list[Body]) -> Body | str:
            return mismatches(proposals, ["step"]) or {"ranks": len(proposals)}

        def commit(results: list[Body]) -> Body:
            assert [result["part"] for result in results] == list(range(self._ranks))
            assert all(result["go"] == {"ranks": self._ranks} for result in results)
            outcome = {"root": txn}
            if self._with_log and judge(outcome) is None:
                raise SnapshotAbortedError("another rank gave up first")
            return outcome

        return Participant(lambda: dict(self.proposal), execute, resolve if self._with_log else None, compare, commit)


def random_simulation(seed: int, ranks: int, *, faults: int, stall: float, max_delay: float = 3.0) -> Simulation:
    """Faults fall into the first attempt and a half; if there are any, one is a death early in the first."""
    draw = Simulation(seed).random
    kinds = ["die", "stall", "error"]
    chosen = tuple(Fault(draw.randrange(ranks), draw.randrange(30), draw.choice(kinds)) for _ in range(faults))
    if faults:
        chosen += (Fault(draw.randrange(1, ranks), 8, "die"),)
    return Simulation(seed, faults=chosen, max_delay=max_delay, duplicates=0.1, stall=stall)


def require_one_outcome(simulation: Simulation, group: list[Rank]) -> None:
    """Every rank that came to an end says what the log says."""
    for rank in group:
        for ending in rank.endings:
            if ending.put is not None:
                assert simulation.log[ending.txn] == ending.put
            elif isinstance(ending.error, SnapshotAbortedError | InputError):
                assert simulation.log.get(ending.txn) is None
            else:  # it could not ask the log
                assert isinstance(ending.error, OSError)


def group_of(simulation: Simulation, ranks: int, **options: Any) -> list[Rank]:
    """The ranks of a group, which begin when the simulation runs."""
    return [Rank(simulation, rank, ranks, **options) for rank in range(ranks)]


def simulate(simulation: Simulation, ranks: int, **options: Any) -> list[Rank]:
    """All ranks of a group, until they have ended or died."""
    group = group_of(simulation, ranks, **options)
    simulation.run()
    return group
