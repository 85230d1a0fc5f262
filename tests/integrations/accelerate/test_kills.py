"""A loop dies at every call of the backend that a save makes: its resume is bit for bit the run that nothing disturbed."""

from contextlib import suppress
from pathlib import Path

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend
from tests.gc.stores import contents, open_store
from tests.integrations.accelerate import runs
from tests.integrations.accelerate.test_accelerator import assert_continues

pytestmark = [pytest.mark.slow, pytest.mark.race]
KILLED_AFTER = 4
"""The first save is whole; the death is in the second, after step 6."""


def test_a_death_at_every_call(tmp_path: Path) -> None:
    whole = runs.train(tmp_path / "whole", None, resume=False)
    before = MemoryBackend()
    with pytest.raises(runs.Killed):
        runs.train(tmp_path / "out", open_store(before), resume=False, kill_after=KILLED_AFTER, attach={"asynchronous": False})
    seen: set[int] = set()
    for at, mode in in_turns(range(1, 1000), ["die-before", "die-after", "tear"]):
        backend, faults = MemoryBackend(), Faults(mode)
        for name, data in contents(before).items():
            backend.put(name, data)
        store = open_store(FaultyBackend(backend, faults, atomic_put=False))
        faults.calls = 0

        def strike(step: int, faults: Faults = faults, at: int = at) -> None:
            if step == 5:
                faults.calls, faults.at = 0, at

        with suppress(Death, runs.Killed):
            runs.train(tmp_path / "out", store, attach={"asynchronous": False}, on_step=strike, kill_after=7)
        resumed = runs.train(tmp_path / "out", open_store(backend))
        done = len(whole.losses) - len(resumed.losses)
        assert_continues(resumed, whole, done)
        seen.add(done)
        if not faults.struck:
            break
    assert at > 5
    assert seen == {3, 6}
