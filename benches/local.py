"""Save, unchanged save and restore compared with their peers, in one run: `python -m benches.local --gib 1 --folder /tmp/bench`.

Peers take turns, round by round, so that drift of the machine hits all alike; medians are compared. Every save starts with
no data of its own on the disk and with nothing dirty; the store is open, as a job has it; every restore reads from the page cache.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benches._peers import LOADERS, SAVERS, State, opened


def make_state(tensors: int, tensor_bytes: int) -> State:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{number}.weight": torch.randn(tensor_bytes // 4, generator=generator) for number in range(tensors)}


def small_state(tensors: int) -> State:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(256, 4097, (tensors,), generator=generator).tolist()
    return {f"layer.{number}.bias": torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


def timed(work: Callable[[], object]) -> float:
    os.sync()
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def bench(state: State, folder: Path, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}
    for round_number in range(rounds + 1):
        for peer in SAVERS:
            place = folder / peer.run.__name__
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            taken = timed(lambda peer=peer, place=place: peer.run(place, state))  # type: ignore[misc]
            if round_number:
                seconds.setdefault(peer.name, []).append(taken)
        shutil.rmtree(folder / "tsck", ignore_errors=True)
        with opened(folder / "tsck") as store:
            for name in ("tsck put, all new", "tsck put, nothing changed"):
                taken = timed(lambda store=store: store.put_snapshot(state, ref="bench"))  # type: ignore[misc]
                if round_number:
                    seconds.setdefault(name, []).append(taken)
    source = {"load_torch": "save_torch", "load_dcp": "save_dcp", "load_safetensors": "save_safetensors"}
    source |= {"load_floor": "save_plain", "load_floor_into": "save_plain", "load_tsck": "tsck", "load_tsck_into": "tsck"}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for round_number in range(rounds + 1):
        for peer in LOADERS:
            place = folder / source[peer.run.__name__]
            taken = timed(lambda peer=peer, place=place: peer.run(place, target))  # type: ignore[misc]
            if round_number:
                seconds.setdefault(peer.name, []).append(taken)
    if not all(torch.equal(state[name], target[name]) for name in state):
        raise SystemExit("a restore returned other bytes")
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, theirs: str) -> float:
    """How many times faster `ours` is: the median over the rounds, each pair from one round."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--small", type=int, default=0, help="instead: this many tensors of 1 to 16 KiB")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    state = small_state(args.small) if args.small else make_state(64, int(args.gib * (1 << 30)) // 64)
    size = sum(tensor.nbytes for tensor in state.values())
    args.folder.mkdir(parents=True, exist_ok=True)
    seconds = bench(state, args.folder, args.rounds)
    print(f"{len(state)} fp32 tensors, {size / 2**30:.2f} GiB, {args.folder}, median (least-most) of {args.rounds} rounds, page cache warm")
    print("| what | GB/s | seconds |\n|---|---|---|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {name} | {size / middle / 1e9:.2f} | {middle:.3f} ({min(taken):.3f}-{max(taken):.3f}) |")
    print("\n| ratio of speeds, median of pairs | |\n|---|---|")
    for ours, theirs in (
        ("tsck put, all new", "DCP save, 2 threads, fsync"),
        ("tsck put, all new", "plain write + fsync"),
        ("tsck put, all new", "torch.save + fsync"),
        ("tsck put, nothing changed", "torch.save + fsync"),
        ("tsck put, nothing changed", "safetensors, no fsync"),
        ("tsck checkout", "floor, fresh memory"),
        ("tsck checkout into=", "floor, in place"),
        ("tsck checkout into=", "DCP load (in place)"),
        ("tsck checkout", "torch.load"),
    ):
        print(f"| {ours} / {theirs} | {ratio(seconds, ours, theirs):.2f} |")
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
