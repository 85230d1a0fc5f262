"""What the queue asks of a save. Protocols only."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.session.save.put_status import PutStatus

if TYPE_CHECKING:
    from tensorstore_ck.state.arena import Slot


class Admission(NamedTuple):
    """What is decided about a save before it is captured."""

    admitted: bool
    dropped: tuple[int, ...] = ()
    """Numbers of queued saves that are dropped to make space for it."""
    failed: int = 0
    """The number of an earlier save, whose error is raised instead."""


class StagedPut(Protocol):
    """A save that is staged."""

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
        """This process's."""

    def publish(self, status: PutStatus) -> SnapshotInfo:
        """Uploads the staged objects and publishes the snapshot."""


class Put(StagedPut, Protocol):
    """One save of this process."""

    @property
    def needed_bytes(self) -> int:
        """How much memory the capture needs."""

    @property
    def frozen_bytes(self) -> int:
        """Bytes that are not copied."""

    @property
    def patience_seconds(self) -> float | None:
        """How long it may wait for memory; None: without limit."""

    def replicate(self, status: PutStatus) -> None:
        """Copies the staged files to other hosts, if that is wanted; never fails."""

    def decide(self, admit: Callable[[], Admission]) -> Admission:
        """The result of `admit` on the rank that decides."""

    def skip(self) -> None:
        """The save does not take place; all ranks know it."""

    def fail(self, error: BaseException) -> None:
        """Reports to the other ranks that this one cannot save. May raise the error that all ranks raise."""

    def capture_into(self, slot: "Slot") -> None:
        """Copies the state, which may be mutated afterwards."""

    def run(self, status: PutStatus) -> SnapshotInfo | None:
        """Stores and publishes the captured state; or only stages it, and returns None."""
