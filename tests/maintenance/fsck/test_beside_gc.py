"""fsck while others write, forget, free and rewrite: at each of its backend calls. What it finds then is never an error."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend, ObjectInfo
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.fsck import FsckReport, run_fsck
from tensorstore_ck.maintenance.fsck.findings import Finding
from tests.maintenance.fsck.stores import names, reopen

AT_ONCE = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1)


class Interrupted(MemoryBackend):
    """Something else happens at the k-th read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        for name, data in objects.items():
            super().put(name, data)
        self.calls = 0
        self.at = -1
        self.meanwhile: Callable[[], object] = lambda: None

    def _count(self) -> None:
        if self.calls == self.at:
            self.at = -1
            self.meanwhile()
        self.calls += 1

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._count()
        return super().get(name, max_bytes=max_bytes)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._count()
        super().read_into(name, offset, target)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._count()
        return super().list(prefix)


def objects() -> dict[str, bytes]:
    """Snapshots that share tensors, so that forgetting the first one leaves its pack sparse."""
    backend = MemoryBackend()
    init_store(backend)
    store = reopen(backend)
    for step in range(3):
        state = {"kept": torch.arange(3000.0), "own": torch.full((9000,), float(step)), "step": step}
        store.put_snapshot(state, ref="runs/a", step=step, codec="raw")
    return {name: backend.get(name, max_bytes=1 << 30) for name in names(backend)}


OBJECTS = objects()


def free(backend: Backend) -> None:
    """Forgets the first snapshot, frees it, and rewrites its pack."""
    store = reopen(backend)
    store.forget("runs/a@0")
    report = store.gc(AT_ONCE)
    assert report.deleted["snapshot"] == 1
    assert report.rewritten
    store.gc(AT_ONCE)


def forget_branch(backend: Backend) -> None:
    store = reopen(backend)
    store.forget("runs/a")
    assert store.gc(AT_ONCE).deleted["pack"] == 3


def put(backend: Backend) -> None:
    store = reopen(backend)
    store.checkout("runs/a")
    store.put_snapshot({"kept": torch.arange(3000.0), "new": torch.ones(5000)}, ref="runs/a", step=9)


def check(backend: Backend) -> FsckReport:
    config = read_config(backend)
    assert config is not None
    return run_fsck(make_engine(backend, config, MemoryTable()), read_data=True)


def errors_of(report: FsckReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "error"]


@pytest.mark.race
@pytest.mark.parametrize("meanwhile", [free, forget_branch, put])
def test_at_every_call(meanwhile: Callable[[Backend], None]) -> None:
    quiet = Interrupted(OBJECTS)
    assert check(quiet).findings == ()
    for at in range(1, quiet.calls):
        backend = Interrupted(OBJECTS)
        backend.at = at

        def happens(backend: Interrupted = backend) -> None:
            meanwhile(backend)

        backend.meanwhile = happens
        report = check(backend)
        assert backend.at == -1, "it never happened"
        assert errors_of(report) == [], at


def test_relocated_and_freed_objects_are_no_damage() -> None:
    backend = Interrupted(OBJECTS)
    free(backend)
    assert names(backend, "moved/")
    assert [finding for finding in check(backend).findings if finding.kind != "old_log"] == []


def test_fsck_finds_missing_needed_objects_while_gc_runs() -> None:
    backend = Interrupted(OBJECTS)
    lost = names(backend, "packs/")[-1]

    def happens() -> None:
        put(backend)
        backend.delete([lost])

    backend.at, backend.meanwhile = 3, happens
    report = check(backend)
    assert [finding.object for finding in errors_of(report)] == [lost]


def test_a_damaged_moved_object() -> None:
    backend = Interrupted(OBJECTS)
    free(backend)
    (moved,) = names(backend, "moved/")
    data = bytearray(backend.get(moved, max_bytes=1 << 20))
    data[-1] ^= 1
    backend.replace(moved, data)
    (finding,) = errors_of(check(backend))
    assert finding.object == moved
    assert "runs/a@1" in finding.hits[0]
