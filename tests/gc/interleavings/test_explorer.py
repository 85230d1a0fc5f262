"""The explorer can fail: each of these breaks one rule of a commit, and a schedule that loses something is found.

tests/mutants/gc.toml has more of them.
"""

from typing import Any

import pytest

from tensorstore_ck.backend.protocol import Created
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import BackendUnavailableError, MissingObjectError, NoSpaceError, UndecidedError
from tensorstore_ck.log import Log, RefTable
from tensorstore_ck.log.entry import EntryWriter
from tests.gc.interleavings.actor import Actor, Process, SteppingBackend
from tests.gc.interleavings.scenes import Scene
from tests.gc.interleavings.schedule import Violation, explore, explore_random, replay
from tests.gc.interleavings.test_writers import FALLIBLE, writers

pytestmark = pytest.mark.race


class Forgetful:
    """A view of the log that knows of no transaction how it ended."""

    def __init__(self, view: RefTable) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def outcome(self, txn: Ulid) -> None:
        return None


def test_an_answer_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXISTS is taken for a loss, though it may be our own entry (icechunk #2099): done, and reported as not done.

    Nor do saves ask the log for their own outcome, which alone would keep them from publishing twice.
    """
    append = Log.append
    monkeypatch.setattr(Log, "append", lambda self, build, **options: append(self, lambda view: build(Forgetful(view)), **options))

    def create(self: EntryWriter, sealed: bytes, entry: Any) -> bool:
        try:
            return self.backend.create(self.chain.name(entry.n), sealed) is Created.CREATED
        except BackendUnavailableError:
            return False

    monkeypatch.setattr(EntryWriter, "create", create)
    with pytest.raises(Violation, match="was told that its snapshot is not published") as caught:
        explore(writers("A", "B"))
    assert len(caught.value.schedule) < 20
    with pytest.raises(Violation, match="was told that its snapshot is not published"):
        replay(writers("A", "B"), caught.value.schedule)
    with pytest.raises(Violation, match="was told that its snapshot is not published"):
        explore_random(writers("A", "B"), 2000, seed=1)
    monkeypatch.undo()
    replay(writers("A", "B"), caught.value.schedule[:-4])  # without the calls that look up who moved the ref, for the message


def test_exclusive_create_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes create one entry (icechunk #804): the second overwrites a commit that was acknowledged."""

    def create(self: SteppingBackend, name: str, data: bytes) -> Created:
        self.replace(name, data)
        return Created.CREATED

    monkeypatch.setattr(SteppingBackend, "create", create)
    with pytest.raises(Violation):
        explore(writers("A", "B")._replace(max_faults=0))


def test_what_an_undecided_save_wrote_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save deletes its objects although its entry was sent, and comes late."""
    monkeypatch.setattr("tensorstore_ck.log.entry.RESEND_DELAYS", (0.0,))
    case = writers("A", "B")._replace(faults=("delayed",), max_faults=1)
    explore(case)
    monkeypatch.setattr("tensorstore_ck.engine.write.write_and_commit.NoSpaceError", (NoSpaceError, UndecidedError))
    with pytest.raises(Violation):
        explore(case)


def test_code_that_is_not_deterministic() -> None:
    scene = Scene()
    scene.put("job", "shared a0")
    count = iter(range(100))

    def run(process: Process) -> object:
        return process.backend.get(f"log/{next(count)}", max_bytes=1)

    with pytest.raises(AssertionError, match="not deterministic"):
        explore(scene.case(Actor("A", run, None, (MissingObjectError, *FALLIBLE)), faults=("refused",)))
