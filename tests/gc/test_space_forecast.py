"""How much space is left where a store is, its growth, and when it will be full; and what it costs."""

from pathlib import Path

import numpy as np
import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.prices import Prices, usd_text
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.gc.usage import Usage, usage_costs
from tensorstore_ck.log import store_objects
from tests.gc.stores import Clock, open_store

DAY = 86_400
SIZE = 1_000_000


class Disk(MemoryBackend):
    """A disk that reports how much is free."""

    free: Space | None = None

    def space(self) -> Space | None:
        return self.free


class Job:
    def __init__(self) -> None:
        self.clock = Clock(2_000_000_000_000_000_000)
        self.backend = Disk(clock=self.clock)
        self.store = open_store(self.backend, clock=self.clock)
        self.number = 0

    def save(self, ref: str = "a") -> int:
        """Saves noise; returns the bytes that it added."""
        self.number += 1
        noise = np.random.default_rng(self.number).integers(0, 256, SIZE, np.uint8)
        return self.store.put_snapshot({"x": noise}, ref=ref, step=self.number).new_bytes

    def usage(self, free: Space | None = None) -> Usage:
        self.backend.free = free
        return self.store.usage()


def test_the_growth_of_the_last_seven_days_and_when_it_is_full() -> None:
    job = Job()
    job.save()
    job.clock.advance(8 * DAY)
    added = []
    for _ in range(4):
        added.append(job.save())
        job.clock.advance(DAY)
    found = job.usage(Space(free_bytes=30 * SIZE, total_bytes=100 * SIZE)).space
    assert found.growth_bytes_per_day == int(sum(added) / 7)
    assert found.full_in_days == pytest.approx(30 * SIZE / (sum(added) / 7))
    assert found.describe() == "28.6 MiB of 95.4 MiB free here; grows by 558.3 KiB a day: full in 52 days"
    job.store.forget("a@2", "a@3")
    job.store.gc(tsck.GcOptions(undo_window_seconds=0, max_delete=1))
    assert job.usage().space.growth_bytes_per_day == int(sum(added[2:]) / 7), "what was freed counts no more"
    assert job.usage().space.full_in_days is None, "the location does not say what is free"


def test_inodes_may_end_first() -> None:
    job = Job()
    for _ in range(3):
        job.save()
        job.clock.advance(DAY)
    space = Space(free_bytes=10**12, total_bytes=10**12, free_inodes=10)
    usage = job.usage(space)
    objects_a_day = usage.space.growth_bytes_per_day / (usage.objects_bytes / len([*store_objects(job.backend)]))  # type: ignore[operator]
    assert usage.space.full_in_days == pytest.approx(10 / objects_a_day)
    assert "10 inodes free" in usage.space.describe()


def test_a_young_or_empty_store_has_no_growth() -> None:
    job = Job()
    assert job.usage().space.describe() == ""
    job.save()
    job.clock.advance(60)
    found = job.usage(Space(5, 10)).space
    assert (found.growth_bytes_per_day, found.full_in_days, found.describe()) == (None, None, "5 B of 10 B free here")


def test_a_folder_reports_bytes_and_inodes(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "ck", create=True) as store:
        space = store.usage().space
    assert space.free_bytes is not None
    assert 0 < space.free_bytes <= (space.total_bytes or 0)


# --- money ------------------------------------------------------------------------------------------------------------


def test_what_refs_jobs_and_the_store_cost() -> None:
    job = Job()
    job.save("runs/a")
    job.save("runs/b")
    usage = job.usage()
    costs = usage_costs(usage, Prices.parse([f"{usage.url}=1000"]))
    assert costs is not None
    assert costs.locations == {usage.url: pytest.approx(usage.objects_bytes / 1e6)}
    assert costs.refs == {ref.ref: pytest.approx(ref.stored_bytes / 1e6) for ref in usage.refs}
    assert costs.jobs == {"runs": pytest.approx(usage.stored_bytes / 1e6, rel=0.01)}
    assert usage_costs(usage, Prices.parse(["s3=1"])) is None


def test_the_longest_name_that_fits_counts(tmp_path: Path) -> None:
    (tmp_path / "prices").write_text("# ours\ns3 = 0.023\n\ns3://cold/deep=0.001 # archive\n/data=0.1\n")
    prices = Prices.parse([str(tmp_path / "prices"), "s3://cold=0.004,file=0.2"])
    found = {
        url: prices.of(url)
        for url in ("s3://a/b", "s3://cold", "s3://cold/x", "s3://cold/deep/x", "s3://colder", "/data/x", "/database", "gs://a")
    }
    assert [*found.values()] == [0.023, 0.004, 0.004, 0.001, 0.023, 0.1, 0.2, None]
    assert prices.usd_per_month({"s3://a/b": 10**10, "gs://a": 0}) == pytest.approx(0.23)
    assert prices.usd_per_month({"s3://a/b": 1, "gs://a": 1}) is None


@pytest.mark.parametrize("word", ["s3=", "=1", "s3=-1", "s3=nan", "s3=inf", "s3=1,x"])
def test_what_is_no_price(word: str) -> None:
    with pytest.raises(InvalidOptionError, match="a price is NAME=USD"):
        Prices.parse([word])


def test_files_of_prices_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file of prices"):
        Prices.parse([str(tmp_path / "none")])
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        Prices.parse([str(tmp_path)])


def test_amounts_as_text() -> None:
    assert [usd_text(usd) for usd in (0, 0.001, 0.01, 1234.5)] == ["0.00 USD", "< 0.01 USD", "0.01 USD", "1,234.50 USD"]
