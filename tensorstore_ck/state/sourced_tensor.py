"""A tensor that is not in memory as a whole: a save assembles its bytes while it reads them."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from tensorstore_ck.engine.interfaces import ByteSource
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.state.byte_sources import MemorySource, bits_of


@dataclass(frozen=True, slots=True, eq=False)
class SourcedTensor:
    """A leaf of a state for `capture`: a tensor of this shape and dtype, whose bytes `source` has in row-major order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: ByteSource


class ElementRun(NamedTuple):
    """Elements of a flattened tensor, from `start` on."""

    start: int
    elements: torch.Tensor
    """One-dimensional, contiguous, on the CPU."""

    @property
    def stop(self) -> int:
        """The number after the last element."""
        return self.start + self.elements.numel()


def tensor_of_runs(shape: tuple[int, ...], dtype: torch.dtype, runs: Sequence[ElementRun]) -> SourcedTensor:
    """The tensor of `dtype` with these runs of elements, which are converted to it block by block.

    Raises:
        InvalidOptionError: they do not cover it exactly once.
    """
    held = sorted((run for run in runs if run.elements.numel()), key=lambda run: run.start)
    at = 0
    for run in held:
        if run.start != at:
            raise InvalidOptionError(f"its elements from {at} on are there {'not' if run.start > at else 'twice'}", object_id="runs")
        at = run.stop
    if at != prod(shape):
        raise InvalidOptionError(f"it has {at} elements, and {prod(shape)} are needed", object_id="runs")
    if len(held) == 1 and held[0].elements.dtype == dtype:
        elements = held[0].elements
        return SourcedTensor(shape, dtype, MemorySource(elements.data_ptr(), elements.untyped_storage(), elements.nbytes))
    return SourcedTensor(shape, dtype, _RunsSource(dtype, held))


class _RunsSource:
    """`ByteSource` over adjacent runs; each range is copied."""

    def __init__(self, dtype: torch.dtype, runs: Sequence[ElementRun]) -> None:
        self._dtype, self._runs = dtype, runs
        self._starts = [run.start for run in runs]
        self.size_bytes = (runs[-1].stop if runs else 0) * dtype.itemsize

    def read(self, start: int, stop: int) -> memoryview:
        item_bytes = self._dtype.itemsize
        first, last = start // item_bytes, -(-stop // item_bytes)
        copy = bytearray(max(last - first, 0) * item_bytes)
        if not copy:
            return memoryview(copy)
        target = torch.frombuffer(copy, dtype=self._dtype)
        for run in self._runs[bisect_right(self._starts, first) - 1 :]:
            if run.start >= last:
                break
            begin, end = max(first, run.start), min(last, run.stop)
            part, into = run.elements.detach()[begin - run.start : end - run.start], target[begin - first : end - first]
            if part.dtype == self._dtype:
                part, into = bits_of(part), bits_of(into)  # torch cannot copy every dtype
            into.copy_(part)
        return memoryview(copy)[start - first * item_bytes : stop - first * item_bytes]
