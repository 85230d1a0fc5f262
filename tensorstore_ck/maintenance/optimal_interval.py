"""How often to save, from the costs of saves and failures and the failure rate. Pure; times are seconds.

J. W. Young, CACM 17 (1974), and J. T. Daly, FGCS 22 (2006), eq. 37: the interval that loses least to saves and repeated work. ETTR:
effective training time divided by wall time.
"""

import math
from typing import Final, NamedTuple

from tensorstore_ck.errors import InvalidOptionError

_STEPS: Final = 200
DEFAULT_MTBF_SECONDS: Final = 4 * 3600.0
"""Assumed if unknown."""


class SaveCosts(NamedTuple):
    """Measured costs of a job."""

    stall: float
    """How long a save blocks training."""
    lag: float = 0.0
    """The time from the end of the stall until the snapshot can be restored. A failure in between goes back one snapshot further."""
    restart: float = 0.0
    """The time from a failure until training continues: detection, new hosts, restore."""
    mtbf: float = DEFAULT_MTBF_SECONDS
    """Mean time between failures of the whole job."""


def require_costs(costs: SaveCosts) -> SaveCosts:
    """Returns valid `costs`. Raises `InvalidOptionError` if a time is negative or not a number, or the MTBF is 0."""
    for name, value in costs._asdict().items():
        if not (math.isfinite(value) and value >= 0) or (name == "mtbf" and value == 0):
            raise InvalidOptionError(f"{name} must be a time in seconds, not {value!r}", object_id=name)
    return costs


def young(costs: SaveCosts) -> float:
    """Young's interval: the square root of 2 x stall x MTBF."""
    return math.sqrt(2 * costs.stall * costs.mtbf)


def daly(costs: SaveCosts) -> float:
    """Daly's interval, which also holds if a save takes much of the time between failures."""
    if costs.stall >= 2 * costs.mtbf:
        return costs.mtbf
    root = math.sqrt(costs.stall / (2 * costs.mtbf))
    return math.sqrt(2 * costs.stall * costs.mtbf) * (1 + root / 3 + root**2 / 9) - costs.stall


def ettr(interval: float, costs: SaveCosts) -> float:
    """The share of wall time that is effective training, with a save after each `interval` of training.

    Failures occur at a constant rate 1/M, also while the job restarts. An interval and its save take t + s, and succeed with probability
    exp(-(t + s)/M), so they take M (exp((t + s)/M) - 1) on average. A failure costs a restart, times exp(r/M) as that may fail, too
    (Daly, eq. 20). A failure within `lag` after a save, a share lag/(t + s) of all, goes back one snapshot further and loses t more,
    which counts here as a longer restart. That holds while the lag is shorter than the interval.
    """
    whole = interval + costs.stall
    if whole / costs.mtbf > 500:
        return 0.0
    again = costs.lag * interval / whole
    spent = costs.mtbf * math.exp((costs.restart + again) / costs.mtbf) * math.expm1(whole / costs.mtbf)
    return interval / spent


def best(costs: SaveCosts) -> float:
    """The interval with the best `ettr`, which has one maximum, by golden-section search. The lag is the lower bound."""
    low, high = max(costs.stall, costs.lag, 1e-3) / 100, max(10 * costs.mtbf, 1.0)
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    for _ in range(_STEPS):
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        if ettr(math.exp(left), costs) < ettr(math.exp(right), costs):
            a = left
        else:
            b = right
    return max(math.exp((a + b) / 2), costs.lag)
