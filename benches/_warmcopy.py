"""The floor of a capture: one copy of a state into memory that was written before, by a number of threads.

All is planned beforehand: a timed copy only copies. Two ways, since neither is the fastest for every state: `memmove`, which goes round
the caches where a tensor is large, and torch's own `_foreach_copy_`, which is a loop in C++ over however many tensors.
"""

import ctypes
import itertools
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

State = dict[str, torch.Tensor]
Part = TypeVar("Part")

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes, _memmove.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


class WarmCopy:
    """Memory as large as a state, and two ways to copy the state there."""

    def __init__(self, state: State, threads: int) -> None:
        sources = [tensor.view(-1) for tensor in state.values()]
        self.size_bytes = sum(tensor.nbytes for tensor in sources)
        pages = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.from_numpy(np.frombuffer(pages, np.uint8))
        memory.fill_(1)
        ends = list(itertools.accumulate(tensor.nbytes for tensor in sources))
        share = -(-self.size_bytes // threads)
        self._parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(threads)]
        for source, end in zip(sources, ends, strict=True):
            start, item_bytes = end - source.nbytes, source.itemsize
            for number, (targets, parts) in enumerate(self._parts):
                low, high = max(start, number * share), min(end, (number + 1) * share)
                low, high = (-(-edge // item_bytes) * item_bytes for edge in (low, high))
                if low < high:
                    targets.append(memory[low:high].view(source.dtype))
                    parts.append(source[(low - start) // item_bytes : (high - start) // item_bytes])
        self._moves = [
            [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in zip(*part, strict=True)] for part in self._parts
        ]

    def by_memmove(self) -> None:
        _side_by_side(_move, self._moves)

    def by_torch(self) -> None:
        _side_by_side(_copy, self._parts)


def _move(moves: list[tuple[int, int, int]]) -> None:
    for move in moves:
        _memmove(*move)


def _copy(part: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    torch._foreach_copy_(*part)


def _side_by_side(work: Callable[[Part], None], parts: Sequence[Part]) -> None:
    helpers = [threading.Thread(target=work, args=(part,)) for part in parts[1:]]
    for helper in helpers:
        helper.start()
    work(parts[0])
    for helper in helpers:
        helper.join()
