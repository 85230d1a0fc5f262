"""Copies between many addresses of host memory: in one call that releases the GIL, where the kernel was compiled."""

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np

from tensorstore_ck.engine.interfaces import Numbers
from tensorstore_ck.format.codec import compiled

SMALL_BYTES: Final = 16 << 10
"""Without the kernel, smaller copies keep the GIL: two threads exchanging it took three times as long for 20,000 copies of 256 bytes."""

_memmove = ctypes.CDLL(None).memmove
_memmove_with_gil = ctypes.PyDLL(None).memmove
for _function in (_memmove, _memmove_with_gil):
    _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


def move(moves: Numbers) -> None:
    """Copies; `moves`: rows of a target address, a source address and a size in bytes. The caller keeps the memory alive."""
    if compiled.HAS_KERNEL:
        compiled.kernel.copy_memory(np.ascontiguousarray(moves, np.int64).data)
        return
    for target, address, size in zip(*moves.T.tolist(), strict=True):
        (_memmove if size > SMALL_BYTES else _memmove_with_gil)(target, address, size)


def gather(addresses: Numbers, sizes: Numbers, read: Callable[[int], memoryview]) -> bytearray:
    """The bytes at these addresses, one piece after another; where an address is 0, what `read` returns for the position of the piece."""
    ends = np.cumsum(sizes)
    starts, joined = ends - sizes, bytearray(int(sizes.sum()))
    move(np.stack((starts + np.frombuffer(joined, np.uint8).ctypes.data, addresses, sizes), axis=1)[addresses != 0])
    target = memoryview(joined)  # takes no piece of another length
    for position in np.flatnonzero(addresses == 0).tolist():
        target[starts[position] : ends[position]] = read(position)
    return joined
