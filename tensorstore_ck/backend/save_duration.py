"""How long a snapshot of a given size by some ranks will take, and whether it fits: measured with a part of it, then scaled.

Threads of this process stand for the ranks: they hash blocks, as a save does, and append them to an object per rank; then everything
is read back and hashed, as a restore does. The result is what ranks on this host get together. Ranks on other hosts may get more, up to
what the storage itself can take, which cannot be measured from here. Writes below ``probe/<ulid>/`` only, and removes it.
"""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

from tensorstore_ck.backend.probe import in_folder
from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.common.free_space import MinFree, require_free_space
from tensorstore_ck.common.ids import block_id
from tensorstore_ck.errors import InvalidOptionError

MAX_RANKS: Final = 8
"""The most threads. More would only share this host's connection."""
MAX_CORES: Final = 16
REMOTE_THREADS: Final = 8
BLOCK_BYTES: Final = 4 << 20
QUICK_BYTES: Final = 64 << 20
SAMPLE_BYTES: Final = 1 << 30
SAMPLE_SECONDS: Final = 10
"""The sample is smaller if one rank alone would take longer."""
TIMED_COMMITS: Final = 5
PART_BYTES: Final = 64 << 10
RECORD_BYTES: Final = 4 << 10
ENTRY_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class SaveEstimate:
    """The measurements, and the estimate for a snapshot of `size_bytes` by `ranks` whose blocks are all new and stored uncompressed."""

    size_bytes: int
    ranks: int
    sample_bytes: int
    """Written by all measured ranks together."""
    measured_ranks: int
    write_bytes_per_second: float
    """Bytes per second of all measured ranks at once, with hashing."""
    rank_write_bytes_per_second: float
    """Of one rank alone."""
    read_bytes_per_second: float
    """Bytes per second of reading the data just written, perhaps from a cache."""
    rank_read_bytes_per_second: float
    commit_seconds: float
    """Seconds for a part, a record and a log entry: a snapshot with nothing new."""
    save_seconds: float
    """Seconds with all ranks on this host."""
    save_seconds_elsewhere: float
    """Seconds at best: each rank has its own host, and is as fast as one rank alone was here."""
    restore_seconds: float
    restore_seconds_elsewhere: float
    free_bytes: int | None
    """None: unknown."""
    fits: bool | None


class _Speed(NamedTuple):
    write: float
    read: float


def estimate_save(backend: Backend, size_bytes: int, ranks: int) -> SaveEstimate:
    """Measures with a tenth of `size_bytes`, at least 64 MiB, and at most 1 GiB or about 10 s.

    Raises:
        InvalidOptionError: the size or the number of ranks is not above 0.
        NoSpaceError: not even the sample fits.
    """
    for name, count in (("size", size_bytes), ("ranks", ranks)):
        if count <= 0:
            raise InvalidOptionError(f"{name} must be above 0, not {count}", object_id=name)
    space = backend.space()
    sample_bytes = min(max(size_bytes // 10, QUICK_BYTES), SAMPLE_BYTES)
    require_free_space(backend, MinFree(), QUICK_BYTES + sample_bytes, "a trial write")
    measured_ranks = min(ranks, MAX_RANKS)

    def measure(folder: str) -> tuple[int, _Speed, _Speed, float]:
        one = _measure(backend, f"{folder}one", 1, QUICK_BYTES)
        size = min(sample_bytes, max(QUICK_BYTES, int(one.write * SAMPLE_SECONDS)))
        every = _measure(backend, f"{folder}every", measured_ranks, size)
        return size, every if measured_ranks == 1 else one, every, _time_commits(backend, folder)

    (sample_bytes, one, every, commit_seconds), _ = in_folder(backend, measure)
    return SaveEstimate(
        size_bytes=size_bytes,
        ranks=ranks,
        sample_bytes=sample_bytes,
        measured_ranks=measured_ranks,
        write_bytes_per_second=every.write,
        rank_write_bytes_per_second=one.write,
        read_bytes_per_second=every.read,
        rank_read_bytes_per_second=one.read,
        commit_seconds=commit_seconds,
        save_seconds=size_bytes / every.write + commit_seconds,
        save_seconds_elsewhere=size_bytes / max(every.write, one.write * ranks) + commit_seconds,
        restore_seconds=size_bytes / every.read,
        restore_seconds_elsewhere=size_bytes / max(every.read, one.read * ranks),
        free_bytes=None if space is None else space.free_bytes,
        fits=None if space is None else size_bytes < space.free_bytes,
    )


def _measure(backend: Backend, name: str, ranks: int, size_bytes: int) -> _Speed:
    """Bytes per second of one object per rank, all written at once and read at once."""
    block = os.urandom(BLOCK_BYTES)
    blocks = range(-(-size_bytes // BLOCK_BYTES))
    names = [f"{name}-{rank}" for rank in range(ranks)]

    def write(number: int) -> None:
        block_id(block)
        writers[number % ranks].append([block])

    def read(number: int) -> None:
        target = bytearray(BLOCK_BYTES)
        backend.read_into(names[number % ranks], number // ranks * BLOCK_BYTES, memoryview(target))
        block_id(target)

    own_threads = min(len(os.sched_getaffinity(0)), MAX_CORES) + 1 if backend.is_local else REMOTE_THREADS
    with ThreadPoolExecutor(max(ranks, own_threads)) as threads:
        began = time.perf_counter()
        writers: list[ObjectWriter] = []
        try:
            writers += map(backend.open_writer, names)
            list(threads.map(write, blocks))
            list(threads.map(lambda writer: writer.close(), writers))
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        written = time.perf_counter()
        list(threads.map(read, blocks))
        ended = time.perf_counter()
    return _Speed(len(blocks) * BLOCK_BYTES / (written - began), len(blocks) * BLOCK_BYTES / (ended - written))


def _time_commits(backend: Backend, folder: str) -> float:
    seconds = []
    for number in range(TIMED_COMMITS):
        began = time.perf_counter()
        backend.put(f"{folder}part-{number}", bytes(PART_BYTES))
        backend.put(f"{folder}record-{number}", bytes(RECORD_BYTES))
        backend.create(f"{folder}entry-{number}", bytes(ENTRY_BYTES))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
