"""Checks that a job resumes bit for bit: runs a few steps twice from one snapshot, and compares the states.

Compares everything that `TrainingState` captures, in the order of capture. Keeps a copy of the state after each step in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.values import encode
from tensorstore_ck.session.group.process_groups import process_group
from tensorstore_ck.state.registered_types import encode_torch
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import require_opened
from tensorstore_ck.training.rank_group import ask_first_rank
from tensorstore_ck.training.training_state import TrainingState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Leaves = dict[str, Any]
"""Path -> tensor or plain value, in the state's order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tensor or value that was not the same both times."""

    step: int
    """Steps after the snapshot: 0 when the restored states differ already."""
    name: str
    """The tensor or value, by its path in the state."""
    what: str
    """For people: ``3 of 100 elements differ, by 1.2e-07 at most``."""
    differing: int = 0
    """Elements of a tensor."""
    elements: int = 0
    max_difference: float | None = None
    """Over the elements that are not NaN either time."""


def leaves_of(state: object, path: str = "") -> Leaves:
    """The tensors and values of a state, not copied."""
    return dict(_flat(state, path))


def copied(leaves: Leaves) -> Leaves:
    """A copy for `first_difference`, which later steps do not change."""
    return {path: _copied(leaf) for path, leaf in leaves.items()}


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _flat(child, f"{prefix}{key}")
    elif isinstance(value, list | tuple) and any(isinstance(child, torch.Tensor | np.ndarray | Mapping | list | tuple) for child in value):
        for number, child in enumerate(value):
            yield from _flat(child, f"{prefix}{number}")
    else:
        yield path, value


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return _local(leaf).clone()
    return _bits(leaf)


def _local(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, np.ndarray):
        is_number = leaf.dtype.kind in "biufc" and leaf.itemsize <= 16 and leaf.dtype.isnative
        return torch.from_numpy(leaf.copy() if is_number else np.frombuffer(leaf.tobytes(), np.uint8).copy())
    local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    assert isinstance(local, torch.Tensor)
    return local.detach().cpu()


def _bits(value: object) -> object:
    """Equal for two values only if they are bit-identical."""
    plain = tuple(value) if isinstance(value, list) else value
    try:
        return type(value).__name__, pack_body(encode(plain, "", encode_torch))
    except UnsupportedValueError:
        return type(value).__name__, repr(value)


def first_difference(step: int, expected: Leaves, actual: Leaves) -> Difference | None:
    """The first difference, in the order of the state. `expected` comes from `copied`."""
    for name, leaf in actual.items():
        if name not in expected:
            return Difference(step, name, "it is there the second time only")
        difference = _compare(step, name, expected[name], leaf)
        if difference is not None:
            return difference
    gone = next((name for name in expected if name not in actual), None)
    return None if gone is None else Difference(step, gone, "it is there the first time only")


def _compare(step: int, name: str, old: Any, new: Any) -> Difference | None:
    if not isinstance(old, torch.Tensor):
        return None if old == _copied(new) else Difference(step, name, "the values are not the same")
    if not isinstance(new, torch.Tensor | np.ndarray):
        return Difference(step, name, "it is a tensor the first time only")
    other = _local(new)
    if (old.dtype, old.shape) != (other.dtype, other.shape):
        return Difference(step, name, f"{old.dtype} {list(old.shape)} the first time, {other.dtype} {list(other.shape)} the second")
    differs = (_bytes_of(old) != _bytes_of(other)).any(dim=-1)
    count = int(differs.sum())
    if not count:
        return None
    gap = _largest_gap(old, other)
    by = "" if gap is None else f", by {gap:.3g} at most"
    what = f"{count} of {old.numel()} elements differ{by}"
    return Difference(step, name, what, differing=count, elements=old.numel(), max_difference=gap)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1, 1).view(torch.uint8)


def _largest_gap(old: torch.Tensor, new: torch.Tensor) -> float | None:
    wide = torch.complex128 if old.is_complex() else torch.float64
    gaps = (old.to(wide) - new.to(wide)).abs()
    numbers = gaps[~gaps.isnan()]
    return float(numbers.max()) if len(numbers) else None


MakeJob = Callable[[], tuple[TrainingState, Callable[[], object]]]
"""Builds a fresh job: its state, and a function that runs one step (and returns, for example, the loss)."""
RETURNED = "what step() returned"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The result of `verify_resume`."""

    root: str
    """Of the snapshot."""
    step: int | None
    """Of the snapshot."""
    steps: int
    """The number of compared steps."""
    compared: int
    """The number of tensors and values after each step."""
    difference: Difference | None

    @property
    def ok(self) -> bool:
        """Whether everything was the same, bit for bit."""
        return self.difference is None

    def __str__(self) -> str:
        where = f"{self.root[:12]} (step {self.step})"
        if self.difference is None:
            same = f"{self.steps} steps from {where} are the same both times, bit for bit: {self.compared} tensors and values after each"
            return f"{same}. Both runs lack what the TrainingState does not hold"
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
