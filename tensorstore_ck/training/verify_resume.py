"""Whether a job resumes bit for bit: some steps are made twice from one snapshot, and all that they leave is compared.

Knows no parts: it compares what `TrainingState` captures, in its order, bit by bit. Keeps a copy of the state after each step in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.read_only_store import ReadOnlyStore
from tensorstore_ck.session.group.process_groups import process_group
from tensorstore_ck.training.compare_states import Difference, Leaves, copied, first_difference, leaves_of
from tensorstore_ck.training.find_resume_point import find_resume_point
from tensorstore_ck.training.training_state import TIMEOUT_SECONDS, TrainingState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MakeJob = Callable[[], tuple[TrainingState, Callable[[], object]]]
"""Builds the job anew: its state, and what makes one step (and returns its loss, say)."""
RETURNED = "what step() returned"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `verify_resume` found."""

    root: str
    """Of the snapshot."""
    step: int | None
    """Of the snapshot."""
    steps: int
    """How many were compared."""
    compared: int
    """Tensors and values after each step."""
    difference: Difference | None

    @property
    def ok(self) -> bool:
        """Whether all was the same, bit for bit."""
        return self.difference is None

    def __str__(self) -> str:
        where = f"{self.root[:12]} (step {self.step})"
        if self.difference is None:
            return f"{self.steps} steps from {where} are the same both times, bit for bit: {self.compared} tensors and values after each"
        found = self.difference
        when = "right after the restore" if found.step == 0 else f"after step {found.step} of {self.steps}"
        return f"from {where}, {when}: {found.name} differs: {found.what}"


def verify_resume(
    make: MakeJob, store: ReadOnlyStore, address: str, steps: int = 3, *, group: "ProcessGroup | DeviceMesh | None" = None
) -> ResumeReport:
    """Restores the snapshot at `address` into two fresh jobs, one after the other, makes some steps with each, and compares them.

    Everything that the states hold is compared bit by bit, after the restore and after each step, and what the step returned.

    Args:
        make: Builds the job, as a process that begins would: a `TrainingState`, and a function that makes one step.
        store: Where the snapshot is.
        address: Of the snapshot.
        steps: How many steps to make.
        group: All ranks of it do the same; each tells what differs of its own side and its shares.

    Raises:
        NotFoundError: there is no such snapshot.
        MismatchError: it does not fit the job.
    """
    if steps < 1:
        raise InvalidOptionError(f"steps must be 1 or more, not {steps!r}", object_id="steps")
    group = process_group(group)
    found = find_resume_point(store, address, group, TIMEOUT_SECONDS)
    if found is None:
        raise NotFoundError(f"there is no snapshot at {address!r}", object_id=address)
    expected = [copied(leaves) for leaves in _run(make, store, found.root, steps, group)]
    first = None
    for number, leaves in enumerate(_run(make, store, found.root, steps, group)):
        first = first or first_difference(number, expected[number], leaves)  # to the end, since other ranks may wait for this one
    return ResumeReport(found.root, found.step, steps, len(expected[-1]), first)


def _run(make: MakeJob, store: ReadOnlyStore, root: str, steps: int, group: "ProcessGroup | DeviceMesh | None") -> Iterator[Leaves]:
    """What one job holds after the restore, and after each step."""
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], TrainingState) or not callable(made[1]):
        raise InvalidOptionError(
            f"make() must return a TrainingState and a function that makes a step, not {made!r:.200}", object_id="make"
        )
    training, step = made
    training.restore(store, root, group=group)
    yield leaves_of(training.captured())
    for _ in range(steps):
        returned = step()
        yield {**leaves_of(training.captured()), **leaves_of(returned, RETURNED)}
