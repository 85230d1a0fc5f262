"""The monthly costs of a store, by location, ref and job. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from tensorstore_ck.common.prices import Prices
from tensorstore_ck.gc.usage import Usage


class UsageCosts(NamedTuple):
    """USD a month."""

    locations: Mapping[str, float]
    refs: Mapping[str, float]
    """Each stored byte costs the mean of all locations: the locations of a ref's blocks are not looked up."""
    jobs: Mapping[str, float]

    @property
    def total(self) -> float:
        """The costs of the whole store."""
        return sum(self.locations.values())


def usage_costs(usage: Usage, prices: Prices) -> UsageCosts | None:
    """The costs; None without prices, or if a location that holds bytes has none."""
    total = prices.usd_per_month(usage.by_location) if prices.by_name else None
    if total is None:
        return None
    each = total / max(1, usage.objects_bytes)
    return UsageCosts(
        locations={url: prices.usd_per_month({url: size}) or 0.0 for url, size in usage.by_location.items()},
        refs={ref.ref: ref.stored_bytes * each for ref in usage.refs},
        jobs={job.job: job.stored_bytes * each for job in usage.jobs},
    )
