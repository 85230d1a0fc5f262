"""What putting a state would do, told before the first step: all that cannot be stored, how large it is, how long it takes."""

import time
from dataclasses import dataclass
from typing import Final

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.envelope import pack_body
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.ids import block_id, new_ulid
from tensorstore_ck.layout import Captured
from tensorstore_ck.pack import pack_name
from tensorstore_ck.state.capture import Walk

SAMPLE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot be stored."""

    path: str
    message: str
    """What it is, and what to do."""


@dataclass(frozen=True, slots=True)
class StateCheck:
    """What `Store.check` found."""

    problems: tuple[Problem, ...]
    tensor_count: int
    tensor_bytes: int
    value_bytes: int
    """Everything that is not a tensor."""
    free_bytes: int | None
    """What the store can still take; None where nobody can tell."""
    seconds: float
    """How long the first put should take, at the speed that a trial write had just now. Later ones store only what changed."""

    @property
    def ok(self) -> bool:
        """Whether a put would succeed."""
        return not self.problems and (self.free_bytes is None or self.tensor_bytes + self.value_bytes < self.free_bytes)


def problems(state: object) -> list[Problem]:
    """All things in `state` that cannot be stored, in its order."""
    return _walked(state)[0]


def check_state(state: object, backend: Backend) -> StateCheck:
    """Checks `state`, and writes and deletes a sample of it to see how long a put would take."""
    found, captured = _walked(state)
    tensor_bytes = sum(spec.size_bytes for spec in captured.layout.tensors)
    space = backend.space()
    value_bytes = len(pack_body(captured.values)) + sum(map(len, captured.blobs)) + len(captured.layout.encode())
    return StateCheck(
        tuple(found),
        len(captured.layout.tensors),
        tensor_bytes,
        value_bytes,
        None if space is None else space.free_bytes,
        _expected_seconds(captured, tensor_bytes, backend),
    )


def _walked(state: object) -> tuple[list[Problem], Captured]:
    errors: list[UnsupportedValueError] = []
    walk = Walk(errors.append)
    walk.visit(state)
    captured = walk.finish()
    return [Problem(error.object_id, str(error)) for error in errors], captured


def _expected_seconds(captured: Captured, total: int, backend: Backend) -> float:
    sample = []
    left = SAMPLE_BYTES
    for spec, source in zip(captured.layout.tensors, captured.sources, strict=True):
        size = min(spec.size_bytes // spec.item_bytes * spec.item_bytes, left)
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
