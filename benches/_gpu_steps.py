"""The steps of `benches.gpu`, each run in a process of its own; each prints its figures as JSON, one object a line."""

import argparse
import itertools
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import tensorstore_ck as tsck
from benches._gpu_loop import run_loop
from benches._peers import LOADERS, SAVERS
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.state.device.kernel import hasher_of

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
TENSORS: Final = 64
TENSOR_ELEMENTS: Final = (16 << 20) if DEVICE == "cuda" else (1 << 18)
BLOCK_BYTES: Final = 4 << 20
STATE_BYTES: Final = TENSORS * TENSOR_ELEMENTS * 4
REF: Final = "bench"
PREPARED_SECONDS: Final = 3.0 if DEVICE == "cuda" else 0.0
"""Two captures are pinned in this time."""
State = dict[str, torch.Tensor]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def report(**figures: object) -> None:
    print(json.dumps({name.replace("_", " "): value for name, value in figures.items()}), flush=True)


def seconds_of(work: Callable[[], object]) -> float:
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def rate(name: str, work: Callable[[], object], before: Callable[[], object] = lambda: None, size_bytes: int = STATE_BYTES) -> None:
    """Reports GB/s: the median of three, and all three."""
    rates = []
    for _ in range(3):
        before()
        rates.append(round(size_bytes / seconds_of(work) / 1e9, 2))
    print(json.dumps({f"{name}, GB/s": statistics.median(rates), f"{name}, each": rates}), flush=True)


def make_state() -> State:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return {f"layers.{number}.weight": torch.randn(TENSOR_ELEMENTS, device=DEVICE, generator=generator) * 0.02 for number in range(TENSORS)}


CHANGES: Final = itertools.count(1)


def change(state: State, tensors: int = TENSORS) -> None:
    """Gives some tensors values that no tensor had before."""
    for tensor in list(state.values())[:tensors]:
        tensor.add_(next(CHANGES) * 1e-5)


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[tsck.Store]:
    with tsck.open(folder / "store", create=True, cache_dir=folder / "cache", **options) as store:
        yield store


class Saves:
    """Saves of one branch, numbered."""

    def __init__(self, store: tsck.Store) -> None:
        self._store = store
        self._step = 0

    def put(self, state: State, **options: Any) -> None:
        self._step += 1
        self._store.put_snapshot(state, ref=REF, step=self._step, expect=tsck.ANY, unchanged="ok", **options)

    def put_async(self, state: State, *changed_by: torch.optim.Optimizer) -> "tsck.PendingSnapshot":
        self._step += 1
        return self._store.put_snapshot_async(state, ref=REF, step=self._step, expect=tsck.ANY, unchanged="ok", changed_by=changed_by)

    def prepare(self, state: State, *changed_by: torch.optim.Optimizer) -> None:
        self._store.prepare(state, changed_by=changed_by)


class SavesAtOnce(Saves):
    """Copies before the next work."""

    def put_async(self, state: State, *_: torch.optim.Optimizer) -> "tsck.PendingSnapshot":
        return super().put_async(state)


def limits(_: Path) -> None:
    """What the machine can do."""
    report(device=torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", cores=os.cpu_count(), torch=torch.__version__)
    state = make_state()
    host = {name: tensor.cpu() for name, tensor in state.items()}
    if DEVICE == "cuda":
        pinned = torch.empty(TENSOR_ELEMENTS * 4, dtype=torch.float32, pin_memory=True)
        windows = torch.split(pinned, TENSOR_ELEMENTS)
        tensors = list(state.values())
        rate("D2H pinned", lambda: [windows[n % 4].copy_(tensor, non_blocking=True) for n, tensor in enumerate(tensors)])
        rate("H2D pinned", lambda: [tensor.copy_(windows[n % 4], non_blocking=True) for n, tensor in enumerate(tensors)])
        rate("D2H pageable, fresh memory", lambda: [tensor.cpu() for tensor in tensors])
        rate("pin 1 GiB", lambda: _pin(1 << 30), size_bytes=1 << 30)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        blocks = [block for tensor in host.values() for block in torch.split(tensor.view(torch.uint8), 4 << 20)]
        rate("BLAKE3 on all cores", lambda: list(pool.map(lambda block: block_id(block.numpy().data), blocks)))


def _pin(size_bytes: int) -> None:
    memory = torch.empty(size_bytes, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostRegister(memory.data_ptr(), size_bytes, 1)
    cudart.cudaHostUnregister(memory.data_ptr())


def ids(folder: Path) -> None:
    """Ids that the device computes."""
    device = torch.empty(1, device=DEVICE).device
    begin = time.perf_counter()
    hasher = hasher_of(device)
    report(seconds_to_compile=round(time.perf_counter() - begin, 2), is_there=hasher is not None)
    if hasher is None:
        return
    state = make_state()
    starts = [tensor.data_ptr() + start for tensor in state.values() for start in range(0, tensor.nbytes, BLOCK_BYTES)]
    for times in (1, 24):
        addresses = np.array(starts * times, np.int64)
        sizes = np.full(len(addresses), BLOCK_BYTES, np.int64)
        name = f"ids of {sizes.sum() / 1e9:.1f} GB in blocks of 4 MiB, table and result included"
        rate(name, lambda addresses=addresses, sizes=sizes: hasher.start(addresses, sizes).wait(), size_bytes=int(sizes.sum()))  # type: ignore[misc]
    rows = {"a": state["layers.0.weight"].view(4096, -1).t()}
    with opened(folder, codec="raw") as store:
        saves = Saves(store)
        saves.put(rows)
        rate("unchanged, one transposed tensor", lambda: saves.put(rows), size_bytes=rows["a"].nbytes)
        shutil.rmtree(folder / "store", ignore_errors=True)
    same = state["layers.0.weight"]
    large = {f"layers.{number}.weight": torch.cat([same] * 16) for number in range(40)}
    size_bytes = sum(tensor.nbytes for tensor in large.values())
    with opened(folder, codec="raw") as store:
        saves = Saves(store)
        saves.put(large)
        rate(f"unchanged put of {size_bytes / 1e9:.0f} GB", lambda: saves.put(large), size_bytes=size_bytes)


def save(folder: Path) -> None:
    """First saves, and saves of what changed everywhere."""
    state = make_state()
    host = {name: tensor.cpu() for name, tensor in state.items()}

    def first(values: State, codec: Any) -> None:
        with opened(folder, codec=codec) as store:
            Saves(store).put(values)

    def fresh() -> None:
        shutil.rmtree(folder / "store", ignore_errors=True)

    rate("first put, CPU tensors, raw", lambda: first(host, "raw"), fresh)
    rate("first put, device tensors, raw", lambda: first(state, "raw"), fresh)
    rate("first put, device tensors, auto", lambda: first(state, "auto"), fresh)
    fresh()
    with opened(folder, codec="raw") as store:
        saves = Saves(store)
        saves.put(state)
        rate("all changed, CPU tensors", lambda: saves.put(host), lambda: change(host))
        rate("all changed, device tensors", lambda: saves.put(state), lambda: change(state))
        saves.put_async(state).wait()
        rate("all changed, device tensors, asynchronous and wait", lambda: saves.put_async(state).wait(), lambda: change(state))


def unchanged(folder: Path) -> None:
    """Saves of what changed nowhere, or almost nowhere."""
    state = make_state()
    host = {name: tensor.cpu() for name, tensor in state.items()}
    with opened(folder, codec="raw") as store:
        saves = Saves(store)
        saves.put(state)
        rate("unchanged, CPU tensors", lambda: saves.put(host))
        rate("unchanged, device tensors", lambda: saves.put(state))
        for _ in range(2):  # the second one learns what has not changed
            saves.put_async(state).wait()
        rate("unchanged, device tensors, asynchronous and wait", lambda: saves.put_async(state).wait())
        rate(
            "one tensor of 64 changed, device tensors, asynchronous and wait",
            lambda: saves.put_async(state).wait(),
            lambda: change(state, 1),
        )
        saves.put(state, frozen=("layers.*",))
        rate("unchanged, device tensors, frozen", lambda: saves.put(state, frozen=("layers.*",)))
        rate("one tensor of 64 changed, device tensors", lambda: saves.put(state), lambda: change(state, 1))


def restore(folder: Path) -> None:
    """Restores, every block verified."""
    state = make_state()
    host = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
    for codec in ("raw", "auto"):
        shutil.rmtree(folder / "store", ignore_errors=True)
        with opened(folder, codec=codec) as store:
            Saves(store).put(state)
        with opened(folder) as store:
            rate(f"{codec}: into CPU tensors", lambda store=store: store.checkout(REF, into=host))  # type: ignore[misc]
            rate(f"{codec}: into device tensors", lambda store=store: store.checkout(REF, into=state))  # type: ignore[misc]
            rate(f"{codec}: new on the device", lambda store=store: store.checkout(REF, device=DEVICE))  # type: ignore[misc]
    report(is_equal=all(torch.equal(host[name], tensor.cpu()) for name, tensor in state.items()))


def stall(folder: Path) -> None:
    """What an asynchronous save costs its caller, in ms, when its memory was prepared."""
    state = make_state()
    calls, free, durable = [], [], []
    with opened(folder, codec="raw") as store:
        saves = Saves(store)
        begin = time.perf_counter()
        saves.prepare(state)
        report(prepare_ms=round((time.perf_counter() - begin) * 1e3))
        time.sleep(PREPARED_SECONDS)
        for _ in range(6):
            change(state)
            synchronize()
            begin = time.perf_counter()
            pending = saves.put_async(state)
            calls.append(round((time.perf_counter() - begin) * 1e3))
            synchronize()
            free.append(round((time.perf_counter() - begin) * 1e3))
            pending.wait()
            durable.append(round((time.perf_counter() - begin) * 1e3))
    report(call_ms=calls, until_the_device_is_free_ms=free, durable_ms=durable)


def peers(folder: Path) -> None:
    """The same state through other programs, once each."""
    state = make_state()
    for peer in SAVERS:
        if peer.run.__name__ == "save_plain":
            continue
        place = folder / peer.run.__name__
        place.mkdir()
        seconds = seconds_of(lambda peer=peer, place=place: peer.run(place, state))  # type: ignore[misc]
        print(json.dumps({f"{peer.name}, GB/s": round(STATE_BYTES / seconds / 1e9, 2)}), flush=True)
    for peer in LOADERS:
        source = folder / peer.run.__name__.replace("load", "save")
        if peer.run.__name__ in ("load_dcp", "load_torch", "load_safetensors"):
            seconds = seconds_of(lambda peer=peer, source=source: peer.run(source, state))  # type: ignore[misc]
            print(json.dumps({f"{peer.name}, GB/s": round(STATE_BYTES / seconds / 1e9, 2)}), flush=True)


def loop(folder: Path, saver: str) -> None:
    """A training loop with saves in the background."""
    with opened(folder, codec="raw") as store:
        savers = {"none": None, "tsck": Saves(store), "at-once": SavesAtOnce(store)}
        print(json.dumps(run_loop(DEVICE, savers[saver])), flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step")
    parser.add_argument("saver", nargs="?", default="")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    if args.step == "loop":
        loop(args.folder, args.saver)
    else:
        {each.__name__: each for each in (limits, ids, save, unchanged, restore, stall, peers)}[args.step](args.folder)


if __name__ == "__main__":
    main()
