"""How fast other ranks restore what is staged from each other's memory: `python -m benches.peer_restore --folder /dev/shm/DIR [--gib 1]`.

Two ranks, each with a folder of its own as the disk of its host, stage a state and are killed with SIGKILL; nothing of its packs is in
the store. Then three ranks restore it in their own layout: the third one's folder is empty, so it reads everything over TCP on loopback,
and the others read what the other host has. For comparison the two ranks restore it in the layout that staged it, each from its own folder.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.staging import ReadThroughBackend, Uploader

SECONDS = 600


def share(rank: int, ranks: int, elements: int, *, filled: bool) -> dict[str, Any]:
    start, stop = (elements * each // ranks for each in (rank, rank + 1))
    local = torch.arange(start, stop, dtype=torch.int32) if filled else torch.zeros(stop - start, dtype=torch.int32)
    return {"w": tsck.FlatShard(local, (elements,), start)}


def hold_packs() -> None:
    """No pack is uploaded: what is staged stays on the disks."""
    upload = Uploader.upload

    def held(self: Uploader, names: Any, **options: Any) -> Any:
        if "on_retry" in options:
            threading.Event().wait()
        return upload(self, names, **options)

    Uploader.upload = held  # type: ignore[method-assign]


def count_from_others() -> list[int]:
    counted: list[int] = []
    read_into = ReadThroughBackend.read_into

    def counting(self: ReadThroughBackend, name: str, offset: int, target: memoryview) -> None:
        if self.others and not self.folder.has_unsent(name):
            counted.append(len(target))
        read_into(self, name, offset, target)

    ReadThroughBackend.read_into = counting  # type: ignore[method-assign]
    return counted


def job(rank: int, ranks: int, folder: str, port: int, elements: int, *, stages: bool, results: "Queue[Any]") -> None:
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=server, rank=rank, world_size=ranks)
    hold_packs()
    staging = tsck.Staging(f"{folder}/host-{rank}", capacity="6GB")
    store = tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", staging=staging)
    group: Any = dist.group.WORLD
    if stages:
        state = share(rank, ranks, elements, filled=True)
        store.put_snapshot_async(state, ref="job", step=1, group=group).staged.wait(SECONDS)
    else:
        into, counted = share(rank, ranks, elements, filled=False), count_from_others()
        store.checkout("job^staged", into=into, group=group)  # opens connections, faults memory in
        counted.clear()
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        store.checkout("job^staged", into=into, group=group)
        dist.barrier()
        seconds = time.perf_counter() - began
        if not torch.equal(into["w"].local, share(rank, ranks, elements, filled=True)["w"].local):
            raise SystemExit("other bytes came back")
        results.put((seconds, sum(counted), into["w"].local.nbytes, time.process_time() - used))
        results.close()
        results.join_thread()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def run(ranks: int, folder: Path, elements: int, *, stages: bool) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    options = {"stages": stages, "results": results}
    processes = [
        context.Process(target=job, args=(rank, ranks, str(folder), server.port, elements), kwargs=options) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [] if stages else [results.get(timeout=SECONDS) for _ in processes]
    for process in processes:
        process.join(SECONDS)
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"a rank ended with {process.exitcode}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    elements = int(options.gib * (1 << 30)) // 4
    shutil.rmtree(options.folder, ignore_errors=True)
    tsck.open(options.folder / "store", create=True, cache_dir=options.folder / "cache").close()
    run(2, options.folder, elements, stages=True)
    print("| ranks | load | GB restored | GB from other hosts | seconds | GB/s | CPU seconds of all ranks |\n|---|---|---|---|---|---|---|")
    for ranks in (2, 3):
        found = [run(ranks, options.folder, elements, stages=False) for _ in range(options.rounds)]
        seconds = statistics.median(max(each[0] for each in ranks_of) for ranks_of in found)
        size_bytes, others = (sum(each[at] for each in found[0]) for at in (2, 1))
        used = statistics.median(sum(each[3] for each in ranks_of) for ranks_of in found)
        figures = f"{size_bytes / 1e9:.2f} | {others / 1e9:.2f} | {seconds:.2f} | {size_bytes / seconds / 1e9:.2f} | {used:.2f}"
        print(f"| {ranks} | {os.getloadavg()[0]:.1f} | {figures} |", flush=True)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
