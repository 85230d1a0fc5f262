"""Checks that a job resumes bit for bit: runs a few steps twice from one snapshot, and compares the states.

Compares everything that `TrainingState` captures, in that order. Keeps a copy of the state after each step in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.session.group.process_groups import process_group
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import require_opened
from tensorstore_ck.training.compare_states import Difference, Leaves, copied, first_difference, leaves_of
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.training_state import TrainingState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MakeJob = Callable[[], tuple[TrainingState, Callable[[], object]]]
"""Builds a fresh job: its state, and a function that runs one step (and returns, for example, the loss)."""
RETURNED = "what step() returned"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `verify_resume` found."""

    root: str
    """Of the snapshot."""
    step: int | None
    """Of the snapshot."""
    steps: int
    """Compared steps."""
    compared: int
    """Tensors and values after each step."""
    difference: Difference | None

    @property
    def ok(self) -> bool:
        """Whether everything was the same, bit for bit."""
        return self.difference is None

    def __str__(self) -> str:
        where = f"{self.root[:12]} (step {self.step})"
        if self.difference is None:
            return f"{self.steps} steps from {where} are the same both times, bit for bit: {self.compared} tensors and values after each"
        difference = self.difference
        when = "right after the restore" if difference.step == 0 else f"after step {difference.step} of {self.steps}"
        return f"from {where}, {when}: {difference.name} differs: {difference.what}"


@short_errors
def verify_resume(
    make: MakeJob, store: ReadOnlyStore, address: str, steps: int = 3, *, group: "ProcessGroup | DeviceMesh | None" = None
) -> ResumeReport:
    """Restores the snapshot at `address` into two fresh jobs, one after the other, runs some steps with each, and compares them.

    Compares the whole state bit by bit, after the restore and after each step, and the values that the step returned.

    Args:
        make: Builds the job as a new process would: a `TrainingState`, and a function that runs one step.
        store: The store with the snapshot.
        address: The address of the snapshot.
        steps: How many steps to run.
        group: All its ranks call this; each reports the differences in its own side and its shards.

    Raises:
        NotFoundError: the snapshot does not exist.
        MismatchError: it does not fit the job.
    """
    require_opened(store)
    if steps < 1:
        raise InvalidOptionError(f"steps must be 1 or more, not {steps!r}", object_id="steps")
    group = process_group(group)

    def find() -> bytes:
        return store.resolve(address).root.encode()

    snapshot = store.resolve(ask_first_rank(store, group, f"the snapshot at {address!r}", find).decode())
    expected = [copied(leaves) for leaves in _run(make, store=store, root=snapshot.root, steps=steps, group=group)]
    first = None
    for number, leaves in enumerate(_run(make, store=store, root=snapshot.root, steps=steps, group=group)):
        first = first or first_difference(number, expected[number], leaves)  # no early exit: other ranks may wait for this one
    return ResumeReport(root=snapshot.root, step=snapshot.step, steps=steps, compared=len(expected[-1]), difference=first)


def _run(make: MakeJob, store: ReadOnlyStore, root: str, steps: int, group: "ProcessGroup | DeviceMesh | None") -> Iterator[Leaves]:
    """The state of one job after the restore, and after each step."""
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], TrainingState) or not callable(made[1]):
        raise InvalidOptionError(f"make() must return a TrainingState and a function that runs a step, not {made!r:.200}", object_id="make")
    training, step = made
    training.restore(store, root, group=group)
    yield leaves_of(training.captured())
    for _ in range(steps):
        returned = step()
        yield {**leaves_of(training.captured()), **leaves_of(returned, RETURNED)}
