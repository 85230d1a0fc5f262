"""Delays between tries."""

import random

import pytest

from tensorstore_ck.common.retry import next_delay


@pytest.mark.parametrize(
    ("failures", "least", "shortest", "longest"),
    [(0, 0.0, 0.0, 0.5), (0, 0.5, 0.25, 0.5), (3, 0.5, 2.0, 4.0), (9, 0.5, 15.0, 30.0), (10**6, 1.0, 30.0, 30.0)],
)
def test_a_delay_doubles_up_to_the_longest(failures: int, least: float, shortest: float, longest: float) -> None:
    assert next_delay(failures, 0.5, 30.0, least=least, jitter=lambda: 0.0) == shortest
    assert next_delay(failures, 0.5, 30.0, least=least, jitter=lambda: 1.0) == longest
    assert shortest <= next_delay(failures, 0.5, 30.0, least=least, jitter=random.random) <= longest
