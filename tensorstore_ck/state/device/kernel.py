"""`BlockHasher`: the ids of blocks in a device's memory, by the kernel in `block_ids.cu`, which torch's NVRTC compiles for the device.

Its results are not trusted: ids are poisoned before a launch, each launch is checked, and each process first hashes blocks with known ids.
If a check fails, the host hashes.
"""

import warnings
from concurrent.futures import Future
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.common.ids import DIGEST_BYTES, block_id
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.user_frames import user_stacklevel

GROUP_BYTES: Final = 128 << 10
"""Bytes that one CTA of the kernel hashes."""
THREADS: Final = 128
_POISON: Final = 0xFF
_KNOWN_SIZES: Final = (1, 64, 1023, 1024, 1025, 5000, GROUP_BYTES, GROUP_BYTES + 1, 3 * GROUP_BYTES + 77)
"""Sizes of the blocks with known ids: partial steps, chunks and groups."""
_KNOWN_OFFSETS: Final = (0, 1, 4)
_KNOWN_ALIGN: Final = 16

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint8]
"""A row of `DIGEST_BYTES` for each block."""


class StartedHash(Protocol):
    """Ids that a device computes."""

    def wait(self) -> Ids:
        """The ids, when the device has computed them. Thread-safe.

        Raises:
            RuntimeError: the device failed.
        """

    def hold_stream(self) -> None:
        """Work that this thread queues later on the device's current stream comes after the hashing. Does not wait."""


class BlockHasher(Protocol):
    """Hashes blocks of one device's memory."""

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> StartedHash:
        """Begins to hash blocks, each of at least one byte, on the current stream. Does not wait for the device.

        Raises:
            RuntimeError: the device failed, or has no memory left.
        """


class BlockTable(NamedTuple):
    """The arguments of the kernel."""

    addresses: Numbers
    sizes: Numbers
    first_group: npt.NDArray[np.int32]
    """Of each block, and the number of all groups."""
    block_of_group: npt.NDArray[np.int32]


def table_of(addresses: Numbers, sizes_bytes: Numbers) -> BlockTable:
    """The arguments for blocks at these addresses."""
    groups = -(-sizes_bytes // GROUP_BYTES)
    first_group = np.concatenate(([0], np.cumsum(groups)))
    block_of_group = np.repeat(np.arange(len(sizes_bytes), dtype=np.int32), groups)
    return BlockTable(addresses.astype(np.int64), sizes_bytes.astype(np.int64), first_group.astype(np.int32), block_of_group)


class CudaHasher:
    """`BlockHasher` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Compiles the kernel, which takes about a second.

        Raises:
            RuntimeError: it cannot be compiled, or returns wrong ids.
        """
        self._device = device
        source = files(__package__).joinpath("block_ids.cu").read_text()
        compiled: Any = torch.cuda._compile_kernel
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # makes the device's context current in a new thread, where a module could not be loaded
            self._hash_groups = compiled(source, "hash_groups")
            self._merge_groups = compiled(source, "merge_groups")

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> StartedHash:
        """See `BlockHasher`."""
        columns = [torch.from_numpy(column).pin_memory() for column in table_of(addresses, sizes_bytes)]
        table = [column.to(self._device, non_blocking=True) for column in columns]
        blocks, groups = len(table[1]), len(table[3])
        nodes, spare = torch.empty((2, groups, DIGEST_BYTES), dtype=torch.uint8, device=self._device)
        ids = torch.full((blocks, DIGEST_BYTES), _POISON, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            launch = {"block": (THREADS, 1, 1), "stream": stream}
            self._hash_groups(grid=(groups, 1, 1), args=[*table, nodes], **launch)
            self._merge_groups(grid=(blocks, 1, 1), args=[table[2], nodes, spare, ids], **launch)
            hashed = stream.record_event()
            on_host = torch.full(ids.shape, _POISON, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(ids, non_blocking=True)
            arrived = stream.record_event()
        return _OnDevice(self._device, hashed, on_host, arrived)


class _OnDevice:
    """`StartedHash` of a CUDA device."""

    def __init__(self, device: torch.device, hashed: torch.cuda.Event, ids: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._device = device
        self._hashed = hashed
        self._ids = ids
        self._arrived = arrived

    def hold_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._hashed)

    def wait(self) -> Ids:
        self._arrived.synchronize()  # the errors of the launches are raised here
        found: Ids = self._ids.numpy()
        if (found == _POISON).all(axis=1).any():
            raise RuntimeError("the kernel that hashes blocks did not write all ids")
        return found


def require_known_ids(hasher: BlockHasher, device: torch.device) -> None:
    """Hashes blocks whose ids the host computes, at aligned and other addresses.

    Raises:
        RuntimeError: an id is wrong.
    """
    ranges, at = list[tuple[int, int]](), 0
    for size in _KNOWN_SIZES:
        for offset in _KNOWN_OFFSETS:
            start = -(-at // _KNOWN_ALIGN) * _KNOWN_ALIGN + offset
            at = start + size
            ranges.append((start, size))
    data = (np.arange(at, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8).tobytes()
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    starts, sizes = np.array(ranges, np.int64).T
    digests = hasher.start(starts + memory.data_ptr(), sizes).wait()
    for (start, size), digest in zip(ranges, digests, strict=True):
        if digest.tobytes() != block_id(data[start : start + size]):
            raise RuntimeError(f"the kernel that hashes blocks returned a wrong id for {size} bytes at {start} on {device}")


@cache
def _being_made(device: torch.device) -> "Future[BlockHasher | None]":
    made: Future[BlockHasher | None] = Future()
    Helper(lambda: made.set_result(hasher_of(device)), "tsck-compile").start()
    return made


def hasher_if_ready(device: torch.device) -> BlockHasher | None:
    """The hasher of a device if it was made; otherwise None, and a thread makes it."""
    made = _being_made(device)
    return made.result() if made.done() else None


@cache
def hasher_of(device: torch.device) -> BlockHasher | None:
    """The hasher of a device, which is made and checked at the first call; None, with a warning, if it cannot be used."""
    if device.type != "cuda":
        return None
    try:
        hasher = CudaHasher(device)
        require_known_ids(hasher, device)
    except (RuntimeError, OSError, AttributeError, ImportError) as exc:
        warnings.warn(f"blocks on {device} are hashed by the host: {exc}", stacklevel=user_stacklevel())
        return None
    return hasher
