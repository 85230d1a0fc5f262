"""A catalog of many snapshots: `python -m benches.catalog --folder /tmp/bench --postgres postgresql://...` (without: one is started).

The log of a real local store gets an entry for each snapshot, as saves write them, without objects behind them; the catalog is fed from
it. Then the same questions are asked of SQLite and PostgreSQL, over and over; it prints medians.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import tensorstore_ck as tsck
from benches._folder import new_folder
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.format.record import Record
from tensorstore_ck.log import Op
from tensorstore_ck.store import Store
from tests.catalog import server

METRICS = ("train_loss", "val_loss", "val/acc")
QUESTIONS = (
    ("val_loss < 2.1 and step > 5000 and job like 'gpt-1%'", None),
    ("val_loss < 2.1 and step > 5000 and job like 'gpt%'", None),
    ("val_loss < 1.02", None),
    ("val_loss < 3", None),
    ("val_loss < 3", "val_loss"),
    ('train_loss < 1.5 and val_loss < 1.5 and "val/acc" > 0.9', "val_loss"),
    ("job = 'gpt-7' and step between 1000 and 20000", "step"),
    ("tag like 'best%' or pinned", None),
    ("not (val_loss < 2.9)", None),
    ("mark = 'bad'", None),
)


def fill(store: Store, snapshots: int, jobs: int) -> None:
    """Entries as saves write them."""
    draw = random.Random(0)
    engine = store.engine
    for number in range(snapshots):
        step = number // jobs * 100
        metrics = {name: 1 + 2 * draw.random() for name in METRICS}
        part = number.to_bytes(32, "big")
        ref = f"runs/gpt-{number % jobs}"
        record = Record(ref, step, None, b"\x80", metrics, engine.clock(), [new_ulid()], part, 10_000_000, 1_000_000)
        engine.log.append(lambda view, ref=ref, record=record: [Op.put(ref, new_ulid(), record, record.encode(), anchor=0, txn=new_ulid())])  # type: ignore[misc]
    for job in range(jobs):
        store.tag(f"best-{job}", f"runs/gpt-{job}@100")
        store.mark(f"runs/gpt-{job}@200", reason="diverged")
        store.pin(f"runs/gpt-{job}@300", reason="eval")


def asked(catalog: Catalog, rounds: int, limit: int) -> Iterator[tuple[str, int, float]]:
    for text, order in QUESTIONS:
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            found = catalog.find(text, order_by=order, limit=limit)
            seconds.append(time.perf_counter() - begin)
        yield text + (f" by {order}" if order else ""), len(found), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=50_000)
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--postgres", metavar="URL")
    args = parser.parse_args()
    with new_folder(args.folder), ExitStack() as stack:
        store = stack.enter_context(tsck.open(args.folder / "store", create=True, no_sync=True, cache_dir=args.folder / "cache"))
        begin = time.perf_counter()
        fill(store, args.snapshots, args.jobs)
        print(f"{args.snapshots} entries in {time.perf_counter() - begin:.0f} s", flush=True)
        urls = {"SQLite": str(args.folder / "catalog.sqlite"), "PostgreSQL": args.postgres or stack.enter_context(server.postgres())}
        rows: dict[str, list[str]] = {}
        for name, url in urls.items():
            catalog = stack.enter_context(Catalog(url))
            begin = time.perf_counter()
            report = catalog.rebuild(store)
            taken = time.perf_counter() - begin
            store.put_snapshot({"step": 0}, ref="runs/last", step=0)
            begin = time.perf_counter()
            catalog.sync(store)
            one = time.perf_counter() - begin
            print(f"{name}: {report.entries / taken:.0f} entries/s, then one more in {1000 * one:.0f} ms", flush=True)
            for text, count, seconds in asked(catalog, args.rounds, args.limit):
                rows.setdefault(text, [str(count)]).append(f"{1000 * seconds:.1f}")
        print(f"\nmedian of {args.rounds}, with at most {args.limit} results; ms\n| find | found | {' | '.join(urls)} |\n|---|---|---|---|")
        print("\n".join(f"| `{text}` | {' | '.join(cells)} |" for text, cells in rows.items()))


if __name__ == "__main__":
    main()
