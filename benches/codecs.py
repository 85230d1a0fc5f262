"""What snapshots of real training cost, and how fast the codecs are: `python -m benches.codecs --folder DIR [--peers] [--only NAME ...]`.

Every trace is made here (see `_traces`) and saved step by step; each snapshot is restored, compared bit by bit. Peers get the same states,
saved by torch.save: zstd, ZipNN and blosc2 on the bytes, restic and borg on the files. ZipNN and blosc2 must be installed for --peers, and
restic and borg be at hand (Debian's packages). The curves are drawn where matplotlib is there.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import tensorstore_ck as tsck
from benches._codecpeers import PEERS, Peer
from benches._traces import TRACES, State, copy_of, flat, pretraining
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.format.codec import CodecName, Elements, Encoded, Encoder, decode

BLOCK_BYTES = 4 << 20


def run_trace(name: str, folder: Path, peers: list[Peer]) -> dict[str, list[float]]:
    """Who -> what each snapshot added, as a share of its raw size."""
    shares: dict[str, list[float]] = {}
    kept: list[tuple[str, State]] = []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for peer in peers:
        peer.begin(folder / peer.name)
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache", codec="small") as store:
        for ref, state in TRACES[name]():
            snapshot = store.put_snapshot(state, ref=ref, step=state["step"])
            shares.setdefault("tsck small", []).append(snapshot.new_bytes / snapshot.logical_bytes)
            for peer in peers:
                shares.setdefault(peer.name, []).append(peer.add(folder / peer.name, state, state["step"]) / snapshot.logical_bytes)
            kept.append((snapshot.root, copy_of(state)))
        for root, state in kept:
            found, wanted = flat(store.checkout(root)), flat(state)
            if found.keys() != wanted.keys() or any(not torch.equal(found[key], wanted[key]) for key in wanted):
                raise SystemExit(f"{name}: a snapshot came back with other bytes")
    shutil.rmtree(folder)
    return shares


def fastest(work: Callable[[], object], passes: int = 7) -> float:
    """The least processor time of this thread in seconds: other work on the machine counts less than in elapsed time."""
    seconds = []
    for _ in range(passes):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)


def block_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def speed(dtype: torch.dtype, elements: Elements, step: float) -> tuple[str, float, float, float]:
    """What `speeds` yields: of numbers, or with a `step` of differences to numbers that are so far away."""
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(BLOCK_BYTES // elements.item_bytes, generator=generator) * 0.02 for _ in range(16)]
    after = [tensor + torch.randn(tensor.shape, generator=generator) * step for tensor in before]
    pairs = [(block_of(tensor.to(dtype)), block_of(base)) for tensor, base in zip(after, before, strict=True)]
    encoder, place = Encoder("small" if step else "fast"), memoryview(bytearray(BLOCK_BYTES))

    def encode(block: memoryview, base: memoryview) -> Encoded:
        if not step:
            return encoder.encode_tensor(block, elements)
        delta = encoder.encode_delta(block, base, elements)
        assert delta is not None
        return delta.encoded

    def encode_all() -> None:
        for block, base in pairs:
            encode(block, base)

    stored = []
    for block, base in pairs:
        encoded = encode(block, base)
        stored.append((encoded.codec, memoryview(b"".join(encoded.pieces)), [base] if step else []))

    def decode_all() -> None:
        for codec, data, bases in stored:
            decode(codec, data, BLOCK_BYTES, "a block", place, bases=bases)

    raw_bytes = len(pairs) * BLOCK_BYTES
    share = sum(len(data) for _, data, _ in stored) / raw_bytes
    name = f"{'differences' if step else 'planes'}, {dtype}".replace("torch.", "")
    return name, share, raw_bytes / fastest(encode_all) / 1e9, raw_bytes / fastest(decode_all) / 1e9


def speeds() -> Iterator[tuple[str, float, float, float]]:
    """(what, ratio, encode GB/s, decode GB/s) on one core, hashing not counted; and what BLAKE3 and a copy do with a block."""
    torch.set_num_threads(1)
    source = torch.randn(BLOCK_BYTES // 4)
    block, into = block_of(source), torch.empty_like(source)
    hashing, copying = fastest(lambda: block_id(block), 100), fastest(lambda: into.copy_(source), 100)
    yield "BLAKE3 (left), a copy (right)", 1.0, BLOCK_BYTES / hashing / 1e9, BLOCK_BYTES / copying / 1e9
    yield speed(torch.bfloat16, Elements(2, is_float=True), 0.0)
    yield speed(torch.float32, Elements(4, is_float=True), 0.0)
    yield speed(torch.float32, Elements(4, is_float=True), 1e-4)


def restores(folder: Path, rounds: int = 7) -> Iterator[tuple[str, float, float, float]]:
    """(how it was saved, ratio of stored to raw size, GB/s of later saves, of restores) in the middle of a run."""
    shutil.rmtree(folder, ignore_errors=True)
    states = [copy_of(state) for state in pretraining(10, 5)]
    raw_bytes = sum(map(len, flat(states[-1]).values()))
    ways: dict[str, tuple[CodecName, bool]] = {"raw": ("raw", False), "small, no differences": ("small", False), "small": ("small", True)}
    shares: dict[str, float] = {}
    saving: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        stores = {way: stack.enter_context(tsck.open(folder / way, create=True, cache_dir=folder / "cache")) for way in ways}
        for way, (codec, delta) in ways.items():
            for state in states:
                began = time.perf_counter()
                put = stores[way].put_snapshot(state, ref="run", step=state["step"], codec=codec, delta=delta)
                saving.setdefault(way, []).append(time.perf_counter() - began)
                shares[way] = put.new_bytes / put.logical_bytes
        for number in range(rounds):
            for way, store in stores.items():
                into = copy_of(states[0])
                began = time.perf_counter()
                store.checkout("run", into=into)
                seconds[way].append(time.perf_counter() - began)
                if number == 0 and any(not torch.equal(flat(into)[name], tensor) for name, tensor in flat(states[-1]).items()):
                    raise SystemExit(f"{way}: a snapshot came back with other bytes")
    shutil.rmtree(folder)
    for way, share in shares.items():
        yield way, share, raw_bytes / statistics.median(saving[way][1:]) / 1e9, raw_bytes / statistics.median(seconds[way]) / 1e9


def draw(results: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Stored bytes over snapshots, ours against theirs."""
    from matplotlib import pyplot  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415 - only here

    rows = -(-len(results) // 3)
    figure, axes = pyplot.subplots(rows, 3, figsize=(15, 4 * rows), squeeze=False)
    for axis, (name, shares) in zip(axes.flat, results.items(), strict=False):
        for who, values in shares.items():
            totals = [sum(values[: count + 1]) for count in range(len(values))]
            axis.plot(range(1, len(totals) + 1), totals, label=who, linewidth=2.5 if who.startswith("tsck") else 1)
        axis.set(title=name, xlabel="snapshots", ylabel="stored / raw size of one")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", nargs="*", default=[*TRACES], choices=[*TRACES])
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    print("| codec, one core | ratio | encode GB/s | decode GB/s |\n|---|---|---|---|")
    for what, ratio, encode, decoded in speeds():
        print(f"| {what} | {ratio:.3f} | {encode:.2f} | {decoded:.2f} |")
    torch.set_num_threads(2)
    print("\n| five snapshots, 10 steps apart | stored / raw | later saves GB/s | restore GB/s |\n|---|---|---|---|")
    for what, share, save, restore in restores(options.folder / "restores"):
        print(f"| {what} | {share:.3f} | {save:.2f} | {restore:.2f} |", flush=True)
    results: dict[str, Any] = {}
    print("\n| trace | who | first | mean after the first | largest after the first |\n|---|---|---|---|---|")
    for name in options.only:
        results[name] = run_trace(name, options.folder / "trace", PEERS if options.peers else [])
        for who, (first, *rest) in results[name].items():
            print(f"| {name} | {who} | {first:.4f} | {statistics.mean(rest):.4f} | {max(rest):.4f} |", flush=True)
    (options.folder / "codecs.json").write_text(json.dumps(results))
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
