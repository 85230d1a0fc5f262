"""Calls with a time limit."""

import threading

import pytest

from tensorstore_ck.common.threads import within_seconds
from tests.effort import PATIENCE_SECONDS


@pytest.mark.parametrize(("notice_seconds", "notices"), [(0.01, 1), (9.0, 0)])
def test_a_call_with_a_limit_says_once_that_it_takes_long(notice_seconds: float, notices: int) -> None:
    said: list[int] = []
    goes_on = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.02 s"):
        within_seconds(0.02, lambda: goes_on.wait(PATIENCE_SECONDS), notice_seconds=notice_seconds, notice=lambda: said.append(1))
    goes_on.set()
    assert len(said) == notices


def test_a_call_within_its_limit_returns_or_raises_as_it_is() -> None:
    assert within_seconds(PATIENCE_SECONDS, lambda: 7, notice_seconds=PATIENCE_SECONDS, notice=pytest.fail) == 7
    with pytest.raises(ZeroDivisionError):
        within_seconds(PATIENCE_SECONDS, lambda: 1 // 0, notice_seconds=PATIENCE_SECONDS, notice=pytest.fail)
