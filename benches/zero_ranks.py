"""What one of 4, 16 and 64 DeepSpeed ranks pays for a save and a restore: `python -m benches.zero_ranks`.

In the environment of `make test-apart`. A Llama of 1.24 B parameters, whose engines do not run. Captures, plans, parts, log and restores
are the real code; faked are the contents of blocks, and the transport of the messages of ranks, whose bytes are counted.
"""
# ruff: noqa: I001 - on_cpu comes before anything that imports DeepSpeed

import argparse
import gc
import tracemalloc
from collections.abc import Sequence
from itertools import islice
from statistics import mean
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from tests.integrations.deepspeed import on_cpu  # noqa: F401

from benches._model import _FakedSource, faked_contents
from benches._scalejob import timed
from benches._simulated import CountingBackend, Traffic
from benches._zero_ranks import MODELS, Rank, given_ranks, zero_engine
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, Body, pack_body
from tensorstore_ck.integrations.deepspeed.engine_state import EngineState
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.group.save_plan import Memory
from tensorstore_ck.session.group.rank_save import RankSave
from tensorstore_ck.session.restoring import SHARED_PARTS, Restoring
from tensorstore_ck.state import restore
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.shared_parts import PartSharingContent, SharedParts
from tensorstore_ck.state.sharded_tensors import SpreadDescriber
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.per_rank_state import PerRankState
from tensorstore_ck.training.stateful_parts import StatefulPart

HOST_RANKS: Final = 8
MODEL: Final = MODELS["Llama 3.2 1B"]


class Cost(NamedTuple):
    """Of one rank."""

    cpu_seconds: float
    traffic: Traffic
    message_bytes: int = 0

    @property
    def parts(self) -> int:
        """How many parts it read."""
        return len({request.name for request in self.traffic if request.name.startswith("parts/") and request.kind in ("get", "read")})


class Job:
    """The ranks of a group, and their store."""

    def __init__(self, stage: int, ranks: int) -> None:
        self.stage, self.ranks = stage, ranks
        self.backend = CountingBackend()
        self._config = init_store(self.backend)
        self._engines = [self._open() for _ in range(ranks)]
        self._memories: list[Memory] = [{} for _ in range(ranks)]

    def _open(self) -> Any:
        return make_engine(self.backend, self._config, MemoryTable())

    def training(self, rank: int, ranks: int, stage: int) -> TrainingState:
        """As `tensorstore_ck.deepspeed` makes it."""
        engine = zero_engine(MODEL, stage, Rank(rank, ranks))
        shared, none = EngineState(engine), StatefulPart.of("dataloader", None)
        return TrainingState.over(shared, PerRankState(StatefulPart.of("model", shared.module), none, {}, {"client_state": {}}, None))

    def _take_apart(self, training: TrainingState, rank: int, step: int) -> CapturedState:
        shared, own = training._sides.capture(self.ranks)
        describer = SpreadDescriber({each: each for each in range(self.ranks)}, rank)
        return _faked(capture(shared, describer), step, rank)._replace(own=capture(own))

    def save(self, step: int, parent: SnapshotRow | None) -> tuple[SnapshotRow, list[Cost]]:
        """All ranks save; with the messages that each sends and gets. Those of rank 0 are to and from all."""
        root = None if parent is None else parent.root
        request = SaveRequest("run", step, root, root, encode_metadata({}), {}, nearest=root)
        plans: list[bytes] = []

        def answer(_: str, plan: bytes | None) -> bytes:
            plans.extend([] if plan is None else [plan])
            return plans[0]

        def ask(name: str, asked: Any, _: Any) -> dict[int, bytes]:
            """What `Round.ask` returns on rank 0, which is the first that works here."""
            return {rank: puts[rank]._planning._regions for rank in asked} if name == "regions" else {}

        attempt = SimpleNamespace(txn=new_ulid(), ask=ask, answer=answer)
        puts, costs, proposals, results = [], [], list[Body](), list[Body]()
        for rank in range(self.ranks):
            training = self.training(rank, self.ranks, self.stage)
            group = SimpleNamespace(rank=rank, ranks=self.ranks, in_job=None)
            side = RankSave(self._engines[rank], group, attempt, memory=self._memories[rank])  # type: ignore[arg-type]
            puts.append(side)
            proposal, cost = self._watched(
                lambda side=side, training=training, rank=rank: side.propose(request, self._take_apart(training, rank, step))
            )
            proposals.append(proposal)
            costs.append(cost._replace(message_bytes=len(pack_body(proposal))))
        go, compared = self._watched(lambda: puts[0].compare(proposals))
        assert isinstance(go, dict)
        regions = [len(put._planning._regions) if go["ask_regions"] else 0 for put in puts]
        for rank, put in enumerate(puts):
            result, cost = self._watched(lambda put=put: put.write(go))
            results.append(result)
            costs[rank] = _sum(costs[rank], cost, len(pack_body(go)) + len(pack_body(result)) + sum(map(len, plans)) + regions[rank])
        outcome, committed = self._watched(lambda: puts[0].commit(results))
        received = sum(len(pack_body(each)) for each in (*proposals, *results)) + sum(regions)
        costs[0] = _sum(_sum(costs[0], compared, 0), committed, received)
        info = puts[0].published(outcome)
        for put in puts:
            put.keep(info, outcome)
        self.backend.take_traffic()
        return info, costs

    def restore(self, info: SnapshotRow, rank: int, ranks: int, stage: int, *, traced: bool = False) -> tuple[Cost, int]:
        """A rank of a job that has just been started, on a host without a cache; and the peak of its memory beyond the state, if traced."""
        training = self.training(rank, ranks, stage)
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)

        def read() -> int:
            engine = self._open()
            engine.log.sync()
            restoring = _Restoring(engine, info, group)  # type: ignore[arg-type]
            training._sides.restore("run", ranks, False, restoring)
            return restoring.gathered_bytes

        gc.collect()
        if traced:
            tracemalloc.start()
        gathered_bytes, cost = self._watched(read)
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
        return cost._replace(message_bytes=gathered_bytes), peak

    def _watched(self, work: Any) -> tuple[Any, Cost]:
        self.backend.take_traffic()
        result, seconds = timed(work)
        return result, Cost(seconds, self.backend.take_traffic())


class _Restoring(Restoring):
    """Reads as a rank of a group does, each rank by itself. All of them want as many parts as this one."""

    gathered_bytes = 0
    """Of the parts that all ranks share."""

    def checkout(self, *, broadcast: bool = False, **options: Any) -> Any:
        group: Any = self.group
        place = (group.rank() + 0.5) / group.size()
        describer = SpreadDescriber({each: each for each in range(group.size())}, group.rank())
        parts = SharedParts(self.engine, self.info, group, lambda bits, do: do(bits))
        is_shared = len(self.engine.recent_record(self.info).parts) >= SHARED_PARTS
        content: Any = open_snapshot(self.engine, self.info, position=place, read_part=parts.read if is_shared else None)
        with (
            patch("tensorstore_ck.state.restore.describer_of", lambda _: describer),
            patch("tensorstore_ck.state.shared_parts.gather_bytes", self._gather),
        ):
            return restore(PartSharingContent(content, parts) if is_shared else content, **options, group=group)

    def _gather(self, own: Sequence[bytes], counts: Sequence[int], _: object) -> list[list[memoryview]]:
        """What the other ranks have read, which is not counted."""
        record = self.engine.recent_record(self.info)
        backend: Any = self.engine.backend
        stored = iter([MemoryBackend.get(backend, part_name(each), max_bytes=MAX_OBJECT_BYTES) for each in record.parts])
        found = [[memoryview(each) for each in islice(stored, count)] for count in counts]
        assert own == found[self.group.rank()]  # type: ignore[union-attr]
        self.gathered_bytes += sum(len(each) for share in found for each in share)
        return found


def _faked(state: CapturedState, step: int, rank: int) -> CapturedState:
    """What is cut by ranks has no contents."""
    cut = {each.tensor for each in state.explicit}
    return state._replace(
        sources=ListedSources(_FakedSource(step, rank, at) if at in cut else each for at, each in enumerate(state.sources))
    )


def _sum(one: Cost, other: Cost, message_bytes: int) -> Cost:
    return Cost(one.cpu_seconds + other.cpu_seconds, Traffic([*one.traffic, *other.traffic]), one.message_bytes + message_bytes)


def _row(title: str, ranks: int, costs: list[Cost], peak: int | None = None) -> None:
    written = [each.traffic.bytes_of("put", "create", "write") / 1e6 for each in costs]
    read = [each.traffic.bytes_of("get", "read") / 1e6 for each in costs]
    seconds, calls, parts = [each.cpu_seconds for each in costs], [len(each.traffic) for each in costs], [each.parts for each in costs]
    messages = [each.message_bytes / 1e3 for each in costs]
    cells = [
        f"{ranks}",
        f"{seconds[0]:.2f}, {mean(seconds[1:]):.2f}",
        f"{mean(written):.1f}",
        f"{mean(read):.1f}",
        f"{mean(calls):.0f} ({max(calls)})",
        f"{mean(parts):.1f} ({max(parts)})",
        f"{messages[0]:.1f}, {mean(messages[1:]):.1f}",
        "" if peak is None else f"{peak / 2**20:.1f}",
    ]
    print("|", " | ".join([title, *cells]), "|", flush=True)


def _bytes_of_any(several: Sequence[Traffic]) -> int:
    """Bytes of packs that one of them read."""
    spans: dict[str, set[tuple[int, int]]] = {}
    for request in (request for traffic in several for request in traffic if request.kind == "read"):
        spans.setdefault(request.name, set()).add((request.offset, request.offset + request.size_bytes))
    total = 0
    for found in spans.values():
        end = 0
        for start, stop in sorted(found):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
    return total


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    options.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 64])
    given = options.parse_args()
    print(
        "| | ranks | CPU s: rank 0, others | MB written | MB read | calls (most) | parts read (most) | kB of messages: rank 0, others "
        "| peak MiB beyond the state |\n|---|---|---|---|---|---|---|---|---|"
    )
    with given_ranks(), faked_contents():
        for stage in given.stages:
            for ranks in given.ranks:
                job = Job(stage, ranks)
                first, costs = job.save(1, None)
                _row(f"ZeRO {stage}: first save", ranks, costs)
                second, costs = job.save(2, first)
                _row(f"ZeRO {stage}: later save", ranks, costs)
                sample = sorted({0, 1, ranks // 2, ranks - 1})
                for title, other_ranks, other in (
                    ("restore", ranks, stage),
                    ("restore on half the ranks", ranks // 2, stage),
                    (f"restore by ZeRO {5 - stage}", ranks, 5 - stage),
                ):
                    found = [job.restore(second, min(rank, other_ranks - 1), other_ranks, other)[0] for rank in sample]
                    _, peak = job.restore(second, other_ranks - 1, other_ranks, other, traced=True)
                    _row(f"ZeRO {stage}: {title}", ranks, found, peak)
                if ranks >= HOST_RANKS:
                    of_host = [job.restore(second, rank, ranks, 5 - stage)[0].traffic for rank in range(HOST_RANKS)]
                    each_mb = _bytes_of_any(of_host) / HOST_RANKS / 1e6
                    print(
                        f"{HOST_RANKS} ranks of a host, which share their reads from a remote store: {each_mb:.1f} MB for each", flush=True
                    )


if __name__ == "__main__":
    main()
