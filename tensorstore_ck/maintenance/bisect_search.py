"""The search of `bisect`: where a row of things turns from good to bad, when some of them cannot be tested. Pure: it knows no store."""

from collections.abc import Callable
from typing import Literal

Verdict = Literal["good", "bad", "skip"]


def first_bad(good: int, bad: int, verdict: Callable[[int], Verdict]) -> tuple[int, int]:
    """The last good and the first bad position in a row that is good at `good`, bad at `bad`, and turns once between them.

    Between the two that are returned lie only positions with the verdict ``skip``. No position is tested twice; without skips some
    log2(bad - good) are tested. If the row turns more than once, one of the turns is found.
    """
    skipped = set[int]()
    missed = 0
    while left := [at for at in range(good + 1, bad) if at not in skipped]:
        at = left[min(int(len(left) * _fraction(missed)), len(left) - 1)]
        match verdict(at):
            case "good":
                good, missed = at, 0
            case "bad":
                bad, missed = at, 0
            case "skip":
                skipped.add(at)
                missed += 1
    return good, bad


def _fraction(missed: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 7/8, ...: after skips away from the middle, since what cannot be tested often lies together."""
    share = 0.5 ** ((missed + 1) // 2 + 1)
    return share if missed % 2 or not missed else 1 - share
