"""What `tsck exporter` costs: `python -m benches.exporter --folder /dev/shm/DIR`.

Each store has a log as saves write it, without objects behind it. The first refresh reads all of it into an SQLite catalog; then a refresh
finds nothing new, or a save to each branch; then the endpoint is scraped over HTTP, as Prometheus does, with and without gzip. It prints
medians.
"""

import argparse
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import tensorstore_ck as tsck
from tensorstore_ck.integrations.prometheus import Endpoint, Exporter
from tensorstore_ck.store import Store
from tests.catalog.made import publish


def timed(work: Callable[[], object], rounds: int) -> float:
    """The median, in milliseconds."""
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - begin))
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stores", type=int, default=10)
    parser.add_argument("--refs", type=int, default=200)
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    cache = given.folder / "cache"
    stores = [tsck.open(given.folder / f"s{number}", create=True, no_sync=True, cache_dir=cache) for number in range(given.stores)]

    def save(store: Store, step: int) -> None:
        for ref in range(given.refs):
            publish(store, f"runs/job-{ref}", step)

    for step in range(given.saves):
        for store in stores:
            save(store, step)
    urls = [store.url for store in stores]
    exporter = Exporter(str(given.folder / "catalog.sqlite"), urls, lambda url: tsck.open(url, read_only=True, cache_dir=cache))
    endpoint = Endpoint(exporter.registry, "127.0.0.1", 0, on_error=exporter.note_scrape_error)
    threading.Thread(target=endpoint.serve, daemon=True).start()

    def scrape(encoding: str) -> int:
        request = urllib.request.Request(endpoint.url, headers={"Accept-Encoding": encoding})
        with urllib.request.urlopen(request) as answer:
            return len(answer.read())

    with closing(exporter), closing(endpoint):
        print(f"{given.stores} stores, {given.refs} branches each, {given.saves} saves to each branch")
        print(f"first refresh {timed(exporter.refresh, 1):,.0f} ms")
        print(f"refresh, nothing new {timed(exporter.refresh, given.rounds):.1f} ms")
        publish(stores[0], "runs/job-0", given.saves)
        print(f"refresh, one save {timed(exporter.refresh, 1):.1f} ms")
        for store in stores:
            save(store, given.saves + 1)
        print(f"refresh, a save to each branch {timed(exporter.refresh, 1):,.0f} ms")
        for encoding in ("identity", "gzip"):
            print(f"scrape, {encoding}: {timed(partial(scrape, encoding), given.rounds):.0f} ms, {scrape(encoding):,} bytes")
        endpoint.stop()
    for store in stores:
        store.close()


if __name__ == "__main__":
    main()
