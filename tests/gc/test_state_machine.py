"""Random histories of a store on which several hosts work, clean up, crash and come back, against a model of dicts and lists."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidOptionError,
    NotFoundError,
    SnapshotExpiredError,
    StoreError,
)
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.maintenance import copy_store
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.model import Content, Model, Put
from tests.gc.stores import AT_ONCE, Clock, open_store, require_readable, same, sizes, state, stay_in_one_thread

pytestmark = [pytest.mark.slow, pytest.mark.race]

Result = TypeVar("Result")
Command = tuple[Any, ...]
"""A method of the machine, and its arguments."""
STEPS_A_RUN = 50
STEPS = effort(6_000, 12_000)
MODES = ("die-before", "die-after", "tear", "lost-reply", "unknown", "unknown-lands-later", "unavailable")
GONE = (NotFoundError, SnapshotExpiredError)

names = st.sampled_from(["job", "job/b", "c", "best"])
"""For branches and tags alike: they get into each other's way."""
handles = st.integers(0, 2)
contents = st.frozensets(st.integers(0, 9), max_size=6).map(lambda found: tuple(sorted(found)))
steps = st.sampled_from([None, 1, 2, 3])
picks = st.integers(0, 1000)
puts = st.tuples(st.just("put"), handles, names, contents, steps)
ages = st.tuples(*[st.sampled_from([0, 0, 100])] * 3)

COMMANDS = {
    "put": (6, puts),
    "branch": (2, st.tuples(st.just("branch"), handles, names, picks)),
    "reset": (2, st.tuples(st.just("reset"), handles, names, picks)),
    "tag": (1, st.tuples(st.just("tag"), handles, names, picks)),
    "pin": (1, st.tuples(st.just("pin"), handles, picks, st.sampled_from(["ada", "grace"]), st.sampled_from([None, 100]))),
    "unpin": (1, st.tuples(st.just("unpin"), handles, picks)),
    "forget": (
        5,
        st.tuples(st.just("forget"), handles, names, st.sampled_from(["whole", "step", "root", "untag"]), st.integers(1, 3), picks),
    ),
    "undo": (2, st.tuples(st.just("undo"), handles, st.sampled_from(["last", "ref", "root"]), names, picks)),
    "gc": (
        5,
        st.tuples(
            st.just("gc"),
            handles,
            ages,
            st.sampled_from([0, 0.5, 1]),
            st.sampled_from([6000, 1 << 30]),
            st.sampled_from([0, 100, 1_000_000]),
        ),
    ),
    "arm": (3, st.tuples(st.just("arm"), st.sampled_from(MODES), st.integers(1, 16))),
    "wait": (1, st.tuples(st.just("wait"), st.sampled_from([1, 60, 101]))),
    "reopen": (1, st.tuples(st.just("reopen"), handles, st.booleans())),
    "read": (2, st.tuples(st.just("read"), picks)),
    "compare": (1, st.tuples(st.just("compare"), handles)),
    "fsck": (1, st.tuples(st.just("fsck"), handles, st.booleans())),
    "copy": (1, st.tuples(st.just("copy"), handles)),
}
"""Method -> how often, and its arguments. One rule for all: of many, hypothesis leaves half out of a run."""
commands = st.sampled_from([name for name, (weight, _) in COMMANDS.items() for _ in range(weight)]).flatmap(lambda name: COMMANDS[name][1])


@cache
def made(content: Content) -> dict[str, object]:
    return state(*content)


class StoreMachine(RuleBasedStateMachine):
    """Three handles: two share a host's cache, the third is on another host."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.backend = MemoryBackend(clock=self.clock)
        self.ids = self.new_ids()
        self.tables = [MemoryTable(), MemoryTable()]
        self.stores = [self.open(handle) for handle in range(3)]
        self.eye = self.open(None)
        self.model = Model()
        self.roots: list[str] = []
        self.armed: tuple[str, int] | None = None

    def new_ids(self) -> Iterator[Ulid]:
        """The same in every run."""
        return (
            Ulid((2_000_000_000_000 + n).to_bytes(6, "big") + (n * 0x9E3779B97F4A7C15 % (1 << 80)).to_bytes(10, "big"))
            for n in itertools.count()
        )

    def open(self, handle: int | None, faults: Faults | None = None) -> Store:
        backend = self.backend if faults is None else FaultyBackend(self.backend, faults, atomic_put=False)
        table = MemoryTable() if handle is None else self.tables[handle // 2]
        return open_store(backend, table=table, clock=self.clock, new_id=self.ids.__next__)

    def head(self) -> int:
        return self.eye.engine.log.sync().n

    def root(self, pick: int) -> str:
        return self.roots[pick % len(self.roots)] if self.roots else "0" * 64

    def act(
        self, handle: int, do: Callable[[Store], Result], failed: Callable[[bool], Result | None] = lambda happened: None
    ) -> Result | None:
        """Does it; when a fault waits, in a process that it strikes: `failed` says what came of it, given whether there is a new entry."""
        if self.armed is None:
            return do(self.stores[handle])
        faults, before = Faults(), self.head()
        store = self.open(handle, faults)
        faults.mode, faults.at, faults.calls = *self.armed, 0
        self.armed = None
        try:
            return do(store)
        except (Death, StoreError):
            if not faults.struck:
                raise
            if faults.later is not None:
                faults.later()
            return failed(self.head() > before)

    def change(self, handle: int, do: Callable[[Store], object]) -> bool:
        """Whether it was done."""

        def done(store: Store) -> bool:
            do(store)
            return True

        return bool(self.act(handle, done, lambda happened: happened))

    def known(self, snapshot: Snapshot) -> str:
        """The key, of a snapshot that the model must know."""
        put = self.model.puts[snapshot.id]
        assert (snapshot.root, snapshot.step) == (put.root, put.step)
        return snapshot.id

    def hold(self, handle: int, root: str, do: Callable[[Store], Snapshot], expected: type[Exception] | None) -> str | None:
        """Whatever makes a new hold of a root; returns the snapshot that is held by it now."""
        wanted = self.model.holder_of(root)
        if wanted is not None and expected is not None:
            with pytest.raises(expected):
                do(self.stores[handle])
            return None
        try:
            snapshot = self.act(handle, do, lambda happened: self.eye.resolve(root) if happened else None)
        except (*GONE, AlreadyExistsError):
            if wanted is not None:
                raise
            return None
        if snapshot is None:
            return None
        assert expected is None
        assert wanted in (None, snapshot.id)
        return self.known(snapshot)

    @initialize(first=st.lists(puts, min_size=3, max_size=6))
    def begin(self, first: list[Command]) -> None:
        """Something to work on."""
        for command in first:
            self.do(command)

    @rule(command=commands)
    def do(self, command: Command) -> None:
        name, *arguments = command
        getattr(self, name)(*arguments)

    # --- put, and refs --------------------------------------------------------------------------------------------------

    def put(self, handle: int, ref: str, content: Content, step: int | None) -> None:
        try:
            snapshot = self.act(
                handle,
                lambda store: store.put_snapshot(made(content), ref=ref, step=step, expect=ANY),
                lambda happened: self.eye.resolve(ref) if happened else None,
            )
        except InvalidOptionError:
            assert ref in self.model.tags
            return
        if snapshot is not None:
            assert ref not in self.model.tags
            self.model.puts[snapshot.id] = Put(snapshot.root, content, step, snapshot.entry)
            self.model.move(ref, snapshot.id)
            if snapshot.root not in self.roots:
                self.roots.append(snapshot.root)

    def branch(self, handle: int, name: str, pick: int) -> None:
        root, taken = self.root(pick), name in self.model.branches or name in self.model.tags
        key = self.hold(handle, root, lambda store: store.branch(name, root), AlreadyExistsError if taken else None)
        if key is not None:
            self.model.move(name, key)

    def reset(self, handle: int, name: str, pick: int) -> None:
        root = self.root(pick)
        missing = name not in self.model.branches
        if missing:
            with pytest.raises(NotFoundError):
                self.stores[handle].reset(name, root)
            return
        key = self.hold(handle, root, lambda store: store.reset(name, root), None)
        if key is not None:
            self.model.move(name, key)

    def tag(self, handle: int, name: str, pick: int) -> None:
        root, taken = self.root(pick), name in self.model.branches or name in self.model.tags
        key = self.hold(handle, root, lambda store: store.tag(name, root), AlreadyExistsError if taken else None)
        if key is not None:
            self.model.tags[name] = key

    def pin(self, handle: int, pick: int, owner: str, expires: int | None) -> None:
        root = self.root(pick)
        key = self.hold(handle, root, lambda store: store.pin(root, owner=owner, expires=expires), None)
        if key is not None:
            self.model.pins[key, owner] = None if expires is None else self.clock() + expires * 10**9

    def unpin(self, handle: int, pick: int) -> None:
        if not self.model.pins:
            return
        key, owner = sorted(self.model.pins)[pick % len(self.model.pins)]
        root = self.model.puts[key].root
        if self.change(handle, lambda store: store.unpin(root, owner=owner)):
            self.model.unpin(root, owner)

    # --- what goes, and comes back --------------------------------------------------------------------------------------

    def forget(self, handle: int, name: str, how: str, step: int, pick: int) -> None:
        model, root = self.model, self.root(pick)
        address = {"whole": name, "step": f"{name}@{step}", "root": root, "untag": name}[how]
        taken: dict[str, set[str] | None] = {}
        error: type[Exception] | None = None
        if how in ("whole", "untag"):
            if name in model.tags or (how == "whole" and name in model.branches):
                taken[name] = None
        elif how == "step":
            key, among = (model.of_step(name, step) if name in model.branches else None), [name]
            if key is None and name in model.tags and model.puts[model.tags[name]].step == step:
                key, among = model.tags[name], list(model.branches)
            taken = {branch: ids for branch in among if key is not None and (ids := model.with_root(branch, model.puts[key].root))}
        else:
            taken = {branch: ids for branch in model.branches if (ids := model.with_root(branch, root))}
        if not taken:
            error = NotFoundError
        elif any(ids is not None and model.head(branch) in ids for branch, ids in taken.items()):
            error = ConflictError
        do: Callable[[Store], object] = (lambda store: store.untag(name)) if how == "untag" else lambda store: store.forget(address)
        if error is not None:
            before = self.head()
            with pytest.raises(error):
                do(self.stores[handle])
            assert self.head() == before
        elif self.change(handle, do):
            model.forget(taken, self.head(), self.clock())

    def undo(self, handle: int, how: str, name: str, pick: int) -> None:
        address = {"last": None, "ref": name, "root": self.root(pick)}[how]
        found = self.model.to_undo(address)
        error = NotFoundError if not found else ConflictError if any(self.model.is_taken(window) for window, _ in found) else None
        if error is not None:
            with pytest.raises(error):
                self.stores[handle].undo(address)
        elif self.change(handle, lambda store: store.undo(address)):
            self.model.undo(found)

    # --- gc, crashes, time ----------------------------------------------------------------------------------------------

    def gc(self, handle: int, ages: tuple[int, int, int], below: float, budget: int, settle: int) -> None:
        min_age, grace, window = ages
        options = GcOptions(min_age, grace, window, 1, below, budget, settle)
        model, now_ns = self.model, self.clock()
        before, planned = self.head(), self.armed is None and self.stores[handle].gc(options, dry_run=True)
        report = self.act(handle, lambda store: store.gc(options))
        if planned and report is not None:
            assert (planned.deleted, planned.freed_bytes, planned.waiting) == (report.deleted, report.freed_bytes, report.waiting)
        endings = [window for window in model.windows if now_ns - window.time_ns >= options.undo_window_seconds * 1e9]
        endings += [key for key, ends_ns in model.pins.items() if ends_ns is not None and ends_ns <= now_ns]  # type: ignore[misc]
        if not endings or self.head() > before:
            model.end(now_ns, options.undo_window_seconds)
        self.read(0)

    def arm(self, mode: str, at: int) -> None:
        """The next process to work dies, or meets a fault, at a backend call."""
        self.armed = mode, at

    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    def reopen(self, handle: int, loses_cache: bool) -> None:
        if loses_cache:
            self.tables[handle // 2] = MemoryTable()
            self.stores = [self.open(other) if other // 2 == handle // 2 else store for other, store in enumerate(self.stores)]
        self.stores[handle] = self.open(handle)

    # --- look -----------------------------------------------------------------------------------------------------------

    def read(self, pick: int) -> None:
        held = list(self.model.contents())
        if held:
            root, content = held[pick % len(held)]
            assert same(self.stores[pick % 3].checkout(root), made(content))

    def compare(self, handle: int) -> None:
        store, model = self.stores[handle], self.model
        assert {name: snapshot.id for name, snapshot in store.branches().items()} == {name: model.head(name) for name in model.branches}
        assert {name: snapshot.root for name, snapshot in store.tags().items()} == {
            name: model.puts[key].root for name, key in model.tags.items()
        }
        for name in model.branches:
            assert [self.known(snapshot) for snapshot in store.log(name)] == model.history(name)
            for step in (1, 2, 3):
                key = model.of_step(name, step)
                if key is not None:
                    assert store.resolve(f"{name}@{step}").id == key
        assert {(pin.snapshot.id, pin.owner): pin.expires_ns for pin in store.pins()} == model.pins
        windows = sorted(
            (each.entry, each.ref, each.kind, {self.known(snapshot) for snapshot in each.snapshots}) for each in store.forgotten()
        )
        assert windows == sorted((window.entry, window.name, window.kind, set(window.moves.values())) for window in model.windows)

    def fsck(self, handle: int, read_data: bool) -> None:
        report = self.stores[handle].fsck(read_data=read_data)
        assert report.ok, report.findings

    def copy(self, handle: int) -> None:
        """To a store that is not there yet."""
        target = open_store(MemoryBackend(clock=self.clock), clock=self.clock, new_id=self.ids.__next__)
        if self.model.branches or self.model.tags:
            copy_store.copy(self.stores[handle], target)
        assert set(target.branches()) == set(self.model.branches)
        assert set(target.tags()) == set(self.model.tags)
        for name in self.model.branches:
            assert same(target.checkout(name), made(self.model.puts[self.model.head(name)].content))

    def teardown(self) -> None:
        self.compare(0)
        fresh = self.open(None)
        require_readable(fresh, {root: made(content) for root, content in self.model.contents()})
        report = fresh.fsck(read_data=True)
        assert report.ok, report.findings
        self.leave_nothing(fresh)

    def leave_nothing(self, store: Store) -> None:
        """Once nothing is held, nothing is left."""
        for name in [*self.model.branches, *self.model.tags]:
            store.forget(name)
        self.clock.advance(1000)
        for root, owner in {(pin.snapshot.root, pin.owner) for pin in store.pins()}:
            store.unpin(root, owner=owner)
        store.gc(AT_ONCE)
        assert sizes(self.backend) == {}


def run(steps: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=max(1, steps // STEPS_A_RUN),
            stateful_step_count=STEPS_A_RUN,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_one_thread(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(STEPS)
    finally:
        torch.set_num_threads(threads)
