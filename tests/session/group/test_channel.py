"""Records in a store: fakes, and the real ones of torch; a store that hangs; groups over a real TCPStore."""

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed

from tensorstore_ck.errors import SnapshotAbortedError, UnsupportedValueError
from tensorstore_ck.format.sealed import Body, pack_body
from tensorstore_ck.session.group import Channel, ChannelError, Group, KeyValue, Participant, StoreThread, open_group
from tensorstore_ck.session.group.channel import BATCH, LONGEST_PAUSE, MAX_RECORD_BYTES, LateError
from tests.effort import PATIENCE_SECONDS
from tests.group_of_one import group_of_one
from tests.session.group.clock import Clock
from tests.session.group.simulation import FakeStore

T = TypeVar("T")
SOON = timedelta(seconds=PATIENCE_SECONDS)
dist: Any = torch.distributed
"""Its annotations lack most of what we use."""


@pytest.fixture(params=["fake", "file", "tcp", "tcp without libuv"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "fake":
            return FakeStore()
        case "file":
            made = dist.FileStore(str(tmp_path / "store"), 1)
        case kind:
            made = dist.TCPStore("127.0.0.1", 0, 1, True, SOON, use_libuv=kind == "tcp")
    return dist.PrefixStore("default_pg", made)


def channel_of(store: Any, clock: Clock, *, prefix: str = "p/", ranks: int = 4) -> Channel:
    def run(action: Callable[[KeyValue], T], seconds: float) -> T:
        assert seconds > 0
        return action(store)

    return Channel(run, prefix, ranks=ranks, clock=clock, sleep=clock.sleep)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_is_saved_is_restored(store: Any, clock: Clock) -> None:
    channel = channel_of(store, clock)
    assert channel.try_get("key", 1.0) is None
    channel.put("key", {"bytes": b"\x00\xff\x00", "n": 1 << 40, "list": [None, 1.5, "ü"]}, 1.0)
    assert channel.try_get("key", 1.0) == {"bytes": b"\x00\xff\x00", "n": 1 << 40, "list": [None, 1.5, "ü"]}
    channel.put("key", {}, 1.0)
    assert channel.wait(["other", "key"], 1.0) == ("key", {})
    assert channel_of(store, clock, prefix="q/").try_get("key", 1.0) is None
    channel.delete(channel.written, 1.0)
    assert channel.try_get("key", 1.0) is None
    assert not clock.pauses


def test_the_first_of_two_records_counts(store: Any, clock: Clock) -> None:
    channel = channel_of(store, clock)
    assert channel.put_first("key", {"who": 1}, 1.0) == {"who": 1}
    assert channel.put_first("key", {"who": 2}, 1.0) == {"who": 1}
    assert channel.try_get("key", 1.0) == {"who": 1}


def test_waiting_ends_when_the_record_comes_and_at_the_deadline(store: Any, clock: Clock) -> None:
    channel = channel_of(store, clock)
    with pytest.raises(LateError, match="within 100 s"):
        channel.wait(["key"], 100.0)
    assert clock.now == 100.0
    assert clock.pauses == sorted(clock.pauses[:-1]) + clock.pauses[-1:]
    assert max(clock.pauses) == LONGEST_PAUSE
    clock.at(110.0, lambda: channel.put("key", {}, 0.0))
    assert channel.wait(["key"], 1000.0) == ("key", {})
    assert clock.now < 112.0
    with pytest.raises(LateError):
        channel.wait(["none"], -1.0)
    assert channel.wait(["key"], -1.0) == ("key", {})


def test_all_are_collected_whenever_they_come(store: Any, clock: Clock) -> None:
    channel = channel_of(store, clock)
    keys = [f"proposal/{rank}" for rank in range(BATCH + 10)]
    rest = keys[::9]

    def more() -> None:
        if rest:
            channel.put(rest.pop(), {}, 0.0)

    clock.on_sleep = more
    for number, key in enumerate(keys):
        if number % 9:
            channel.put(key, {"rank": number}, 1.0)
    found, alarm, _ = channel.collect(dict.fromkeys(keys, 1), 10_000.0, alarm="failed")
    assert list(found) == keys
    assert found["proposal/7"] == pack_body({"rank": 7})
    assert alarm is None


@pytest.mark.parametrize("missing", [[0, 1, 255, 256, 521], list(range(522))])
def test_at_the_deadline_what_is_there_is_collected(store: Any, clock: Clock, missing: list[int]) -> None:
    channel = channel_of(store, clock)
    keys = [f"proposal/{rank}" for rank in range(522)]
    there = [key for number, key in enumerate(keys) if number not in missing]
    for key in there:
        channel.put(key, {}, 1.0)
    found, alarm, _ = channel.collect(dict.fromkeys(keys, 1), 2.0, alarm="failed")
    assert sorted(found) == sorted(there)
    assert alarm is None
    assert clock.now == 2.0


def test_an_alarm_ends_the_wait(store: Any, clock: Clock) -> None:
    channel = channel_of(store, clock)
    channel.put("proposal/1", {}, 1.0)
    clock.at(3.0, lambda: channel.put("failed", {"rank": 2}, 1.0))
    found, alarm, _ = channel.collect({"proposal/0": 0, "proposal/1": 1}, 100.0, alarm="failed")
    assert list(found) == ["proposal/1"]
    assert alarm == pack_body({"rank": 2})
    assert clock.now < 4.0


def test_polls_for_thousands_of_ranks_are_few_and_small(clock: Clock) -> None:
    fake = FakeStore()
    channel = channel_of(fake, clock, ranks=4096)
    keys = [f"proposal/{rank}" for rank in range(4096)]
    for key in keys[:-1]:
        channel.put(key, {}, 1.0)
    fake.calls = 0
    clock.at(10.0, lambda: channel.put(keys[-1], {}, 1.0))
    assert len(channel.collect(dict.fromkeys(keys, 1), 100.0, alarm="failed").values) == 4096
    assert fake.calls <= 2 * 4096 // BATCH + 2 * len(clock.pauses) + 4
    assert len(clock.pauses) <= 100


@pytest.mark.parametrize("value", [b"", b"\xc1", pack_body(1), pack_body({"a": 1}) + b"\x00", pack_body({"a": b"x" * MAX_RECORD_BYTES})])
def test_what_is_no_record_is_refused(value: bytes, clock: Clock) -> None:
    fake = FakeStore()
    fake.set("p/key", value)
    with pytest.raises(ChannelError, match="key"):
        channel_of(fake, clock).try_get("key", 1.0)


def test_values_that_are_too_large_or_not_plain_are_not_saved(clock: Clock) -> None:
    fake = FakeStore()
    for value in (b"x" * MAX_RECORD_BYTES, object()):
        with pytest.raises(UnsupportedValueError):
            channel_of(fake, clock).put("key", {"a": value}, 1.0)
    assert not fake.values


def test_a_store_that_fails_is_a_channel_error(clock: Clock) -> None:
    def run(action: Callable[[KeyValue], T], seconds: float) -> T:
        raise RuntimeError("Broken pipe")

    with pytest.raises(ChannelError, match="Broken pipe"):
        Channel(run, "p/", ranks=2, clock=clock, sleep=clock.sleep).put("key", {}, 1.0)


# --- a thread and a clone -----------------------------------------------------------------------------------------


class HangingStore(FakeStore):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.let_go = threading.Event(), threading.Event()
        self.clones = 0

    def clone(self) -> "HangingStore":
        self.clones += 1
        return self

    def check(self, keys: list[str], /) -> bool:
        self.reached.set()
        self.let_go.wait()
        return super().check(keys)


def test_a_store_that_hangs_does_not_hang_the_caller() -> None:
    hanging = HangingStore()
    run = StoreThread(hanging)
    while not hanging.reached.is_set():
        with pytest.raises(TimeoutError, match="no answer"):
            run(lambda store: store.check(["a"]), 0.01)
    with pytest.raises(TimeoutError):
        run(lambda store: store.set("late", b""), 0.01)
    hanging.let_go.set()
    assert run(lambda store: store.check(["a"]), PATIENCE_SECONDS) is False
    assert "late" not in hanging.values  # nobody waited for it any more
    assert hanging.clones == 1


class BreakingStore(FakeStore):
    """Clones whose connection breaks, and then stays broken."""

    def __init__(self) -> None:
        super().__init__()
        self.clones = 0
        self.is_there = True

    def clone(self) -> KeyValue:
        if not self.is_there:
            raise RuntimeError("Connection refused")
        self.clones += 1
        return BrokenOnce(self)


class BrokenOnce(FakeStore):
    def __init__(self, store: BreakingStore) -> None:
        super().__init__()
        self._store = store
        self._is_broken = False

    def check(self, keys: list[str], /) -> bool:
        self._is_broken |= "break" in keys
        if self._is_broken:
            raise RuntimeError("Connection reset by peer")
        return self._store.check(keys)


def test_a_connection_that_broke_is_made_again_when_the_next_attempt_begins() -> None:
    """Not before, since that may take long: a rank in an attempt should read the log."""
    breaking = BreakingStore()
    run = StoreThread(breaking)
    run.renew()
    assert breaking.clones == 0
    for _ in range(3):
        with pytest.raises(RuntimeError, match="reset"):
            run(lambda store: store.check(["break"]), PATIENCE_SECONDS)
    assert breaking.clones == 1
    run.renew()
    run.renew()
    assert breaking.clones == 2
    assert run(lambda store: store.check(["a"]), PATIENCE_SECONDS) is False


def test_a_store_that_is_gone_aborts_the_attempt_when_it_begins() -> None:
    breaking = BreakingStore()
    run = StoreThread(breaking)
    group = Group(run, rank=0, ranks=1, scope="s", renew=run.renew)
    with pytest.raises(RuntimeError, match="reset"):
        run(lambda store: store.check(["break"]), PATIENCE_SECONDS)
    breaking.is_there = False
    with pytest.raises(SnapshotAbortedError, match="refused"):
        group.begin("the put", object_id="main", timeout=600.0)


def test_the_thread_survives_errors_and_ends_with_its_owner() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "tsck-group"}

    before = threads()
    run = StoreThread(dist.HashStore())
    (thread,) = threads() - before
    with pytest.raises(ZeroDivisionError):
        run(lambda store: 1 // 0, PATIENCE_SECONDS)
    assert run(lambda store: store.check(["a"]), PATIENCE_SECONDS) is False
    del run
    gc.collect()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


# --- groups over a real store -------------------------------------------------------------------------------------


@pytest.fixture
def tcp() -> Any:
    return dist.TCPStore("127.0.0.1", 0, 1, True, SOON)


class Watched:
    """A process group's store, which only the thread that made this may use; others may clone it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._owner = threading.get_ident()
        self.clones = 0

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._owner:
            return getattr(self._store, name)
        assert name == "clone", f"another thread calls {name}"
        self.clones += 1
        return self._store.clone


def test_the_training_thread_uses_its_store_while_ours_waits(tcp: Any) -> None:
    """A client serves one call at a time: if they shared one, this `set` would wait for a `get` that waits for this `set`."""
    run = StoreThread(tcp)
    answer: list[bytes] = []
    begun = threading.Event()

    def wait(store: KeyValue) -> bytes:
        begun.set()
        return store.get("from the training thread")

    waiter = threading.Thread(target=lambda: answer.append(run(wait, 60.0)))
    waiter.start()
    begun.wait(PATIENCE_SECONDS)
    tcp.set("from the training thread", b"x")
    waiter.join(PATIENCE_SECONDS)
    assert answer == [b"x"]


def test_an_attempt_leaves_the_store_of_the_training_thread_alone(tcp: Any) -> None:
    """Rank 0 waits for rank 1, which comes only when the training thread has used the store in between."""
    watched = Watched(dist.PrefixStore("default_pg", tcp))
    log: dict[bytes, Body | None] = {}
    endings: list[Body] = []

    def put(run: StoreThread, rank: int) -> None:
        attempt = Group(run, rank=rank, ranks=2, scope="s").begin("the put", object_id="main", timeout=PATIENCE_SECONDS)
        endings.append(attempt.run(duties_of(log, attempt.txn, rank, 2, fails=False)))

    first = threading.Thread(target=put, args=(StoreThread(watched), 0))
    first.start()
    while not watched.clones:
        watched.set("busy", b"")
    for number in range(100):
        watched.set(f"of training {number}", b"")
        assert watched.check([f"of training {number}"])
    put(StoreThread(dist.PrefixStore("default_pg", tcp)), 1)
    first.join(PATIENCE_SECONDS)
    assert len(endings) == 2
    assert endings[0] == endings[1]
    assert watched.clones == 1


def duties_of(log: dict[bytes, Body | None], txn: bytes, rank: int, ranks: int, *, fails: bool) -> Participant:
    def execute(go: Body) -> Body:
        if fails:
            raise ValueError("no")
        return {"rank": rank}

    def commit(results: list[Body]) -> Body:
        assert [result["rank"] for result in results] == list(range(ranks))
        return log.setdefault(txn, {"root": txn}) or {}

    return Participant(lambda: {"step": 7}, execute, lambda: log.setdefault(txn, None), lambda proposals: {}, commit)


def join(tcp: Any, ranks: int, *, attempts: int, fails: int | None = None) -> list[list[Any]]:
    """Each rank in a thread, over a clone of its own; what each attempt returned or raised."""
    log: dict[bytes, Body | None] = {}
    endings: list[list[Any]] = [[] for _ in range(ranks)]

    def one(rank: int) -> None:
        group = Group(StoreThread(dist.PrefixStore("default_pg", tcp)), rank=rank, ranks=ranks, scope="s")
        for number in range(attempts):
            attempt = group.begin("the put", object_id="main", timeout=PATIENCE_SECONDS)
            participant = duties_of(log, attempt.txn, rank, ranks, fails=rank == fails and number == 0)
            try:
                endings[rank].append(attempt.run(participant))
            except SnapshotAbortedError as exc:
                endings[rank].append(str(exc))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return endings


@pytest.mark.parametrize("fails", [None, 3])
def test_groups_over_a_tcp_store(tcp: Any, fails: int | None) -> None:
    keys = []
    for _ in range(2):  # made again over the same store
        endings = join(tcp, 4, attempts=5, fails=fails)
        assert len(endings[0]) == 5
        assert all(ending == endings[0] for ending in endings)
        assert [type(ending) for ending in endings[0]] == [dict if fails is None else str, dict, dict, dict, dict]
        keys.append(tcp.num_keys())
    assert keys[1] - keys[0] <= 4 * 4 + 3  # of the last attempt, which nobody can know to be over for all, and of the group


def test_a_process_group() -> None:
    with group_of_one():
        process_group = dist.group.WORLD
        assert process_group is not None
        attempt = open_group(process_group, "s").begin("the put", object_id="main", timeout=PATIENCE_SECONDS)
        assert attempt.run(Participant(dict, dict, None, lambda proposals: {}, lambda results: {"ranks": len(results)})) == {"ranks": 1}
