"""Stores with snapshots of several ranks, saved by threads over a c10d store."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.engine.write.request import ANY, SaveRequest
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.group.channel import KeyValue
from tensorstore_ck.session.group.group import Group
from tensorstore_ck.session.group.save_plan import Memory
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import open_store
from tests.session.group.putting import put_ranks
from tests.session.group.states import Spreading, captured, whole

T = TypeVar("T")


def put_all(
    backend: Backend,
    ranks: int,
    shared: Callable[[int], CapturedState],
    own: Callable[[int], CapturedState] | None = None,
    *,
    ref: str = "job",
    step: int = 1,
) -> SnapshotRow:
    """Saves what each rank captured, each by a host of its own."""
    return Hosts(backend, ranks).put(shared, own, ref=ref, step=step)


class Hosts:
    """Ranks that save together again and again, each on a host of its own."""

    def __init__(self, backend: Backend, ranks: int) -> None:
        self._pairs: Any = dist.HashStore()  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self.stores = [open_store(backend) for _ in range(ranks)]
        self._groups = [Group(self._run, rank=rank, ranks=ranks, scope="test") for rank in range(ranks)]
        self._memory: list[Memory] = [{} for _ in range(ranks)]

    def _run(self, action: Callable[[KeyValue], T], seconds: float) -> T:
        with self._lock:
            return action(self._pairs)

    def put(
        self, shared: Callable[[int], CapturedState], own: Callable[[int], CapturedState] | None = None, *, ref: str = "job", step: int = 1
    ) -> SnapshotRow:
        """Saves what each rank captured, in a thread for each."""

        def put(rank: int) -> SnapshotRow:
            engine = self.stores[rank].engine
            engine.log.sync()
            head = engine.log.view().branch(ref)
            parent = head.root if head else None
            request = SaveRequest(ref, step, parent, ANY, encode_metadata({}), {}, nearest=parent)
            prepared = request, shared(rank)._replace(own=own(rank) if own is not None else None)
            return put_ranks(engine, self._groups[rank], lambda: prepared, ref=ref, timeout=PATIENCE_SECONDS, memory=self._memory[rank])

        with ThreadPoolExecutor(len(self.stores)) as pool:
            infos = list(pool.map(put, range(len(self.stores))))
        assert len({info.ulid for info in infos}) == 1
        return infos[0]


def rank_state(rank: int, step: int = 1) -> CapturedState:
    """What is a rank's alone."""
    return captured({"rng": Spreading(whole((2000,), 100 * step + rank), None)}, [], 0, 1, [rank])


def read_all(store: Store, info: SnapshotRow, first: int = 0) -> dict[str, bytes]:
    """Every tensor of one layout, read whole."""
    store.engine.log.sync()
    reader = SnapshotReader(store.engine, info, first)
    return {spec.name: read_tensor(reader, number) for number, spec in enumerate(reader.layout.tensors)}


def read_tensor(reader: SnapshotReader, number: int) -> bytes:
    """One tensor, read whole."""
    memory = bytearray(reader.layout.tensors[number].size_bytes)
    reader.read({number: BufferTarget(memoryview(memory))})
    return bytes(memory)


def expected(tensors: Mapping[str, Spreading] | Sequence[tuple[str, Spreading]]) -> dict[str, bytes]:
    """What `read_all` should give."""
    return {name: each.whole.tobytes() for name, each in dict(tensors).items()}
