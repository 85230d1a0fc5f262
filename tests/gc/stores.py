"""Stores to free space in: a clock that stands until a test moves it, small states, and the contents of a backend."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common import threads
from tensorstore_ck.common.ids import IdSource, new_ulid
from tensorstore_ck.common.processes import Process
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.log.cache import MemoryTable, Table
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS, in_turns
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend

AT_ONCE = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)
"""Frees everything that nothing holds, whatever its age."""
TENSOR_BYTES = 5000
"""More than what lies inside a part."""
FOLDERS = ("packs", "parts", "snapshots", "moved")

State = dict[str, object]
T = TypeVar("T")


class Clock:
    """Nanoseconds since 1970, as set."""

    def __init__(self, now_ns: int = 2_000_000_000_000_000_000) -> None:
        self.now_ns = now_ns  # later than files of today

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def open_store(
    backend: Backend | None = None,
    *,
    table: Table | None = None,
    clock: Clock | None = None,
    new_id: IdSource = new_ulid,
    open_place: Callable[[str], Backend] | None = None,
    process: Process | None = None,
) -> Store:
    """A handle of a host of its own; without `table` it has no cache, and without `process` nobody can tell what it left behind."""
    backend = backend if backend is not None else (MemoryBackend(clock=clock) if clock is not None else MemoryBackend())
    config = read_config(backend) or init_store(backend)
    table = MemoryTable() if table is None else table
    find_process = None if process is None else lambda: process
    engine = make_engine(
        backend,
        config,
        table,
        sleep=lambda _: None,
        clock=clock or time.time_ns,
        new_id=new_id,
        open_place=open_place,
        find_process=find_process,
    )
    return Store(engine)


def tensor(number: int, size: int = TENSOR_BYTES) -> torch.Tensor:
    """Bytes that no other number has, and that lz4 makes no smaller."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def state(*numbers: int, size: int = TENSOR_BYTES) -> State:
    """A tensor, and so a block, for each number."""
    return {f"t{number}": tensor(number, size) for number in numbers}


def same(left: object, right: object) -> bool:
    """Whether two states are equal bit by bit."""
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    return left == right


def contents(backend: Backend, prefix: str = "") -> dict[str, bytes]:
    """Every object and its bytes."""
    return {info.name: backend.get(info.name, max_bytes=1 << 30) for info in backend.list(prefix)}


def copied(backend: MemoryBackend, clock: Clock | None = None) -> MemoryBackend:
    """Another backend with the same objects, as old as they are: a store that was built once, for many tests."""
    copy = MemoryBackend() if clock is None else MemoryBackend(clock=clock)
    copy._objects = dict(backend._objects)
    return copy


def contents_without_log(backend: Backend) -> dict[str, bytes]:
    """Every object and its bytes, without the entries of the log, and the checkpoints of that."""
    return {name: data for name, data in contents(backend).items() if not name.startswith(("log/", "checkpoint/"))}


def sizes(backend: Backend) -> dict[str, int]:
    """What gc may free: name -> bytes."""
    return {info.name: info.size_bytes for folder in FOLDERS for info in backend.list(f"{folder}/")}


def counts(backend: Backend) -> dict[str, int]:
    """Folder -> how many objects."""
    return {folder: sum(1 for _ in backend.list(f"{folder}/")) for folder in FOLDERS}


def require_readable(store: Store, held: dict[str, State]) -> None:
    """Every held snapshot is what was saved."""
    for address, expected in held.items():
        assert same(store.checkout(address), expected), address


def require_sound(store: Store, held: dict[str, State]) -> None:
    """Every held snapshot is what was saved, and fsck finds nothing wrong in any byte."""
    require_readable(store, held)
    report = store.fsck(read_data=True)
    assert report.ok, report.findings


def require_nothing_needed_is_condemned(store: Store) -> None:
    """No object that a root needs is condemned or swept. gc looks again before it deletes, so that a reader alone would not see it."""
    view, live = store.engine.log.view(), LiveSet(store.engine, None)
    live.update(view)
    assert not [key.name for key, _ in view.objects() if live.needs(key)]


def put_all(store: Store, ref: str, states: Sequence[State]) -> list[str]:
    """Saves the states as steps 1, 2, ...; returns their roots."""
    return [store.put_snapshot(state, ref=ref, step=step).root for step, state in enumerate(states, start=1)]


def each_call(run: Callable[[int, T], str], variants: Sequence[T]) -> set[str]:
    """Runs with an interruption or a fault at call 1, 2, ..., with one of the variants at each, until it strikes no call any more.

    `run` returns the call that was struck; this returns the kinds of calls.
    """
    struck: set[str] = set()
    for at, variant in in_turns(itertools.count(1), variants):
        what = run(at, variant)
        if not what:
            return struck
        struck.add(what.split()[0])
    raise AssertionError


def stay_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the backend calls come in the same order every time: `for_each` does all tasks in its caller's thread."""

    def start(self: threads.Helper) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.Helper, "start", start)


class Interrupted(Faults):
    """At one call somebody else does something in full; and then the call goes on."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action
        self.when: int | str = 0
        """The call's number, or what its description begins with."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if not self.struck and (what.startswith(self.when) if isinstance(self.when, str) else self.calls + 1 == self.when):
            self.struck = what
            self.action()
        return super().call(what, effect, tear, create=create)


def interrupted(backend: Backend, when: int | str, action: Callable[[], object], **options: Any) -> tuple[Store, Interrupted]:
    """A handle in whose call number `when`, from now on, or in the first whose description begins so, `action` happens."""
    faults = Interrupted(action)
    store = open_store(FaultyBackend(backend, faults, atomic_put=True), **options)
    faults.calls, faults.when = 0, when
    return store, faults


class Noted(Faults):
    """Notes the calls, each with its description."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        self.seen.append(what)
        return super().call(what, effect, tear, create=create)


class DiesAt(Faults):
    """The process dies before the first call whose description begins with `what`."""

    def __init__(self, what: str) -> None:
        super().__init__("die-before")
        self._what = what

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if what.startswith(self._what):
            self.dead = True
        return super().call(what, effect, tear, create=create)


def leave_orphans(backend: Backend, state: State, *, process: Process | None = None) -> None:
    """A save that dies before its log entry, of `process`, whose writer record is written by then."""
    store = open_store(FaultyBackend(backend, DiesAt("create log"), atomic_put=True), process=process)
    if store.engine.put_ids is not None:
        store.engine.put_ids()
        assert store.engine.put_ids._thread is not None
        store.engine.put_ids._thread.join(PATIENCE_SECONDS)
    with pytest.raises(Death):
        store.put_snapshot(state, ref="orphaned")
