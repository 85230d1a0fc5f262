"""Host memory for copies of captured states, under a hard limit: allocated once, and reused from one copy to the next.

`capture_copy` copies states into its slots; the caller decides when to copy, and what to do when all memory is in use. Pages come
directly from the system in the requested size, and are returned as soon as they are unused: torch's allocator of pinned memory rounds
up to a power of two and keeps freed memory, so it could not hold the limit.
"""

import mmap
import threading
import weakref
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from tensorstore_ck.common.huge_pages import HUGE_PAGE_BYTES, new_pages
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.errors import NoSpaceError
from tensorstore_ck.state.byte_sources import Array, address_of
from tensorstore_ck.state.device.side_streams import DeviceArrival, DeviceCopies, SideStreams

GRAIN_BYTES: Final = HUGE_PAGE_BYTES
"""Memory is allocated in whole huge pages, so that a state that grew a little still fits."""
TOUCHED_BYTES: Final = 64 << 20
"""The bytes that one thread touches at a time."""
PAGE_BYTES: Final = 4096
_REGISTER_PORTABLE: Final = 1
"""Pinned for every device, not only the current one."""


class Arena:
    """Host memory that captured states are copied into: allocated once, reused, never more than `limit_bytes`. Thread-safe."""

    def __init__(self, limit_bytes: int, *, pinned: bool = False) -> None:
        """`pinned`: CUDA devices copy into it while the caller computes. Without CUDA it has no effect."""
        self.limit_bytes = limit_bytes
        self.device_copies: DeviceCopies = SideStreams()
        """Copies tensors from devices into it."""
        self._is_pinned = pinned and torch.cuda.is_available()
        self._is_closed = False
        self._lock = threading.Lock()
        self._free: list[Array] = []
        self._in_use: dict[Slot, Array] = {}

    @property
    def allocated_bytes(self) -> int:
        """The memory that it holds, in use or not."""
        with self._lock:
            return sum(map(len, [*self._free, *self._in_use.values()]))

    def fill(self, slot: "Slot") -> bool:
        """Gives a slot its memory; returns False if it does not fit now. Never waits. Whatever interrupts it, `Slot.release` undoes it.

        Raises:
            NoSpaceError: the system refuses memory that the limit allows.
        """
        with self._lock:
            slot.memory = self._find(slot.size_bytes)
            if slot.memory is not None:
                self._in_use[slot] = slot.memory
            return slot.memory is not None

    def prepare(self, size_bytes: int, count: int) -> None:
        """Allocates memory for `count` copies of this size, as far as the limit allows. A copy that is made meanwhile waits for it.

        Raises:
            NoSpaceError: the system refuses memory that the limit allows.
        """
        wanted = -(-max(size_bytes, 1) // GRAIN_BYTES) * GRAIN_BYTES
        for _ in range(count):
            with self._lock:
                held = [*self._free, *self._in_use.values()]
                is_enough = sum(memory.nbytes >= size_bytes for memory in held) >= count
                if self._is_closed or is_enough or wanted > self.limit_bytes - sum(memory.nbytes for memory in held):
                    return
                self._free.append(_new_pages(wanted, pinned=self._is_pinned))

    def close(self) -> None:
        """Frees unused memory now, and the rest when it is released."""
        with self._lock:
            self._is_closed = True
            self._free.clear()

    def take_back(self, slot: "Slot") -> None:
        """Takes a slot's memory back; only `Slot.release` calls it."""
        with self._lock:
            self._in_use.pop(slot, None)
            memory, slot.memory = slot.memory, None
            if memory is not None and not self._is_closed:
                self._free.append(memory)

    def _find(self, size_bytes: int) -> Array | None:
        left = self.limit_bytes - self._in_use_bytes
        needed = max(size_bytes, 1)
        if needed > left:
            return None
        wanted = min(-(-needed // GRAIN_BYTES) * GRAIN_BYTES, left)
        self._free.sort(key=lambda memory: memory.nbytes)
        best = next((number for number, memory in enumerate(self._free) if memory.nbytes >= size_bytes), None)
        has_room = wanted <= left - self._free_bytes()
        if best is not None and (self._free[best].nbytes <= 2 * wanted or not has_room):  # else it is kept for a larger copy
            return self._free.pop(best)
        while wanted > left - self._free_bytes():
            del self._free[0]
        return _new_pages(wanted, pinned=self._is_pinned)

    @property
    def _in_use_bytes(self) -> int:
        return sum(map(len, self._in_use.values()))

    def _free_bytes(self) -> int:
        return sum(map(len, self._free))


@dataclass(eq=False, repr=False)
class Slot:
    """Memory of one copy."""

    arena: Arena
    size_bytes: int
    memory: Array | None = None
    """None before `Arena.fill` and after the release."""
    arrivals: list[DeviceArrival] = field(default_factory=list)
    """Copies from devices into it that may still be under way."""

    def release(self) -> None:
        """Returns the memory for other copies; its content must not be read any more. Idempotent."""
        try:
            for arrival in self.arrivals:
                arrival.wait()
        finally:
            self.arena.take_back(self)


def _new_pages(size_bytes: int, *, pinned: bool) -> Array:
    try:
        pages = new_pages(size_bytes)
    except (OSError, OverflowError) as exc:
        raise _refused(size_bytes, "allocate", str(exc)) from exc
    array: Array = np.frombuffer(pages, np.uint8)
    if pinned:
        _touch(array)
        address = address_of(array)
        result = torch.cuda.cudart().cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE)  # type: ignore[no-untyped-call]
        if int(result):
            raise _refused(size_bytes, "pin", str(result))
        weakref.finalize(array, _unpin, address, pages).atexit = False
    return array


def _touch(array: Array) -> None:
    """Makes the system provide all pages, on several threads: CUDA would do it on one, and under a lock that its other calls need."""
    pieces = [array[start : start + TOUCHED_BYTES] for start in range(0, array.nbytes, TOUCHED_BYTES)]
    for_each(pieces, _touch_piece, min(cpu_threads(), len(pieces)))


def _touch_piece(piece: Array) -> None:
    piece[::PAGE_BYTES] = 0


def _unpin(address: int, pages: mmap.mmap) -> None:
    """`pages` is an argument only to keep them mapped until now."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _refused(size_bytes: int, what: str, why: str) -> NoSpaceError:
    return NoSpaceError(
        f"the system refused to {what} {size_bytes / (1 << 20):,.0f} MiB of host memory to capture a state ({why}): lower "
        "host_memory_bytes, or free memory on this host",
        object_id="host_memory_bytes",
    )
