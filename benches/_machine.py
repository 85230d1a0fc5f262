"""A simulated clock: replays the requests of many ranks against hosts, a network and a store of given speeds.

A request waits for its turn at the prefix or the metadata server, then for the latency, then for its bytes on its own connection, its
host's link and the store, each of which serves first come, first served. A rank sends the requests of one stage over a few connections; its
next stage begins when they are back.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benches._simulated import Request

READS = ("get", "read", "head", "list")


class Machine(NamedTuple):
    """What a store and its hosts can do."""

    name: str
    is_local: bool
    """A file system; else objects."""
    read_seconds: float
    """Latency of a request that reads."""
    write_seconds: float
    reads_per_second: float
    """At each prefix of an object store, or at the metadata server."""
    creates_per_second: float
    has_one_prefix: bool
    stream_bytes: float
    """Of one connection, per second."""
    store_bytes: float
    host_bytes: float = 12.5e9
    ranks_a_host: int = 8
    hash_bytes: float = 12e9
    """What the cores of one rank hash per second."""

    def limit(self, request: Request) -> str:
        """What limits the rate of such requests."""
        side = "read" if request.kind in READS else "write"
        if self.is_local:
            return "" if request.size_bytes and request.kind in ("read", "write") else side  # bytes cost the metadata server nothing
        return side if self.has_one_prefix else f"{side} {request.name.rsplit('/', 1)[0]}"


S3 = Machine("S3, prefixes split", False, 0.03, 0.06, 5500, 3500, False, 90e6, 1e12)
S3_ONE_PREFIX = S3._replace(name="S3, all in one prefix", has_one_prefix=True)
LUSTRE = Machine("Lustre", True, 0.0005, 0.001, 50_000, 10_000, True, 2e9, 500e9)
MACHINES = (S3, S3_ONE_PREFIX, LUSTRE)


class Stage(NamedTuple):
    """Requests of one rank that wait for nothing but each other."""

    name: str
    requests: Sequence[Request]
    lanes: int
    cpu_seconds: float = 0.0
    """What the rank computes before the first request."""


class _Rank:
    def __init__(self, host: int, stages: Sequence[Stage]) -> None:
        self.host = host
        self.stages = iter(stages)
        self.stage = Stage("", (), 0)
        self.left: Iterator[Request] = iter(())
        self.busy = 1
        self.end = 0.0


def replay(machine: Machine, ranks: Sequence[Sequence[Stage]]) -> dict[str, float]:
    """Stage -> when the last rank ended it, in seconds since all began."""
    ends: dict[str, float] = {}
    turns: dict[str, float] = {}
    links = [0.0] * (len(ranks) // machine.ranks_a_host + 1)
    store_free = 0.0
    all_ranks = [_Rank(number // machine.ranks_a_host, stages) for number, stages in enumerate(ranks)]
    events: list[tuple[float, int, int]] = [(0.0, number, -1) for number in range(len(ranks))]
    while events:
        now, number, size = heapq.heappop(events)
        rank = all_ranks[number]
        if size >= 0:  # a request that had its turn: now its bytes
            links[rank.host] = max(links[rank.host], now) + size / machine.host_bytes
            store_free = max(store_free, now) + size / machine.store_bytes
            heapq.heappush(events, (max(now + size / machine.stream_bytes, links[rank.host], store_free), number, -1))
            continue
        request = next(rank.left, None)
        if request is not None:
            limit, is_read = machine.limit(request), request.kind in READS
            if limit:
                begun = max(now, turns.get(limit, 0.0))
                turns[limit] = begun + 1 / (machine.reads_per_second if is_read else machine.creates_per_second)
            else:
                begun = now
            heapq.heappush(events, (begun + (machine.read_seconds if is_read else machine.write_seconds), number, request.size_bytes))
            continue
        rank.busy -= 1
        rank.end = max(rank.end, now)
        if rank.busy:
            continue
        if rank.stage.name:
            ends[rank.stage.name] = max(ends.get(rank.stage.name, 0.0), rank.end)
        stage = next(rank.stages, None)
        if stage is not None:
            rank.stage, rank.left, rank.busy = stage, iter(stage.requests), max(1, min(stage.lanes, len(stage.requests)))
            for _ in range(rank.busy):
                heapq.heappush(events, (rank.end + stage.cpu_seconds, number, -1))
    return ends
