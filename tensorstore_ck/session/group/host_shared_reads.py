"""Ranks on one host read each block from the store once, and share its bytes through shared memory.

Each rank of a restore lists the blocks that it wants in a folder of the host's shared memory. One of
the ranks that want a block fetches and verifies it, and puts it into a window of shared memory; windows keep memory bounded. Sharing only
saves reads: a rank without a peer, or without memory, reads by itself. A rank takes part while it holds the lock of its file
there, so the others notice at once when it dies. Linux only; elsewhere ranks have no peers.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.ids import DIGEST_BYTES, derived_hash
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.engine.read.block_reader import MAX_GAP_BYTES, MERGE_BYTES, WantedBlock, deliver, read_blocks
from tensorstore_ck.log import SnapshotRow

if sys.platform == "linux":
    import fcntl
    import mmap

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - folders in it have names that cannot be guessed, and belong to this user alone
WINDOW_BYTES: Final = 16 << 20
"""The size of a window; `WINDOWS` of them are in use at a time."""
PAGE_BYTES: Final = 4096
WINDOWS: Final = 2
STALE_SECONDS: Final = 3600
POLL_SECONDS: Final = (0.0005, 0.02)
"""The first pause, and the longest."""
_WANT_DTYPE: Final = np.dtype([("id", f"S{DIGEST_BYTES}"), ("raw", "<u4")])
_SET: Final = b"\x01"


def host_key(folder: Path = SHARED_MEMORY) -> bytes:
    """A name that is the same for all processes that can share memory, and for no others; empty if none can."""
    if sys.platform != "linux":
        return b""
    try:
        boot, status = Path("/proc/sys/kernel/random/boot_id").read_bytes(), os.stat(folder)
    except OSError:
        return b""
    return bytes(derived_hash("host of a rank", boot, f"{status.st_dev} {status.st_ino} {os.geteuid()}".encode())[:8])


class HostSharedReads:
    """One rank's side. Call `join`, then `read` at most as often as the others do, then `close`."""

    def __init__(
        self, name: str, rank: int, *, base: Path = SHARED_MEMORY, window_bytes: int = WINDOW_BYTES, timeout: float = 600.0
    ) -> None:
        """`name`: the name of this restore, the same on all ranks, and hard to guess. A rank that cannot take part raises no error."""
        self.rank = rank
        self.folder = base / f"tsck-{name}"
        self._window_bytes = window_bytes
        self._deadline = time.monotonic() + timeout
        self.peers: list[int] = []
        """All ranks on this host, this one included."""
        self._round = 0
        self._lock: int | None = None
        self._leaving = threading.Lock()
        with contextlib.suppress(OSError):
            _remove_stale(base)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.stat().st_uid == os.geteuid():
                lock = os.open(self._path("alive", rank), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(lock)
                    raise
                self._lock = lock

    def join(self, ranks: Sequence[int]) -> None:
        """Waits until all `ranks` on this host have begun."""
        self.peers = sorted(ranks) if self._lock is not None else []

    def leave(self) -> None:
        """Stops taking part: other ranks do not wait for this one any more."""
        with self._leaving:
            if self._lock is not None:
                lock, self._lock = self._lock, None
                with contextlib.suppress(OSError):
                    self._path("alive", self.rank).unlink()
                os.close(lock)

    def close(self) -> None:
        """Leaves; the last rank frees the memory. Idempotent."""
        self.leave()
        if self.peers and all(map(self.is_gone, self.peers)):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # other ranks use the folder
                self.folder.rmdir()

    def read(self, engine: Engine, info: SnapshotRow, wanted: Sequence[WantedBlock]) -> None:
        """Reads and verifies blocks; blocks that other ranks of this host want in the same round are fetched once.

        Raises:
            DamageError: a block is missing or is not what its id says.
        """
        number, self._round = self._round, self._round + 1
        mine: dict[bytes, list[WantedBlock]] = {}
        for block in sorted(wanted, key=lambda block: (block.pack, block.offset)):
            mine.setdefault(block.source.part.block_id(block.row), []).append(block)
        windows = self._plan(number, mine) if len(self.peers) > 1 else []
        shared = {block.id for window in windows for block in window}
        own = [block for block_id, blocks in mine.items() if block_id not in shared for block in blocks]
        if windows:
            own += _Passing(self, windows, mine, lambda blocks: read_blocks(engine, info, blocks)).run()
        read_blocks(engine, info, own)

    def _plan(self, number: int, mine: dict[bytes, list[WantedBlock]]) -> "list[list[_Shared]]":
        """The blocks that several ranks want, in windows; the same on all ranks."""
        rows = np.array([(block_id, blocks[0].raw) for block_id, blocks in mine.items()], _WANT_DTYPE)
        try:
            space = os.statvfs(self.folder)
            window_bytes = min(self._window_bytes, space.f_bavail * space.f_frsize // 4)
            path = self._path("wants", number, self.rank)
            Path(f"{path}.new").write_bytes(window_bytes.to_bytes(8, "little") + rows.tobytes())
            os.rename(f"{path}.new", path)
        except OSError:
            self.leave()
            return []
        records: dict[int, bytes] = {}
        for peer in self.peers:
            path = self._path("wants", number, peer)
            if self.wait(path.exists, peer):
                records[peer] = path.read_bytes()
            elif not self.is_gone(peer):
                self.leave()  # the deadline has passed
        if self._lock is None:
            return []
        window_bytes = min(int.from_bytes(record[:8], "little") for record in records.values())
        return _cut(list(_shared({rank: np.frombuffer(record[8:], _WANT_DTYPE) for rank, record in records.items()})), window_bytes)

    def wait(self, is_so: Callable[[], bool], on: int) -> bool:
        """Waits until `is_so`; False if rank `on` or this rank does not take part any more."""
        pause, longest = POLL_SECONDS
        while not is_so():
            if self._lock is None or self.is_gone(on) or time.monotonic() > self._deadline:
                return is_so()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def is_gone(self, peer: int) -> bool:
        """Whether a rank does not take part any more."""
        if peer == self.rank:
            return self._lock is None
        return not _is_locked(self._path("alive", peer))

    def _path(self, kind: str, *numbers: int) -> Path:
        return self.folder / "-".join([kind, *map(str, numbers)])


class _Shared(NamedTuple):
    id: bytes
    raw: int
    fetcher: int
    """The rank that reads it."""


def _shared(wants: dict[int, np.ndarray]) -> Iterator[_Shared]:
    """The blocks that several ranks want, by the first rank that wants each. Of these ranks, the one with the least to fetch fetches it.

    One rank fetches a run of neighbours: small blocks are read together with what lies between them.
    """
    rows = np.concatenate(list(wants.values()))
    ranks = np.concatenate([np.full(len(wanted_rows), rank) for rank, wanted_rows in wants.items()])
    _, first, inverse, counts = np.unique(rows["id"], return_index=True, return_inverse=True, return_counts=True)
    who: dict[int, list[int]] = {}
    several = counts[inverse] > 1
    for number, rank in zip(inverse[several].tolist(), ranks[several].tolist(), strict=True):
        who.setdefault(number, []).append(rank)
    load = dict.fromkeys(wants, 0)
    ids, sizes = rows["id"].tobytes(), rows["raw"].tolist()
    run_bytes = max(min(sum(sizes) // (8 * len(wants)), MERGE_BYTES), 4 * MAX_GAP_BYTES)
    fetcher = -1
    for number in sorted(who, key=lambda number: int(first[number])):
        at = int(first[number])
        least = min(who[number], key=lambda rank: (load[rank], rank))
        if fetcher not in who[number] or load[fetcher] >= load[least] + run_bytes:
            fetcher = least
        load[fetcher] += sizes[at]
        yield _Shared(ids[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], sizes[at], fetcher)


def _cut(shared: list[_Shared], window_bytes: int) -> list[list[_Shared]]:
    windows: list[list[_Shared]] = []
    free = 0
    for block in shared:
        if not windows or block.raw > free:
            windows.append([])
            free = window_bytes
        windows[-1].append(block)
        free -= block.raw
    return windows


class _SharedWindow:
    """Some blocks in shared memory: flags that say which are ready and which ranks are done, then the blocks."""

    def __init__(self, path: Path, blocks: Sequence[_Shared], peers: Sequence[int]) -> None:
        """Raises `OSError` when there is no memory for it."""
        self.blocks = blocks
        self._peers = peers
        flags = len(blocks) + len(peers)
        data = -(-flags // PAGE_BYTES) * PAGE_BYTES
        ends = data + np.cumsum([block.raw for block in blocks])
        self._starts = [data, *ends[:-1].tolist()]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(self._file, 0, int(ends[-1]))  # so that a write to it cannot fail
            self._memory = mmap.mmap(self._file, int(ends[-1]))
        except OSError:
            os.close(self._file)
            raise

    def put(self, number: int, data: memoryview) -> None:
        """Passes a block on. The flag goes through the kernel, which orders it after the bytes."""
        start = self._starts[number]
        self._memory[start : start + len(data)] = data
        os.pwrite(self._file, _SET, number)

    def is_ready(self, number: int) -> bool:
        return os.pread(self._file, 1, number) == _SET

    def block(self, number: int) -> memoryview:
        start = self._starts[number]
        return memoryview(self._memory)[start : start + self.blocks[number].raw]

    def finish(self, rank: int) -> None:
        """Notes that `rank` does not need the window any more."""
        os.pwrite(self._file, _SET, len(self.blocks) + self._peers.index(rank))

    def unfinished(self) -> list[int]:
        flags = os.pread(self._file, len(self._peers), len(self.blocks))
        return [rank for rank, flag in zip(self._peers, flags, strict=True) if not flag]

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


class _Slot(ByteTarget):
    """`ByteTarget` over a block of a window."""

    def __init__(self, window: _SharedWindow, number: int) -> None:
        self._window = window
        self._number = number

    def memory(self) -> None:
        """Returns None: other ranks may only see verified bytes."""

    def write(self, start: int, data: memoryview) -> None:
        """Takes the whole block."""
        assert start == 0
        self._window.put(self._number, data)


@dataclass(eq=False, repr=False)
class _Passing:
    """One round: a thread fetches the blocks assigned to this rank, and the caller's thread takes the blocks that this rank wants."""

    host: HostSharedReads
    plan: list[list[_Shared]]
    mine: dict[bytes, list[WantedBlock]]
    read: Callable[[Sequence[WantedBlock]], None]

    def __post_init__(self) -> None:
        self._name = derived_hash("plan of a round", *(block.id for blocks in self.plan for block in blocks)).hex()[:32]
        self._windows: dict[int, _SharedWindow | None] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> list[WantedBlock]:
        """Returns the blocks that other ranks should have fetched and did not."""
        fetching = Helper(self._fetch, "tsck")
        fetching.start()
        left: list[WantedBlock] = []
        try:
            for number in range(len(self.plan)):
                left += self._take(number)
        except BaseException:
            self.host.leave()
            raise
        finally:
            fetching.join()
            for number in list(self._windows):
                self._drop(number)
        if self._error is not None:
            raise self._error
        return left

    def _fetch(self) -> None:
        try:
            for number, blocks in enumerate(self.plan):
                if number >= WINDOWS:
                    self._drop(number - WINDOWS, wait=True)
                window = self._window(number)
                if window is None:
                    return self.host.leave()
                assigned = [at for at, block in enumerate(blocks) if block.fetcher == self.host.rank]
                self.read([self.mine[blocks[at].id][0]._replace(start=0, target=_Slot(window, at)) for at in assigned])
        except BaseException as exc:  # noqa: BLE001 - raised in the caller's thread
            self._error = exc
            self.host.leave()

    def _take(self, number: int) -> list[WantedBlock]:
        """Delivers the blocks of a window that this rank wants; returns those that are not there."""
        window = self._window(number)
        left: list[WantedBlock] = []
        for at, block in enumerate(self.plan[number]):
            targets = self.mine.get(block.id, [])
            if not targets or self._error is not None:
                continue
            if window is None or not self.host.wait(partial(window.is_ready, at), block.fetcher):
                left += targets
                continue
            with window.block(at) as data:
                for target in targets:
                    deliver(target.target, target.start, data)
        if window is not None:
            window.finish(self.host.rank)
        return left

    def _window(self, number: int) -> _SharedWindow | None:
        with self._lock:
            if number not in self._windows:
                try:
                    self._windows[number] = _SharedWindow(self._path(number), self.plan[number], self.host.peers)
                except OSError:
                    self._windows[number] = None
            return self._windows[number]

    def _drop(self, number: int, *, wait: bool = False) -> None:
        """Closes a window, and removes its memory if no rank needs it."""
        window = self._windows[number]
        if window is None:
            return
        if wait:
            self.host.wait(lambda: all(map(self.host.is_gone, window.unfinished())), self.host.rank)
            if self.host.rank in window.unfinished():
                return  # the caller's thread still needs it
        if not window.unfinished():
            self._path(number).unlink(missing_ok=True)
        window.close()
        self._windows[number] = None

    def _path(self, number: int) -> Path:
        return self.host.folder / f"{self._name}-{number}"


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    with closing_fd(file):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove_stale(base: Path) -> None:
    for folder in base.glob("tsck-*"):
        with contextlib.suppress(OSError):
            status = folder.stat()
            is_mine = status.st_uid == os.geteuid() and time.time() - status.st_mtime > STALE_SECONDS
            if is_mine and not any(map(_is_locked, folder.glob("alive-*"))):
                shutil.rmtree(folder, ignore_errors=True)
