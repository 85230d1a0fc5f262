"""A store with two snapshots of four ranks, spread in every way and with rank states, for tests to damage; and what should be in it."""

import gc
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.cli import main
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.layout import ExplicitRegions, Layout, TensorSpec
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Shard
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.maintenance.fsck.findings import FsckReport
from tests.gc.stores import open_store
from tests.session.group.states import BytesSource, Spreading, captured, cut, sharded, whole
from tests.session.group.stores import put_all, rank_state, read_tensor

RANKS = 4
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0, compact_below=0.9)
MESHES = (Mesh((2, 2), (0, 1, 2, 3)), Mesh((4,), (0, 1, 2, 3)))


def tensors(step: int = 1) -> dict[str, Spreading]:
    return {
        "fsdp": Spreading(whole((4000, 5)), sharded(1, Shard(0))),
        "tp": Spreading(whole((64, 400), step), sharded(0, Shard(0), Shard(1))),
        "same": Spreading(whole((10, 1000), 2), None),
        "hsdp": Spreading(whole((300, 30), 10 * step), sharded(0, None, Shard(0))),
        "small": Spreading(whole((37,), 5), sharded(1, Shard(0))),
        "one": Spreading(whole((1, 7000), 7 * step), sharded(1, Shard(0))),
    }


def shared(step: int, meshes: tuple[Mesh, ...] = MESHES, ranks: int = RANKS) -> Callable[[int], CapturedState]:
    return lambda rank: captured(tensors(step), meshes, rank, ranks, ["text", step])


def build() -> tuple[MemoryBackend, list[SnapshotRow]]:
    backend = MemoryBackend()
    open_store(backend)
    return backend, [put_all(backend, RANKS, shared(step), partial(rank_state, step=step), step=step) for step in (1, 2)]


def objects(backend: Backend) -> dict[str, bytes]:
    return {info.name: backend.get(info.name, max_bytes=1 << 30) for info in backend.list("")}


BUILT, INFOS = build()
OBJECTS = objects(BUILT)
FIRST = decode_record(OBJECTS[record_name(INFOS[0].ulid)], "first")
PARTS = [part_name(ulid) for ulid in FIRST.parts]


def copy(found: dict[str, bytes]) -> MemoryBackend:
    backend = MemoryBackend()
    for name, data in found.items():
        backend.put(name, data)
    return backend


def without(lost: str, found: dict[str, bytes] = OBJECTS) -> MemoryBackend:
    """The store without one object."""
    return copy({name: data for name, data in found.items() if name != lost})


def failing(backend: Backend, info: SnapshotRow, *, ranks: int = RANKS) -> Iterator[str]:
    """What cannot be read, as fsck would name it; what can is exact."""
    store = open_store(backend)
    store.engine.log.sync()
    expected = {spec: each.whole.tobytes() for spec, each in tensors(info.step or 0).items()}
    for first in (0, *range(ranks, 2 * ranks)):
        prefix = f"rank_state[{first - ranks}]" if first else ""
        try:
            reader = SnapshotReader(store.engine, info, first)
        except StoreError:
            yield prefix or "all of it"
            continue
        for number, spec in enumerate(reader.layout.tensors):
            try:
                data = read_tensor(reader, number)
            except StoreError:
                yield f"{prefix}.{spec.name}" if first else spec.name
            else:
                step = info.step or 0
                assert data == (whole((2000,), 100 * step + first - ranks).tobytes() if first else expected[spec.name])


def hits(report: FsckReport, info: SnapshotRow) -> set[str]:
    root = info.root.hex()[:12]
    told = (re.findall(rf"\(root {root}\): (.*)", hit) for finding in report.findings for hit in finding.hits)
    return {name for found in told for names in found for name in names.split(", ") if not name.startswith("no tensor")}


def assert_found(backend: Backend, *damaged: str, read_data: bool = True) -> FsckReport:
    report = open_store(backend).fsck(read_data=read_data)
    assert {finding.object for finding in report.findings if finding.severity == "error"} == set(damaged)
    for info in INFOS:
        assert hits(report, info) == set(failing(backend, info)), (damaged, info.step)
    return report


def assert_whole(backend: Backend, infos: list[SnapshotRow] = INFOS) -> None:
    report = open_store(backend).fsck(read_data=True)
    assert report.ok, report.findings
    store = open_store(backend)
    store.engine.log.sync()
    for info in infos:
        found = store.engine.log.view().by_root(info.root)
        assert found is not None
        assert list(failing(backend, found)) == []


def without_log(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if not name.startswith(("log", "checkpoint"))}


def on_disk(folder: Path) -> Callable[..., str]:
    """Writes the store to ``ck`` in a folder; the program on it, or on another `store` in the folder."""
    for name, data in OBJECTS.items():
        (folder / "ck" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "ck" / name).write_bytes(data)

    def tsck(*args: str, store: str | None = "ck", code: int = 0) -> str:
        own = [] if store is None else ["-s", str(folder / store)]
        result = CliRunner().invoke(main, [*args, *own, "--cache-dir", str(folder / "cache")], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.stdout

    return tsck


class Counting:
    """A backend that counts what is read of packs."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.read_bytes += len(target)
        self._inner.read_into(name, offset, target)


STAGES = ({"first": (3000, 4), "tied": (1500,)}, {"second": (500, 9), "tied": (1500,)})


def stage(rank: int) -> CapturedState:
    """Two stages of a pipeline on two ranks each; one has a tensor whose boxes only the parts tell."""
    members = (0, 1) if rank < 2 else (2, 3)
    found = {name: Spreading(whole(shape), sharded(0, Shard(0))) for name, shape in STAGES[rank // 2].items()}
    taken = captured(found, [Mesh((2,), members)], rank, RANKS, [])
    told = TensorSpec("told", "np:<i4", 4, (5000,))
    box = BoxBounds((2500 * (rank % 2),), (2500,))
    layout = Layout(
        [*taken.layout.tensors, told],
        ["d", [*found, "told", "stage"] if rank < 2 else [*found, "told", "stage2"], [*range(len(found) + 1), None]],
        (),
        taken.layout.meshes,
        [*taken.layout.spreads, "boxes"],
    )
    data = BytesSource(cut(whole((5000,), 9), box))
    return CapturedState(layout, [rank // 2], (), ListedSources([*taken.sources, data]), [ExplicitRegions(len(found), (box,))])


class Reads:
    """A backend that counts how often each object is read; and, if it is to, how many parts are in memory when one is."""

    def __init__(self, inner: Backend, *, counts_parts: bool = False) -> None:
        """Parts that are counted are those that came after `gc.freeze`."""
        self._inner = inner
        self._counts_parts = counts_parts
        self._lock = threading.Lock()
        self.most = 0
        self.reads = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self.reads[name] += 1
        if self._counts_parts and name.startswith("parts/"):
            with self._lock:  # who counts has them all in hand
                gc.collect()
                self.most = max(self.most, sum(type(each) is Part for each in gc.get_objects()))
        return self._inner.get(name, max_bytes=max_bytes)
