"""A sample of the bytes of a save: finds tensors that change while they are read, and counts floating elements that are not finite.

Small tensors are sampled in full. Larger ones have a systematic sample: one piece of each `STRIDE_BYTES`, at an offset that a hash draws
for each tensor and save. The draw depends on what the root of a snapshot depends on, and on nothing else, so that equal saves
have equal samples.
"""

import threading
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, block_id, derived_hash
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.common.units import listed
from tensorstore_ck.engine.interfaces import CapturedState, Numbers, TensorBlock
from tensorstore_ck.engine.write.write_plan import InlineTensors
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.format.codec import elements_of

SAMPLE_SHARE: Final = 1 / 256
"""The sampled share of larger tensors. With it, both checks together took less than 1 % of a save of 1 GiB to memory, at 2.6 GB/s."""
MIN_SAMPLE_BYTES: Final = 256 << 10
"""The least sample of a state; smaller states are sampled in full."""
STRIDE_BYTES: Final = 4 << 20
THREAD_BYTES: Final = 1 << 20
"""Of a sample that is compared: for so many more, one thread more."""
_ALIGN: Final = 16
"""No element is larger than this, or lies across a multiple of it."""
MAX_NAMED: Final = 3

_EXPONENT: Final = {8: 0x7FF << 52, 4: 0xFF << 23, 2: 0x1F << 10, 1: 0x1F << 2}
"""Item bytes -> the bits that are all set in an IEEE number that is not finite."""
_UNLIKE_IEEE: Final = {"bfloat16": 0xFF << 7, "float8_e4m3fn": 0x7F}
_WITHOUT: Final = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
"""Formats without an exponent for numbers that are not finite: they are not checked."""


class Sampling(NamedTuple):
    """How a save is sampled."""

    turn: int = 0
    verify_share: float = 0.0
    """The share of larger tensors that is read a second time; 0: nothing is, not even small ones."""


NOT_VERIFIED: Final = Sampling()


class SampledPiece(NamedTuple):
    """Bytes of a tensor that were read."""

    tensor: int
    start: int
    stop: int
    digest: Digest


class Finiteness(NamedTuple):
    """How many elements were checked, and how many are not finite."""

    elements: int = 0
    non_finite: int = 0

    @property
    def share(self) -> float:
        """The share of elements that are not finite."""
        return self.non_finite / self.elements if self.elements else 0.0


def turn_of(parent: bytes | None, step: int | None) -> int:
    """The number from which the offsets of a save's sample are drawn."""
    return int.from_bytes(derived_hash("sample of a put", parent or b"", str(step).encode())[:4], "little")


def share_of(state_bytes: int, share: float) -> float:
    """The share of larger tensors that is sampled in a state of `state_bytes`, if the caller asks for `share`."""
    return min(1.0, max(share, MIN_SAMPLE_BYTES / max(state_bytes, 1)))


def pieces(tensor: int, start: int, stop: int, share: float, turn: int) -> list[tuple[int, int]]:
    """The sampled pieces of bytes [start, stop) of a tensor."""
    offset, length = _draw(tensor, share, turn)
    at = offset + (start - offset) // STRIDE_BYTES * STRIDE_BYTES
    sampled = []
    while at < stop:
        first, last = max(at, start), min(at + length, stop)
        if first < last:
            sampled.append((first, last))
        at += STRIDE_BYTES
    return sampled


def pieces_of_many(tensors: Numbers, sizes: Numbers, share: float, turn: int) -> Numbers:
    """`pieces` of many whole tensors, of which most are small and have none: rows of a tensor, a start and a length."""
    drawn, length = _draw(tensors.astype(np.uint64), share, turn)
    offsets = drawn.astype(np.int64)
    numbers = np.flatnonzero((offsets < sizes) | (offsets + length > STRIDE_BYTES))
    found = [
        (tensor, first, last - first)
        for tensor, size in np.stack((tensors, sizes), axis=1)[numbers].tolist()
        for first, last in pieces(tensor, start=0, stop=size, share=share, turn=turn)
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def _draw(tensor: Any, share: float, turn: int) -> tuple[Any, int]:
    """Where the first piece of a tensor begins, and the bytes of a piece; `tensor`: its number, or many as uint64."""
    offset = (((turn ^ tensor * 0x9E3779B1) & 0xFFFFFFFF) * 0x85EBCA6B >> 13) % STRIDE_BYTES // _ALIGN * _ALIGN
    return offset, -(-int(share * STRIDE_BYTES) // _ALIGN) * _ALIGN


def count_non_finite(data: Buffer, dtype: str, item_bytes: int) -> Finiteness:
    """Counts the elements, and those that are not finite, of a dtype of a layout."""
    mask = _mask_of(dtype, item_bytes)
    if mask is None:
        return Finiteness()
    words = np.frombuffer(data, f"{'>' if '>' in dtype else '<'}u{elements_of(dtype, item_bytes).item_bytes}")
    return Finiteness(len(words), int(np.count_nonzero((words & words.dtype.type(mask)) == mask)))


class CaptureSample:
    """The sample of what one rank writes. Thread-safe while it is taken."""

    def __init__(self, captured: CapturedState, sampling: Sampling) -> None:
        self._captured = captured
        self._specs = captured.layout.tensors[:]
        self._turn = sampling.turn
        state_bytes = captured.logical_bytes
        self._share = share_of(state_bytes, SAMPLE_SHARE)
        self._verify_share = sampling.verify_share and share_of(state_bytes, sampling.verify_share)
        self._lock = threading.Lock()
        self._runs: list[list[SampledPiece]] = []
        """The pieces to read a second time, by the runs of blocks in which they were read first."""
        self._elements = 0
        self.non_finite_rows: dict[int, int] = {}
        """Row of a block -> the number of its elements that are not finite, if there are any."""
        self._hashed: Sequence[TensorBlock] = ()
        """Blocks on devices."""
        self._device_ids: Sequence[Digest] = ()
        """Their ids as a device computed them first."""
        self._hashed_rows: Set[int] = frozenset()
        self.non_finite_inline: dict[int, int] = {}
        """Number of a small tensor -> the number of its elements that are not finite, if there are any."""

    def note(self, blocks: Sequence[TensorBlock], reads: Sequence[Buffer]) -> None:
        """Samples blocks as they were read, before they are hashed and stored."""
        run = list[SampledPiece]()
        for block, data in zip(blocks, reads, strict=True):
            row, tensor, start, stop = block
            if tensor in self._captured.frozen:
                continue  # frozen tensors have their own check
            sampled = pieces(tensor, start=start, stop=stop, share=self._share, turn=self._turn)
            if self._verify_share and row not in self._hashed_rows:
                again = sampled
                if self._verify_share != self._share:
                    again = pieces(tensor, start=start, stop=stop, share=self._verify_share, turn=self._turn)
                for first, last in again:
                    run.append(SampledPiece(tensor, first, last, block_id(data[first - start : last - start])))
            spec = self._specs[tensor]
            if _mask_of(spec.dtype, spec.item_bytes) is None:
                continue
            for first, last in sampled:
                counted = count_non_finite(data[first - start : last - start], spec.dtype, spec.item_bytes)
                with self._lock:
                    self._elements += counted.elements
                    if counted.non_finite:
                        self.non_finite_rows[row] = self.non_finite_rows.get(row, 0) + counted.non_finite
        if run:
            self._runs.append(run)

    def note_hashed(self, blocks: Sequence[TensorBlock], ids: Sequence[Digest]) -> None:
        """Notes blocks that devices hashed before anything was read: `verify` has them hashed again, instead of reading a sample."""
        self._hashed, self._device_ids, self._hashed_rows = blocks, ids, {block.row for block in blocks}

    def note_unread(self, blocks: Sequence[TensorBlock]) -> None:
        """Counts what `note` would have counted of blocks on devices that are not read. Those of one tensor follow each other."""
        for tensor, group in groupby(blocks, key=attrgetter("tensor")):
            spec = self._specs[tensor]
            if tensor in self._captured.frozen or _mask_of(spec.dtype, spec.item_bytes) is None:
                continue
            several = list(group)
            joined = (pieces(tensor, start, stop, share=self._share, turn=self._turn) for start, stop in _joined(several))
            sampled_bytes = sum(last - first for sampled in joined for first, last in sampled)
            self._elements += sampled_bytes // elements_of(spec.dtype, spec.item_bytes).item_bytes
            for row, _, start, stop in () if self._is_finite(tensor) else several:
                for first, last in pieces(tensor, start=start, stop=stop, share=self._share, turn=self._turn):
                    data = self._captured.sources.read(tensor, first, last)
                    if count := count_non_finite(data, spec.dtype, spec.item_bytes).non_finite:
                        self.non_finite_rows[row] = self.non_finite_rows.get(row, 0) + count

    def note_inline(self, inlined: InlineTensors, data: Buffer) -> None:
        """Samples all small tensors; `data`: their bytes."""
        view = memoryview(data)
        for dtype, item_bytes, first, stop, run_data in inlined.runs:  # neighbours of one dtype are checked together
            counted = count_non_finite(view[run_data], dtype, item_bytes)
            self._elements += counted.elements
            for number in range(first, stop) if counted.non_finite else ():
                some = count_non_finite(view[inlined.place(number)], dtype, item_bytes).non_finite
                if some:
                    tensor = int(inlined.ranges.tensors[number])
                    self.non_finite_inline[tensor] = self.non_finite_inline.get(tensor, 0) + some

    def _is_finite(self, tensor: int) -> bool:
        """Whether the whole sample of a tensor on a device is finite; False also if that is unknown."""
        captured = self._captured
        spec, source = self._specs[tensor], captured.sources[tensor]
        mask, word_bytes = _mask_of(spec.dtype, spec.item_bytes), elements_of(spec.dtype, spec.item_bytes).item_bytes
        sampled = pieces(tensor, start=0, stop=source.size_bytes, share=self._share, turn=self._turn)
        if mask is None or captured.device_blocks is None:
            return False
        return not sampled or captured.device_blocks.is_finite(source, sampled, mask, word_bytes)

    @property
    def finiteness(self) -> Finiteness:
        """The finiteness of the whole sample."""
        return Finiteness(self._elements, sum(self.non_finite_rows.values()) + sum(self.non_finite_inline.values()))

    def verify(self, inlined: InlineTensors, data: Buffer) -> None:
        """Reads the sample a second time, and compares.

        Raises:
            CaptureChangedError: a tensor has other bytes than when it was read first.
        """
        if not self._verify_share:
            return
        read = self._captured.sources.read
        changed = set[int]()

        def compare(run: Sequence[SampledPiece]) -> None:
            for tensor, start, stop, digest in run:
                if block_id(read(tensor, start, stop)) != digest:
                    changed.add(tensor)

        # On one thread the comparison took a sixth of a save of unchanged tensors on 16 cores; to begin one costs as much as a MiB.
        sampled_bytes = sum(map(len, self._runs)) * int(self._verify_share * STRIDE_BYTES)
        for_each(self._runs, compare, min(cpu_threads(), len(self._runs), 1 + sampled_bytes // THREAD_BYTES))
        if self._hashed and self._captured.device_blocks is not None:
            again_ids = self._captured.device_blocks.ids(self._captured.sources, self._hashed)
            compared = zip(self._hashed, self._device_ids, again_ids, strict=True)
            changed |= {block.tensor for block, before, after in compared if after is not None and after != before}
        if (again := self._captured.sources.gather(inlined.ranges)) != data:
            changed |= set(inlined.ranges.tensors[inlined.differing(data, again)].tolist())
        if changed:
            require_unchanged(self._captured, changed - self._captured.frozen.keys())


def _joined(blocks: Sequence[TensorBlock]) -> Iterator[tuple[int, int]]:
    """The bytes of blocks of one tensor, in order: those that touch are joined."""
    start, stop = blocks[0].start, blocks[0].start
    for block in blocks:
        if block.start != stop:
            yield start, stop
            start = block.start
        stop = block.stop
    yield start, stop


def require_unchanged(captured: CapturedState, changed: set[int]) -> None:
    """Raises if tensors changed.

    Raises:
        CaptureChangedError: it names them.
    """
    if changed:
        names = [captured.layout.tensors[number].name for number in sorted(changed)]
        raise CaptureChangedError(
            f"{listed(names, MAX_NAMED)} changed while being captured, so the save would hold a mixture of two states: nothing was "
            "published. Save between steps, when no thread changes the state, or leave such tensors out; verify_capture=0 turns this "
            "check off",
            object_id=names[0],
        )


@lru_cache(256)
def _mask_of(dtype: str, item_bytes: int) -> int | None:
    elements = elements_of(dtype, item_bytes)
    if not elements.is_float or dtype in _WITHOUT:
        return None
    return _UNLIKE_IEEE.get(dtype) or _EXPONENT.get(elements.item_bytes)
