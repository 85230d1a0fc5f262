"""The search finds what a look at every position finds."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.maintenance.bisect_history import Verdict, first_bad

rows = st.lists(st.sampled_from(["good", "bad", "skip"]), max_size=60).map(lambda between: ["good", *between, "bad"])
turning = st.builds(
    lambda good, bad, skips: [
        "good",
        *("skip" if skip else each for each, skip in zip(["good"] * good + ["bad"] * bad, skips, strict=False)),
        "bad",
    ],
    st.integers(0, 40),
    st.integers(0, 40),
    st.lists(st.booleans(), min_size=80, max_size=80),
)


def several(verdict: Verdict, count: int) -> list[Verdict]:
    return [verdict] * count


def searched(row: list[Verdict]) -> tuple[int, int, list[int]]:
    """The last good position, the first bad one, and what was tested."""
    tested: list[int] = []

    def verdict(at: int) -> Verdict:
        tested.append(at)
        return row[at]

    return (*first_bad(0, len(row) - 1, verdict), tested)


@given(turning)
def test_a_row_that_turns_once_is_searched_as_by_a_linear_scan(row: list[Verdict]) -> None:
    good, bad, _ = searched(row)
    assert good == max(at for at, each in enumerate(row) if each == "good")
    assert bad == min(at for at, each in enumerate(row) if each == "bad")


@given(rows)
def test_in_any_row_the_answer_is_a_place_where_bad_follows_good(row: list[Verdict]) -> None:
    good, bad, tested = searched(row)
    assert (row[good], row[bad]) == ("good", "bad")
    assert good < bad
    assert set(row[good + 1 : bad]) <= {"skip"}
    assert len(set(tested)) == len(tested)


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_without_skips_the_number_of_tests_is_the_logarithm(good: int, bad: int) -> None:
    tested = []

    def verdict(at: int) -> Verdict:
        tested.append(at)
        return "good" if at <= good else "bad"

    assert first_bad(0, good + bad + 1, verdict) == (good, good + 1)
    assert len(tested) <= math.ceil(math.log2(good + bad + 1))


def test_after_a_skip_it_looks_far_away() -> None:
    """What cannot be tested often lies together, as half of this row does."""
    row = [*several("good", 240), *several("bad", 10), *several("skip", 500), *several("bad", 250)]
    good, bad, tested = searched(row)
    assert (good, bad) == (239, 240)
    assert len(tested) < 50
