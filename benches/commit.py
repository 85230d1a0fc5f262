"""What rank 0 does for all others in a save of many ranks: `python -m benches.commit --ranks 1024 4096`.

The save of rank 0 is the real one, on a backend in memory; what the other ranks say and store was made before, as if all were there at
once. Rank 0's own side is 1,000 small tensors, so nearly all of its seconds go to the agreement and the commit. *Handled* is what rank
0 reads and writes: records of other ranks, its own, parts that it must read again, its own part, the snapshot record and the log.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import numpy as np

from benches._simulated import CountingBackend, Traffic
from tensorstore_ck.common.ids import Digest, new_ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.write.publish import RankParts
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings
from tensorstore_ck.format.layout import Layout, Sharding, TensorSpec
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, encode_values, part_name
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.log import ObjectKey, Objects, Op
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.group import Channel, Group, KeyValue, Participant
from tensorstore_ck.session.group.planning_round import Planning
from tensorstore_ck.session.group.rank_kinds import RankKind, encode_kind
from tensorstore_ck.session.group.rank_save import RankResult, RankSave
from tensorstore_ck.session.group.replica_check import ReplicaDigests
from tensorstore_ck.session.group.save_plan import Memory, PlanMemory, SavePlan, plan_of, remember
from tests.session.group.simulation import FakeStore

T = TypeVar("T")

TENSORS = 1000
PACKS = 5
BLOCK_BYTES = 4 << 20
FAR_AWAY = time.monotonic() + 1e6


class Case(NamedTuple):
    """What happens before rank 0 commits."""

    name: str
    is_first: bool = False
    """The first save of a layout: ranks also send digests of what they share with others."""
    condemns: bool = False
    """Another process's gc condemned something meanwhile, some of it named by the parts."""
    kinds: int = 1
    """How many kinds of ranks there are, each with its own experts, in addition to the tensors that are spread over all ranks."""


CASES = [
    Case("nothing condemned"),
    Case("nothing condemned, first put of the layout", is_first=True),
    Case("condemned meanwhile, 1 pack in 100 of these", condemns=True),
    Case("64 kinds of ranks", kinds=64),
    Case("64 kinds of ranks, first put of the layouts", is_first=True, kinds=64),
]
EXPERTS = 48
"""Tensors of the experts of one kind of ranks."""
VALUES = 40


class Cost(NamedTuple):
    seconds: float
    records: int
    """Bytes in the group's store."""
    traffic: Traffic


def state(ranks: int, kinds: int, kind: int) -> CapturedState:
    """Tensors of one row of 32 bytes on each rank, and of its experts, where there are several kinds."""
    names = [f"layers.{number}.weight" for number in range(TENSORS)]
    meshes, spreads = [Mesh((ranks,), tuple(range(ranks)))], [Sharding(0, (Shard(0),))] * TENSORS
    specs = [TensorSpec(name, "float32", 4, (ranks, 8)) for name in names]
    if kinds > 1:
        names += [f"experts.{kind}.{number}" for number in range(EXPERTS)]
        own = tuple(range(kind, ranks, kinds))
        meshes.append(Mesh((len(own),), own))
        spreads = spreads + [Sharding(1, (Shard(0),))] * EXPERTS
        specs += [TensorSpec(name, "float32", 4, (len(own), 8)) for name in names[TENSORS:]]
    values = [f"value.{number}" for number in range(VALUES)]
    tree = ["d", [*names, *values], [*range(len(names)), *[None] * VALUES]]
    return CapturedState(Layout(specs, tree, (), meshes, spreads), list(range(VALUES)), (), ListedSources([ZeroSource()] * len(specs)))


class ZeroSource:
    """`ByteSource` of zeros."""

    size_bytes = 0

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(bytes(stop - start))


def make_part(layout_id: Digest, rank: int, ranks: int, blocks: int) -> Part:
    """A part whose blocks lie in packs of its own, one after another."""
    extents = np.zeros(blocks, EXTENT_DTYPE)
    number = np.arange(blocks)
    in_a_pack = -(-blocks // PACKS)
    extents["pack"], extents["entry"] = number // in_a_pack, number % in_a_pack
    extents["offset"] = 64 + extents["entry"].astype(np.int64) * BLOCK_BYTES
    extents["stored"] = extents["raw"] = BLOCK_BYTES
    extents["base"] = -1
    ids = np.random.default_rng(rank).bytes(32 * blocks)
    packs = [new_ulid() for _ in range(PACKS)]
    return Part(layout_id, rank, ranks, np.zeros(1, BLOB_DTYPE), ids, encode_values(()), b"", packs, extents, b"", 0, b"")


def measure(case: Case, ranks: int, blocks: int) -> Cost:
    """Has rank 0 save, with all others' records there."""
    backend = CountingBackend()
    engine = make_engine(backend, init_store(backend), MemoryTable())
    request = SaveRequest("bench", 1, None, None, encode_metadata({}), {})
    nonce = new_ulid()
    store = FakeStore()
    memory: Memory = {}
    job = Job(engine, backend, case, request, ranks, memory)
    if not case.is_first:
        _put_before(job)
    said = [*_sayings(job, blocks)]
    prefix = f"tsck/bench/{ulid_text(nonce)}/1/"
    channel = Channel(lambda action, seconds: action(store), prefix, ranks=ranks)
    for key, record in said:
        channel.put(key, record, FAR_AWAY)
    if case.condemns:
        some = [ulid for number, ulid in enumerate(backend.packs_named) if number % 100 == 0]
        condemned = Op.condemn(Objects(ObjectKey("pack", ulid) for ulid in [*some, new_ulid()]))
        make_engine(backend, engine.config, MemoryTable()).log.append(lambda view: [condemned])

    def run(action: Callable[[KeyValue], T], seconds: float) -> T:
        return action(store)

    ids = chain([new_ulid(), nonce], (new_ulid() for _ in repeat(None)))
    group = Group(run, rank=0, ranks=ranks, scope="bench", new_id=lambda: next(ids))
    store.bytes = 0
    backend.take_traffic()
    started = time.perf_counter()
    attempt = group.begin("the save", object_id=request.ref, timeout=600)
    side = RankSave(engine, group, attempt, memory=memory)
    captured = state(ranks, case.kinds, 0)
    attempt.run(Participant(lambda: side.propose(request, captured), side.write, side.resolve, side.compare, side.commit))
    return Cost(time.perf_counter() - started, store.bytes, backend.take_traffic())


class Job(NamedTuple):
    """Who saves what."""

    engine: Engine
    backend: CountingBackend
    case: Case
    request: SaveRequest
    ranks: int
    memory: Memory
    """Of every rank."""


def _put_before(job: Job) -> None:
    """As if the same layouts had been saved once: all ranks know the plan."""
    ranks, case = job.ranks, job.case
    kinds = [RankKind(tuple(range(kind, ranks, case.kinds)), *state(ranks, case.kinds, kind)[:2], {}, ()) for kind in range(case.kinds)]
    known = plan_of(kinds, {}) if case.kinds > 1 else PlanMemory(SavePlan())
    known.turn = 1
    planning = Planning(SimpleNamespace(txn=new_ulid()), job.memory, 0, ranks)  # type: ignore[arg-type]
    remember(job.memory, planning.compare(_proposals(job), state(ranks, case.kinds, 0))["key"], known)


def _proposals(job: Job) -> list[Body]:
    """What all ranks say first."""
    engine, _, case, request, ranks, memory = job
    attempt = SimpleNamespace(txn=new_ulid())
    of_kind = []
    for kind in range(case.kinds):
        place = SimpleNamespace(rank=kind, ranks=ranks, in_job=None)
        side = RankSave(engine, place, attempt, memory=memory)  # type: ignore[arg-type]
        of_kind.append(side.propose(request, state(ranks, case.kinds, kind)))
    return [of_kind[rank % case.kinds] for rank in range(ranks)]


def _sayings(job: Job, blocks: int) -> Iterable[tuple[str, Body]]:
    """The proposals and results of all ranks but rank 0, and what the first rank of each kind reports; their parts are stored."""
    engine, backend, case, _, ranks, _ = job
    head, proposals = engine.log.sync().n, _proposals(job)
    replicas = ReplicaDigests({}, b"") if case.is_first else None
    for rank in range(1, ranks):
        part, ulid = make_part(proposals[rank]["layout"], rank, ranks, blocks), new_ulid()
        backend.put(part_name(ulid), part.encode())
        backend.packs_named += part.packs
        result = RankResult(
            RankParts([ulid], [part.part_id()], blocks * BLOCK_BYTES, head, head, Objects()), 0, replicas, None, SaveFindings()
        )
        yield f"proposal/{rank}", {"record": proposals[rank], "oldest": 1, "call": "the save"}
        yield f"result/{rank}", {"record": result.record()}
        if rank < case.kinds:
            told = encode_kind(state(ranks, case.kinds, rank), with_layout=case.is_first, known_blobs=b"")
            yield f"kinds/{rank}", {"data": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--blocks", type=int, default=1250)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{args.blocks} blocks each, least of {args.rounds}; MiB: in the group's store, read from the backend, written to it")
    print("| ranks | case | seconds | records | read | written |\n|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for case in CASES:
            cost = min((measure(case, ranks, args.blocks) for _ in range(args.rounds)), key=lambda cost: cost.seconds)
            read, written = cost.traffic.bytes_of("get", "read"), cost.traffic.bytes_of("put", "create", "write")
            sizes = " | ".join(f"{size / 2**20:.2f}" for size in (cost.records, read, written))
            print(f"| {ranks} | {case.name} | {cost.seconds:.2f} | {sizes} |", flush=True)


if __name__ == "__main__":
    main()
