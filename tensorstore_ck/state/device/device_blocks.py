"""`DeviceBlocks`: the ids of blocks that lie on devices, and whether sampled numbers are finite, without a copy to the host."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.interfaces import ByteSource, TensorBlock
from tensorstore_ck.state.byte_sources import CopySource
from tensorstore_ck.state.byte_sources import pieces as pieces_of
from tensorstore_ck.state.device.kernel import BlockHasher, Numbers, StartedHash, hasher_if_ready, hasher_of
from tensorstore_ck.state.device.waited_copies import copies_of
from tensorstore_ck.state.plain_memory import is_dense
from tensorstore_ck.state.rank_shares import ChainedSource

MIN_SOURCE_BYTES: Final = 256 << 10
"""Smaller tensors are read: a launch for each would take longer."""
GATHER_BYTES: Final = 64 << 20
"""Bytes of non-dense tensors that are gathered on the device at a time."""
_ALIGN: Final = 16
HasherOf = Callable[[torch.device], BlockHasher | None]
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Run(NamedTuple):
    """Blocks of one tensor."""

    tensor: torch.Tensor
    positions: Numbers
    """Among the blocks that were asked for."""
    starts: Numbers
    sizes: Numbers


class _Gathered(NamedTuple):
    """A block of a tensor that is not dense."""

    tensor: torch.Tensor
    position: int
    start: int
    stop: int


class _Hashing(NamedTuple):
    """Blocks of one device that are being hashed."""

    positions: Numbers
    """Among the blocks that were asked for."""
    hash: StartedHash


class StartedIds:
    """The ids of blocks as they were when `DeviceBlocks.start` was called."""

    def __init__(self, blocks: Sequence[TensorBlock], hashing: Sequence[_Hashing]) -> None:
        self.blocks = blocks
        self._hashing = hashing
        self._lock = threading.Lock()
        self._ids: list[Digest | None] | None = None

    @property
    def tensors(self) -> set[int]:
        """The tensors of which each block is hashed."""
        is_hashed = np.zeros(len(self.blocks), bool)
        for each in self._hashing:
            is_hashed[each.positions] = True
        left = {self.blocks[position].tensor for position in np.flatnonzero(~is_hashed).tolist()}
        return {block.tensor for block in self.blocks} - left

    def hold_streams(self) -> None:
        """Work that this thread queues later on the devices' current streams comes after the hashing. Does not wait."""
        for each in self._hashing:
            each.hash.hold_stream()

    def wait(self) -> list[Digest | None]:
        """The id of each block; None for those that no device hashes. Thread-safe.

        Raises:
            RuntimeError: a device failed.
        """
        with self._lock:
            if self._ids is None:
                ids: list[Digest | None] = [None] * len(self.blocks)
                for each in self._hashing:
                    data = each.hash.wait().tobytes()
                    starts = range(0, len(data), DIGEST_BYTES)
                    for position, start in zip(each.positions.tolist(), starts, strict=True):
                        ids[position] = Digest(data[start : start + DIGEST_BYTES])
                self._ids = ids
            return self._ids


class DeviceBlocks:
    """See `engine.interfaces.DeviceBlocks`. Caches nothing: each call computes ids, so no id is of memory that was reused since."""

    must_agree = False

    def __init__(self, hasher: HasherOf = hasher_of, ready: HasherOf = hasher_if_ready) -> None:
        """`hasher` makes the hasher of a device, and `ready` returns the one that was made."""
        self._hasher_of = hasher
        self._ready_hasher_of = ready

    def ids(self, sources: Sequence[ByteSource], blocks: Sequence[TensorBlock]) -> list[Digest | None]:
        """See `engine.interfaces.DeviceBlocks`."""
        try:
            return _start(self._hasher_of, sources, blocks).wait()
        except RuntimeError as exc:
            _warn_of(exc)
            return [None] * len(blocks)

    def start(self, sources: Sequence[ByteSource], blocks: Sequence[TensorBlock]) -> StartedIds:
        """Begins to compute the ids of blocks as they are now; there are none of those that no device can hash. Does not wait."""
        return _start(self._ready_hasher_of, sources, blocks)

    def note_unchanged(self, sources: Sequence[ByteSource]) -> None:
        """See `engine.interfaces.DeviceBlocks`. Nothing follows from it for tensors that are not copied anyway."""

    def is_finite(self, source: ByteSource, pieces: Sequence[tuple[int, int]], mask: int, item_bytes: int) -> bool:
        """See `engine.interfaces.DeviceBlocks`."""
        if not isinstance(source, CopySource) or not isinstance(source.tensor, torch.Tensor) or not is_dense(source.tensor):
            return False
        tensor = source.tensor
        with _on_stream_of(tensor.device):
            words = tensor.view(-1).view(_WORDS[item_bytes])
            return not any(bool(((sample & mask) == mask).any()) for sample in _samples(words, pieces, item_bytes))


def _samples(words: torch.Tensor, pieces: Sequence[tuple[int, int]], item_bytes: int) -> Iterator[torch.Tensor]:
    """Views of pieces at equal distances: one of the longest ones, and one of each at an end that is shorter."""
    longest = max(stop - start for start, stop in pieces)
    equal = [start for start, stop in pieces if stop - start == longest]
    step = equal[1] - equal[0] if len(equal) > 1 else longest
    sizes, strides = (len(equal), longest // item_bytes), (step // item_bytes, 1)
    yield words.as_strided(sizes, strides, words.storage_offset() + equal[0] // item_bytes)
    yield from (words[start // item_bytes : stop // item_bytes] for start, stop in pieces if stop - start < longest)


def _start(hasher_of: HasherOf, sources: Sequence[ByteSource], blocks: Sequence[TensorBlock]) -> StartedIds:
    on_devices: dict[torch.device, list[_Run]] = {}
    table = np.fromiter(chain.from_iterable(blocks), np.int64, 4 * len(blocks)).reshape(-1, 4)
    firsts = np.flatnonzero(np.diff(table[:, 1], prepend=-1)).tolist()
    for first, last in pairwise([*firsts, len(blocks)]):
        starts, stops = table[first:last, 2:].T
        for run in _runs(sources[blocks[first].tensor], np.arange(first, last), starts, stops - starts):
            on_devices.setdefault(run.tensor.device, []).append(run)
    hashing: list[_Hashing] = []
    for device, runs in on_devices.items():
        hasher = hasher_of(device)
        if hasher is None:
            continue
        try:
            with _on_stream_of(device):
                hashing += [_Hashing(positions, started) for positions, started in _hash(hasher, runs)]
        except RuntimeError as exc:
            _warn_of(exc)
    return StartedIds(blocks, hashing)


def _warn_of(error: RuntimeError) -> None:
    warnings.warn(f"blocks on a device are hashed by the host this time: {error}", stacklevel=user_stacklevel())


def _runs(source: ByteSource, positions: Numbers, starts: Numbers, sizes: Numbers) -> Iterator[_Run]:
    """The runs of blocks in the tensors of a source."""
    if isinstance(source, ChainedSource):
        at = 0
        for part in source.sources:
            is_there = (at <= starts) & (starts < at + part.size_bytes)
            yield from _runs(part, positions[is_there], starts[is_there] - at, sizes[is_there])
            at += part.size_bytes
    elif (
        len(positions)
        and isinstance(source, CopySource)
        and isinstance(source.tensor, torch.Tensor)
        and source.size_bytes >= MIN_SOURCE_BYTES
    ):
        yield _Run(source.tensor, positions, starts, sizes)


def _hash(hasher: BlockHasher, runs: Sequence[_Run]) -> Iterator[tuple[Numbers, StartedHash]]:
    """Positions of one device's blocks, and the hash that was started: of dense tensors all at once, of others a few at a time."""
    dense = [run for run in runs if is_dense(run.tensor)]
    if dense:
        addresses = np.concatenate([run.tensor.data_ptr() + run.starts for run in dense])
        yield (
            np.concatenate([run.positions for run in dense]),
            hasher.start(addresses, np.concatenate([run.sizes for run in dense])),
        )
    strided = [
        _Gathered(run.tensor, position, start, start + size)
        for run in runs
        if not is_dense(run.tensor)
        for position, start, size in zip(run.positions.tolist(), run.starts.tolist(), run.sizes.tolist(), strict=True)
    ]
    for several in batches(strided, lambda block: block.stop - block.start + _ALIGN, GATHER_BYTES, max(len(strided), 1)):
        yield np.array([block.position for block in several]), _hash_gathered(hasher, several)


def _hash_gathered(hasher: BlockHasher, blocks: Sequence[_Gathered]) -> StartedHash:
    sizes = np.array([block.stop - block.start for block in blocks], np.int64)
    starts = np.concatenate(([0], np.cumsum(-(-sizes // _ALIGN) * _ALIGN)))
    memory = torch.empty(int(starts[-1]), dtype=torch.uint8, device=blocks[0].tensor.device)
    for block, at in zip(blocks, starts.tolist(), strict=False):
        item_bytes, position = block.tensor.itemsize, at
        for index, count in pieces_of(tuple(block.tensor.shape), block.start // item_bytes, block.stop // item_bytes):
            elements = block.tensor[index].resolve_conj().resolve_neg()
            until = position + count * item_bytes
            memory[position:until].view(elements.dtype).view(elements.shape).copy_(elements)
            position = until
    return hasher.start(starts[:-1] + memory.data_ptr(), sizes)


def _on_stream_of(device: torch.device) -> AbstractContextManager[object]:
    """The stream that reads tensors, which follows the work that the caller had queued."""
    if device.type != "cuda":
        return nullcontext()
    context: AbstractContextManager[object] = torch.cuda.stream(copies_of(device).out_stream)
    return context
