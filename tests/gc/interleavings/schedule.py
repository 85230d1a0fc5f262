"""Explores every order in which actors' calls can reach a backend, and every fault that a case allows.

A state is where each actor is in its behaviour, what the backend holds, and what is still on its way to it. All of it is
known, so a state that is reached twice is explored once, and the search is complete although it looks at few schedules
one by one. Breadth first: the schedule of a violation is a shortest one.

A crash needs no step of its own. An actor that is never scheduled again is one that died or sleeps for ever, and each state
is checked with every unfinished actor at that point: before each of its calls, and after the call's effect.

Where the next calls of some actors can be neither noticed nor influenced by anything that the others may still do, only those
actors are scheduled (a persistent set): all else commutes with them. What an actor may still do is not declared, but learned:
a search that finds new behaviour is made again, until one finds none. By then nothing is missing: take the shortest schedule to
anything unknown; all that comes before it is known, so it was reordered rightly, and it would have been found.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from tensorstore_ck.format.store_config import StoreConfig
from tests.gc.interleavings.actor import Actor, Node, Outcome, Tree, without_helper_threads
from tests.gc.interleavings.contents import DOWN, FULL, OK, UNKNOWN, Contents, Request, Response
from tests.gc.interleavings.footprint import Names

FAULTS: Final = ("lost", "refused", "delayed", "late", "again")
"""What may go wrong with a call:

lost      the reply to a create; it took effect
refused   a read of the log fails
delayed   a write fails, and takes effect at some later time, or never
late      the same of a delete
again     a delete takes effect, and once more at some later time

Any other error ends what an actor does, which is a crash.
full      a write is refused, for it does not fit; only in the cases that name it
"""


class Violation(AssertionError):
    """Something that must never be; `schedule` leads there."""

    def __init__(self, what: str, schedule: Sequence[str] = (), story: str = "") -> None:
        super().__init__(f"{what}\nschedule = {list(schedule)!r}\n{story}")
        self.what = what
        self.schedule = tuple(schedule)


class Case(NamedTuple):
    """What is explored: where it begins, who acts, and what may go wrong."""

    config: StoreConfig
    start: Contents
    actors: Sequence[Actor]
    check: Callable[[Contents], None]
    """Raises `Violation` when a store must not hold this."""
    check_end: Callable[[Contents], None]
    """The same, and dearer: called where all actors have finished."""
    check_outcome: Callable[[int, Outcome, Contents], None]
    """Raises `Violation` when that actor must not end so, or must not have ended so in a store that holds this."""
    faults: Sequence[str] = ()
    max_faults: int = 0
    max_switches: int | None = None
    """How often an actor may be put to sleep while it could go on; None: any number of times. What is explored with a number is not
    complete, but all that few switches can do (most bugs of concurrent programs take one or two) is in it."""
    reduce: bool = True


class State(NamedTuple):
    """Where everything is."""

    nodes: tuple[Node, ...]
    contents: Contents
    pending: tuple[Request, ...]
    """Requests that may take effect at any time, or never."""
    faults: int
    awake: int = -1
    """Where switches are counted: the actor that went last."""
    switches: int = 0


class Step(NamedTuple):
    """One step of a schedule: an actor's call, how it went wrong, or what came late."""

    label: str
    request: Request
    state: State
    """What it leads to, but that the actor has not got its answer yet."""
    number: int = -1
    """The actor."""
    response: Response = OK


class Explored(NamedTuple):
    """What an exploration saw."""

    states: int
    steps: int
    schedules: int
    """Different orders that end with all actors finished."""
    crashes: int
    """States in which all have finished but those that are dead."""
    runs: int
    """How often real code was started."""
    contents: int
    """Different contents of the backend; each was checked."""
    ends: frozenset[frozenset[tuple[str, bytes]]]
    """What the backend holds when all actors have finished."""
    seconds: float


class Explorer:
    """One case, being explored."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._names = Names()
        self._trees = [Tree(actor, case.config, number, self._names) for number, actor in enumerate(case.actors, 1)]
        self._checked: set[Contents] = set()
        self._ends: set[Contents] = set()
        self.first = State(tuple(tree.root for tree in self._trees), case.start, (), 0)
        self.check(self.first)

    @property
    def runs(self) -> int:
        """How often real code was started."""
        return sum(tree.runs for tree in self._trees)

    @property
    def nodes(self) -> int:
        """How much of all actors' behaviour is known."""
        return sum(tree.size for tree in self._trees)

    @property
    def contents(self) -> int:
        """How many different contents were checked."""
        return len(self._checked)

    def close(self) -> None:
        """Ends all actors."""
        for tree in self._trees:
            tree.close()

    def check(self, state: State) -> None:
        """Raises `Violation` when the state must not be."""
        if state.contents not in self._checked:
            self._checked.add(state.contents)
            self.case.check(state.contents)
        for number, node in enumerate(state.nodes):
            if node.outcome is not None:
                self.case.check_outcome(number, node.outcome, state.contents)
        if state.contents not in self._ends and all(node.outcome is not None for node in state.nodes):
            self._ends.add(state.contents)
            self.case.check_end(state.contents)

    def steps(self, state: State, *, reduce: bool) -> list[Step]:
        """What can happen next; with `reduce`, enough of it that nothing is missed."""
        actors = [number for number, node in enumerate(state.nodes) if node.request is not None]
        late = [place for place, request in enumerate(state.pending) if state.contents.perform(request)[1] is not state.contents]
        if reduce and len(actors) + len(late) > 1:
            actors, late = self._persistent(state, actors, late)
        found: list[Step] = []
        for number in actors:
            request, switched = state.nodes[number].request, self._switched(state, number, actors)
            if request is not None and switched is not None:
                found += self._actor_steps(switched, number, request)
        for place in late:
            request = state.pending[place]
            pending = state.pending[:place] + state.pending[place + 1 :]
            found.append(Step(f"late:{request}", request, state._replace(contents=state.contents.perform(request)[1], pending=pending)))
        return found

    def take(self, step: Step) -> State:
        """The state after a step; runs the actor to its next call."""
        state, number = step.state, step.number
        if number < 0:
            return state
        node = self._trees[number].answered(state.nodes[number], step.response)
        return state._replace(nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))

    def _persistent(self, state: State, actors: list[int], late: list[int]) -> tuple[list[int], list[int]]:
        """The smallest set of actors and late requests whose next steps commute with all that the others may ever do."""
        nodes, pending = state.nodes, state.pending
        everyone = [(nodes[number].request, nodes[number].future) for number in actors]
        everyone += [(pending[place], self._names.footprint(pending[place])) for place in range(len(pending))]
        candidates = [*range(len(actors)), *(len(actors) + place for place in late)]
        smallest = set(candidates)
        for first in candidates:
            chosen, todo = {first}, [first]
            while todo and len(chosen) < len(smallest):
                request = everyone[todo.pop()][0]
                for other in range(len(everyone)):
                    if other not in chosen and self._names.interferes(state.contents, request, everyone[other][1]):
                        chosen.add(other)
                        todo.append(other)
            if not todo and len(chosen) < len(smallest) and not chosen.isdisjoint(candidates):
                smallest = chosen
        return (
            [number for place, number in enumerate(actors) if place in smallest],
            [place for place in late if len(actors) + place in smallest],
        )

    def _switched(self, state: State, number: int, actors: list[int]) -> State | None:
        """The state with that actor awake; None when too many were put to sleep."""
        if self.case.max_switches is None or number == state.awake:
            return state
        if state.nodes[state.awake].request is None or state.awake == -1:
            return state._replace(awake=number)
        if state.awake not in actors:
            return state  # it goes on later, and nobody can tell
        return state._replace(awake=number, switches=state.switches + 1) if state.switches < self.case.max_switches else None

    def _actor_steps(self, state: State, number: int, request: Request) -> Iterator[Step]:
        name, kind = self.case.actors[number].name, request.kind
        response, contents = state.contents.perform(request)
        done = state._replace(contents=contents)
        yield Step(name, request, done, number, response)
        if state.faults >= self.case.max_faults:
            return
        silence = UNKNOWN if kind == "create" else DOWN
        late = state._replace(pending=tuple(sorted((*state.pending, request))))
        for fault in self.case.faults:
            if fault == "lost" and kind == "create" and contents is not state.contents:
                after, answer = done, silence
            elif fault == "refused" and kind == "get" and request.name.startswith("log/"):
                after, answer = state, DOWN
            elif fault == "full" and kind in ("put", "create"):
                after, answer = state, FULL
            elif (fault == "delayed" and kind in ("put", "create")) or (fault == "late" and kind == "delete"):
                after, answer = late, silence
            elif fault == "again" and kind == "delete":
                after, answer = late._replace(contents=contents), OK
            else:
                continue
            yield Step(f"{name}:{fault}", request, after._replace(faults=state.faults + 1), number, answer)


def explore(case: Case, *, limit: int = 2_000_000) -> Explored:
    """Looks at every state of a case.

    Raises:
        Violation: with a shortest schedule that leads to it.
    """
    started = time.perf_counter()
    with _explorer(case) as explorer:
        known = -1
        while known < explorer.nodes:
            known = explorer.nodes
            explored = _explore_once(explorer, limit)
        return explored._replace(seconds=time.perf_counter() - started)


def _explore_once(explorer: Explorer, limit: int) -> Explored:
    case = explorer.case
    level: dict[State, int] = {explorer.first: 1}
    """States after so many steps (a state says how many), and by how many schedules each is reached."""
    origins: list[tuple[int, str]] = [(-1, "")]
    """The state before each state, and the step that led from it."""
    first = states = steps = schedules = crashes = 0
    ends = set[Contents]()
    while level:
        below: dict[State, int] = {}
        for number, (state, ways) in enumerate(level.items()):
            states += 1
            assert states <= limit, f"more than {limit} states"
            unfinished = sum(node.request is not None for node in state.nodes)
            crashes += 0 < unfinished < len(state.nodes)
            if unfinished == 0:
                schedules += ways
                ends.add(state.contents)
            for step in explorer.steps(state, reduce=case.reduce):
                steps += 1
                after = explorer.take(step)
                known = below.get(after)
                below[after] = ways + (known or 0)
                if known is None:
                    origins.append((first + number, step.label))
                    try:
                        explorer.check(after)
                    except Violation as violation:
                        raise _explained(explorer, violation, _schedule(origins, len(origins) - 1)) from None
        first += len(level)
        level = below
    return Explored(states, steps, schedules, crashes, explorer.runs, explorer.contents, _objects(ends), 0)


def explore_random(case: Case, count: int, seed: int) -> Explored:
    """Looks at `count` schedules drawn at random: half of them with actors that run for long and then sleep for long.

    Raises:
        Violation: with the schedule that leads to it.
    """
    started = time.perf_counter()
    draw = random.Random(seed)
    states = 0
    with _explorer(case) as explorer:
        for number in range(count):
            state, schedule = explorer.first, list[str]()
            haste = draw.choice((0.0, 0.05, 0.2)) if number % 2 else 1.0
            awake = draw.choice(case.actors).name
            while steps := explorer.steps(state, reduce=False):
                if draw.random() < haste:
                    awake = draw.choice(steps).label.partition(":")[0]
                mine = [step for step in steps if step.label.partition(":")[0] == awake] or steps
                plain = [step for step in mine if ":" not in step.label]
                step = draw.choice(mine if not plain or draw.random() < 0.1 else plain)
                state = explorer.take(step)
                schedule.append(step.label)
                states += 1
                try:
                    explorer.check(state)
                except Violation as violation:
                    raise _explained(explorer, violation, schedule) from None
        return Explored(states, states, count, 0, explorer.runs, explorer.contents, frozenset(), time.perf_counter() - started)


def replay(case: Case, schedule: Iterable[str]) -> Contents:
    """Goes one schedule, as a violation shows it; returns what the store holds in the end."""
    with _explorer(case._replace(max_switches=None)) as explorer:
        state = explorer.first
        for label in schedule:
            (step,) = (step for step in explorer.steps(state, reduce=False) if step.label == label)
            state = explorer.take(step)
            explorer.check(state)
        return state.contents


def drive(case: Case, *moves: str) -> tuple[Contents, dict[str, Outcome]]:
    """Runs one schedule, given in words: ``A`` (to its end), ``A until create log/`` (a call that begins so), ``A:lost`` (one call,
    that goes wrong). Returns what the store holds then, and how actors ended.
    """
    with _explorer(case) as explorer:
        state = explorer.first
        for move in moves:
            label, _, until = move.partition(" until ")
            repeats = ":" not in label
            while True:
                steps = [step for step in explorer.steps(state, reduce=False) if step.label == label]
                if not steps or (until and str(steps[0].request).startswith(until)):
                    assert repeats, f"{move!r} cannot be done here"
                    break
                state = explorer.take(steps[0])
                explorer.check(state)
                if not repeats:
                    break
        names = [actor.name for actor in case.actors]
        return state.contents, {name: node.outcome for name, node in zip(names, state.nodes, strict=True) if node.outcome is not None}


@contextmanager
def _explorer(case: Case) -> Iterator[Explorer]:
    with warnings.catch_warnings(), without_helper_threads():
        warnings.simplefilter("ignore")
        explorer = Explorer(case)
        try:
            yield explorer
        finally:
            explorer.close()


def _objects(found: Iterable[Contents]) -> frozenset[frozenset[tuple[str, bytes]]]:
    return frozenset(frozenset(contents.objects.items()) for contents in found)


def _schedule(origins: list[tuple[int, str]], place: int) -> list[str]:
    labels = []
    while place > 0:
        place, label = origins[place]
        labels.append(label)
    return labels[::-1]


def _explained(explorer: Explorer, violation: Violation, schedule: Sequence[str]) -> Violation:
    """The violation, with what each step of its schedule does."""
    explorer.case = explorer.case._replace(max_switches=None)
    state, lines = explorer.first, []
    for label in schedule:
        (step,) = (step for step in explorer.steps(state, reduce=False) if step.label == label)
        lines.append(f"  {label:12} {step.request}")
        state = explorer.take(step)
    ends = [f"  {actor.name} ended: {node.outcome}" for actor, node in zip(explorer.case.actors, state.nodes, strict=True) if node.outcome]
    return Violation(violation.what, schedule, "\n".join(lines + ends))
