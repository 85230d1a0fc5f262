"""Actors: real code over an engine of its own, stopped at every backend call that others could notice.

What an actor does next is a function of the answers that it got: it has its own table, clock and source of ids, and nothing
else of it is shared. So its behaviour is a tree, whose branches are answers, and the real code runs only to find a branch
that nobody took before; `Tree` holds what was found. A thread that waits at a node goes on from there; where there is none,
a new one is led to the node by the recorded answers, and must ask the recorded questions.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pytest

from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common import threads
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.ids import Clock, IdSource, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import make_engine
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError, NoSpaceError
from tensorstore_ck.format.store_config import StoreConfig
from tensorstore_ck.log.cache import MemoryTable
from tests.gc.interleavings.contents import MODIFIED_NS, Request, Response
from tests.gc.interleavings.footprint import Footprint, Names

MAX_PARKED: Final = 1000
MAX_CALLS: Final = 600


class Death(BaseException):
    """The process is gone: nothing after this runs in it."""


class Process(NamedTuple):
    """What an actor's code gets: a backend, and the makings of engines over it."""

    backend: Any
    config: StoreConfig
    table: MemoryTable
    clock: Clock
    new_id: IdSource

    def engine(self, *, new_id: IdSource | None = None) -> Engine:
        """A new engine on this host's table."""
        return make_engine(
            self.backend, self.config, self.table, clock=self.clock, new_id=new_id or self.new_id, sleep=lambda _seconds: None
        )


class Actor(NamedTuple):
    """One process: its code, and what it may do to others."""

    name: str
    run: Callable[[Process], object]
    table: MemoryTable | None = None
    """What its host has cached when it begins; every run has a copy."""
    may_raise: tuple[type[BaseException], ...] = ()


class Outcome(NamedTuple):
    """How an actor ended."""

    value: object
    error: BaseException | None


def make_process(backend: Any, config: StoreConfig, number: int, table: MemoryTable | None) -> Process:
    """The process number `number`: with ids that no other has, and a clock that stands still: it decides nothing."""
    ids = itertools.count(1)

    def new_id() -> Ulid:
        return Ulid((MODIFIED_NS // 1_000_000).to_bytes(6, "big") + number.to_bytes(2, "big") + next(ids).to_bytes(8, "big"))

    return Process(backend, config, copy_table(table), lambda: MODIFIED_NS, new_id)


def process_of(ulid: bytes) -> int:
    """The number of the process that drew an id."""
    return int.from_bytes(ulid[6:8], "big")


def copy_table(table: MemoryTable | None) -> MemoryTable:
    """A table with the same rows."""
    copy = MemoryTable()
    if table is not None:
        copy._values = dict(table._values)
        copy._keys = list(table._keys)
    return copy


class SteppingBackend:
    """Hands each call to `call` and waits for its answer; what nobody can notice (appends, folders' syncs) is no call."""

    url = "explored:"
    is_local = True

    def __init__(self, call: Callable[[Request], Response]) -> None:
        self._call = call

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = self._ask(Request("get", name, length=max_bytes))
        assert isinstance(data, bytes)
        return data

    get_if_there = Backend.get_if_there

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        data = self._ask(Request("read", name, b"", offset, len(target)))
        assert isinstance(data, bytes)
        target[:] = data

    def size(self, name: str) -> int:
        size = self._ask(Request("size", name))
        assert isinstance(size, int)
        return size

    def put(self, name: str, data: Buffer) -> None:
        self._ask(Request("put", name, bytes(data)))

    def replace(self, name: str, data: Buffer) -> None:
        self._ask(Request("replace", name, bytes(data)))

    def create(self, name: str, data: Buffer) -> Created:
        answer = self._call(Request("create", name, bytes(data)))
        if answer.kind == "down":
            raise BackendUnavailableError(f"no answer to create {name}", object_id=name)
        if answer.kind == "full":
            raise NoSpaceError(f"no space for {name}", object_id=name)
        return {"ok": Created.CREATED, "exists": Created.EXISTS, "unknown": Created.UNKNOWN}[answer.kind]

    def sync_folders(self, name: str) -> None: ...

    def open_writer(self, name: str) -> ObjectWriter:
        return _Writer(self, name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: Any = self._ask(Request("list", prefix))
        return iter([ObjectInfo(name, size, MODIFIED_NS, MODIFIED_NS) for name, size in found])

    def delete(self, names: Iterable[str]) -> None:
        for name in names:  # one by one: an actor may die in between
            self._ask(Request("delete", name))

    def space(self) -> Space | None:
        return None

    def folders(self, start: str) -> set[str]:
        return {info.name.partition("/")[0] for info in self.list("") if info.name.startswith(start)}

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        return iter(())

    def abort_upload(self, name: str) -> None: ...

    def close(self) -> None: ...

    def _ask(self, request: Request) -> object:
        answer = self._call(request)
        match answer.kind:
            case "ok":
                return answer.value
            case "missing":
                raise MissingObjectError(f"{request.name} is not in the store", object_id=request.name)
            case "full":
                raise NoSpaceError(f"no space for {request.name}", object_id=request.name)
            case "short":
                raise CorruptObjectError(f"{request.name} is not as long as it should be", object_id=request.name)
        raise BackendUnavailableError(f"{answer.kind}: {request}", object_id=request.name)


class _Writer:
    def __init__(self, backend: SteppingBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._data = bytearray()

    def append(self, data: Sequence[Buffer]) -> int:
        offset = len(self._data)
        for piece in data:
            self._data += piece
        return offset

    def close(self) -> None:
        self._backend.put(self._name, self._data)

    def abort(self) -> None: ...


class _Thread:
    """Real code on its way: runs until its next call, and waits there."""

    def __init__(self, actor: Actor, config: StoreConfig, number: int, past: list[tuple[Request, Response]]) -> None:
        self._past = iter(past)
        self._answer: Response | None = None
        self._dead = False
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self.request: Request | None = None
        self.outcome: Outcome | None = None
        backend = SteppingBackend(self._call)
        self._thread = threading.Thread(target=self._run, args=(actor, backend, config, number), name=actor.name, daemon=True)
        self._thread.start()
        self._asked.acquire()

    def go_on(self, answer: Response) -> None:
        """Runs to the next call, or the end."""
        self._answer = answer
        self._answered.release()
        self._asked.acquire()

    def kill(self) -> None:
        """Ends the thread where it waits."""
        self._dead = True
        self._answered.release()
        self._thread.join()

    def _run(self, actor: Actor, backend: SteppingBackend, config: StoreConfig, number: int) -> None:
        try:
            self.outcome = Outcome(actor.run(make_process(backend, config, number, actor.table)), None)
        except Death:
            self.outcome = Outcome(None, None)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the exploration checks it
            self.outcome = Outcome(None, exc)
        self.request = None
        self._asked.release()

    def _call(self, request: Request) -> Response:
        if self._dead:
            raise Death
        for asked, answer in self._past:
            if asked != request:
                break  # seen by who reads `request`
            return answer
        self.request = request
        self._asked.release()
        self._answered.acquire()
        if self._dead or self._answer is None:
            raise Death
        return self._answer


class Node:
    """A point in an actor's behaviour: what it asks next, or how it ended."""

    __slots__ = ("branches", "depth", "future", "outcome", "parent", "request", "response", "thread")

    def __init__(self, parent: "Node | None", response: Response | None, thread: _Thread) -> None:
        self.parent = parent
        self.response = response
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.request = thread.request
        self.outcome = thread.outcome
        self.thread: _Thread | None = thread if thread.outcome is None else None
        self.branches: dict[Response, Node] = {}
        self.future = Footprint()
        """What the actor is known to touch from here on."""

    def past(self) -> list[tuple[Request, Response]]:
        """All questions and answers before it."""
        found: list[tuple[Request, Response]] = []
        node = self
        while node.parent is not None and node.response is not None:
            assert node.parent.request is not None
            found.append((node.parent.request, node.response))
            node = node.parent
        return found[::-1]


class Tree:
    """All that is known of one actor's behaviour."""

    def __init__(self, actor: Actor, config: StoreConfig, number: int, names: Names) -> None:
        self.actor = actor
        self._names = names
        self._config = config
        self._number = number
        self._parked: OrderedDict[Node, None] = OrderedDict()
        self.size = 0
        """How many points of its behaviour are known."""
        self.runs = 0
        """How often the real code was started."""
        self.root = self._park(Node(None, None, self._start([])))

    def answered(self, node: Node, response: Response) -> Node:
        """Where the actor is after this answer."""
        after = node.branches.get(response)
        if after is None:
            assert node.depth < MAX_CALLS, f"{self.actor.name} made {MAX_CALLS} calls: it goes round in a circle"
            thread, node.thread = node.thread or self._start(node.past()), None
            assert thread.request == node.request, (
                f"not deterministic: asked {node.request} before, and now {thread.request or thread.outcome}"
            )
            self._parked.pop(node, None)
            thread.go_on(response)
            after = node.branches[response] = self._park(Node(node, response, thread))
        return after

    def close(self) -> None:
        """Ends all threads."""
        while self._parked:
            self._end_oldest()

    def _start(self, past: list[tuple[Request, Response]]) -> _Thread:
        self.runs += 1
        return _Thread(self.actor, self._config, self._number, past)

    def _park(self, node: Node) -> Node:
        self.size += 1
        if node.request is not None:
            self._foresee(node, self._names.footprint(node.request))
        if node.thread is not None:
            self._parked[node] = None
            if len(self._parked) > MAX_PARKED:
                self._end_oldest()
        return node

    def _foresee(self, node: Node | None, found: Footprint) -> None:
        """Notes at all nodes before this one what lies beyond them."""
        while node is not None and (future := node.future.union(found)) != node.future:
            node.future = future
            node = node.parent

    def _end_oldest(self) -> None:
        node, _ = self._parked.popitem(last=False)
        if node.thread is not None:
            node.thread.kill()
            node.thread = None


@contextmanager
def without_helper_threads() -> Iterator[None]:
    """`parallel.for_each` does all tasks in its caller's thread, one after another."""

    def start(self: threads.Helper) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads.Helper, "start", start)
        yield
