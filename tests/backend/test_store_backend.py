"""Bytes pass no faster than the limit; a writer stops before its backend is full; the log never waits."""

import math
import pickle
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend import Backend, Buffer, Created, ObjectWriter
from tensorstore_ck.backend import store_backend as limited_module
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.store_backend import CHECK_BYTES, throttled, throttled_to
from tensorstore_ck.common.executor import LocalThreads
from tensorstore_ck.common.free_space import MinFree, Space
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.engine import opening
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.maintenance.fsck import FsckOptions, run_fsck, run_repair
from tests.effort import PATIENCE_SECONDS
from tests.maintenance.fsck.stores import build, reopen

RATE = 1000


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.longest = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.longest = max(self.longest, seconds)


class Calls(MemoryBackend):
    """Notes the sizes of reads and appends; each byte takes some time of its own."""

    def __init__(self, time: Time, seconds_a_byte: float = 0.0) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._time, self._seconds = time, seconds_a_byte

    def note(self, size: int) -> None:
        self.sizes.append(size)
        self._time.now += size * self._seconds

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        super().read_into(name, offset, target)
        self.note(len(target))

    def open_writer(self, name: str) -> ObjectWriter:
        return Appends(self, super().open_writer(name))


class Appends:
    def __init__(self, backend: Calls, inner: ObjectWriter) -> None:
        self._backend, self._inner = backend, inner

    def append(self, data: Sequence[Buffer]) -> int:
        offset = self._inner.append(data)
        self._backend.note(sum(map(len, data)))
        return offset

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def paced(inner: Backend, time: Time) -> Backend:
    return throttled(inner, writes=RateLimit(RATE, clock=time.clock), reads=RateLimit(RATE, clock=time.clock), sleep=time.sleep)


@pytest.mark.parametrize(("size", "seconds_a_byte"), [(50, 0.0), (999, 0.5 / RATE), (1000, 0.0), (1001, 0.5 / RATE), (7777, 0.0)])
def test_the_rate_holds_both_ways(size: int, seconds_a_byte: float) -> None:
    time = Time()
    backend = paced(Calls(time, seconds_a_byte), time)
    writer = backend.open_writer("object")
    written = 0
    while written < 30 * RATE:
        assert writer.append([b"x" * size]) == written
        written += size
    writer.close()
    assert written / time.now == pytest.approx(RATE, rel=0.05)
    began = time.now
    target = memoryview(bytearray(size))
    for offset in range(0, written, size):
        backend.read_into("object", offset, target)
    assert written / (time.now - began) == pytest.approx(RATE, rel=0.05)


def test_small_objects_are_paced_too() -> None:
    time = Time()
    backend = paced(MemoryBackend(), time)
    for number in range(100):
        backend.put(f"parts/{number}", bytes(100))
    assert time.now == pytest.approx(10)
    for number in range(100):
        assert backend.get(f"parts/{number}", max_bytes=100) == bytes(100)
    assert time.now == pytest.approx(19, abs=1.1)  # what nobody read meanwhile is kept for a second


def test_a_large_read_passes_in_slices_and_an_append_as_a_whole() -> None:
    """So that appends of several threads stay whole."""
    time = Time()
    inner = Calls(time)
    backend = paced(inner, time)
    data = bytes(range(250)) * 10
    writer = backend.open_writer("object")
    assert writer.append([b"head"]) == 0
    assert writer.append([data, b"", b"tail"]) == 4
    writer.close()
    assert inner.sizes == [4, 2504]
    target = bytearray(2508)
    inner.sizes.clear()
    backend.read_into("object", 0, memoryview(target))
    assert target == b"head" + data + b"tail"
    assert inner.sizes == [*[250] * 10, 8]
    assert time.longest <= 1.0


def test_a_wait_ends_early_when_the_rate_rises_and_a_pace_ends_by_itself() -> None:
    """A step that no longer comes must not leave a save slow."""
    time = Time()
    limit = RateLimit(clock=time.clock)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        time.sleep(seconds)
        if len(sleeps) == 4:
            limit.slow_to(math.inf, 0)

    limit.wait(10**9, sleep)
    assert sleeps == [], "without a limit nobody waits"
    limit.slow_to(10, 1000)
    limit.wait(10_000, sleep)
    assert time.now == 1.0
    limit.slow_to(10, seconds=5)
    limit.wait(10_000, sleep)
    assert time.now == pytest.approx(6.0, abs=0.25)
    limit.wait(10_000, sleep)
    assert time.now == pytest.approx(6.0, abs=0.25)


def test_the_lowest_of_the_given_rate_the_share_of_the_store_and_the_pace_counts() -> None:
    limit = RateLimit("8MB", clock=Time().clock)
    limit.share(4)
    assert limit.rate == 2e6
    limit.limit_job(4e6)
    assert limit.rate == 1e6
    limit.slow_to(3e5, seconds=1)
    assert limit.rate == 3e5
    limit.slow_to(math.inf, 0)
    limit.limit_job(None)
    limit.share(1)
    assert limit.rate == 8e6


def test_the_log_and_all_that_is_no_data_waits_for_nobody() -> None:
    time = Time()
    backend = paced(MemoryBackend(), time)
    assert backend.create("log/1", bytes(10 * RATE)) is Created.CREATED
    backend.replace("checkpoint/1", bytes(10 * RATE))
    backend.sync_folders("log/1")
    assert [found.size_bytes for found in backend.list("log/")] == [10 * RATE]
    assert backend.size("log/1") == 10 * RATE
    backend.delete(["log/1"])
    assert (backend.url, backend.is_local, backend.space()) == ("memory:", True, None)
    assert time.now == 0


def test_without_a_limit_it_is_not_there() -> None:
    inner = MemoryBackend()
    assert throttled(inner) is inner
    assert throttled_to(inner, None) is inner
    with pytest.raises(InvalidOptionError, match="rate limit must be more than 0"):
        throttled_to(inner, 0)


# --- min_free ------------------------------------------------------------------------------------------------------


class Filling(MemoryBackend):
    """A disk that others fill, too: each look finds 32 MiB less."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes, self.looks = free_bytes, 0

    def space(self) -> Space:
        self.looks += 1
        self.free_bytes -= 32 << 20
        return Space(self.free_bytes, 1 << 30)


def test_a_writer_stops_before_the_backend_is_full() -> None:
    inner = Filling(200 << 20)
    backend = throttled(inner, min_free=MinFree.parse("10%"))
    first, second = backend.open_writer("packs/1"), backend.open_writer("packs/2")
    block = bytes(4 << 20)
    for number in range(24):
        (first, second)[number % 2].append([block])
    with pytest.raises(NoSpaceError, match=r"packs/1 needs 4\.0 MiB, .*memory:: 104\.0 MiB of 1\.0 GiB are free, and 102\.4 MiB must stay"):
        first.append([block])
    assert inner.looks == 3, "at first, after 62 MiB, after 30"
    backend.abort_upload("nothing")  # all else is the backend's own
    first.abort()
    second.abort()
    assert list(inner.list_uploads()) == []


def test_free_space_is_looked_at_once_for_so_many_bytes() -> None:
    inner = Filling(1 << 40)
    backend = throttled(inner, min_free=MinFree.parse("1MB"))
    for number in range(33):
        backend.put(f"parts/{number}", bytes(4 << 20))
    backend.put("parts/empty", b"")
    assert inner.looks == 1 + 33 * (4 << 20) // CHECK_BYTES == 3


# --- gc and fsck ---------------------------------------------------------------------------------------------------


class Meter:
    """Replaces a `RateLimit`: records the bytes and never waits."""

    made: ClassVar[list["Meter"]] = []
    burst_bytes = 1 << 30

    def __init__(self, rate: float | None) -> None:
        self.rate = math.inf if rate is None else rate
        self.count = self.waits = 0
        self._lock = threading.Lock()
        self.made.append(self)

    def wait(self, count: int, _: object) -> None:
        with self._lock:
            self.count += count

    job_rate: float | None = None
    """Policies limit nothing here."""


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Meter]]:
    """Of writes and of reads."""
    monkeypatch.setattr(limited_module, "RateLimit", Meter)
    yield Meter.made
    Meter.made.clear()


def test_gc_and_fsck_keep_their_rate_limit_and_leave_the_store_as_fast_as_it_was(meters: list[Meter]) -> None:
    store = reopen(build())
    store.forget("runs/b")
    store.forget("runs/a@1")  # whose pack is still needed, in part
    log_bytes = len([*store.engine.backend.list("log/")])
    report = store.gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1, rate_limit=5e6))
    checked = store.fsck(FsckOptions(read_data=True, rate_limit=5e6))
    gc_writes, gc_reads, writes, reads = meters
    assert report.rewritten
    assert (gc_writes.rate, gc_reads.rate, gc_writes.count) == (5e6, 5e6, report.written_bytes)
    assert gc_reads.count >= report.written_bytes
    assert len([*store.engine.backend.list("log/")]) > log_bytes
    assert checked.ok
    assert (writes.rate, reads.rate, writes.count) == (5e6, 5e6, 0)
    assert reads.count > checked.data_bytes > 0
    before = [meter.count for meter in meters]
    store.put_snapshot({"x": bytes(100_000)}, ref="runs/c")
    assert [meter.count for meter in meters] == before
    assert store.engine.limited_to(None) is store.engine


def test_repair_limits_both_stores(meters: list[Meter]) -> None:
    store, other = reopen(build(codec="raw")), reopen(build(codec="raw"))
    (pack, *_) = [found for found in store.engine.backend.list("packs/") if found.size_bytes > 10_000]
    store.engine.backend.replace(pack.name, bytes(pack.size_bytes))
    report = run_repair(store.engine, FsckOptions(read_data=True, rate_limit=5e6), other=other.engine)
    assert len(meters) == 4
    assert report.ok
    assert meters[3].count > 0  # the other store's reads


def test_work_elsewhere_cannot_be_limited() -> None:
    class Elsewhere(LocalThreads):
        is_remote = True

    with pytest.raises(InvalidOptionError, match="this process only"):
        run_fsck(reopen(build()).engine, FsckOptions(read_data=True, rate_limit=5e6), executor=Elsewhere(1))


# --- an open store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_a_handle_limits_what_it_writes_to_the_store_and_what_it_reads_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, staged: bool
) -> None:
    """Not what a staging disk has."""
    monkeypatch.setattr(opening, "RateLimit", Meter)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "rate_limit": 5e6, "read_rate_limit": 7e6}
    if staged:
        options["staging"] = tmp_path / "stage"
    state = {"w": torch.arange(50_000)}
    with tsck.open(tmp_path / "store", create=True, **options) as store:
        if not staged:
            assert pickle.loads(pickle.dumps(store.engine.backend)).url == store.url, "for workers elsewhere, without the limits"
        store.put_snapshot(state, ref="job")
        store.put_snapshot_async({"w": state["w"] + 1}, ref="job").wait(PATIENCE_SECONDS)
    writes, reads = Meter.made
    assert (writes.rate, reads.rate) == (5e6, 7e6)
    assert writes.count > 2 * 400_000
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache", read_only=True, read_rate_limit=9e6) as store:
        assert torch.equal(store.checkout("job~1")["w"], state["w"])
    nothing, reads = Meter.made[2:]
    assert (nothing.rate, reads.rate, nothing.count) == (math.inf, 9e6, 0)
    assert reads.count > 400_000
    if staged:
        with tsck.open(tmp_path / "store", **{**options, "staging": tmp_path / "another"}) as store:
            store.checkout("job~1")
            from_store = Meter.made[5].count
            store.checkout("job~1")
        assert Meter.made[5].count == from_store > 400_000
    Meter.made.clear()


def test_rates_that_are_none(tmp_path: Path) -> None:
    for name in ("rate_limit", "read_rate_limit"):
        with pytest.raises(InvalidOptionError, match="rate limit must be more than 0"):
            tsck.open(tmp_path / "store", create=True, **{name: 0})  # type: ignore[call-overload]
