"""At every call of the store and of the staging disk, while two saves are staged, uploaded and published: faults, and deaths.

Whatever was acknowledged is there afterwards, once: what was published at once, what was staged when the next process has opened the store
with that disk. Nothing stays in the folder, nothing is pinned.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.errors import StoreError
from tests.backend.staging.places import PieceStore
from tests.end_to_end.crash.faulty import Faults
from tests.session.staging.places import check, ended, process, require_all_well

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


class Full(Faults):
    """Counts only what uses space."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if what.split(maxsplit=1)[0] in ("open", "append", "close", "put", "replace", "rename", "makedirs"):
            return super().call(what, effect, tear, create=create)
        return effect()


class Acknowledged:
    """What a process learned before it died."""

    def __init__(self) -> None:
        self.staged: set[int] = set()
        self.published: set[int] = set()
        self.failed: set[int] = set()


def run_once(server: PieceStore, path: Path, which: str, faults: Faults) -> Acknowledged:
    """Two saves on top of a published one, by a process that meets the faults; then another process."""
    told = Acknowledged()
    with process(server, path) as first:
        first.put(0).wait()
    mode_at, faults.at = faults.at, 0
    try:
        dying = process(server, path, **{which: faults})
        with dying as second:
            check(second.store, 0, "job")
            faults.calls, faults.at = 0, mode_at
            pendings = []
            for step in (1, 2):
                with contextlib.suppress(BaseException):  # what an earlier one failed with
                    pendings.append((step, second.put(step)))
            for step, pending in pendings:
                ended(pending)
                if pending.staged.reached():
                    told.staged.add(step)
                if isinstance(pending.error, StoreError):
                    told.failed.add(step)
                if pending.published.reached():
                    told.published.add(step)
            faults.at = 0
    finally:
        faults.at = mode_at
    with process(server, path) as third:
        third.store.finish_staged("job")
        found = [snapshot.step for snapshot in third.store.log("job")]
    steps = sorted(found)  # type: ignore[type-var]
    assert found == steps[::-1]
    assert len(set(found)) == len(found), "published twice"
    lost = (told.staged | {0}) - set(found)
    assert not lost, f"staged, and lost: {faults.struck}"
    assert told.published <= set(found), f"published, and lost: {faults.struck}"
    require_all_well(server, path, steps)
    return told


@pytest.mark.parametrize("mode", ["die-after", "lost-reply", "unavailable"])
def test_every_call_of_the_store(tmp_path: Path, mode: str) -> None:
    struck = enumerate_calls(tmp_path, "store_faults", mode)
    assert {"get", "create", "put_object", "create_multipart_upload", "upload_part", "complete_multipart_upload"} <= struck


@pytest.mark.parametrize("mode", ["tear", "no-space"])
def test_every_call_of_the_disk(tmp_path: Path, mode: str) -> None:
    struck = enumerate_calls(tmp_path, "disk_faults", mode)
    assert {"open", "append", "close", "put", "replace", "rename"} <= struck


def enumerate_calls(path: Path, which: str, mode: str) -> set[str]:
    struck = set()
    for at in range(1, 1000):
        faults = (Full if mode == "no-space" else Faults)(mode, at)
        told = run_once(PieceStore(), path / str(at) / "stage", which, faults)
        if not faults.struck:
            assert told.published == {1, 2}
            break
        if mode in ("lost-reply", "unavailable"):
            assert told.published == {1, 2}, f"a passing fault cost a snapshot: {faults.struck}"
        struck.add(faults.struck.split()[0])
    return struck
