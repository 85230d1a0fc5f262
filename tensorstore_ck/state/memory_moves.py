"""Copies and compares many pieces of memory at once: with the compiled kernel without the GIL. The caller keeps the memory alive."""

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.engine.interfaces import Numbers
from tensorstore_ck.format.codec import compiled

SMALL_BYTES: Final = 16 << 10
"""Without the kernel, smaller pieces keep the GIL: two threads exchanging it took three times as long for 20,000 copies of 256 bytes."""

_memmove, _memcmp = ctypes.CDLL(None).memmove, ctypes.CDLL(None).memcmp
_memmove_with_gil, _memcmp_with_gil = ctypes.PyDLL(None).memmove, ctypes.PyDLL(None).memcmp
for _functions, _result in ((_memmove, _memmove_with_gil), None), ((_memcmp, _memcmp_with_gil), ctypes.c_int):
    for _function in _functions:
        _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], _result


def move(moves: Numbers) -> None:
    """Copies; `moves`: rows of a target address, a source address and a size in bytes."""
    if compiled.HAS_KERNEL:
        compiled.kernel.copy_memory(np.ascontiguousarray(moves, np.int64).data)
        return
    for target, address, size in zip(*moves.T.tolist(), strict=True):
        (_memmove if size > SMALL_BYTES else _memmove_with_gil)(target, address, size)


def differing(moves: Numbers) -> npt.NDArray[np.bool_]:
    """Whether the bytes at the two addresses differ, for each row as in `move`."""
    differs = np.zeros(len(moves), np.bool_)
    if compiled.HAS_KERNEL:
        compiled.kernel.compare_memory(np.ascontiguousarray(moves, np.int64).data, differs.data)
        return differs
    for row, (target, address, size) in enumerate(zip(*moves.T.tolist(), strict=True)):
        differs[row] = (_memcmp if size > SMALL_BYTES else _memcmp_with_gil)(target, address, size)
    return differs


def gather(addresses: Numbers, sizes: Numbers, read: Callable[[int], memoryview]) -> bytearray:
    """The bytes at these addresses, one piece after another; where an address is 0, what `read` returns for the position of the piece."""
    ends = np.cumsum(sizes)
    starts, joined = ends - sizes, bytearray(int(sizes.sum()))
    move(np.stack((starts + np.frombuffer(joined, np.uint8).ctypes.data, addresses, sizes), axis=1)[addresses != 0])
    target = memoryview(joined)  # takes no piece of another length
    for position in np.flatnonzero(addresses == 0).tolist():
        target[starts[position] : ends[position]] = read(position)
    return joined
