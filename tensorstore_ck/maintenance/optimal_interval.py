"""How often to save, by what a save costs, what a failure costs, and how often there is one. Pure.

Times are seconds. J. W. Young, CACM 17 (1974), and J. T. Daly, FGCS 22 (2006), eq. 37: the interval that loses least to saves and to
work that is done again. ETTR: effective training time by wall time.
"""

import math
from typing import Final, NamedTuple

from tensorstore_ck.errors import InvalidOptionError

_STEPS: Final = 200
DEFAULT_MTBF_SECONDS: Final = 4 * 3600.0
"""What is assumed where nothing is known."""


class SaveCosts(NamedTuple):
    """What is measured of a job."""

    stall: float
    """What a save holds the training up for."""
    lag: float = 0.0
    """From then until the snapshot can be restored: what fails in between goes back one snapshot further."""
    restart: float = 0.0
    """From a failure until training goes on: noticing it, new hosts, restoring."""
    mtbf: float = DEFAULT_MTBF_SECONDS
    """Mean time between failures of the whole job."""


def require_costs(costs: SaveCosts) -> SaveCosts:
    """The same, if it makes sense.

    Raises:
        InvalidOptionError: a time that is negative or no number, or no time between failures.
    """
    for name, value in costs._asdict().items():
        if not (math.isfinite(value) and value >= 0) or (name == "mtbf" and value == 0):
            raise InvalidOptionError(f"{name} must be a time in seconds, not {value!r}", object_id=name)
    return costs


def young(costs: SaveCosts) -> float:
    """Young's interval between two saves, of training: the square root of 2 x stall x MTBF."""
    return math.sqrt(2 * costs.stall * costs.mtbf)


def daly(costs: SaveCosts) -> float:
    """Daly's, which stays right where a save costs much of the time between failures."""
    if costs.stall >= 2 * costs.mtbf:
        return costs.mtbf
    root = math.sqrt(costs.stall / (2 * costs.mtbf))
    return math.sqrt(2 * costs.stall * costs.mtbf) * (1 + root / 3 + root**2 / 9) - costs.stall


def ettr(interval: float, costs: SaveCosts) -> float:
    """The share of wall time that is training which counts, when a save is begun after each `interval` of training.

    Failures come at random, at a constant rate 1/M, also while the job restarts. An interval and its save take t + s; a try of that
    succeeds with exp(-(t + s)/M), so it takes M (exp((t + s)/M) - 1) on average, and each failure costs a restart, exp(r/M) times as it
    may fail, too (Daly, eq. 20). A failure within `lag` after a save goes back one snapshot further: of all failures lag/(t + s) do, and
    each loses t more, which counts here as a longer restart. That holds as long as the lag is shorter than the interval.
    """
    whole = interval + costs.stall
    if whole / costs.mtbf > 500:
        return 0.0
    again = costs.lag * interval / whole
    spent = costs.mtbf * math.exp((costs.restart + again) / costs.mtbf) * math.expm1(whole / costs.mtbf)
    return interval / spent


def best(costs: SaveCosts) -> float:
    """The interval with the best `ettr`, found by golden section: it has one maximum. Where a save stalls nothing, the lag bounds it."""
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
