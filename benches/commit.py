"""What rank 0 does for all others in a put of many ranks: `python -m benches.commit --ranks 1024 4096`.

The put of rank 0 is the real one, on a backend in memory; what the other ranks say and store was made before, as if all were there at
once. Rank 0's own side is 1,000 small tensors, so nearly all of its seconds go to the agreement and the commit. *Handled* is what rank
0 reads and writes: records of other ranks, its own, parts that it must read again, its own part, the snapshot record and the log.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benches._simulated import CountingBackend, Traffic
from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import Body
from tensorstore_ck.ids import Digest, new_ulid, ulid_text
from tensorstore_ck.layout import Captured, Layout, Sharding, TensorSpec
from tensorstore_ck.log import ObjectKey, Objects, Op
from tensorstore_ck.opening import init_store, make_engine
from tensorstore_ck.part import BLOB_DTYPE, EXTENT_DTYPE, Part, encode_values, part_name
from tensorstore_ck.ranks import Channel, Group, KeyValue
from tensorstore_ck.ranks.plan import Known, Memory, Plan
from tensorstore_ck.ranks.publish import RankParts
from tensorstore_ck.ranks.put import Done, Prepared, RankPut, RankStates, put_ranks
from tensorstore_ck.ranks.replicas import Digests
from tensorstore_ck.record import encode_metadata
from tensorstore_ck.sharding import Mesh, Shard
from tensorstore_ck.suspicion import Findings
from tensorstore_ck.table import MemoryTable
from tensorstore_ck.writer import PutRequest
from tests.ranks.simulation import FakeStore

T = TypeVar("T")

TENSORS = 1000
PACKS = 5
BLOCK_BYTES = 4 << 20
FAR_AWAY = time.monotonic() + 1e6


class Case(NamedTuple):
    """What happens before rank 0 commits."""

    name: str
    is_first: bool = False
    """The first put of a layout: ranks also tell digests of what they hold with others."""
    condemns: bool = False
    """Another process's gc condemned something meanwhile, some of it named by the parts."""


CASES = [
    Case("nothing condemned"),
    Case("nothing condemned, first put of the layout", is_first=True),
    Case("condemned meanwhile, 1 pack in 100 of these", condemns=True),
]


class Cost(NamedTuple):
    seconds: float
    records: int
    """Bytes in the group's store."""
    traffic: Traffic


def layout(ranks: int) -> Layout:
    """Tensors of one row of 32 bytes on each rank."""
    specs = [TensorSpec(f"layers.{number}.weight", "float32", 4, (ranks, 8)) for number in range(TENSORS)]
    mesh = Mesh((ranks,), tuple(range(ranks)))
    return Layout(specs, ["l", list(range(TENSORS))], (), [mesh], [Sharding(0, (Shard(0),))] * TENSORS)


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
    """Has rank 0 put, with all others' records there."""
    backend = CountingBackend()
    engine = make_engine(backend, init_store(backend), MemoryTable())
    own_layout = layout(ranks)
    states = RankStates(Captured(own_layout, (), (), [ZeroSource()] * TENSORS), None)
    request = PutRequest("bench", 1, None, None, encode_metadata({}), {})
    nonce = new_ulid()
    store = FakeStore()
    other, attempt = SimpleNamespace(rank=1, ranks=ranks), SimpleNamespace(txn=new_ulid())
    put = RankPut(engine, other, lambda: Prepared(request, states), attempt=attempt, memory={})  # type: ignore[arg-type]
    said = _sayings(engine, case, put, ranks, blocks)
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
    memory: Memory = {}
    if not case.is_first:
        memory = _Everything()
    store.bytes = 0
    backend.take_traffic()
    started = time.perf_counter()
    put_ranks(engine, group, lambda: Prepared(request, states), ref=request.ref, memory=memory, timeout=600)
    return Cost(time.perf_counter() - started, store.bytes, backend.take_traffic())


class _Everything(Memory):
    """It has it all: every layout was put before."""

    def get(self, key: bytes, default: object = None) -> Any:
        return Known(Plan(), turn=1)


def _sayings(engine: Engine, case: Case, put: RankPut, ranks: int, blocks: int) -> Iterable[tuple[str, Body]]:
    """The hellos and dones of all ranks but rank 0, of which `put` is; their parts are stored."""
    backend, head, hello = engine.backend, engine.log.sync().n, put.hello()
    assert isinstance(backend, CountingBackend)
    replicas = Digests({}, b"") if case.is_first else None
    for rank in range(1, ranks):
        part, ulid = make_part(hello["layout"], rank, ranks, blocks), new_ulid()
        if case.condemns:
            backend.put(part_name(ulid), part.encode())
            backend.packs_named += part.packs
        done = Done(RankParts([ulid], [part.part_id()], blocks * BLOCK_BYTES, head, head, Objects()), 0, replicas, None, Findings())
        yield f"hello/{rank}", {"record": hello, "oldest": 1}
        yield f"done/{rank}", {"record": done.record()}


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
