"""Pages of `tsck ui` over a large store: `python -m benches.ui --folder /tmp/bench`.

The log of a local store gets an entry for each of 10,000 snapshots with 200 metrics each, as saves write them, without objects behind
them, and some real snapshots with tensors. The command itself serves it, in a process of its own; a client asks over HTTP for each page,
over and over. Printed are the first start and the second, which finds the catalog, with their memory, then p50 and p95 of each page.
"""

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import torch

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.catalog.made import publish

WAIT_SECONDS = 600


class Client:
    """A browser without a screen: one connection, with the token's cookie."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=WAIT_SECONDS)
        self._connection.request("GET", parts.path)
        reply = self._connection.getresponse()
        reply.read()
        self._headers = {"Cookie": (reply.getheader("set-cookie") or "").partition(";")[0]}

    def get(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path, headers=self._headers)
        reply = self._connection.getresponse()
        return reply.status, reply.read()

    def another(self) -> "Client":
        return Client(self._url)

    def seconds(self, path: str) -> float:
        begin = time.perf_counter()
        self.get(path)
        return time.perf_counter() - begin


def fill(store: Store, snapshots: int, metrics: int, refs: int, tensors: int) -> tuple[str, str, str]:
    """Entries as saves write them, half of them of one branch, then real ones; a made root, and the last two real ones."""
    draw = random.Random(0)
    names = [f"layer_{number:03}/grad_norm" for number in range(metrics - 1)]
    root = ""
    for number in range(snapshots):
        ref = "runs/long" if number % 2 else f"runs/{number // 2 % (refs - 1)}"
        values = {name: draw.random() for name in names} | {"loss": 5 / (1 + number / 1000) + draw.random()}
        root = publish(store, ref, number * 10, values, logical_bytes=10**10, new_bytes=10**9)
        if number % 500 == 250:
            store.pin(root, reason="evaluation")
            store.tag(f"best-{number}", root)
            store.mark(root, reason="diverged")
    state = {f"layers.{number // 10}.weight_{number % 10}": torch.rand(16, 16) for number in range(tensors)}
    real = []
    for step in range(20):
        state["layers.0.weight_0"].add_(1)
        real.append(store.put_snapshot(state, ref="runs/real", step=step, metrics={"loss": 1 / (step + 1)}))
    return root, real[-2].root, real[-1].root


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Client, int]]:
    """A server and its process id."""
    command = [sys.executable, "-m", "tensorstore_ck.cli", "ui", "--no-browser", "--json", "--cache-dir", str(folder / "reader")]
    with subprocess.Popen([*command, "-s", str(folder / "store")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Client(json.loads(process.stdout.readline())["url"]), process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_SECONDS)


def start(folder: Path, what: str) -> None:
    begin = time.perf_counter()
    with serving(folder) as (client, pid):
        listens = time.perf_counter() - begin
        status, text = client.get("/")
        first = time.perf_counter() - begin
        while b"is being read" in text:
            time.sleep(0.1)
            status, text = client.get("/")
        read = time.perf_counter() - begin
        assert status == 200
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
        peak = int(found[1]) / 1024 if found else 0
    size = sum(path.stat().st_size for path in (folder / "reader/catalogs").iterdir()) / 1e6
    print(
        f"{what}: URL after {listens:.1f} s, first page {first:.1f} s, whole log read {read:.1f} s; {peak:.0f} MiB, catalog {size:.0f} MB"
    )


def pages(client: Client, uuid: str, made: str, old: str, new: str) -> dict[str, str]:
    """Name -> path of every page, with what is in the store."""
    of_store = f"/stores/{uuid}"
    found = {
        "overview": "/",
        "ref, 5,000 snapshots": f"{of_store}/ref?name=runs%2Flong",
        "ref, few snapshots": f"{of_store}/ref?name=runs%2Freal",
        "snapshot": f"{of_store}/snapshot?at={new}",
        "snapshot without objects": f"{of_store}/snapshot?at={made}",
        "compare": f"{of_store}/compare?old={old}&new={new}",
        "space": f"{of_store}/space",
        "health": f"{of_store}/health",
        "find, all": "/find",
        "find, a metric": f"/find?q={quote('loss < 2 and step > 5000')}&order=loss",
        "find, of 200 metrics": f"/find?q={quote('loss < 3')}&order=layer_100/grad_norm&descending=1",
        "activity": "/activity",
        "activity of a branch": "/activity?ref=runs%2Flong&page=20",
    }
    return {name: path for name, path in found.items() if client.get(path)[0] != 404}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--refs", type=int, default=50)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts, for a machine with other work")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="keep the folder, and use it if it exists")
    args = parser.parse_args()
    is_made = args.keep and args.folder.exists()
    args.folder.mkdir(parents=True, exist_ok=args.keep)
    try:
        if not is_made:
            with tsck.open(args.folder / "store", create=True, no_sync=True, cache_dir=args.folder / "cache") as store:
                begin = time.perf_counter()
                roots = fill(store, args.snapshots, args.metrics, args.refs, args.tensors)
                (args.folder / "roots.json").write_text(json.dumps([store.engine.config.uuid, *roots]), encoding="ascii")
                print(f"{args.snapshots} entries with {args.metrics} metrics in {time.perf_counter() - begin:.0f} s", flush=True)
        shutil.rmtree(args.folder / "reader", ignore_errors=True)
        start(args.folder, "first start")
        start(args.folder, "second start")
        uuid, *roots_ = json.loads((args.folder / "roots.json").read_text(encoding="ascii"))
        with serving(args.folder) as (client, _):
            asked = pages(client, uuid, *roots_)
            print(f"\nms, {args.requests} requests, the fastest of {args.rounds} rounds\n| page | p50 | p95 | KB |\n|---|---|---|---|")
            for name, path in asked.items():
                rounds = [[client.seconds(path) for _ in range(args.requests)] for _ in range(args.rounds)]
                p50 = min(statistics.median(each) for each in rounds)
                p95 = min(sorted(each)[int(0.95 * (len(each) - 1) + 0.5)] for each in rounds)
                status, body = client.get(path)
                note = "" if status == 200 else f", status {status}"
                print(f"| {name}{note} | {1000 * p50:.0f} | {1000 * p95:.0f} | {len(body) / 1000:.0f} |", flush=True)
            with ThreadPoolExecutor(20) as pool:
                clients = [client.another() for _ in range(20)]
                begin = time.perf_counter()
                list(pool.map(lambda number: clients[number].get(list(asked.values())[number % len(asked)]), range(20)))
                seconds = time.perf_counter() - begin
                print(f"\n20 requests at once: {seconds:.2f} s in all; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    finally:
        if not args.keep:
            shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
