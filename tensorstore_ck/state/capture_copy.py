"""Copies a captured state into reused host memory, at memory speed, so that its owner may change it at once.

Large tensors are cut so that every thread has work; small ones are copied many at a time. The slot then holds the tensors in the order
of the layout, each at a multiple of `ALIGN_BYTES`.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from tensorstore_ck.common.threads import for_each
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, DeviceBlocks, Numbers, SourceRanges, Sources
from tensorstore_ck.engine.write.sampled_checks import NOT_VERIFIED, Sampling, pieces, pieces_of_many, require_unchanged, share_of
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES
from tensorstore_ck.state.arena import Arena, Slot
from tensorstore_ck.state.byte_sources import Array, CopySource, MemorySource, address_of
from tensorstore_ck.state.device.capture_proofs import ArrivingSource, Overlap, start_copies
from tensorstore_ck.state.device.side_streams import DeviceArrival, DeviceCopy, is_on_device
from tensorstore_ck.state.rank_shares import ChainedSource
from tensorstore_ck.state.tensor_table import ByteSources, differing, gather, move

__all__ = ["Arena", "Slot", "copy_captured", "slot_bytes"]

ALIGN_BYTES: Final = 64
PIECE_BYTES: Final = 4 << 20
"""The smallest unit of a thread's work."""
MAX_PIECE_BYTES: Final = 256 << 20
"""A memcpy of hundreds of MiB bypasses the caches: it ran at 20 GB/s, and at 13 in pieces of 16 MiB."""


def memory_key(source: ByteSource) -> tuple[object, ...]:
    """Identifies the memory that a source reads, as long as the source lives."""
    if isinstance(source, ChainedSource):
        return tuple(key for part in source.sources for key in memory_key(part))
    if isinstance(source, MemorySource):
        return source.address, source.size_bytes
    if isinstance(source, CopySource):
        tensor = source.tensor
        if isinstance(tensor, torch.Tensor):
            return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        return address_of(tensor), tensor.shape, tensor.strides, tensor.dtype
    return (id(source),)


def slot_bytes(captured: CapturedState, skip: Collection[int] = ()) -> int:
    """The slot size in bytes that `copy_captured` needs."""
    return int(_offsets(_sizes(captured, skip))[-1])


def bytes_of(captured: CapturedState, numbers: Collection[int]) -> int:
    """The size in bytes of these tensors."""
    return int(ByteSources.of(captured.sources).sizes[_array_of(numbers)].sum()) if numbers else 0


def copy_captured(
    captured: CapturedState,
    slot: Slot,
    *,
    skip: Collection[int] = (),
    threads: int,
    start_bytes: int = 0,
    sampling: Sampling = NOT_VERIFIED,
    overlap: Overlap | None = None,
) -> CapturedState:
    """Copies a state into a slot: its tensors, except those in `skip`, may be changed as soon as this returns.

    A tensor on a CUDA device may be changed by work queued on the current stream afterwards; readers of its copy wait for it. With
    `overlap`, what an optimizer with a gate owns must not be changed before its next step.

    The `slot` has at least `slot_bytes`, from `start_bytes` on; the result is valid until it is released. `sampling`: which bytes are
    compared with their copy at the end; none of a tensor on a CUDA device.

    Raises:
        InvalidOptionError: the slot is too small, or was released.
        CaptureChangedError: a tensor differs from its copy.
    """
    sizes = _sizes(captured, skip)
    offsets = _offsets(sizes) + start_bytes
    memory = slot.memory
    if memory is None or offsets[-1] > slot.size_bytes:
        what = "was released" if memory is None else f"has {slot.size_bytes}"
        raise InvalidOptionError(f"a capture needs {offsets[-1]} bytes of a slot, and this one {what}: take one of slot_bytes()")
    sources = ByteSources.of(captured.sources)
    addresses = sources.addresses
    rest = _OtherSources(memory)
    arriving: dict[int, list[DeviceCopy]] = {}
    for number in np.flatnonzero((addresses == 0) & (sizes > 0)).tolist():
        if several := rest.add(captured.sources[number], int(offsets[number]), int(sizes[number])):
            arriving[number] = several
    copies = _CopiedSources(slot, offsets, sizes, sources, skipped=skip)
    device_blocks: DeviceBlocks | None = captured.device_blocks if skip else None
    if arriving:
        started = start_copies(captured, copies=arriving, device_copies=slot.arena.device_copies, copying=slot.arrivals, overlap=overlap)
        copies.arrivals, device_blocks = started.arrivals, started.blocks or device_blocks
        copies.others = started.kept
    moves = np.stack((offsets[:-1] + address_of(memory), addresses, sizes), axis=1)[(addresses != 0) & (sizes > 0)]
    jobs = _jobs(np.concatenate((moves, rest.moves())), threads)
    for_each(jobs, move, min(threads, len(jobs)))
    rest.copy_strided()
    if sampling.verify_share:
        sampling = sampling._replace(verify_share=share_of(int(sizes.sum()), sampling.verify_share))
        own = [number for number in np.flatnonzero((addresses == 0) & (sizes > 0)).tolist() if number not in arriving]
        changed = _changed(addresses, address_of(memory) + offsets[:-1], sizes, sampling)
        require_unchanged(captured, changed | _changed_rest(captured, copies, own, sampling))
    return captured._replace(sources=copies, device_blocks=device_blocks)


def _changed(addresses: Numbers, targets: Numbers, sizes: Numbers, sampling: Sampling) -> set[int]:
    """The tensors at `addresses` whose sample differs from their copies at `targets`."""
    is_small = sizes <= INLINE_TENSOR_BYTES
    small, larger = (np.flatnonzero((addresses != 0) & (sizes > 0) & chosen) for chosen in (is_small, ~is_small))
    sampled = pieces_of_many(larger, sizes[larger], sampling.verify_share, sampling.turn)
    numbers, starts, lengths = np.concatenate((np.stack((small, np.zeros_like(small), sizes[small]), axis=1), sampled)).T
    differs = differing(np.stack((targets[numbers] + starts, addresses[numbers] + starts, lengths), axis=1))
    return set(numbers[differs].tolist())


def _changed_rest(captured: CapturedState, copies: "_CopiedSources", numbers: Sequence[int], sampling: Sampling) -> set[int]:
    """Like `_changed`, for tensors that are not contiguous CPU memory."""
    changed = set()
    for number in numbers:
        source, copy = captured.sources[number], copies.at(number)
        size = source.size_bytes
        for start, stop in ((0, size),) if size <= INLINE_TENSOR_BYTES else pieces(number, 0, size, sampling.verify_share, sampling.turn):
            if bytes(source.read(start, stop)) != bytes(copy.read(start, stop)):
                changed.add(number)
    return changed


def _sizes(captured: CapturedState, skip: Collection[int]) -> Numbers:
    """How many bytes of each tensor are copied."""
    sizes = ByteSources.of(captured.sources).sizes.copy()
    sizes[_array_of(skip)] = 0
    return sizes


def _array_of(numbers: Collection[int]) -> Numbers:
    return np.fromiter(numbers, np.int64, len(numbers))


def _offsets(sizes: Numbers) -> Numbers:
    """The offset of each copy in a slot, and the end of the last one."""
    return np.concatenate(([0], np.cumsum(-(-sizes // ALIGN_BYTES) * ALIGN_BYTES)))


class _CopiedSources(Sources):
    def __init__(self, slot: Slot, offsets: Numbers, sizes: Numbers, originals: ByteSources, skipped: Collection[int]) -> None:
        """`skipped`: the numbers of tensors that are read where they were captured; keeps no memory of others."""
        self._slot = slot
        self._offsets = offsets
        self._sizes = sizes
        self._is_skipped = np.zeros(len(sizes), np.bool_)
        self._is_skipped[_array_of(skipped)] = True
        self._originals = originals if self._is_skipped.all() else originals.pick(np.flatnonzero(self._is_skipped).tolist(), [])
        self._position = np.cumsum(self._is_skipped) - 1
        """Of a skipped tensor among the originals."""
        self.others: Mapping[int, ByteSource] = {}
        """Tensors that a device keeps, and that were not copied."""
        self.arrivals: Mapping[int, DeviceArrival] = {}
        """Copies from a device that may still be under way."""

    def at(self, number: int) -> ByteSource:
        if self._is_skipped[number]:
            return self._originals.at(int(self._position[number]))
        if number in self.others:
            return self.others[number]
        memory = self._slot.memory
        if memory is None:
            raise InvalidOptionError("a captured state was read after its slot was released", object_id="slot")
        source = MemorySource(address_of(memory) + int(self._offsets[number]), memory, int(self._sizes[number]))
        return source if number not in self.arrivals else ArrivingSource(source, self.arrivals[number], number)

    def read(self, number: int, start: int, stop: int) -> memoryview:
        memory = self._slot.memory
        if memory is None or self._is_skipped[number] or number in self.others or number in self.arrivals:
            return super().read(number, start, stop)
        first = int(self._offsets[number])
        return memory[first + start : first + stop].data

    def gather(self, ranges: SourceRanges) -> bytearray:
        memory = self._slot.memory  # held: its pages stay mapped while they are copied
        if memory is None:
            return super().gather(ranges)
        tensors, starts, sizes = ranges
        addresses = address_of(memory) + self._offsets[tensors] + starts
        addresses[self._is_skipped[tensors] | np.isin(tensors, [*self.others, *self.arrivals])] = 0
        return gather(addresses, sizes, lambda at: self.read(int(tensors[at]), int(starts[at]), int(starts[at] + sizes[at])))

    def __len__(self) -> int:
        return len(self._sizes)


class _OtherSources:
    """Collects the copies of tensors that are not contiguous CPU memory."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self._bytes = torch.from_numpy(memory)
        self._moves: list[tuple[int, int, int]] = []
        self._kept: list[object] = []
        """Keeps the sources of `_moves` alive."""
        self._strided: list[tuple[torch.Tensor | Array, int]] = []

    def add(self, source: ByteSource, offset: int, size: int) -> list[DeviceCopy]:
        """Adds a copy at `offset` of the slot; returns what is to be copied from devices instead."""
        if isinstance(source, ChainedSource):
            copies = []
            for part in source.sources:
                copies += self.add(part, offset, part.size_bytes)
                offset += part.size_bytes
            return copies
        if isinstance(source, CopySource):
            if is_on_device(source.tensor):
                return [DeviceCopy(source.tensor, self._tensor(offset, source.tensor))]
            self._strided.append((source.tensor, offset))
            return []
        if size:
            data = np.frombuffer(source.read(0, size), np.uint8)
            self._kept.append(data)
            self._moves.append((address_of(self._memory) + offset, address_of(data), data.nbytes))
        return []

    def moves(self) -> Numbers:
        """The contiguous copies: rows of target, source, size."""
        return np.array(self._moves, np.int64).reshape(-1, 3)

    def copy_strided(self) -> None:
        """Copies what is not contiguous: torch uses threads of its own, and is faster than copying in parts."""
        for tensor, offset in self._strided:
            if isinstance(tensor, torch.Tensor):
                self._tensor(offset, tensor).copy_(tensor)
            else:
                np.copyto(np.ndarray(tensor.shape, tensor.dtype, self._memory, offset), tensor)

    def _tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        return self._bytes[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _jobs(moves: Numbers, threads: int) -> list[Numbers]:
    """Units of work for threads, the largest first, so that all threads end together: rows of target, source, size."""
    sizes = moves[:, 2]
    piece_bytes = int(sizes.sum()) // (2 * threads)
    piece_bytes = min(max(piece_bytes, PIECE_BYTES), MAX_PIECE_BYTES)
    large = []
    for target, address, size in moves[sizes > PIECE_BYTES].tolist():
        starts = range(0, size, piece_bytes)
        large += [np.array([(target + start, address + start, min(piece_bytes, size - start))]) for start in starts]
    small = moves[sizes <= PIECE_BYTES]
    ends = (np.flatnonzero(np.diff(np.cumsum(small[:, 2]) // PIECE_BYTES)) + 1).tolist()
    together = [small[start:end] for start, end in pairwise([0, *ends, len(small)])]
    return [*sorted(large, key=lambda job: -int(job[0, 2])), *together]
