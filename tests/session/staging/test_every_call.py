"""At every call of the store and of the staging disk, while two saves are staged, uploaded and published: faults, and deaths.

Whatever was acknowledged is there afterwards, once: what was published at once, what was staged when the next process has opened the store
with that disk. Nothing stays in the folder, nothing is pinned.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.backend.staging.places import PieceStore
from tests.effort import in_turns
from tests.end_to_end.crash.faulty import Faults
from tests.session.staging.places import Acknowledged, check, process, require_nothing_lost

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.usefixtures("quick")]
MANY = range(1, 1000)


def enumerate_calls(path: Path, which: str, faults_at: Iterable[Faults], *, is_passing: bool = False) -> set[str]:
    """Two saves on top of a published one, by a process that meets the fault; then another process. Returns the kinds of calls."""
    struck: set[str] = set()
    for number, faults in enumerate(faults_at):
        server, disk, told, at = PieceStore(), path / str(number) / "stage", Acknowledged(), faults.at
        with process(server, disk) as first:
            told.put(first, 0)
        faults.at = 0
        with process(server, disk, **{which: faults}) as second:
            check(second.store, 0, "job")
            second.put_at(faults, at, told, 1, 2)
            faults.at = 0
        require_nothing_lost(server, disk, told)
        if not faults.struck:
            assert told.published == {0, 1, 2}
            return struck
        assert not is_passing or told.published == {0, 1, 2}, f"a passing fault cost a snapshot: {faults.struck}"
        struck.add(faults.struck.split()[0])
    raise AssertionError("the enumeration did not end")


def test_a_death_at_every_call_of_the_store(tmp_path: Path) -> None:
    """The first save is uploaded while the second is staged, so calls come in another order each time: none may be missed every time."""
    missed = {"get", "create", "put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"}
    for again in range(3):
        missed -= enumerate_calls(tmp_path / str(again), "store_faults", (Faults("die-after", at) for at in MANY))
        if not missed:
            return
    raise AssertionError(f"never struck: {missed}")


def test_a_passing_fault_at_every_call_of_the_store(tmp_path: Path) -> None:
    faults = (Faults(mode, at) for at, mode in in_turns(MANY, ["lost-reply", "unavailable"]))
    enumerate_calls(tmp_path, "store_faults", faults, is_passing=True)


def test_a_death_at_every_call_of_the_disk(tmp_path: Path) -> None:
    """In the middle of a write, where it is one."""
    struck = enumerate_calls(tmp_path, "disk_faults", (Faults("tear", at) for at in MANY))
    assert {"open", "append", "close", "put", "replace", "rename"} <= struck
