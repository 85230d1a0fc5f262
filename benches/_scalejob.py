"""The real save, restore and gc of a few of thousands of ranks, over a backend that counts what they ask; the other ranks are copies."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import numpy as np

from benches._model import captured, is_complete, make_layout, wanted
from benches._simulated import CountingBackend, Traffic
from tensorstore_ck.common.ids import Digest, Ulid, new_ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.engine.write.publish import RankParts
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings
from tensorstore_ck.format.layout import Layout
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body
from tensorstore_ck.gc import GcOptions, run_gc
from tensorstore_ck.log import Objects, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.maintenance.forget import forget
from tensorstore_ck.session.group.rank_save import RankResult, RankSave

T = TypeVar("T")


class Seat(NamedTuple):
    """What a save asks of a group."""

    rank: int
    ranks: int


class Ran(NamedTuple):
    """What one rank asked, and computed."""

    traffic: Traffic
    cpu_seconds: float


class Put(NamedTuple):
    """A save of all ranks."""

    info: SnapshotRow
    ran: dict[int, Ran]
    """Of those that ran."""
    commit: Ran
    """Of rank 0, for all."""


class Job:
    """A store, and the ranks that save into it."""

    def __init__(self, ranks: int, width: int, *, is_local: bool) -> None:
        self.ranks = ranks
        self.layout = make_layout(ranks, width)
        self.backend = CountingBackend(is_local=is_local)
        self._config = init_store(self.backend)
        self._engines: dict[int, Engine] = {}

    def put(self, step: int, running: Sequence[int], parent: Digest | None) -> Put:
        """Has some ranks save with the real code, rank 0 among them; all others save what one of these did."""
        request = SaveRequest("run", step, parent, parent, encode_metadata({}), {}, nearest=parent)
        txn = new_ulid()
        puts = {rank: self._put_of(rank, txn) for rank in running}
        proposals = [put.propose(request, captured(self.layout, step, rank)) for rank, put in puts.items()]
        go, compare_seconds = timed(lambda: puts[0].compare([proposals[0]] * self.ranks))
        assert isinstance(go, dict)
        done: dict[int, Body] = {}
        ran: dict[int, Ran] = {}
        for rank, put in puts.items():
            done[rank], ran[rank] = self._watched(lambda put=put: put.write(go))  # type: ignore[misc]
        others = [rank for rank in running if rank]
        for rank in range(self.ranks):
            if rank not in done:
                done[rank] = self._copy(puts[others[rank % len(others)]], rank)
        outcome, commit = self._watched(lambda: puts[0].commit([done[rank] for rank in range(self.ranks)]))
        info = puts[0].published(outcome)
        for put in puts.values():
            put.keep(info, outcome)
        return Put(info, ran, commit._replace(cpu_seconds=commit.cpu_seconds + compare_seconds))

    def restore(self, info: SnapshotRow, target: Layout, rank: int, ranks: int) -> Ran:
        """A rank of a job that has just been started, on a host without a cache."""
        boxes = wanted(target, rank, ranks)

        def read() -> None:
            engine = self._fresh_engine()
            engine.log.sync()
            SnapshotReader(engine, info).read_boxes(boxes)

        ran = self._watched(read)[1]
        if not is_complete(boxes, target):
            raise SystemExit(f"rank {rank} of {ranks} did not get what it wanted")
        return ran

    def collect(self, info: SnapshotRow) -> Ran:
        """Forgets a snapshot, and frees it."""
        engine = self._fresh_engine()
        forget(engine, [f"run@{info.step}"])
        return self._watched(lambda: run_gc(engine, GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0)))[1]

    def _put_of(self, rank: int, txn: Ulid) -> RankSave:
        if rank not in self._engines:
            self._engines[rank] = self._fresh_engine()
        group = SimpleNamespace(rank=rank, ranks=self.ranks, in_job=None)
        attempt = SimpleNamespace(txn=txn, ask=lambda *_: {})  # ranks that are alike tell nothing more
        return RankSave(self._engines[rank], group, attempt, memory={})  # type: ignore[arg-type]

    def _copy(self, put: RankSave, rank: int) -> Body:
        """Stores a part like that of `put`, with packs and block ids of its own."""
        written = put._written[0]
        packs = [new_ulid() for _ in written.part.packs]
        for ulid, like in zip(packs, written.part.packs, strict=True):
            self.backend.packs[pack_name(ulid)] = self.backend.packs[pack_name(like)]
        ids = np.random.default_rng(list(packs[0])).bytes(len(written.part.ids))
        part, ulid = written.part._replace(rank=rank, packs=packs, ids=ids), new_ulid()
        self.backend.put(part_name(ulid), part.encode())
        result = RankResult(
            RankParts([ulid], [part.part_id()], written.new_bytes, part.anchor, part.anchor, Objects()), 0, None, None, SaveFindings()
        )
        return result.record()

    def _watched(self, work: Callable[[], T]) -> tuple[T, Ran]:
        self.backend.take_traffic()
        result, seconds = timed(work)
        return result, Ran(self.backend.take_traffic(), seconds)

    def _fresh_engine(self) -> Engine:
        return make_engine(self.backend, self._config, MemoryTable())


def timed(work: Callable[[], T]) -> tuple[T, float]:
    begun = time.process_time()
    result = work()
    return result, time.process_time() - begun
