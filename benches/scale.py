"""Thousands of ranks on a simulated store and clock: `python -m benches.scale --ranks 1024 --readers 1016`.

All above the backend is the real code: cuts, parts, packs, record, log, plans of reads, gc. Faked are the contents of blocks, and
time: what the code asks of the backend is replayed on a simulated clock (`_machine`), with the seconds that it computed here and what
hashing would take. Three hosts of ranks run, and those whom they read from; every other host does as one of these, in packs and parts
of its own. `--dcp RANKS` instead has DCP's planner plan for such ranks.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from benches._dcpplan import print_plans
from benches._machine import LUSTRE, MACHINES, Machine, Stage, replay
from benches._model import faked_contents, make_layout, sources_of, wanted
from benches._scalejob import Job, Put, Ran
from benches._simulated import Request, Traffic
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.format.layout import Layout

HOST: Final = LUSTRE.ranks_a_host
ANSWERS_PER_SECOND: Final = 20_000
"""Of the process that serves the group's store; a save asks it about six times for each rank."""
POLL_SECONDS: Final = 0.5
"""Two waits for others, each asked for every quarter of a second."""
LANES: Final = {"write blocks": 4, "read blocks": 8, "read parts, for gc": 8, "read footers": 8, "delete": 8}
LOCAL_LANES: Final = LANES | {"read blocks": 6, "read parts, for gc": 4, "read footers": 1}
"""As many as the real code has threads where a rank has four cores."""
BLOCKS: Final = ("write blocks", "read blocks")


class Phase(NamedTuple):
    """What all ranks did in it."""

    requests: int
    objects: int
    size_bytes: int
    seconds: float


def label(request: Request) -> str:
    folder = request.name.split("/", 1)[0]
    if folder in ("log", "checkpoint"):
        return "log"
    if folder == "packs":
        return "read blocks" if request.kind in ("read", "head") else "write blocks"
    return "write part" if request.kind == "put" else "record and parts"


def gc_label(request: Request) -> str:
    folder = request.name.split("/", 1)[0]
    if request.kind in ("list", "delete") and folder != "log":
        return {"list": "list", "delete": "delete"}[request.kind]
    return {"parts": "read parts, for gc", "packs": "read footers"}.get(folder, "log")


def lanes(machine: Machine, name: str) -> int:
    return (LOCAL_LANES if machine.is_local else LANES).get(name, 1)


def stages(ran: Ran, machine: Machine) -> list[Stage]:
    """What a rank did, one stage after another; its own work comes before the blocks."""
    found: list[Stage] = []
    groups = [(name, list(requests)) for name, requests in groupby(ran.traffic, label)]
    last = max((number for number, (name, _) in enumerate(groups) if name in BLOCKS), default=-1)
    for number, (name, requests) in enumerate(groups):
        if name == "read blocks" and number != last:
            name = "record and parts"  # the layout
        cpu_seconds = 0.0
        if number == last:
            hashed = sum(request.size_bytes for request in requests)
            cpu_seconds = ran.cpu_seconds + hashed / machine.hash_bytes
        if name == "log" and number > last >= 0:
            name = "log again"
        found.append(Stage(name, requests, lanes(machine, name), cpu_seconds))
    return found


def spread(ran: Mapping[int, Ran], ranks: int) -> Iterator[Ran]:
    """What every rank does: as a rank of the next host that ran, under names of its own."""
    hosts = sorted({rank // HOST for rank in ran if all(other in ran for other in host_ranks(rank // HOST, ranks))})
    users: dict[str, set[int]] = {}
    for rank, each in ran.items():
        for request in each.traffic:
            users.setdefault(request.name, set()).add(rank // HOST)
    for host in range(-(-ranks // HOST)):
        own = host_ranks(host, ranks)
        likes = [like for like in hosts if len(host_ranks(like, ranks)) == len(own) and (like != hosts[-1] or host == like)]
        like = min(likes, key=lambda like: abs(like - host))
        names: dict[str, str] = {}
        for rank, other in zip(own, host_ranks(like, ranks), strict=True):
            if rank in ran and like == host:
                yield ran[rank]
                continue
            yield ran[other]._replace(traffic=Traffic(_renamed(request, users, names) for request in ran[other].traffic))


def _renamed(request: Request, users: Mapping[str, set[int]], names: dict[str, str]) -> Request:
    folder = request.name.split("/", 1)[0]
    if folder not in ("packs", "parts") or len(users[request.name]) > 1:
        return request
    if request.name not in names:
        text = ulid_text(new_ulid())
        names[request.name] = f"{folder}/{text[-2:]}/{text}"
    return request._replace(name=names[request.name])


def host_ranks(host: int, ranks: int) -> range:
    return range(host * HOST, min((host + 1) * HOST, ranks))


def sampled(ranks: int) -> list[int]:
    """The first host, one from the middle and the last one."""
    hosts = -(-ranks // HOST)
    return [rank for host in (0, hosts // 2, hosts - 1) for rank in host_ranks(host, ranks)]


def phases(machine: Machine, ranks: Sequence[Sequence[Stage]]) -> dict[str, Phase]:
    ends = replay(machine, ranks)
    totals: dict[str, list[Stage]] = {}
    for each in ranks:
        for stage in each:
            totals.setdefault(stage.name, []).append(stage)
    found = {}
    before = 0.0
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        requests = [request for stage in totals[name] for request in stage.requests]
        objects = len({request.name for request in requests})
        found[name] = Phase(len(requests), objects, sum(request.size_bytes for request in requests), end - before)
        before = end
    return found


def table(title: str, found: Mapping[str, Phase]) -> None:
    print(f"\n{title}\n| phase | requests | objects | GB | seconds |\n|---|---|---|---|---|")
    for name, phase in found.items():
        print(f"| {name} | {phase.requests:,} | {phase.objects:,} | {phase.size_bytes / 1e9:,.3f} | {phase.seconds:.1f} |")
    total = [sum(phase[at] for phase in found.values()) for at in (0, 2, 3)]
    print(f"| in all | {total[0]:,.0f} | | {total[1] / 1e9:,.1f} | **{total[2]:.1f}** |", flush=True)


def put_phases(machine: Machine, put: Put, ranks: int) -> dict[str, Phase]:
    found = phases(machine, [stages(each, machine) for each in spread(put.ran, ranks)])
    asked = 6 * ranks
    found["agree"] = Phase(asked, 0, 0, asked / ANSWERS_PER_SECOND + POLL_SECONDS)
    commit = phases(machine, [[Stage("commit by rank 0", put.commit.traffic, 1, put.commit.cpu_seconds)]])
    return found | commit


def read_summary(ran: Mapping[int, Ran], needed: int) -> str:
    """Of the hosts that ran: what they read beyond what they need, alone and together, and from how many parts."""
    alone = sum(each.traffic.bytes_of("read") for each in ran.values())
    together = 0
    for host in {rank // HOST for rank in ran}:
        of_host = [each.traffic for rank, each in ran.items() if rank // HOST == host]
        together += union_bytes(request for traffic in of_host for request in traffic if request.kind == "read")
    parts = [len({request.name for request in each.traffic if request.name.startswith("parts/")}) for each in ran.values()]
    computed = max(each.cpu_seconds for each in ran.values())
    return (
        f"each rank reads {sum(parts) / len(parts):.1f} parts (at most {max(parts)}) and computes for {computed:.2f} s (at most); "
        f"bytes read / needed {alone / needed:.2f} rank by rank, {together / needed:.2f} if the ranks of a host share"
    )


def union_bytes(reads: Iterable[Request]) -> int:
    total = 0
    at: tuple[str, int] = ("", 0)
    for name, start, size in sorted((request.name, request.offset, request.size_bytes) for request in reads):
        begin = max(start, at[1]) if name == at[0] else start
        total += max(start + size - begin, 0)
        at = (name, max(start + size, begin))
    return total


def needed_bytes(target: Layout, ran: Iterable[int], ranks: int) -> int:
    total = 0
    for rank in ran:
        for tensor, box, _ in wanted(target, rank, ranks):
            size = target.tensors[tensor].item_bytes
            for extent in box.sizes:
                size *= extent
            total += size
    return total


def scene(ranks: int, readers: int, width: int, *, is_local: bool) -> None:
    job = Job(ranks, width, is_local=is_local)
    target = make_layout(readers, width)
    machines = [machine for machine in MACHINES if machine.is_local == is_local]
    samples = sampled(readers)
    sources = sources_of(job.layout, ranks, (box for rank in samples for box in wanted(target, rank, readers)))
    running = sorted({0, *sampled(ranks), *sources})
    size = sum(spec.size_bytes for spec in job.layout.tensors)
    print(f"\n## {ranks} ranks, {size / 1e12:.2f} TB in {len(job.layout.tensors)} tensors, {size / ranks / 1e9:.2f} GB each")
    print(f"{len(running)} ranks put and {len(samples)} restored with the real code; all others are copies")
    first = job.put(1, running, None)
    second = job.put(2, running, first.info.root)
    same = {rank: job.restore(second.info, job.layout, rank, ranks) for rank in sampled(ranks)}
    other = {rank: job.restore(second.info, target, rank, readers) for rank in samples}
    collected = job.collect(first.info)
    print(f"\nsame layout: {read_summary(same, needed_bytes(job.layout, same, ranks))}")
    print(f"\n{ranks} -> {readers}: {read_summary(other, needed_bytes(target, other, readers))}")
    for machine in machines:
        put = put_phases(machine, second, ranks)
        table(f"{machine.name}: put, all blocks new, the parent there", put)
        restored = phases(machine, [stages(each, machine) for each in spread(same, ranks)])
        table(f"{machine.name}: restore, same layout, no cache", restored)
        restored = phases(machine, [stages(each, machine) for each in spread(other, readers)])
        table(f"{machine.name}: restore by {readers} ranks, no cache, each rank by itself", restored)
        grouped = [(name, list(requests)) for name, requests in groupby(collected.traffic, gc_label)]
        cpu_seconds = collected.cpu_seconds / len(grouped)
        table(
            f"{machine.name}: gc of one snapshot of two ({collected.cpu_seconds:.1f} s computed)",
            phases(machine, [[Stage(name, requests, lanes(machine, name), cpu_seconds) for name, requests in grouped]]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--readers", type=int, default=1016)
    parser.add_argument("--width", type=int, default=1, help="1: 4.9 TB; 2: 19.4 TB")
    parser.add_argument("--dcp", type=int, nargs="*", default=[], metavar="RANKS")
    args = parser.parse_args()
    if args.dcp:
        print_plans(args.dcp, args.width)
        return
    with faked_contents():
        for is_local in (False, True):
            scene(args.ranks, args.readers, args.width, is_local=is_local)


if __name__ == "__main__":
    main()
