"""A tensor of the follower, and the changes that are staged for it.

Bytes of a new version are compared with the tensor as they arrive. Few changed elements are staged as positions and values, so that a swap
writes these alone; otherwise the whole range is staged.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.format.codec import find_changes
from tensorstore_ck.state.byte_sources import bits_of, memory_at, source_of, target_of
from tensorstore_ck.state.plain_memory import span_of

FEW: Final = 1 / 8
"""Up to this share of changed elements, writing single elements is faster than copying all."""
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Array = npt.NDArray[Any]


class Change(Protocol):
    """What a swap does to a range of a tensor, and how it is undone."""

    size_bytes: int
    """Host memory that it takes."""

    def apply(self) -> None:
        """Writes the new elements."""

    def undo(self) -> None:
        """Restores the elements as they were before `apply`, however far that came."""


class ChangedElements:
    """Single elements of a tensor in host memory."""

    def __init__(self, tensor: torch.Tensor, positions: Array, new: Array, old: Array) -> None:
        """`positions`: in elements of memory from the tensor's first one."""
        self._memory = np.frombuffer(memory_at(tensor.data_ptr(), span_of(tensor)), new.dtype)
        self._owner = tensor
        self._positions, self._new, self._old = positions, new, old
        self.size_bytes = positions.nbytes + new.nbytes + old.nbytes

    def apply(self) -> None:
        """Writes the new elements."""
        self._memory[self._positions] = self._new

    def undo(self) -> None:
        """Writes the old elements."""
        self._memory[self._positions] = self._old


class ChangedDeviceElements:
    """Single elements of a tensor on a device, with positions and values in its memory. Written on the device's default stream."""

    def __init__(self, tensor: torch.Tensor, positions: Array, new: Array, old: Array) -> None:
        bits = bits_of(tensor)
        self._memory = bits.as_strided((span_of(tensor) // tensor.itemsize,), (1,))
        self._positions = torch.from_numpy(positions).to(tensor.device)
        self._new, self._old = (
            torch.from_numpy(words.view(f"i{words.itemsize}" if words.itemsize > 1 else "u1")).to(tensor.device) for words in (new, old)
        )
        self.size_bytes = 0

    def apply(self) -> None:
        """Writes the new elements."""
        self._write(self._new)

    def undo(self) -> None:
        """Writes the old elements."""
        self._write(self._old)

    def _write(self, words: torch.Tensor) -> None:
        # Threads differ in their current streams; and the allocator reuses what was allocated on the default stream only in its order.
        device = self._memory.device
        with torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else nullcontext():
            self._memory.index_copy_(0, self._positions, words)


class ChangedRange:
    """Consecutive elements of a tensor, row-major."""

    def __init__(self, tensor: torch.Tensor, start: int, new: bytes) -> None:
        """`start`: in bytes of the tensor."""
        self._tensor, self._start, self._new = tensor, start, new
        self._old: bytes | None = None
        self.size_bytes = len(new)

    def apply(self) -> None:
        """Writes the new elements, and keeps the old ones."""
        self._old = bytes(source_of(self._tensor).read(self._start, self._start + len(self._new)))
        target_of(self._tensor).write(self._start, memoryview(self._new))

    def undo(self) -> None:
        """Writes the old elements."""
        if self._old is not None:
            target_of(self._tensor).write(self._start, memoryview(self._old))


class FollowedTensor(ByteTarget):
    """A tensor of the follower. As a `ByteTarget` it takes the verified bytes of a new version aside. Thread-safe."""

    def __init__(self, name: str, tensor: torch.Tensor, stored: torch.dtype) -> None:
        """`stored`: the dtype in the snapshot, which may be another one."""
        self.identity: tuple[object, ...] = name, stored
        """What the bytes of a block depend on besides their place: the tensor, and the dtype in which it is stored."""
        self.tensor = tensor.detach()
        self.item_bytes = stored.itemsize
        """Of a stored element."""
        self._stored = stored
        self._lock = threading.Lock()
        self._changes: dict[int, Sequence[Change]] = {}
        """By the first byte, as a range may be read twice."""

    @property
    def changes(self) -> list[Change]:
        """What makes the tensor that of the new version."""
        return [change for several in self._changes.values() for change in several]

    def holds(self, start: int, stop: int) -> memoryview | None:
        """Bytes [start, stop) of the tensor as they are stored; None if that is in another dtype."""
        return source_of(self.tensor).read(start, stop) if self._stored == self.tensor.dtype else None

    def memory(self) -> None:
        """None: bytes must come through `write`."""

    def write(self, start: int, data: memoryview) -> None:
        """Stages what `data` changes."""
        item_bytes = self.tensor.itemsize
        first = start // self._stored.itemsize
        new = _words(data if self._stored == self.tensor.dtype else self._converted(data), item_bytes)
        old = _words(source_of(self.tensor).read(first * item_bytes, (first + len(new)) * item_bytes), item_bytes)
        changed = _changed(new, old)
        if changed is None or (
            len(changed) and is_on_device(self.tensor) and item_bytes not in _WORDS
        ):  # a device writes integers, and complex128 has none of its size
            with self._lock:
                self._changes[start] = [ChangedRange(self.tensor, first * item_bytes, new.tobytes())]
        else:
            self.change(start, changed, new=new[changed], old=old[changed])

    def change(self, start: int, positions: Array, *, new: Array, old: Array) -> None:
        """Stages few elements; `positions` count from the stored byte `start`, `old` is what the tensor has there."""
        staged: list[Change] = []
        if len(positions):
            kind = ChangedDeviceElements if is_on_device(self.tensor) else ChangedElements
            staged = [kind(self.tensor, self._in_memory(start // self._stored.itemsize + positions), new, old)]
        with self._lock:
            self._changes[start] = staged

    def _converted(self, data: memoryview) -> memoryview:
        converted = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(self._stored).to(self.tensor.dtype)
        return memoryview(converted.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def _in_memory(self, elements: Array) -> Array:
        """Row-major positions of elements -> their positions in memory, from the first element on."""
        if self.tensor.is_contiguous():
            return elements
        steps = zip(np.unravel_index(elements, tuple(self.tensor.shape)), self.tensor.stride(), strict=True)
        return np.asarray(sum(along * step for along, step in steps))


class SeveralTensors(ByteTarget):
    """Several tensors of the follower that are one stored tensor, as weights that were tied in the training."""

    def __init__(self, tensors: Sequence[FollowedTensor]) -> None:
        self.identity = tuple(tensor.identity for tensor in tensors)
        """Of all: a block that one of them has is not in the others if they were several stored tensors before."""
        self.item_bytes = tensors[0].item_bytes
        self._tensors = tensors

    def holds(self, start: int, stop: int) -> memoryview | None:
        """As `FollowedTensor.holds`; empty where somebody changed one of them."""
        held = [tensor.holds(start, stop) for tensor in self._tensors]
        if None in held:
            return None
        return held[0] if all(other == held[0] for other in held[1:]) else memoryview(b"")

    def memory(self) -> None:
        """None: bytes must come through `write`."""

    def write(self, start: int, data: memoryview) -> None:
        """Stages what `data` changes in each."""
        for tensor in self._tensors:
            tensor.write(start, data)

    def change(self, start: int, positions: Array, *, new: Array, old: Array) -> None:
        """As `FollowedTensor.change`, in each."""
        for tensor in self._tensors:
            tensor.change(start, positions, new=new, old=old)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its elements can be written by the device alone."""
    return not tensor.is_cpu


def _changed(new: Array, old: Array) -> Array | None:
    """The positions at which they differ; None if these are not few."""
    limit = int(FEW * len(new))
    if new.dtype.kind == "V":
        changed = np.flatnonzero(new != old)
        return changed if len(changed) <= limit else None
    changes = find_changes(new.view(np.uint8).data, old.view(np.uint8).data, new.itemsize, is_float=False, limit=limit)
    return np.cumsum(changes.gaps, dtype=np.int64) - 1 if changes.changed <= limit else None


def _words(data: memoryview, item_bytes: int) -> Array:
    return np.frombuffer(data, _WORDS.get(item_bytes, np.dtype((np.void, item_bytes))))
