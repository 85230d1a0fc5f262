"""What it costs that all ranks say that they live: `python -m benches.alive --ranks 64 1024`.

A real TCPStore in a process of its own, as torchrun's agent serves it, and a real `Heartbeat` with a connection of its own for each
rank; the ranks are threads of two processes, which takes more of one interpreter than a rank does of its own. Rank 0's looks are real.
"""

import argparse
import multiprocessing
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from tensorstore_ck.session.group import Channel, StoreThread
from tensorstore_ck.session.group.liveness import BEAT_SECONDS, DEAD_AFTER_SECONDS, Heartbeat, LivenessWatch

TICKS: Final = os.sysconf("SC_CLK_TCK")
PROCESSES: Final = 2
LOOKS: Final = 20
FAR_AWAY: Final = time.monotonic() + 1e6


def connect(port: int, *, serves: bool = False) -> Any:
    made: Any = dist.TCPStore("127.0.0.1", port, None, serves, timedelta(seconds=300), wait_for_workers=False)  # type: ignore[attr-defined]
    return made


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def serve(pipe: Connection) -> None:
    store = connect(0, serves=True)
    pipe.send(store.port)
    pipe.recv()


def live(pipe: Connection, port: int, ranks: range) -> None:
    store = connect(port)
    hearts = [Heartbeat(store) for _ in ranks]
    for rank, heart in zip(ranks, hearts, strict=True):
        heart(f"alive/{rank}", BEAT_SECONDS)
    while not store.check([f"alive/{rank}" for rank in ranks]):
        time.sleep(0.1)
    pipe.send(None)
    pipe.recv()
    os._exit(0)


def measure(ranks: int, seconds: float) -> str:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,), daemon=True)
    server.start()
    port = here.recv()
    assert server.pid is not None
    store = connect(port)
    channel = Channel(StoreThread(store), "", ranks=ranks, watch=LivenessWatch("alive/", every=0.0, limit=DEAD_AFTER_SECONDS))
    started = time.perf_counter()
    channel.set_unborn(ranks, "unborn/", FAR_AWAY)
    making = time.perf_counter() - started
    empty = resident_mib(server.pid)

    pipes, people = [], []
    for number in range(PROCESSES):
        mine, theirs = context.Pipe()
        process = context.Process(target=live, args=(theirs, port, range(number, ranks, PROCESSES)), daemon=True)
        process.start()
        pipes.append(mine)
        people.append(process)
    for pipe in pipes:
        pipe.recv()
    full = resident_mib(server.pid)

    before = [cpu_seconds(process.pid or 0) for process in (server, *people)]
    time.sleep(seconds)
    spent = [now - was for now, was in zip((cpu_seconds(process.pid or 0) for process in (server, *people)), before, strict=True)]

    looks = []
    for watched in (ranks, 1):
        took = []
        for _ in range(LOOKS):
            started = time.perf_counter()
            channel._silent(range(watched), FAR_AWAY)  # the look, without the wait around it
            took.append(time.perf_counter() - started)
        looks.append(sorted(took)[LOOKS // 2])
    for process in (*people, server):
        process.kill()
    beat = sum(spent[1:]) / (ranks * seconds / BEAT_SECONDS)
    figures = f"{100 * spent[0] / seconds:.2f} % | {full - empty:.0f} | {1e6 * beat:.0f} | {1e3 * making:.1f}"
    return f"| {ranks} | {ranks / BEAT_SECONDS:.0f} | {figures} | {1e3 * looks[0]:.2f} | {1e3 * looks[1]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    print(f"over {args.seconds:g} s; server: requests a second, share of a core, MiB for the connections; beat: µs of a core, for a rank")
    print("| ranks | requests/s | server | MiB | a beat, µs | make counters, ms | look at all, ms | look at one, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        print(measure(ranks, args.seconds), flush=True)


if __name__ == "__main__":
    main()
