"""What the queue of puts asks of a put, and of the memory that it is captured into. Protocols only."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.save.put_status import PutStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot


class Admission(NamedTuple):
    """What is decided about a put before it is captured."""

    admitted: bool
    dropped: tuple[int, ...] = ()
    """Numbers of queued puts that are given up for it."""
    failed: int = 0
    """The number of an earlier put, whose error is raised instead."""


class StagedPut(Protocol):
    """A put that was staged already."""

    @property
    def number(self) -> int:
        """From 1, the same on all ranks; 0 for what another process began."""

    @property
    def ref(self) -> str:
        """The branch that it moves."""

    @property
    def step(self) -> int | None:
        """The training step."""

    @property
    def rank(self) -> int:
        """Of this process."""

    def publish(self, status: PutStatus) -> SnapshotInfo:
        """Uploads what was staged, and publishes it."""


class Put(StagedPut, Protocol):
    """One put of this process."""

    @property
    def needed_bytes(self) -> int:
        """Of the memory to capture into."""

    @property
    def frozen_bytes(self) -> int:
        """That need not be captured."""

    @property
    def patience_seconds(self) -> float | None:
        """How long it may wait for memory; None: for ever."""

    def replicate(self, status: PutStatus) -> None:
        """Has what was staged kept on other hosts as well, where that is wanted; never fails."""

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """What `admit` says on the rank that decides."""

    def skip(self) -> None:
        """It does not take place, as all ranks know."""

    def fail(self, error: BaseException) -> None:
        """This rank cannot: the others are told. May raise what came of it."""

    def capture_into(self, slot: "Slot") -> None:
        """Copies the state: it may be mutated afterwards."""

    def run(self, status: PutStatus) -> SnapshotInfo | None:
        """Stores what was captured, and publishes it; or only stages it, and returns None."""
