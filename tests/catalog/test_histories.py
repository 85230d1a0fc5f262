"""Random histories: fed bit by bit, a catalog is what one fed at once is, and says what the store says."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.read_entries import CHANGED_TABLES
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import StoreError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log.operations import SCHEMA
from tensorstore_ck.store import Store
from tests.catalog.made import dump
from tests.gc.stores import AT_ONCE, Clock, open_store, state

refs = st.sampled_from(["runs/a", "runs/b", "c"])
picks = st.integers(0, 50)
numbers = st.sampled_from([0.5, 2.0, math.nan, math.inf])
named = st.dictionaries(st.sampled_from(["loss", "acc", "zero\0"]), numbers, max_size=2)

_numbers = itertools.count()


class History:
    """A store, and the roots that were ever saved to it."""

    def __init__(self, sync: Callable[[Store], object] = lambda _: None) -> None:
        self.clock = Clock()
        backend = MemoryBackend(clock=self.clock)
        backend.url = f"memory:{next(_numbers)}"
        self.store = open_store(backend, clock=self.clock)
        self.roots: list[str] = []
        self.sync = sync

    def do(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.clock.advance(1)
        with suppress(StoreError):
            COMMANDS[name][2](self, *arguments)

    def root(self, pick: int) -> str:
        return self.roots[pick % len(self.roots)] if self.roots else "0" * 64

    def put(self, ref: str, content: int, step: int | None, metrics: dict[str, float]) -> None:
        self.roots.append(self.store.put_snapshot(state(content, size=50), ref=ref, step=step, metrics=metrics, expect=ANY).root)

    def forget(self, which: str | int) -> None:
        self.store.forget(which if isinstance(which, str) else self.root(which))

    def policy(self, keep: int | None) -> None:
        if keep is None:
            self.store.remove_policy("runs/*")
        else:
            self.store.set_policy("runs/*", keep_last=keep)

    def quota(self, refuse: int | None) -> None:
        if refuse is not None:
            self.store.set_quota("*", refuse=refuse)
        elif "*" in self.store.quotas():
            self.store.remove_quota("*")

    def gc(self, later: bool) -> None:
        self.clock.advance(200 if later else 0)
        self.store.gc(AT_ONCE)


marks = st.tuples(picks, st.sampled_from(["bad", ""]), st.sampled_from(["", "nul \0"]))
owners, versions = st.sampled_from(["ada", "bob"]), st.sampled_from(["v1", "v2"])
COMMANDS: dict[str, tuple[int, st.SearchStrategy[Any], Callable[..., object]]] = {
    "put": (8, st.tuples(refs, st.integers(0, 1), st.sampled_from([None, 1, 2]), named), History.put),
    "branch": (1, st.tuples(refs, picks), lambda made, ref, pick: made.store.branch(ref, made.root(pick))),
    "reset": (1, st.tuples(refs, picks), lambda made, ref, pick: made.store.reset(ref, made.root(pick))),
    "tag": (2, st.tuples(versions, picks), lambda made, name, pick: made.store.tag(name, made.root(pick))),
    "untag": (1, st.tuples(versions), lambda made, name: made.store.untag(name)),
    "annotate": (2, st.tuples(picks, named), lambda made, pick, metrics: made.store.annotate(made.root(pick), metrics)),
    "mark": (2, marks, lambda made, pick, mark, reason: made.store.mark(made.root(pick), mark, reason=reason)),
    "pin": (
        1,
        st.tuples(picks, owners, st.sampled_from([None, 100])),
        lambda made, pick, owner, expires: made.store.pin(made.root(pick), owner=owner, expires=expires),
    ),
    "unpin": (1, st.tuples(picks, owners), lambda made, pick, owner: made.store.unpin(made.root(pick), owner=owner)),
    "forget": (3, st.tuples(st.one_of(refs, picks)), History.forget),
    "undo": (1, st.tuples(), lambda made: made.store.undo()),
    "policy": (1, st.tuples(st.sampled_from([1, None])), History.policy),
    "quota": (1, st.tuples(st.sampled_from([None, 4000, 10**12])), History.quota),
    "gc": (3, st.tuples(st.booleans()), History.gc),
    "sync": (3, st.tuples(), lambda made: made.sync(made.store)),
}
commands = st.sampled_from([name for name, (weight, _, _) in COMMANDS.items() for _ in range(weight)]).flatmap(
    lambda name: st.tuples(st.just(name), COMMANDS[name][1])
)


@pytest.fixture
def catalogs(new_url: Callable[[], str]) -> Iterator[tuple[Catalog, Catalog]]:
    with Catalog(new_url(), batch_entries=5) as often, Catalog(new_url()) as once:
        yield often, once


@pytest.mark.parametrize("new_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(commands, min_size=15, max_size=40))
def test_fed_bit_by_bit_it_is_what_it_is_fed_at_once(catalogs: tuple[Catalog, Catalog], history: list[tuple[str, tuple[Any, ...]]]) -> None:
    often, once = catalogs
    made = History(often.sync)
    for name, arguments in history:
        made.do(name, arguments)
    often.sync(made.store)
    once.sync(made.store)
    said = dump(often, made.store)
    assert said == dump(once, made.store)
    require_true(often, made.store)
    often.rebuild(made.store)
    assert dump(often, made.store) == said


def require_true(catalog: Catalog, store: Store) -> None:
    """Every snapshot that the store has is there as the store has it, and as held as it is."""
    view = store.engine.log.view()
    held = {move.ulid for name in view.branches() for move in view.moves(name)} | {pin.ulid for pin in view.pins()}
    held |= {row.ulid for name in view.tags() if (row := view.tag_row(name)) is not None}
    waiting = {move.ulid for window in view.windows() for move in window.moves} - held
    found = {each.id: each for each in catalog.find(f"store = '{store.url}'", state=None)}
    its = {ulid_text(info.ulid): info for live in (True, False) for info in view.snapshots(live=live)}
    ours = {at: each for at, each in found.items() if at in its}
    assert set(ours) == set(its)
    for at, info in its.items():
        each = ours[at]
        assert (each.root, each.step, each.ref, each.mark) == (info.root.hex(), info.step, info.ref, info.mark)
        assert each.reason == info.reason.replace("\0", "\N{REPLACEMENT CHARACTER}")
        assert repr(each.metrics) == repr(
            dict(sorted((name.replace("\0", "\N{REPLACEMENT CHARACTER}"), value) for name, value in info.metrics.items()))
        )
        assert each.state == ("live" if info.ulid in held else "forgotten" if info.ulid in waiting else "gone")
        assert each.pinned == any(pin.ulid == info.ulid for pin in view.pins())
        assert each.tags == tuple(name for name in view.tags() if view.tag_row(name).ulid == info.ulid)  # type: ignore[union-attr]


def test_every_operation_was_thought_of() -> None:
    assert set(SCHEMA) <= set(CHANGED_TABLES) | {"place"}


def test_states_follow_whatever_holds_a_snapshot(url: str) -> None:
    made = History()
    store = made.store
    waiting = GcOptions(undo_window_seconds=0, min_age_seconds=0, grace_seconds=1000, max_delete=1)
    with Catalog(url) as catalog:

        def state_after(*actions: Callable[[], object]) -> str:
            for action in actions:
                made.clock.advance(1)
                action()
            catalog.sync(store)
            (found,) = catalog.find(state=None)
            return found.state

        made.put("runs/a", 0, 1, {})
        (root,) = made.roots
        assert state_after() == "live"
        assert state_after(lambda: store.tag("v1", root), lambda: store.forget("runs/a")) == "live"
        assert state_after(lambda: store.untag("v1")) == "forgotten"
        assert state_after(lambda: store.undo("v1")) == "live"
        assert len(catalog.find("tag = 'v1'")) == 1
        assert state_after(lambda: store.untag("v1")) == "forgotten"
        assert state_after(lambda: store.pin(root, owner="ada")) == "live"
        assert state_after(lambda: store.unpin(root, owner="ada")) == "forgotten"
        assert state_after(lambda: store.undo("runs/a")) == "live"
        assert state_after(lambda: store.forget("runs/a")) == "forgotten"
        assert state_after(lambda: store.branch("b", root)) == "live"
        assert state_after(lambda: store.forget("b")) == "forgotten"
        assert state_after(lambda: store.gc(waiting)) == "gone"
        assert state_after(lambda: store.tag("v2", root)) == "live"


def test_what_is_let_go_one_by_one(url: str) -> None:
    made = History()
    with Catalog(url) as catalog:

        def states() -> list[tuple[int | None, str]]:
            catalog.sync(made.store)
            return [(each.step, each.state) for each in catalog.find(state=None, order_by="step")]

        for step in (1, 2, 3):
            made.clock.advance(1)
            made.store.put_snapshot({"step": step}, ref="runs/a", step=step)
        assert states() == [(1, "live"), (2, "live"), (3, "live")]
        made.store.forget("runs/a@2")
        assert states() == [(1, "live"), (2, "forgotten"), (3, "live")]
        made.store.undo("runs/a@2")
        assert states() == [(1, "live"), (2, "live"), (3, "live")]
        made.store.set_policy("runs/*", keep_last=1)
        made.store.put_snapshot({"step": 4}, ref="runs/a", step=4)
        assert states() == [(1, "forgotten"), (2, "forgotten"), (3, "live"), (4, "live")]


def test_what_was_said_of_a_root_ends_with_its_last_snapshot(url: str) -> None:
    made = History()
    with Catalog(url, batch_entries=1) as catalog:
        for _ in range(2):
            made.put("runs/a", 0, 1, {})
            made.store.mark(made.root(0), "bad", reason="diverged")
            made.store.annotate(made.root(0), {"acc": 0.5})
            made.store.forget("runs/a")
            made.gc(later=False)
            catalog.sync(made.store)
        made.put("runs/a", 0, 1, {})
        catalog.sync(made.store)
        found = [(each.mark, dict(each.metrics), each.state) for each in catalog.find(state=None)]
    assert len(set(made.roots)) == 1
    assert found == [("", {}, "live"), ("bad", {"acc": 0.5}, "gone"), ("bad", {"acc": 0.5}, "gone")]


def test_what_is_said_of_a_root_holds_for_all_its_snapshots(url: str) -> None:
    made = History()
    with Catalog(url, batch_entries=2) as catalog:
        made.put("runs/a", 0, 1, {"acc": 0.1})
        made.put("runs/b", 0, 1, {})
        made.store.annotate(made.root(0), {"acc": 0.5})
        made.store.mark(made.root(0), "bad", reason="x")
        made.put("c", 0, 1, {"acc": 0.2, "loss": 1.0})
        catalog.sync(made.store)
        found = {each.ref: (dict(each.metrics), each.mark) for each in catalog.find()}
    assert found == {"runs/a": ({"acc": 0.5}, "bad"), "runs/b": ({"acc": 0.5}, "bad"), "c": ({"acc": 0.5, "loss": 1.0}, "bad")}
