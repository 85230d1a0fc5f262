"""How much fsck reads: all of it, a sample, or what there is time for; and in which order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.store_config import decode_config
from tensorstore_ck.log.cache import MemoryTable, Table
from tensorstore_ck.maintenance.fsck import FsckOptions, FsckReport, check_data, run_fsck
from tensorstore_ck.store import Store
from tests.gc.stores import Clock
from tests.maintenance.copy_store.places import Elsewhere
from tests.maintenance.fsck.stores import build, contents, flip, names

OBJECTS = contents(build())
CONFIG = decode_config(OBJECTS["store.json"], "memory:")
PACKS = 5


class Watched(MemoryBackend):
    """Notes which packs' blocks are read, and moves the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.clock = clock
        self.read: list[str] = []

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        super().read_into(name, offset, target)
        if offset and len(target) > 4096:  # a run of blocks, not a header or a footer
            self.read.append(name)
            self.clock.advance(1)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Five packs of one tensor each, alike in size; read by one thread."""
    monkeypatch.setattr(check_data, "cpu_threads", lambda: 1)
    monkeypatch.setattr(check_data, "DISK_QUEUE", 0)
    backend = Watched(Clock())
    init_store(backend)
    store = Store(engine_of(backend))
    for step in range(PACKS):
        backend.clock.advance(0.01)
        store.put_snapshot({"weight": torch.full((20_000,), float(step))}, ref="runs/a", step=step, codec="raw")
    backend.read.clear()
    return backend


def engine_of(backend: Watched, table: Table | None = None) -> Engine:
    config = read_config(backend)
    assert config is not None
    return make_engine(backend, config, table or MemoryTable(), clock=backend.clock)


def reads(backend: Watched, check: Callable[[], FsckReport]) -> tuple[FsckReport, list[str]]:
    backend.read.clear()
    report = check()
    assert report.ok
    return report, list(dict.fromkeys(backend.read))


def test_structure_reads_no_data_and_read_data_reads_all(backend: Watched) -> None:
    report, read = reads(backend, lambda: run_fsck(engine_of(backend)))
    assert (read, report.read_packs, report.data_bytes, report.never_verified) == ([], 0, 0, PACKS)
    assert report.oldest_verified_ns is None
    report, read = reads(backend, lambda: Store(engine_of(backend)).fsck(read_data=True))
    assert (len(read), report.read_packs, report.never_verified, report.out_of_time) == (PACKS, PACKS, 0, False)
    assert report.data_bytes > PACKS * 80_000
    for options in ({"sample_fraction": 0}, {"sample_fraction": 1.1}, {"max_seconds": 0}, {"max_seconds": -1}):
        with pytest.raises(InvalidOptionError):
            FsckOptions(**options)


def test_samples_go_round_the_store(backend: Watched) -> None:
    engine = engine_of(backend)
    seen: list[str] = []
    for done in range(1, PACKS + 1):
        report, read = reads(backend, lambda: run_fsck(engine, FsckOptions(sample_fraction=0.1)))
        assert (len(read), report.read_packs, report.never_verified) == (1, 1, PACKS - done)
        seen += read
        if done == 1:
            first = report.oldest_verified_ns
        assert report.oldest_verified_ns == first
    assert len(set(seen)) == PACKS
    report, again = reads(backend, lambda: run_fsck(engine, FsckOptions(sample_fraction=0.1)))
    assert again == seen[:1]
    assert (report.oldest_verified_ns or 0) > (first or 0) > 0
    _, half = reads(backend, lambda: run_fsck(engine, FsckOptions(sample_fraction=0.5)))
    assert half == seen[1:4]
    assert len(reads(backend, lambda: run_fsck(engine, FsckOptions(sample_fraction=1.0)))[1]) == PACKS


def test_limited_time_goes_on_where_it_stopped(backend: Watched) -> None:
    engine = engine_of(backend)
    first, read = reads(backend, lambda: run_fsck(engine, FsckOptions(max_seconds=2)))
    assert (len(read), first.read_packs, first.out_of_time, first.never_verified) == (2, 2, True, PACKS - 2)
    _, then = reads(backend, lambda: run_fsck(engine, FsckOptions(max_seconds=2)))
    assert not set(then) & set(read)
    report, last = reads(backend, lambda: run_fsck(engine, FsckOptions(max_seconds=1)))
    assert set(last) == set(all_packs(backend)) - set(read) - set(then)
    assert report.never_verified == 0
    report, again = reads(backend, lambda: run_fsck(engine, FsckOptions(max_seconds=60)))
    assert again == read + then + last
    assert not report.out_of_time


def test_time_is_looked_at_inside_a_pack(backend: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_data, "PIECE_BYTES", 1)
    monkeypatch.setattr(check_data, "RUN_BYTES", 1)
    store = Store(engine_of(backend))
    store.put_snapshot({str(n): torch.full((20_000,), float(n)) for n in range(10)}, ref="runs/big", step=1, codec="raw")
    engine = engine_of(backend)
    assert run_fsck(engine, FsckOptions(sample_fraction=0.2)).read_packs == 3
    report = run_fsck(engine, FsckOptions(max_seconds=5))  # two small packs, and three of the ten blocks of the large one
    assert (report.out_of_time, report.read_packs, report.never_verified) == (True, 2, 1)


def test_times_are_kept_per_table_and_for_packs_that_are_there(backend: Watched) -> None:
    table = MemoryTable()
    run_fsck(engine_of(backend, table), FsckOptions(read_data=True))
    assert run_fsck(engine_of(backend, table)).never_verified == 0
    assert run_fsck(engine_of(backend)).never_verified == PACKS
    backend.delete(all_packs(backend)[:1])
    run_fsck(engine_of(backend, table), FsckOptions(read_data=True))
    assert len(list(table.scan(b"f/"))) == PACKS - 1


def test_a_damaged_pack_is_read_first_next_time(backend: Watched) -> None:
    engine = engine_of(backend)
    run_fsck(engine, FsckOptions(read_data=True))
    (damaged,) = all_packs(backend)[3:4]
    flip(backend, damaged, 100)
    assert not run_fsck(engine, FsckOptions(read_data=True)).ok
    backend.read.clear()
    report = run_fsck(engine, FsckOptions(sample_fraction=0.1))
    assert (set(backend.read), report.ok, report.never_verified) == ({damaged}, False, 1)


def test_pieces_may_be_run_by_anybody(tmp_path: Path) -> None:
    backend = LocalBackend(f"{tmp_path}/store")
    for name, data in OBJECTS.items():
        backend.put(name, data)
    engine = make_engine(backend, CONFIG, MemoryTable())
    report = run_fsck(engine, FsckOptions(read_data=True), executor=Elsewhere())
    assert (report.ok, report.read_packs) == (True, 4)
    damaged = names(backend, "packs/")[2]
    flip(backend, damaged, 100)
    (finding,) = run_fsck(engine, FsckOptions(read_data=True), executor=Elsewhere()).findings
    assert finding.object == damaged


def all_packs(backend: Watched) -> list[str]:
    return sorted(info.name for info in backend.list("packs/"))
