"""A run is killed with -9 at every call of the backend that a save in the background makes: its resume is bit for bit the run that nothing
disturbed. For saves that are waited for see `test_conformance.py`.
"""

import random
from pathlib import Path

import pytest

from tests.effort import effort
from tests.integrations.hf.killed_runs import Ended, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_kill_at_every_call(tmp_path: Path) -> None:
    """Before the call, or in the middle of it where it can leave half an object."""
    whole = run(tmp_path / "whole")
    assert whole is not None
    assert whole.calls > 5
    every = [(at, torn) for at in range(1, whole.calls + 1) for torn in (False, True)]
    cases = random.Random(21).sample(every, min(len(every), effort(2, len(every))))
    print(f"{len(cases)} of {len(every)} kills")
    wrong = []
    for at, torn in cases:
        cut = tmp_path / f"cut-{at}-{torn}"
        run(cut, at=at, torn=torn)  # nothing is killed where two saves share calls
        resumed = run(cut, resume=True)
        assert resumed is not None
        if not _same(resumed, whole):
            wrong.append((at, torn))
    assert wrong == []


def _same(resumed: Ended, whole: Ended) -> bool:
    order = whole.samples[len(whole.samples) - len(resumed.samples) :]
    return (resumed.samples, resumed.losses, resumed.digests) == (order, whole.losses, whole.digests)
