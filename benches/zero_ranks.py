"""What one of 4, 16 and 64 DeepSpeed ranks pays for a save and a restore: `python -m benches.zero_ranks`.

In the environment of `make test-apart`. A Llama of 1.24 B parameters, whose engines do not run. Captures, plans, parts, log and restores
are the real code; faked are the contents of blocks, and the transport of the messages of ranks, whose bytes are counted.
"""
# ruff: noqa: I001 - on_cpu comes before anything that imports DeepSpeed

import argparse
import gc
import tracemalloc
from statistics import mean
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from tests.integrations.deepspeed import on_cpu  # noqa: F401

from benches._model import _FakedSource, faked_contents
from benches._scalejob import timed
from benches._simulated import CountingBackend, Traffic
from benches._zero_ranks import MODELS, Rank, given_ranks, zero_engine
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read.snapshot_reader import open_snapshot
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.format.record import encode_metadata
from tensorstore_ck.format.sealed import Body, pack_body
from tensorstore_ck.integrations.deepspeed.engine_state import EngineState
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.session.group.put_plan import Memory
from tensorstore_ck.session.group.rank_put import PreparedPut, RankPut, RankStates
from tensorstore_ck.session.restore import Restoring
from tensorstore_ck.state import restore
from tensorstore_ck.state.capture import capture
from tensorstore_ck.state.sharded_tensors import SpreadDescriber
from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.rank_own_state import RankOwnState
from tensorstore_ck.training.stateful_parts import StatefulPart

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
        return TrainingState.over(shared, RankOwnState(StatefulPart.of("model", shared.module), none, {}, {"client_state": {}}, None))

    def _take_apart(self, training: TrainingState, rank: int, step: int) -> RankStates:
        shared, own = training._capture(self.ranks)
        describer = SpreadDescriber({each: each for each in range(self.ranks)}, rank)
        return RankStates(_faked(capture(shared, describer), step, rank), capture(own))

    def save(self, step: int, parent: SnapshotInfo | None) -> tuple[SnapshotInfo, list[Cost]]:
        """All ranks save; with the messages that each sends and gets. Those of rank 0 are to and from all."""
        root = None if parent is None else parent.root
        request = PutRequest("run", step, root, root, encode_metadata({}), {})
        plans: list[bytes] = []

        def answer(_: str, plan: bytes | None) -> bytes:
            plans.extend([] if plan is None else [plan])
            return plans[0]

        attempt = SimpleNamespace(txn=new_ulid(), ask=lambda *_: {}, answer=answer)
        puts, costs, proposals, results = [], [], list[Body](), list[Body]()
        for rank in range(self.ranks):
            training = self.training(rank, self.ranks, self.stage)
            group = SimpleNamespace(rank=rank, ranks=self.ranks, in_job=None)
            prepare = lambda training=training, rank=rank: PreparedPut(request, self._take_apart(training, rank, step))  # noqa: E731
            options: dict[str, Any] = {"attempt": attempt, "memory": self._memories[rank]}
            puts.append(RankPut(self._engines[rank], group, prepare, **options))  # type: ignore[arg-type]
            proposal, cost = self._watched(puts[-1].propose)
            proposals.append(proposal)
            costs.append(cost._replace(message_bytes=len(pack_body(proposal))))
        go, compared = self._watched(lambda: puts[0].compare(proposals))
        assert isinstance(go, dict)
        for rank, put in enumerate(puts):
            result, cost = self._watched(lambda put=put: put.execute(go))
            results.append(result)
            costs[rank] = _sum(costs[rank], cost, len(pack_body(go)) + len(pack_body(result)) + sum(map(len, plans)))
        outcome, committed = self._watched(lambda: puts[0].commit(results))
        costs[0] = _sum(_sum(costs[0], compared, 0), committed, sum(len(pack_body(each)) for each in (*proposals, *results)))
        info = puts[0].published(outcome)
        for put in puts:
            put.keep(info, outcome)
        self.backend.take_traffic()
        return info, costs

    def restore(self, info: SnapshotInfo, rank: int, ranks: int, stage: int, *, traced: bool = False) -> tuple[Cost, int]:
        """A rank of a job that has just been started, on a host without a cache; and the peak of its memory beyond the state, if traced."""
        training = self.training(rank, ranks, stage)
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)

        def read() -> None:
            engine = self._open()
            engine.log.sync()
            training._read("run", ranks, False, _Restoring(engine, info, group))  # type: ignore[arg-type]

        gc.collect()
        if traced:
            tracemalloc.start()
        cost = self._watched(read)[1]
        peak = tracemalloc.get_traced_memory()[1] if traced else 0
        tracemalloc.stop()
        return cost, peak

    def _watched(self, work: Any) -> tuple[Any, Cost]:
        self.backend.take_traffic()
        result, seconds = timed(work)
        return result, Cost(seconds, self.backend.take_traffic())


class _Restoring(Restoring):
    """Reads as a rank of a group does, each rank by itself."""

    def checkout(self, *, broadcast: bool = False, **options: Any) -> Any:
        group: Any = self.group
        content = open_snapshot(self.engine, self.info, place=(group.rank() + 0.5) / group.size())
        describer = SpreadDescriber({each: each for each in range(group.size())}, group.rank())
        with patch("tensorstore_ck.state.restore.describer_of", lambda _: describer):
            return restore(content, **options, group=group)


def _faked(state: CapturedState, step: int, rank: int) -> CapturedState:
    """What is cut by ranks has no contents."""
    cut = {each.tensor for each in state.explicit}
    return state._replace(sources=[_FakedSource(step, rank, at) if at in cut else each for at, each in enumerate(state.sources)])


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


if __name__ == "__main__":
    main()
