"""A run is killed with -9 at every call of the backend that a save makes: its resume is bit for bit the run that nothing disturbed."""

import random
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan cannot be installed with the pinned fsspec: run `make test-apart`")

from tests.effort import effort
from tests.integrations.titan import runs
from tests.integrations.titan.killed_runs import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.race,
    pytest.mark.timeout(3600),
    *map(pytest.mark.filterwarnings, [*runs.WARNINGS, "ignore:a run has ended with", "ignore:This process .* is multi-threaded"]),
]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_kill_at_every_call(tmp_path: Path, async_mode: str) -> None:
    """Before the call, or in the middle of it where it can leave half an object; also in the last save, which has only weights."""
    undisturbed = run(tmp_path / "whole", async_mode=async_mode)
    assert undisturbed is not None
    calls, whole = undisturbed
    assert calls > 5
    every = [(at, torn) for at in range(1, calls + 1) for torn in (False, True)]
    cases = random.Random(21).sample(every, min(len(every), effort(3, len(every))))
    print(f"{len(cases)} of {len(every)} kills")
    for at, torn in cases:
        cut = tmp_path / f"cut-{at}-{torn}"
        killed = run(cut, at=at, torn=torn, async_mode=async_mode) is None
        assert killed or async_mode == "async", f"nothing was killed at {at}"  # in the background, two saves can share calls
        ended = run(cut, async_mode=async_mode)
        assert ended is not None
        resumed = ended[1]
        done = len(whole.losses) - len(resumed.losses)
        assert done in (3, 6)
        runs.assert_continues(resumed, whole, done)
