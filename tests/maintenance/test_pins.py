"""Pins: who holds a snapshot, why, and until when."""

from collections.abc import Iterator
from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.engine import current_user
from tensorstore_ck.errors import InvalidNameError, InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.store import Store
from tests.gc.stores import AT_ONCE, Clock, counts, open_store, put_all, require_sound, state

DAY = 86_400


@pytest.fixture
def store(clock: Clock) -> Iterator[Store]:
    """Steps 1 and 2 on job."""
    with open_store(MemoryBackend(clock=clock), clock=clock) as store:
        put_all(store, "job", [state(1), state(2)])
        yield store


def test_a_pin_says_who_and_why_and_is_this_users_and_permanent_unless_it_says_more(store: Store, clock: Clock) -> None:
    pinned = store.pin("job@1", owner="ada", reason="figure 3", expires="30d")
    (pin,) = store.pins()
    assert pin.snapshot == pinned == store.resolve("job@1")
    assert (pin.owner, pin.reason, pin.time_ns) == ("ada", "figure 3", clock())
    assert pin.expires_ns == clock() + 30 * DAY * 10**9
    store.pin("job@2")
    pin = open_store(store.engine.backend).pins()[-1]
    assert (pin.owner, pin.reason, pin.expires_ns) == (current_user(), "", None)


def test_each_owner_holds_a_forgotten_snapshot_and_nobody_unpins_for_another_by_accident(store: Store, clock: Clock) -> None:
    root = store.pin("job@1", owner="ada").root
    store.pin("job@1", owner="grace")
    store.forget("job@1")
    for address in (root, "job"):
        with pytest.raises(NotFoundError, match="has no pin on that snapshot"):
            store.unpin(address)
    store.unpin(root, owner="ada")
    with pytest.raises(NotFoundError, match="'ada' has no pin"):
        store.unpin(root, owner="ada")
    assert [pin.owner for pin in store.pins()] == ["grace"]
    clock.advance(100 * DAY)
    store.gc(AT_ONCE)
    require_sound(store, {root: state(1), "job": state(2)})
    store.unpin(root, owner="grace")
    store.gc(AT_ONCE)
    assert counts(store.engine.backend)["snapshots"] == 1


def test_a_second_pin_of_an_owner_replaces_the_first(store: Store, clock: Clock) -> None:
    root = store.pin("job@1", owner="ada", reason="for now", expires="1d").root
    store.pin("job@1", owner="ada", reason="for good")
    (pin,) = store.pins()
    assert (pin.reason, pin.expires_ns) == ("for good", None)
    store.forget("job@1")
    clock.advance(2 * DAY)
    store.gc(AT_ONCE)
    require_sound(store, {root: state(1)})
    store.unpin(root, owner="ada")
    assert store.pins() == ()
    store.gc(AT_ONCE)
    assert counts(store.engine.backend)["snapshots"] == 1, "one unpin was enough"


def test_a_pin_on_one_of_two_snapshots_with_one_root_can_be_taken_back(store: Store) -> None:
    root = store.pin("job@1", owner="ada").root
    assert open_store(store.engine.backend).put_snapshot(state(1), ref="again", step=1).root == root
    store.pin(root, owner="ada")
    store.unpin(root, owner="ada")
    assert store.pins() == ()


def test_a_pin_ends_when_it_has_expired(store: Store, clock: Clock) -> None:
    root = store.pin("job@1", owner="ada", expires="1h").root
    store.pin("job@1", owner="grace", expires=3600)
    store.pin("job@1", owner="grace", expires=7200)  # made longer meanwhile
    store.forget("job@1")
    clock.advance(3599)
    store.gc(AT_ONCE)
    assert len(store.pins()) == 2
    clock.advance(1)
    assert store.gc(AT_ONCE, dry_run=True).snapshots == ()
    assert len(store.pins()) == 2, "only a run of gc ends it"
    store.gc(AT_ONCE)
    assert [pin.owner for pin in store.pins()] == ["grace"]
    require_sound(store, {root: state(1)})
    clock.advance(3600)
    assert [snapshot.root for snapshot in store.gc(AT_ONCE).snapshots] == [root]
    assert store.pins() == ()


def test_pinned_at_any_address(store: Store) -> None:
    store.tag("best", "job@1")
    for number, address in enumerate(["job", "job@1", "job~1", "best", store.resolve("job").root[:12]]):
        store.pin(address, owner=f"owner{number}")
    assert sorted(pin.snapshot.step or 0 for pin in store.pins()) == [1, 1, 1, 2, 2]


def test_what_cannot_be_pinned(store: Store) -> None:
    head = store.engine.log.sync()
    unknown: list[tuple[type[Exception], dict[str, Any]]] = [(NotFoundError, {"address": "nothing"}), (NotFoundError, {"address": "job@9"})]
    invalid: list[tuple[type[Exception], dict[str, Any]]] = [(InvalidNameError, {"address": "no address"})]
    invalid += [(StoreError, {field: "\ud800"}) for field in ("owner", "reason")]
    for error, arguments in (*unknown, *invalid):
        with pytest.raises(error):
            store.pin(**{"address": "job", **arguments})
    durations: list[Any] = ["soon", "3 fortnights", -1, float("nan"), float("inf"), True, "-1d", ""]
    messages: list[tuple[str, dict[str, Any]]] = [("expires", {"expires": duration}) for duration in durations]
    messages += [("owner must be 1 to 256 bytes", {"owner": owner}) for owner in ("x" * 257, "é" * 129)]
    messages += [("without zero bytes", {"owner": "zero\0byte"}), ("leave `expires` out", {"expires": 1e10})]
    messages += [("reason must be a text of at most 4,096 characters", {"reason": "x" * 4097})]
    for message, arguments in messages:
        with pytest.raises(InvalidOptionError, match=message):
            store.pin("job", **arguments)
    assert store.engine.log.sync() == head
    assert store.pins() == ()
    store.pin("job", owner="é" * 128, reason="x" * 4096)
    assert len(store.pins()) == 1
