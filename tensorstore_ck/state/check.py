"""The dry run of a save: all values that cannot be stored, the size of the state, and the expected time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import block_id, new_ulid
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.state.capture import CaptureWalk
from tensorstore_ck.state.sharded_tensors import SpreadDescriber

SAMPLE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StateProblem:
    """One thing that cannot be stored."""

    path: str
    message: str
    """What it is, and advice."""


@dataclass(frozen=True, slots=True)
class StateCheck:
    """The result of `Store.check`."""

    problems: tuple[StateProblem, ...]
    """With ``group=``: this rank's problems, and those of another rank, or why the ranks' states cannot form one snapshot."""
    tensor_count: int
    tensor_bytes: int
    """With ``group=``: of all ranks together; if there are problems, of this rank."""
    value_bytes: int
    """Bytes of everything that is not a tensor."""
    free_bytes: int | None
    """Free space of the store; None if unknown."""
    seconds: float
    """The expected time of the first save, at the speed of a trial write. Later saves store only what changed."""

    @property
    def ok(self) -> bool:
        """Whether a save would succeed."""
        return not self.problems and (self.free_bytes is None or self.tensor_bytes + self.value_bytes < self.free_bytes)


def check_state(state: object, backend: Backend) -> StateCheck:
    """Checks `state`, and writes and deletes a sample of it to estimate the time of a save."""
    problems, captured = inspect_state(state)
    return build_check(problems, captured, backend, captured.layout.size_bytes)


def build_check(
    problems: Sequence[StateProblem], captured: CapturedState, backend: Backend, tensor_bytes: int, *, writers: int = 1
) -> StateCheck:
    """The result for an inspected state; `writers` processes write its `tensor_bytes` together."""
    space = backend.space()
    value_bytes = len(pack_body(captured.values)) + sum(map(len, captured.blobs)) + len(captured.layout.encoded)
    return StateCheck(
        problems=tuple(problems),
        tensor_count=len(captured.layout.tensors),
        tensor_bytes=tensor_bytes,
        value_bytes=value_bytes,
        free_bytes=None if space is None else space.free_bytes,
        seconds=_expected_seconds(captured, tensor_bytes, backend) / writers,
    )


def inspect_state(state: object, describer: SpreadDescriber | None = None) -> tuple[list[StateProblem], CapturedState]:
    """All values in `state` that cannot be stored, in order; and the rest of it, captured."""
    errors: list[UnsupportedValueError] = []
    captured = CaptureWalk(errors.append, describer).capture(state)
    return [StateProblem(error.object_id, str(error)) for error in errors], captured


def _expected_seconds(captured: CapturedState, total: int, backend: Backend) -> float:
    sample = []
    left = SAMPLE_BYTES
    for spec, source in zip(captured.layout.tensors, captured.sources, strict=True):
        size = min(source.size_bytes, left) // spec.item_bytes * spec.item_bytes
        if size:
            sample.append(source.read(0, size))
            left -= size
        if not left:
            break
    if not sample:
        return 0.0
    start = time.monotonic()
    name = pack_name(new_ulid())
    writer = backend.open_writer(name)
    try:
        for piece in sample:
            block_id(piece)
            writer.append([piece])
        writer.close()
    except BaseException:
        writer.abort()
        raise
    seconds = time.monotonic() - start
    backend.delete([name])
    return seconds * total / (SAMPLE_BYTES - left)
