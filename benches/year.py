"""A year of 48 jobs on one store, simulated: `python -m benches.year --folder DIR`.

Each job saves hourly for some weeks, fails every 12 hours on average (one failure in four in the middle of a save), and goes on
from its newest snapshot. One policy for all; every day what it lets go and gc, every week `tier`. The clock is simulated, all else is
real: the log, its cache on disk in DIR, the policies, gc. Objects lie in memory. Prints the store's size and the bound that the
policy implies, how long each operation took in the first and the last quarter, what another host needs to catch up, and how quickly
a catalog of it answers.
"""

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend, Created
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.log.cache import open_table

HOUR = 3600.0
DAY = 24 * HOUR
START_NS = 1_800_000_000 * 10**9
MTBF_SECONDS = 12 * HOUR
CHANGED_BYTES = 64 << 10
SHARED_BYTES = 256 << 10
KEEP_DAYS = 60
RULES: dict[str, Any] = {
    "keep_last": 5,
    "keep_best": (3, "val_loss", "min"),
    "keep_every_seconds": "1d",
    "keep_younger": "6h",
    "expire_after": f"{KEEP_DAYS}d",
    "move_after": ("30d", "memory://cold"),
}
ALWAYS = 2
"""Of a branch: the newest and the fallback."""
BY_COUNT = 5 + 3 + 7
"""By keep_last, keep_best and keep_younger."""

QUESTIONS = (
    "val_loss < 0.62 and step > 500000 and job like 'gpt%'",
    "val_loss < 0.5",
    "mmlu > 0.4",
    "ref = 'runs/vit-02' and state = 'live'",
    "step between 100000 and 101000",
)


class Clock:
    """Nanoseconds since 1970, as set."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def __call__(self) -> int:
        return self.now_ns

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return (self.now_ns - START_NS) / 1e9

    def move_to(self, seconds: float) -> None:
        """Goes on; never back."""
        self.now_ns = max(self.now_ns, START_NS + int(seconds * 1e9))


class Died(BaseException):
    """The process is gone."""


class Mortal:
    """A backend whose process dies before its n-th write from now on."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.writes_left: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, name: str, data: Buffer) -> None:
        self._count()
        self._inner.put(name, data)

    def create(self, name: str, data: Buffer) -> Created:
        self._count()
        return self._inner.create(name, data)

    def open_writer(self, name: str) -> Any:
        self._count()
        return self._inner.open_writer(name)

    def _count(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise Died


class Timings:
    """Seconds of operations, with when they were."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._taken.setdefault(what, []).append(time.perf_counter() - start)

    def lines(self) -> Iterator[str]:
        for what, taken in self._taken.items():
            quarter = max(1, len(taken) // 4)
            first, last = statistics.median(taken[:quarter]), statistics.median(taken[-quarter:])
            p99 = sorted(taken)[int(len(taken) * 0.99)]
            told = f"median of the first quarter {first * 1e3:.1f} ms, of the last {last * 1e3:.1f} ms"
            yield f"{what:8} {len(taken):6,} times: {told}; p99 {p99 * 1e3:.1f} ms, longest {max(taken) * 1e3:.0f} ms"


class Job:
    """One training job: what it is at, and when it ends."""

    def __init__(self, number: int, begins: float, ends: float) -> None:
        family = ("gpt", "llama", "vit", "moe")[number % 4]
        self.ref = f"runs/{family}-{number:02d}"
        self.base = torch.from_numpy(np.random.default_rng(number % 4).integers(0, 256, SHARED_BYTES, dtype=np.uint8))
        self.begins, self.ends = begins, ends
        self.step = 0
        self.restarts = 0

    def state(self, random_bytes: np.random.Generator) -> dict[str, Any]:
        return {
            "base": self.base,
            "changed": torch.from_numpy(random_bytes.integers(0, 256, CHANGED_BYTES, dtype=np.uint8)),
            "step": self.step,
        }


class Year:
    """The simulation."""

    def __init__(self, folder: Path, jobs: int, days: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = np.random.default_rng(seed)
        self.clock = Clock()
        self.days = days
        self.own = MemoryBackend(clock=self.clock)
        self.cold = MemoryBackend(clock=self.clock)
        self.mortal = Mortal(cast(Backend, self.own))
        self.config = init_store(cast(Backend, self.own))
        self.table = open_table(folder, "host")
        self.store = self.open()
        self.timings = Timings()
        self.puts: list[float] = []
        self.failures = self.died_saving = 0
        self.most_bytes = self.most_of_bound = 0.0
        self.jobs = []
        for number in range(jobs):
            begins = self.random.uniform(0, 0.9 * days) * DAY
            self.jobs.append(Job(number, begins, min(days * DAY, begins + self.random.uniform(14, 56) * DAY)))

    def open(self, table: Any = None) -> tsck.Store:
        """A handle of a new process of the host; with a table, of another host."""
        backend = cast(Backend, self.mortal)
        engine = make_engine(backend, self.config, table or self.table, clock=self.clock, open_place=lambda _: cast(Backend, self.cold))
        return tsck.Store(engine)

    def run(self) -> None:
        self.store.set_policy("runs/*", **RULES)
        events: list[tuple[float, int, Callable[[], None]]] = []
        order = iter(range(1 << 60))

        def at(seconds: float, action: Callable[[], None]) -> None:
            heapq.heappush(events, (seconds, next(order), action))

        def save(job: Job) -> None:
            job.step += 1000
            dies = self.random.random() < HOUR / MTBF_SECONDS
            self.mortal.writes_left = self.random.randrange(4) if dies and self.random.random() < 0.25 else None
            self.put(job)
            if dies:
                self.fail(job)
            if self.clock.seconds + HOUR < job.ends:
                at(self.clock.seconds + HOUR * self.random.uniform(0.9, 1.1), lambda: save(job))

        for job in self.jobs:
            at(job.begins, lambda job=job: save(job))  # type: ignore[misc]
        for day in range(1, self.days + 1):
            at(day * DAY, lambda day=day: self.look_after(day))  # type: ignore[misc]
        while events:
            seconds, _, action = heapq.heappop(events)
            self.clock.move_to(seconds)
            action()

    def put(self, job: Job) -> None:
        loss = 10 / (1 + job.step / 50_000) + self.random.gauss(0, 0.05)
        try:
            with self.timings.of("put"):
                self.store.put_snapshot(
                    job.state(self.bytes), ref=job.ref, step=job.step, metrics={"val_loss": loss, "lr": 1e-4}, expect=tsck.ANY
                )
            self.puts.append(self.clock.seconds)
        except Died:
            self.died_saving += 1
        finally:
            self.mortal.writes_left = None

    def fail(self, job: Job) -> None:
        """Another process goes on from what is published."""
        self.failures += 1
        job.restarts += 1
        self.store = self.open()
        found = self.store.log(job.ref, limit=1) if job.ref in self.store.branches() else []
        job.step = int(found[0].step or 0) if found else 0
        if found:
            with self.timings.of("restore"):
                state = self.store.checkout(job.ref)
            assert state["step"] == job.step

    def look_after(self, day: int) -> None:
        with self.timings.of("retain"):
            self.store.apply_policies()
        if day % 7 == 0:
            with self.timings.of("tier"):
                self.store.migrate_tiers()
        with self.timings.of("gc"):
            self.store.gc()
        used, bound = self.used_bytes(), self.bound_bytes()
        self.most_bytes = max(self.most_bytes, used)
        self.most_of_bound = max(self.most_of_bound, used / bound)
        if day % 30 == 0:
            kept = sum(1 for _ in self.store.engine.log.view().snapshots())
            print(
                f"day {day}: {len(self.puts):,} puts, {kept:,} snapshots held, {human_bytes(used)} of at most {human_bytes(bound)}, "
                f"{human_bytes(self.cold_bytes())} of that in the cold place",
                flush=True,
            )

    def used_bytes(self) -> int:
        """All that snapshots take, everywhere."""
        return sum(
            info.size_bytes for kind in ("packs/", "parts/", "snapshots/", "moved/") for info in self.store.engine.backend.list(kind)
        )

    def cold_bytes(self) -> int:
        return sum(info.size_bytes for info in self.cold.list(""))

    def bound_bytes(self) -> int:
        """What the policy keeps at most, and what came in the last two days: the undo window, and the day until the next gc."""
        now = self.clock.seconds
        kept = 0
        for job in self.jobs:
            days = (min(now, job.ends) - max(job.begins, now - KEEP_DAYS * DAY)) / DAY
            kept += 0 if job.begins > now else ALWAYS if days <= 0 else ALWAYS + BY_COUNT + int(days) + 2
        recent = sum(seconds > now - 2 * DAY for seconds in self.puts[-48 * 60 :])
        each = CHANGED_BYTES + 4096  # pack, part, record and moved object around it
        return 4 * SHARED_BYTES + (kept + recent) * each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the host's cache and the catalog")
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    year = Year(options.folder, options.jobs, options.days, options.seed)
    start = time.perf_counter()
    year.run()
    print(f"{len(year.jobs)} jobs, {len(year.puts):,} snapshots put, {year.failures:,} failures, {year.died_saving:,} of them while saving")
    print(f"simulated in {time.perf_counter() - start:.0f} s; the log has {year.store.engine.log.sync().n:,} entries")
    print(f"size: at most {human_bytes(int(year.most_bytes))}, and at most {year.most_of_bound:.2f} of the bound")
    print(*year.timings.lines(), sep="\n")
    assert year.most_of_bound <= 1
    other = year.open(open_table(options.folder, "other"))
    before = time.perf_counter()
    assert other.branches().keys() == year.store.branches().keys()
    print(f"another host, without a cache: {time.perf_counter() - before:.2f} s to know every ref")
    report = other.fsck(read_data=True)
    assert report.ok, report.findings
    for job in year.jobs:
        assert torch.equal(other.checkout(job.ref)["base"], job.base)
    ask_catalog(options.folder / "catalog.sqlite", other)


def ask_catalog(path: Path, store: tsck.Store) -> None:
    path.unlink(missing_ok=True)
    with Catalog(path) as catalog:
        before = time.perf_counter()
        report = catalog.sync(store)
        taken = time.perf_counter() - before
        print(
            f"catalog: {report.entries:,} entries, {report.snapshots:,} snapshots read in {taken:.1f} s; {human_bytes(path.stat().st_size)}"
        )
        store.annotate("runs/gpt-00", {"mmlu": 0.5})
        before = time.perf_counter()
        assert catalog.sync(store).entries == 1
        print(f"  a sync of one more entry: {(time.perf_counter() - before) * 1e3:.1f} ms")
        for condition in QUESTIONS:
            taken_each = []
            for _ in range(9):
                before = time.perf_counter()
                found = catalog.find(condition, state=None, limit=50)
                taken_each.append(time.perf_counter() - before)
            print(f"  {statistics.median(taken_each) * 1e3:6.1f} ms, {len(found):,} found: {condition}")


if __name__ == "__main__":
    main()
